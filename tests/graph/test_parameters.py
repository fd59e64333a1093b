"""Readers and training flags of each parameter of a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.graph import ModelGraph

transformers = pytest.importorskip("transformers")

_IDS = {"input_ids": ((2, 16), "int64")}


def _gpt2(*, tie: bool) -> Any:
    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=128, tie_word_embeddings=tie
    )
    return lambda: transformers.GPT2LMHeadModel(config)


def _readers(graph: ModelGraph) -> dict[str, list[str]]:
    """Units that read each parameter which several units do."""
    return {
        p.name: [graph.blocks[block].layer for block in p.readers]
        for p in graph.parameters
        if p.readers
    }


def test_a_tied_weight_names_every_unit_that_must_hold_it() -> None:
    tied, untied = (capture(_gpt2(tie=tie), _IDS) for tie in (True, False))
    assert _readers(tied) == {"transformer.wte.weight": ["transformer.wte", "lm_head"]}
    assert _readers(untied) == {}
    weight = next(p for p in tied.parameters if p.readers)
    assert weight.block == weight.readers[0]
    assert weight.aliases == ("lm_head.weight",)


def test_all_readers_of_one_embedding_are_named() -> None:
    config = transformers.T5Config(
        d_model=64, d_ff=128, d_kv=16, num_heads=4, num_layers=2, vocab_size=128
    )
    inputs = {**_IDS, "decoder_input_ids": ((2, 8), "int64"), "use_cache": False}
    graph = capture(lambda: transformers.T5ForConditionalGeneration(config), inputs)
    assert _readers(graph) == {
        "shared.weight": ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]
    }


class Layered(nn.Module):
    """Four equal layers, of which one may be frozen."""

    def __init__(self, frozen: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if frozen is not None:
            self.layers[frozen].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


@pytest.mark.parametrize("frozen", [None, 0, 2])
@pytest.mark.parametrize("repeat", [True, False])
def test_frozen_parameters_are_known_and_their_gradients_are_not_computed(
    frozen: int | None, repeat: bool
) -> None:
    graph = capture(lambda: Layered(frozen), {"x": ((4, 8), "float32")}, repeat=repeat)
    trains = {p.name: p.trainable for p in graph.parameters}
    assert trains == {
        f"layers.{i}.{leaf}": i != frozen
        for i in range(4)
        for leaf in ("weight", "bias")
    }
    product = 2.0 * 4 * 8 * 8
    # The first trained layer has no gradient to pass on, a frozen one none of its own.
    first = 1 if frozen == 0 else 0
    expected = [0 if i < first else 1 if i in {first, frozen} else 2 for i in range(4)]
    assert [b.backward_flops for b in graph.blocks] == [n * product for n in expected]
