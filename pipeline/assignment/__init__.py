"""Who gets which row, as pure functions: groups, ranks, permutations, chunks."""
