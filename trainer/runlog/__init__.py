"""The folder and the log of a run: written during training, read for the result."""
