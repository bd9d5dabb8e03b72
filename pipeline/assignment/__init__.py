"""The assignment of rows to workers, as pure functions: groups, ranks, permutations, chunks."""
