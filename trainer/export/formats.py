"""The formats of ``sharding export``. Loads no torch."""

TORCHSCRIPT = "torchscript"
ONNX = "onnx"
SAFETENSORS = "safetensors"
MODEL_FORMATS = {
    TORCHSCRIPT: "a file for torch.jit.load, in Python or C++",
    ONNX: "a file for ONNX Runtime and similar programs; needs the packages onnx and onnxscript",
    SAFETENSORS: "a folder for the Hugging Face Hub: model.safetensors, config.json and a model card, README.md",
}
WEBDATASET = "webdataset"
DATASET = "dataset"
MDS = "mds"
SET_FORMATS = {
    WEBDATASET: "a folder of .tar files with an image and its class per sample, for WebDataset",
    MDS: "a folder for MosaicML streaming: .mds files and an index for each worker",
    DATASET: "a folder for the Hugging Face Hub and load_dataset: Parquet with PNG images, and a card, README.md",
}
FORMATS = MODEL_FORMATS | SET_FORMATS
BEGUN = "export.json"  # in the folder of an export: names the set or model and the format, and is written first
