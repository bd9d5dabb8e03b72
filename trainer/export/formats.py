"""The formats of ``sharding export``. Loads no torch."""

TORCHSCRIPT = "torchscript"
ONNX = "onnx"
SAFETENSORS = "safetensors"
FORMATS = {
    TORCHSCRIPT: "a file for torch.jit.load, in Python or C++",
    ONNX: "a file for ONNX Runtime and similar programs; needs the packages onnx and onnxscript",
    SAFETENSORS: "a folder for the Hugging Face Hub: model.safetensors, config.json and a model card, README.md",
}
