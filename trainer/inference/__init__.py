"""The use of a trained model: loading it for raw images, and a table of its predictions.

The package itself loads no torch."""
