"""A run over several hosts that a cluster gives: who runs what where, and how they find each other."""
