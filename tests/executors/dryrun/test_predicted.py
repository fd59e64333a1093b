"""Predicted memory and messages equal those of a dry run of every stage."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from executors.dryrun import dry_runs
from planner import Cluster, plan
from planner.capture import capture, load_model
from planner.capture.models import LoadedModel
from planner.graph import ModelGraph
from planner.schema import Optimizer, Precision
from planner.schema.verification import Verification
from tests.marked import cases

#: Wide enough for activations to outweigh what an optimizer takes for a moment.
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "use_cache": False,
    "tie_word_embeddings": False,
}
_LENGTH = 256


@functools.cache
def _model(folder: Path, dtype: str) -> tuple[LoadedModel, ModelGraph]:
    path = folder / "config.json"
    path.write_text(json.dumps(_CONFIG))
    loaded = load_model(f"hf:{path}", seq_len=_LENGTH)
    return loaded, capture(loaded, dtype=dtype)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


PINS: dict[str, dict[str, Any]] = {
    "sequence": {"sequence_parallel": True},
    # Reduced gradients count as held beside activations, though they come after: where
    # little is kept, that takes larger microbatches to be within the tenth.
    "sequence, recomputed": {
        "sequence_parallel": True,
        "recompute": "full",
        "microbatch_size": 4,
    },
    "sequence, selective": {"sequence_parallel": True, "recompute": "selective"},
    "whole": {},
    "whole, recomputed": {"recompute": "full"},
    "whole, selective": {"recompute": "selective"},
    "three stages": {"sequence_parallel": True, "pp": 3, "dp_shard": 1},
    "V": {
        "sequence_parallel": True,
        "schedule": "ZBVZeroBubble",
        "virtual_stages": 2,
    },
    "no pipeline": {"sequence_parallel": True, "pp": 1, "dp_shard": 4},
}
FURTHER = {"sequence"}


@pytest.mark.parametrize("name", cases(PINS, further=FURTHER, slow=set(PINS) - FURTHER))
@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]
)
def test_messages_are_as_predicted_and_memory_is_close(
    folder: Path, name: str, dtype: Any
) -> None:
    pins: dict[str, Any] = {"pp": 2, "tp": 2, "dp_shard": 2, "schedule": "1F1B"}
    pins |= {"recompute": "none", "sequence_parallel": False, "cp": 1, "ep": 1}
    pins |= {"dp_replicate": 1, "microbatch_size": 2} | PINS[name]
    if pins["pp"] == 1:
        del pins["schedule"]
    if pins["dp_shard"] > 1:
        pins["zero_stage"] = 1
    devices = pins["pp"] * pins["tp"] * pins["dp_shard"]
    loaded, graph = _model(folder, dtype)
    made = plan(
        graph,
        Cluster.parse(f"local:{devices}"),
        global_batch=16 * pins["dp_shard"],
        pin=pins,
        precision=Precision(compute=dtype),
        optimizer=Optimizer(name="SGD"),
    )
    mesh = made.strategy.mesh
    ranks = [rank * mesh.stride("pp") for rank in range(mesh.pp)]
    found = dry_runs(made, loaded.build, ranks)
    assert not any(rank.failure for rank in found)
    for each in Verification.of(made, found).deviations:
        if each.name.startswith("peak memory"):
            assert each.ratio == pytest.approx(1, abs=0.1), each.name
        else:
            # A step's loss is summed up, too: four bytes.
            assert each.predicted == pytest.approx(each.found, abs=8), each.name
