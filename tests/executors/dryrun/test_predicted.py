"""Predicted memory and messages equal those of a dry run of every stage."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from executors.dryrun import dry_runs
from planner import Cluster, plan, predict
from planner.capture import capture, load_config, load_model
from planner.capture.models import LoadedModel
from planner.graph import ModelGraph
from planner.schema import Mesh, Optimizer, Precision, Stage, Strategy
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
    "parts": {"boundary": "scattered"},
    "parts, interleaved, recomputed": {
        "boundary": "scattered",
        "schedule": "Interleaved1F1B",
        "virtual_stages": 2,
        "recompute": "full",
        "microbatch_size": 4,
    },
    "parts, sequence": {"boundary": "scattered", "sequence_parallel": True},
    "three stages": {"sequence_parallel": True, "pp": 3, "dp_shard": 1},
    "V": {
        "sequence_parallel": True,
        "schedule": "ZBVZeroBubble",
        "virtual_stages": 2,
    },
    "no pipeline": {"sequence_parallel": True, "pp": 1, "dp_shard": 4},
}
FURTHER = {"sequence", "parts"}


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


_GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
    "vocab_size": 8192,
    "n_positions": 512,
    "use_cache": False,
}
_MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 512,
    "use_cache": False,
}
_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "d_model": 256,
    "d_ff": 1024,
    "d_kv": 64,
    "num_heads": 4,
    "num_layers": 4,
    "vocab_size": 4096,
    "use_cache": False,
}
#: Model, microbatch, tokens, dtype, recomputation. Few tokens keep less than gradients
#: take: the end of backward is the worst, where for many it is the beginning. Masks of
#: dropout are a byte an element; attention with a learned bias is not fused. Replicas
#: that cast hold what the only device does.
ALONE: dict[str, tuple[dict[str, Any], int, int, Any, Any]] = {
    "dropout": (_GPT2, 16, 256, "bfloat16", "none"),
    "tied, few tokens": (_GPT2, 1, 32, "bfloat16", "none"),
    "float32": (_GPT2, 8, 256, "float32", "none"),
    "float32, few tokens": (_GPT2, 1, 32, "float32", "none"),
    "recomputed": (_GPT2, 2, 128, "bfloat16", "full"),
    "experts": (_MIXTRAL, 1, 256, "bfloat16", "none"),
    "experts, few tokens": (_MIXTRAL, 1, 32, "bfloat16", "none"),
    "untied, few tokens": (_CONFIG, 1, 16, "bfloat16", "none"),
    "learned bias": (_T5, 8, 256, "bfloat16", "none"),
    "replicas, few tokens": (_GPT2, 1, 32, "bfloat16", "none"),
}


ALONE_SLOW = {"float32", "recomputed", "experts", "replicas, few tokens"}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize("name", cases(ALONE, further=(), slow=ALONE_SLOW))
def test_memory_of_a_model_on_one_gpu(name: str) -> None:
    config, size, length, dtype, recompute = ALONE[name]
    loaded = load_config(config, seq_len=length)
    graph = capture(loaded, dtype=dtype)
    strategy = Strategy(
        mesh=Mesh(dp_replicate=2 if "replicas" in name else 1),
        stages=(Stage(rank=0, modules=(), recompute=recompute),),
        precision=Precision(compute=dtype),
        microbatch_size=size,
        num_microbatches=1,
    )
    made = predict(graph, Cluster.parse("dgx-h100:1"), strategy)
    (found,) = dry_runs(made, loaded.build, [0])
    assert found.failure is None, found.failure
    (memory,) = made.prediction.memory
    predicted = memory.total_bytes - memory.reserve_bytes
    # Of the tied weights, whose last gradient is widened, 3.3 %.
    rel = 0.04 if name == "tied, few tokens" else 0.03
    assert predicted == pytest.approx(found.peak_bytes, rel=rel)
