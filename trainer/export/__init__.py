"""A trained model for other programs: a TorchScript or ONNX graph of raw images, or a folder for the Hugging Face Hub.

The package itself loads no torch."""
