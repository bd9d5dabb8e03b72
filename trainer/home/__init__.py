"""The storage of a run: its home on any file system, and a work folder per host. Imports neither torch nor sockets."""
