"""The beginning and the end of a run, the same on real processes and in virtual time."""
