"""Measurements beside peers: `python -m tests.benchmarks.NAME --help`."""
