"""What a person sees of a run: the page, the terminal, TensorBoard."""
