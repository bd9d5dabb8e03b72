"""A parameter server: its process, its slice of the model, and what server 0 leads."""
