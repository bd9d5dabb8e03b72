"""The processes of one host: their start, their supervision, and the end of a run."""
