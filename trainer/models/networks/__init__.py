"""The networks that the model specs make."""
