"""Checks before a run: packages, paths, rights, room, clocks and tickets of the driver, the executors and the store."""
