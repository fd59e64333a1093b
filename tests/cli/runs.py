"""Plans that runs are started by, and what stands in for a launcher."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import torch

from planner import plan
from planner.cluster import Cluster
from planner.schema import Plan, Precision
from tests.plans import TINY

__all__ = ["FAILS", "LAUNCHER", "TOKENS", "changed", "two_stages"]

TOKENS = TINY / "genesis.npy"
LAUNCHER = importlib.import_module("executors.launching.launcher")
#: A model whose third layer fails when it is run.
FAILS = ("--model", "tests.cli.models:failing", "--steps", "1")


def changed(path: Path, **parts: dict[str, object]) -> Path:
    """A plan's file with parts of it updated."""
    data = json.loads(path.read_text())
    for name, update in parts.items():
        data[name] |= update
    path.write_text(json.dumps(data))
    return path


def two_stages(of: tuple[torch.nn.Module, dict[str, torch.Tensor]]) -> Plan:
    """A plan of two stages."""
    model, inputs = of
    return plan(
        model,
        Cluster.detect(processes=2),
        example_inputs=inputs,
        global_batch=8,
        pin={"pp": 2},
        precision=Precision(compute="float32"),
    )
