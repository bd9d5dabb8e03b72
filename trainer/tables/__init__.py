"""Tables of one value per image, such as embeddings and predictions, computed in parts and resumable.

The package itself loads no torch."""
