"""Small configs keep every kind of layer, and models of them can be built and run."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

from planner.capture.small import small_config, small_module


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


class _Layered(nn.Module):
    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        wide = [nn.Linear(8, 8) for _ in range(5)]
        narrow = [nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))]
        self.layers = nn.ModuleList([*wide[:3], *narrow, *wide[3:]])
        self.register_buffer("scale", torch.full((8,), 2.0))
        self.count = len(self.layers) if counted else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count is not None:
            layers = [self.layers[index] for index in range(self.count)]
        else:
            layers = list(self.layers)
        for layer in layers:
            x = torch.relu(layer(x)) * self.scale
        return x


def test_a_small_module_has_the_first_layers_of_each_kind() -> None:
    model = _Layered()
    small = small_module(model, layers=2)
    assert len(model.layers) == 6
    assert [type(layer) for layer in small.layers] == [
        nn.Linear,
        nn.Linear,
        nn.Sequential,
    ]
    assert small.layers[1].weight is model.layers[1].weight
    assert small.layers[2][0].weight is model.layers[3][0].weight
    assert small.scale is model.scale
    x = torch.rand(3, 8)
    wanted = x
    for index in (0, 1, 3):
        wanted = torch.relu(model.layers[index](wanted)) * 2
    assert torch.equal(small(x), wanted)


def test_layers_without_parameters_stay() -> None:
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.0)]
    model = nn.Sequential(*(copy.deepcopy(one) for _ in range(4) for one in layers))
    small = small_module(model, layers=2)
    assert sum(isinstance(one, nn.Linear) for one in small) == 2
    assert sum(isinstance(one, nn.ReLU) for one in small) == 4
    assert list(small._modules) == [str(index) for index in range(len(small))]


def test_a_forward_that_counts_its_layers_fails_and_leaves_the_module_alone() -> None:
    model = _Layered(counted=True)
    with pytest.raises(IndexError):
        small_module(model, layers=2)(torch.rand(1, 8))
    assert model(torch.rand(1, 8)).shape == (1, 8)
