"""Checks before a run: packages, places, rights, room, clocks and tickets of the driver, the executors and the store."""
