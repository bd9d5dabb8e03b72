"""Runs in virtual time: the coordinator, slices, sampler and models of a real run in one process, without sockets."""
