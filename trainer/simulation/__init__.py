"""A run in virtual time: the same coordinator, slices, sampler and models in one process, without sockets."""
