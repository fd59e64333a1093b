"""Weights of Hugging Face's format: read before a run, written after it.

``files``     safetensors files: names, shapes, parts of tensors
``naming``    a model's parameters from tensors of files, and the way back
``adapters``  names of an adapted model's tensors
``load``      files into the shards of a run, or into a whole model
``save``      a run or a checkpoint into files
``options``   weights of a run, at its beginning and end
"""

from __future__ import annotations

from executors.weights.files import WeightFiles
from executors.weights.load import load_into, load_whole
from executors.weights.naming import Naming
from executors.weights.options import WeightOptions
from executors.weights.save import WeightFolder, save_checkpoint, save_run

__all__ = [
    "Naming",
    "WeightFiles",
    "WeightFolder",
    "WeightOptions",
    "load_into",
    "load_whole",
    "save_checkpoint",
    "save_run",
]
