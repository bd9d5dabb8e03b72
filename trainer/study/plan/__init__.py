"""Plans of studies: combinations and seeds, and the command line of every run."""
