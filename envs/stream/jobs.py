"""Kinds of jobs: models to train, with batch and steps."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from planner.capture import capture, load_config, load_model, read_profile
from planner.capture.inputs import InputShape
from planner.errors import CaptureError, StrategyError
from planner.graph import ModelGraph
from planner.reading import read_bytes
from planner.schema.base import fingerprint_bytes

__all__ = [
    "BUILT_IN",
    "PROFILES",
    "JobType",
    "built_in_jobs",
    "profiled_jobs",
    "resnet50",
]

#: Samples of a profiled job's step, each one profiled batch. An assumption: profiles
#: do not say how many samples they were made with.
_PROFILED_BATCH = 32
_PROFILED_STEPS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class JobType:
    """A kind of job: a model to train, with batch and steps.

    Attributes:
        name: Name that arrivals use.
        ref: Reference of the model; see :func:`planner.capture.load_model`. A path
            that ends in ``.txt`` is a PipeDream profile.
        global_batch: Samples in a step.
        steps: Steps of a job of usual size.
        seq_len: Tokens in a sample; None for the model's own.
        graph: The model, if it has been read already.
        config: Fields of a transformers config, which then describe the model in place
            of the reference; see :func:`planner.capture.load_config`.
    """

    name: str
    ref: str
    global_batch: int
    steps: int
    seq_len: int | None = None
    graph: ModelGraph | None = None
    config: Mapping[str, Any] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.steps < 1:
            raise StrategyError(
                f"job {self.name!r} has global_batch={self.global_batch} and "
                f"steps={self.steps}; both are at least 1"
            )

    def read_graph(self) -> ModelGraph:
        """Return the model, captured once a process.

        Raises:
            CaptureError: If it cannot be read.
            UnknownNameError: If no model has that name.
        """
        if self.graph is not None:
            return self.graph
        if self.config is not None:
            return _read_config(_text(self.config), self.name, self.seq_len)
        return _read(self.ref, self.seq_len)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of model and batch; name and steps do not matter."""
        what = self.ref
        if self.graph is not None:
            what = fingerprint_bytes(
                json.dumps(self.graph.to_dict(), sort_keys=True).encode()
            )
        elif self.config is not None:
            what = fingerprint_bytes(_text(self.config).encode())
        elif self.ref.endswith(".txt"):
            what = fingerprint_bytes(_profile_bytes(Path(self.ref)))
        text = f"{what}|{self.global_batch}|{self.seq_len}"
        return fingerprint_bytes(text.encode())


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


@lru_cache(maxsize=64)
def _read_config(text: str, name: str, seq_len: int | None) -> ModelGraph:
    loaded = load_config(json.loads(text), name=name, seq_len=seq_len)
    return capture(loaded, None, dtype="bfloat16")


def _profile_bytes(path: Path) -> bytes:
    return read_bytes(path, "profile", error=CaptureError)


@lru_cache(maxsize=64)
def _read(ref: str, seq_len: int | None) -> ModelGraph:
    if ref.endswith(".txt"):
        return read_profile(ref)
    return capture(load_model(ref, seq_len=seq_len), None, dtype="bfloat16")


def resnet50() -> tuple[torch.nn.Module, dict[str, InputShape]]:
    """Make ResNet-50 of transformers, with the shape of its input.

    Source: He et al. 2016, "Deep residual learning for image recognition", table 1.
    """
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig(num_labels=1000))
    pixels = InputShape(shape=(1, 3, 224, 224), dtype="float32")
    return model, {"pixel_values": pixels}


#: Built-in jobs, small to large. Batches and steps are assumptions: some hours on one
#: GPU.
BUILT_IN: tuple[JobType, ...] = (
    JobType(
        name="resnet-50", ref="envs.stream.jobs:resnet50", global_batch=256, steps=40000
    ),
    JobType(name="vit-l", ref="vit-l", global_batch=256, steps=10000),
    JobType(name="bert-large", ref="bert-large", global_batch=64, steps=40000),
    JobType(
        name="qwen2.5-0.5b",
        ref="qwen2.5-0.5b",
        global_batch=64,
        steps=6000,
        seq_len=2048,
    ),
    JobType(name="vit-h", ref="vit-h", global_batch=256, steps=5000),
    JobType(name="t5-large", ref="t5-large", global_batch=64, steps=20000, seq_len=512),
    JobType(
        name="llama3.2-1b", ref="llama3.2-1b", global_batch=64, steps=3000, seq_len=2048
    ),
    JobType(
        name="whisper-large-v3", ref="whisper-large-v3", global_batch=64, steps=4000
    ),
    JobType(name="gpt2-xl", ref="gpt2-xl", global_batch=64, steps=4000, seq_len=1024),
    JobType(
        name="llama3.2-3b", ref="llama3.2-3b", global_batch=64, steps=2000, seq_len=2048
    ),
    JobType(
        name="llama3-8b", ref="llama3-8b", global_batch=64, steps=1000, seq_len=2048
    ),
)

#: PipeDream's profiles, by the names of their files.
PROFILES = (
    "alexnet",
    "densenet121",
    "gnmt",
    "gnmt_large",
    "inception_v3",
    "nasnetalarge",
    "nasnetamobile",
    "resnet101",
    "resnet18",
    "resnet50",
    "resnext101",
    "resnext50",
    "squeezenet1_0",
    "vgg16",
)


def built_in_jobs() -> tuple[JobType, ...]:
    """Return the jobs of real models, which need no files."""
    return BUILT_IN


def profiled_jobs(folder: str | os.PathLike[str] | None = None) -> tuple[JobType, ...]:
    """Return the jobs of PipeDream's profiles, with times as measured.

    Args:
        folder: Folder of ``<model>.txt`` files; by default ``pipedream`` in the folder
            that the environment variable MESHWRIGHT_DATA names.

    Raises:
        CaptureError: If the folder or a profile is missing.
    """
    if folder is None:
        data = os.environ.get("MESHWRIGHT_DATA")
        if data is None:
            raise CaptureError(
                "MESHWRIGHT_DATA is not set, and profiles are read from its folder "
                "pipedream; set it, or give the folder of profiles"
            )
        folder = Path(data) / "pipedream"
    paths = {name: Path(folder) / f"{name}.txt" for name in PROFILES}
    for name, path in paths.items():
        if not path.is_file():
            raise CaptureError(
                f"{path.parent} has no profile {name}.txt; give a folder with "
                f"{', '.join(PROFILES)}"
            )
    return tuple(
        JobType(
            name=f"pipedream-{name}",
            ref=str(path),
            global_batch=_PROFILED_BATCH,
            steps=_PROFILED_STEPS,
        )
        for name, path in paths.items()
    )
