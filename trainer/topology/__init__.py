"""``sharding topology``: the matchings, weights, spectrum and traffic of a topology before a run."""
