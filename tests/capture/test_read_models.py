"""Every kind of model is read, with the right parameters and FLOPs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from planner.capture import (
    architectures,
    capture,
    load_config,
    load_model,
    model_names,
)
from planner.capture.fakes import build_on_meta
from planner.errors import CaptureError
from planner.graph import ModelGraph
from tests.marked import cases
from tests.models.convolutional import ResNet, UNet3d
from tests.models.other import Recommender, Recurrent

pytest.importorskip("transformers")

#: Model, sequence length, parameters (published or counted by hand where known).
LOADED = [
    ("llama3-8b", 512, 8_030_261_248),
    ("llama3-70b", 512, 70_553_706_496),
    ("llama3-405b", 512, 405_853_388_800),
    ("mixtral-8x7b", 512, 46_702_792_704),
    ("deepseek-v3", 512, 671_026_404_352),
    ("gpt2-xl", 512, 1_557_611_200),
    ("bert-large", 512, 335_174_458),
    ("vit-h", None, 632_045_800),
    ("t5-3b", 128, 2_851_598_336),
    ("whisper-large-v3", 64, 1_543_490_560),
    ("mamba-2.8b", 16, 2_768_345_600),
]
#: Their blocks are those of llama3-8b.
_ALIKE = {"llama3-70b", "llama3-405b"}


def _well_formed(graph: ModelGraph) -> None:
    """Blocks are numbered, edges go forward, units are contiguous and named once."""
    assert [block.index for block in graph.blocks] == list(range(len(graph.blocks)))
    assert all(edge.source < edge.target for edge in graph.edges)
    assert len(set(graph.unit_names)) == len(graph.units)
    assert len(graph.cut_bytes) == len(graph.units) - 1
    assert sum(b.parameter_count for b in graph.blocks) == graph.num_parameters
    for start, stop in graph.units:
        inside = graph.blocks[start + 1 : stop]
        assert not any(block.boundary_bytes for block in inside)
    assert graph.backward_flops >= graph.forward_flops > 0
    assert graph.saved_bytes > 0


@pytest.mark.parametrize(
    ("name", "seq_len", "parameters"),
    [
        pytest.param(*one, marks=pytest.mark.further if one[0] in _ALIKE else ())
        for one in LOADED
    ],
)
def test_transformers_model(name: str, seq_len: int | None, parameters: int) -> None:
    loaded = load_model(name, seq_len=seq_len)
    graph = capture(loaded)
    module = build_on_meta(loaded.build, None)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    assert graph.num_parameters == parameters
    assert {p.name: p.shape for p in graph.parameters} == {
        key: tuple(p.shape) for key, p in module.named_parameters()
    }
    assert graph.ref == name
    # T5 has no fused attention in transformers.
    told = ("mean square", "fallback code: attention")
    others = [one for one in graph.assumptions if not any(t in one for t in told)]
    assert others == []
    _well_formed(graph)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (ResNet, {"x": ((2, 3, 224, 224), "float32")}),
        (UNet3d, {"x": ((1, 1, 32, 32, 32), "float32")}),
        (Recommender, {"dense": ((8, 13), "float32"), "sparse": ((8, 8, 4), "int64")}),
        (Recurrent, {"tokens": ((2, 16), "int64")}),
    ],
)
def test_other_model(build: type[torch.nn.Module], inputs: object) -> None:
    graph = capture(build, inputs)
    module = build_on_meta(build, None)
    assert graph.num_parameters == sum(p.numel() for p in module.parameters())
    _well_formed(graph)


@pytest.mark.parametrize(
    "name",
    cases(("llama3-8b", "llama3-70b", "llama3-405b", "vit-h"), further=["llama3-70b"]),
)
def test_flops_equal_the_closed_form(name: str) -> None:
    graph = capture(load_model(name, seq_len=None if name == "vit-h" else 2048))
    hidden, layers = int(graph.config["hidden_size"]), int(graph.config["num_layers"])
    length = graph.seq_len or (224 // 14) ** 2 + 1
    tokens = graph.batch * length
    embedding = sum(
        p.numel for p in graph.parameters if graph.blocks[p.block].kind == "embedding"
    )
    if name == "vit-h":
        # The patch projection is an embedding by name and a product by nature.
        embedding = 0
    weights = 6 * (graph.num_parameters - embedding) * tokens
    attention = 12 * layers * length * hidden * tokens
    total = graph.forward_flops + graph.backward_flops
    assert total == pytest.approx(weights + attention, rel=0.02)
    assert graph.backward_flops == pytest.approx(2 * graph.forward_flops, rel=0.02)


def test_gpt2_xl_counts_its_tied_head() -> None:
    graph = capture(load_model("gpt2-xl"))
    tokens, hidden, layers = 1024, 1600, 48
    head = hidden * 50257
    positions = 1024 * hidden
    products = graph.num_parameters - positions - head
    want = 6 * (products + head) * tokens + 12 * layers * 1024 * hidden * tokens
    assert graph.forward_flops + graph.backward_flops == pytest.approx(want, rel=0.02)


def test_recomputation_in_attention_is_counted_apart() -> None:
    graph = capture(load_model("llama3-8b", seq_len=1024))
    attention = [k for b in graph.blocks for k in b.kernels if k.kind == "attention"]
    assert len(attention) == 32
    for kernel in attention:
        assert kernel.backward_flops == 2 * kernel.forward_flops
        assert kernel.recompute_flops == kernel.forward_flops / 2


def test_layers_of_the_405b_model_are_equal_blocks() -> None:
    graph = capture(load_model("llama3-405b", seq_len=256))
    mlps = [block for block in graph.blocks if block.kind == "mlp"]
    assert len(mlps) == 126
    assert len({block.repeat for block in mlps}) == 1
    assert graph.unit_names[1:127] == tuple(f"model.layers.{i}" for i in range(126))
    assert graph.tp_dims == {
        "num_heads": 128,
        "num_key_value_heads": 8,
        "intermediate_size": 53248,
        "vocab_size": 128256,
    }


def test_experts_are_told_apart() -> None:
    graph = capture(load_model("mixtral-8x7b", seq_len=256))
    assert graph.num_experts == 8
    block = next(block for block in graph.blocks if block.kind == "expert")
    assert block.expert_parameter_count == 8 * 3 * 4096 * 14336
    assert block.expert_bytes == 256 * 2 * 4096 * 2
    assert all(p.expert == (".experts." in p.name) for p in graph.parameters)


def test_key_value_heads_before_they_are_repeated() -> None:
    graph = capture(load_model("llama3-8b", seq_len=256))
    block = next(block for block in graph.blocks if block.kind == "attention")
    assert (block.heads, block.kv_heads) == (32, 8)
    assert block.sequence_bytes == 2 * 256 * 8 * 128 * 2


def test_encoder_output_is_relayed_across_every_decoder_cut() -> None:
    graph = capture(load_model("whisper-large-v3", seq_len=64))
    encoded = 1500 * 1280 * 2
    place = graph.unit_names.index("model.decoder.layers.5")
    assert graph.cut_bytes[place] == encoded + 64 * 1280 * 2


def test_the_fields_of_a_config_are_the_model_they_describe() -> None:
    fields = {"model_type": "gpt2", **architectures()["gpt2-medium"].figures}
    given = capture(load_config(fields, seq_len=128), name="one")
    named = capture(load_model("gpt2-medium", seq_len=128), name="one")
    assert given.ref is None
    assert given == replace(named, ref=None)


def test_a_config_without_a_known_type_is_refused() -> None:
    with pytest.raises(CaptureError, match="model_type=None; give the name"):
        load_config({"hidden_size": 8})
    with pytest.raises(CaptureError, match="model_type='lama'"):
        load_config({"model_type": "lama"})


def test_every_built_in_name_is_listed() -> None:
    assert {name for name, _, _ in LOADED} <= set(model_names())


def test_every_built_in_model_has_a_source() -> None:
    for name, entry in architectures().items():
        assert re.search(r"\b(19|20)\d\d\b|config\.json of", entry.source), name
        assert entry.figures, name
