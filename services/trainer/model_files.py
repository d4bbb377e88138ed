"""The files of a model directory; imports nothing heavy."""

from pathlib import Path

from libs.common.manifest import MANIFEST

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack"})


def weights(directory: Path) -> list[Path]:
    """Files that hold weights, or an index of them."""
    return [path for path in _files(directory) if {*path.suffixes} & WEIGHT_SUFFIXES]


def companions(directory: Path) -> list[Path]:
    """What makes weights a model that others load: config, tokenizer and generation settings."""
    return [path for path in _files(directory) if not {*path.suffixes} & WEIGHT_SUFFIXES]


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if path.is_file() and path.name != MANIFEST]
