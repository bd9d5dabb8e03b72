"""The views of a run: its report page, the terminal, TensorBoard."""
