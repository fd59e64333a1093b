"""All that the pool's processes import, read once in the process that forks them."""

from __future__ import annotations

import contextlib
import gc
import importlib
from pathlib import Path

import pytest

__all__: list[str] = []

_NAMES = [
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    # Imported by the first backward of a pipeline.
    "torch._functorch.partitioners",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "executors.trainer",
    # Jobs are functions of these.
    *sorted(
        f"tests.distributed.{p.stem}" for p in Path(__file__).parent.glob("test_*")
    ),
]

# What imports make stays: each process would go through it again, and copy it.
gc.disable()
for _name in _NAMES:
    # A library of some tests may be missing here.
    with contextlib.suppress(pytest.skip.Exception):
        importlib.import_module(_name)
gc.freeze()
gc.enable()
