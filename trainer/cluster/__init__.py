"""Runs on several hosts of a cluster: the assignment of roles to hosts, their start, and how hosts find each other."""
