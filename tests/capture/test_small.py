"""Small configs keep every kind of layer, and models of them can be built and run."""

from __future__ import annotations

import pytest
import torch
import transformers

from planner.capture.small import small_config


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "gemma",  # heads times their features are not the width
        "gptj",  # rotates part of a head, whose features have a field
        "gpt_neo",  # kinds of layers times how often
        "bamba",  # state-space heads times their features are twice the width
        "gemma3n_text",  # late layers read keys and values of earlier ones
        "gemma4_text",  # some layers have a config of their own
        "longcat_flash",  # ranks of projections
        "prophetnet",
        "opt",
    ],
)
def test_a_small_model_runs(kind: str) -> None:
    config = small_config(transformers.AutoConfig.for_model(kind), head_size=16)
    maker = transformers.AutoModelForCausalLM
    model = maker.from_config(config)
    assert sum(p.numel() for p in model.parameters()) < 1e6
    model(input_ids=torch.randint(4, 90, (2, 8)))


def test_layers_of_every_kind_stay() -> None:
    config = transformers.AutoConfig.for_model("gemma3n_text")
    small = small_config(config, layers=2, head_size=16)
    count = small.num_hidden_layers
    assert count == len(small.layer_types) == len(small.intermediate_size)
    shared = count - small.num_kv_shared_layers
    assert set(small.layer_types[:shared]) == set(small.layer_types[shared:])
    assert set(small.layer_types) == set(config.layer_types)


def test_a_layer_with_its_own_config_stays() -> None:
    config = transformers.AutoConfig.for_model("gemma4_text")
    small = small_config(config, layers=2, head_size=16)
    data = small.to_dict()
    at, own = next(iter(data["per_layer_config"].items()))
    assert int(at) < small.num_hidden_layers
    assert small.layer_types[int(at)] == "full_attention"
    assert own["head_dim"] == 2 * data["head_dim"]
