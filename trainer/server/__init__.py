"""A parameter server: its process and its slice of the model."""
