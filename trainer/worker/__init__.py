"""A worker: its process, its training step, its connection to the servers."""
