"""Plans of studies: what varies, how often, and the command line of every run."""
