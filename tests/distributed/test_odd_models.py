"""Models with odd inputs and parameters train as in one process, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from executors.certifying.compare import compare_with_whole
from executors.data import require_lengths, synthetic_batch
from planner import plan
from planner.errors import ExecutionError, NoFeasiblePlanError
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.cases import SEQ, make_plan

PIPELINE = {"pp": 2, "schedule": "1F1B"}


def made(model: nn.Module, inputs: dict[str, torch.Tensor], pins: Any) -> Plan:
    devices = 1
    for axis in ("pp", "dp_shard", "dp_replicate", "tp", "cp"):
        devices *= pins.get(axis, 1)
    found: Plan = plan(
        model,
        f"local:{devices}",
        global_batch=8,
        example_inputs=inputs,
        pin=pins,
        partitioner="exhaustive",
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=1e-2),
    )
    return found


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)
        )


class _Named(_Stack):
    """Inputs are called as keywords of torch's pipelines, and as our own values."""

    def forward(
        self, target: torch.Tensor, losses: torch.Tensor, relay_0: torch.Tensor
    ) -> torch.Tensor:
        out = target
        for layer, other in zip(self.layers, (losses, relay_0) * 2, strict=True):
            out = out + layer(out) * other
        return out


def test_inputs_may_have_any_name() -> None:
    inputs = {n: torch.randn(8, 3, 8) for n in ("target", "losses", "relay_0")}
    model = _Named()
    found = compare_with_whole(made(model, inputs, PIPELINE), model)
    assert found.verdict == "right", found


class _Scaled(_Stack):
    """Scalars in a unit and beside the units."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.layers[1].gain = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            x = x + layer(x) * self.scale
            if index == 1:
                x = x * layer.gain  # type: ignore[operator]
        return x


@pytest.mark.parametrize(
    "pins",
    [
        {"dp_shard": 2, "zero_stage": 1},
        {"dp_shard": 2, "zero_stage": 3},
        {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 2},
        PIPELINE | {"dp_replicate": 2},
    ],
    ids=" ".join,
)
def test_scalars_are_trained(pins: dict[str, Any]) -> None:
    model = _Scaled()
    inputs = {"x": torch.randn(8, 3, 8)}
    found = compare_with_whole(made(model, inputs, pins), model)
    assert found.verdict == "right", found


class _Unread(_Stack):
    """Parameters without a gradient: never read, or for an output that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.pooler = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return x, self.pooler(x[:, 0])


@pytest.mark.parametrize(
    "pins",
    [
        PIPELINE,
        PIPELINE | {"dp_shard": 2, "zero_stage": 2},
        {"dp_shard": 2, "zero_stage": 3},
        {"dp_replicate": 2},
        {"dp_replicate": 2, "num_microbatches": 2},
    ],
    ids=" ".join,
)
def test_parameters_without_gradients_stay_as_they_are(pins: dict[str, Any]) -> None:
    model = _Unread()
    inputs = {"x": torch.randn(8, 3, 8)}
    found = compare_with_whole(made(model, inputs, pins), model)
    assert found.verdict == "right", found


class _Unlike(_Stack):
    """A layer and a head in dtypes of their own, to which forward casts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].bfloat16()
        self.head = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x.to(layer[0].weight.dtype)).to(x.dtype)  # type: ignore[index]
        return self.head(x.to(self.head.weight.dtype)).float()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "pins",
    [{}, PIPELINE, {"dp_shard": 2, "zero_stage": 3}, {"dp_replicate": 2}],
    ids=" ".join,
)
def test_weights_of_unlike_dtypes_are_trained_in_one(pins: dict[str, Any]) -> None:
    model = _Unlike()
    inputs = {"x": torch.randn(8, 3, 8)}
    # As plain torch does with all weights in float32.
    found = compare_with_whole(made(model, inputs, pins), model.float())
    assert found.verdict == "right", found


class _Sharing(_Stack):
    """One layer within each block, which is another module in each."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), shared) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("virtual", [1, 2])
def test_stages_of_one_rank_share_a_module(virtual: int) -> None:
    model = _Sharing()
    pins = PIPELINE | {"schedule": "Interleaved1F1B" if virtual > 1 else "1F1B"}
    pins |= {"virtual_stages": virtual}
    found = compare_with_whole(made(model, {"x": torch.randn(8, 3, 8)}, pins), model)
    assert found.verdict == "right", found


class _Looking(_Stack):
    """An embedding whose gradient lists the rows that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8, sparse=True)
        self.bag = nn.EmbeddingBag(64, 8, mode="sum", sparse=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.bag(tokens)[:, None]
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize(
    "pins",
    [
        {},
        {"dp_replicate": 2},
        {"dp_shard": 2, "zero_stage": 1},
        {"dp_shard": 2, "zero_stage": 3},
        PIPELINE | {"dp_shard": 2, "zero_stage": 2},
    ],
    ids=" ".join,
)
def test_sparse_gradients_are_trained(pins: dict[str, Any]) -> None:
    model = _Looking()
    # Tokens are the labels of eight scores, too.
    inputs = {"tokens": torch.randint(0, 8, (8, 3))}
    found = compare_with_whole(made(model, inputs, pins), model)
    assert found.verdict == "right", found


class _Translating(nn.Module):
    """torch's encoder-decoder, which looks at the values of a mask without a hint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 16)
        self.inner = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 64)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = self.inner(
            self.embedding(source), self.embedding(target), tgt_mask=mask
        )
        scores: torch.Tensor = self.head(found)
        return scores


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_masks_of_torchs_transformer_in_a_pipeline(recompute: str) -> None:
    model = _Translating()
    inputs = {name: torch.randint(0, 64, (8, 6)) for name in ("source", "target")}
    plan = made(model, inputs, PIPELINE | {"recompute": recompute})
    found = compare_with_whole(plan, model)
    assert found.verdict == "right", found


def _albert(**sizes: int) -> nn.Module:
    config = transformers.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **sizes,
    )
    torch.manual_seed(0)
    return transformers.AlbertForMaskedLM(config)


_TOKENS = {"input_ids": torch.randint(0, 64, (8, 8))}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    "sizes", [{}, {"inner_group_num": 2}], ids=["one layer", "two layers"]
)
def test_layers_that_run_in_turn_are_not_cut_apart(sizes: dict[str, int]) -> None:
    model = _albert(**sizes)
    with pytest.raises(
        NoFeasiblePlanError,
        match=r"pp=2 cuts a model in which .* and .* run in turn.*; use pp=1",
    ):
        made(model, _TOKENS, PIPELINE)
    found = compare_with_whole(
        made(model, _TOKENS, {"dp_shard": 2, "zero_stage": 3}), model
    )
    assert found.verdict == "right", found


def test_groups_of_layers_that_run_in_turn_are_cut_between() -> None:
    model = _albert(num_hidden_groups=2)
    found = compare_with_whole(made(model, _TOKENS, PIPELINE), model)
    assert found.verdict == "right", found


class _Drawing(_Stack):
    """A diffusion model whose later layers are left out sample by sample."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        times = torch.randint(1, 9, (len(x), 1, 1)) / 9
        noise = torch.randn_like(x)
        made = x * (1 - times) + noise * times
        for layer in self.layers:
            kept = torch.rand(len(x), 1, 1) < 0.7
            made = made + layer(made) * kept
        return functional.mse_loss(made, noise)


@pytest.mark.parametrize(
    "pins",
    [
        {"dp_replicate": 2, "num_microbatches": 2},
        {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
        PIPELINE | {"dp_shard": 2, "zero_stage": 1, "num_microbatches": 2},
    ],
    ids=" ".join,
)
def test_random_numbers_of_samples_are_those_of_one_process(
    pins: dict[str, Any],
) -> None:
    model = _Drawing()
    found = compare_with_whole(made(model, {"x": torch.randn(8, 3, 8)}, pins), model)
    assert found.verdict == "right", found


class _Sketching(_Stack):
    """Random numbers that depend on how many samples there are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x[torch.randperm(len(x))]
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_samples_that_meet_by_chance_are_not_certified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inputs = _Sketching(), {"x": torch.randn(8, 3, 8)}
    with pytest.raises(NoFeasiblePlanError, match="data parallel 2"):
        made(model, inputs, {"dp_replicate": 2})
    # As if nothing had been found when it was read.
    monkeypatch.setattr("planner.capture.token_check.mixes_samples", lambda *_: False)
    monkeypatch.setattr("planner.capture.read.batch_violation", lambda *_, **__: None)
    found = compare_with_whole(made(model, inputs, {"dp_replicate": 2}), model)
    assert found.verdict == "wrong", found


class _Leaving(_Stack):
    """A parameter that the loss depends on in the first step alone."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Once for trial, once for a gradient.
        self.calls += 1
        x = self.extra(x) if self.calls <= 2 else x
        for layer in self.layers:
            x = layer(x)
        return x


def test_replicas_name_a_parameter_that_loses_its_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As of a model that is too large to be tried on its halves when it is read.
    monkeypatch.setattr("planner.capture.read.batch_violation", lambda *_, **__: None)
    model = _Leaving()
    inputs = {"x": torch.randn(8, 3, 8)}
    found = compare_with_whole(made(model, inputs, {"dp_replicate": 2}), model)
    assert found.verdict == "late"
    assert "does not depend on extra.weight, whose gradient" in str(found.violation)


def _tiny(kind: str, **sizes: Any) -> nn.Module:
    """A transformers model of two layers, which keeps keys and values by default."""
    base = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=64, pad_token_id=0, **base, **sizes
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return,no-untyped-call]


_EXPERTS = {
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
}
_ODD = {
    "experts shared by tokens in rows, under sequence parallelism": (
        {"tp": 2, "sequence_parallel": True},
        ("ernie4_5_moe", _EXPERTS | {"moe_num_experts": 4, "moe_k": 2}),
    ),
    "a ring with values narrower than keys": (
        {"cp": 2},
        (
            "deepseek_v3",
            _EXPERTS
            | {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
            | {"topk_group": 1, "first_k_dense_replace": 1, "qk_rope_head_dim": 8}
            | {"qk_nope_head_dim": 8, "v_head_dim": 8}
            | {"q_lora_rank": 16, "kv_lora_rank": 16},
        ),
    ),
    "keys and values kept, in a pipeline": (
        PIPELINE | {"recompute": "full"},
        ("llama", {"intermediate_size": 64, "use_cache": True}),
    ),
}


@pytest.mark.parametrize("name", _ODD)
def test_models_of_transformers(name: str) -> None:
    pins, (kind, sizes) = _ODD[name]
    model = _tiny(kind, **sizes)
    inputs = {"input_ids": torch.randint(0, 64, (8, 16))}
    found = compare_with_whole(made(model, inputs, pins), model)
    assert found.verdict == "right", found


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_other_lengths_than_planned_are_refused(axis: str) -> None:
    made = make_plan("llama", **{axis: 2})
    batch = synthetic_batch(made.workload, 0)
    require_lengths(batch, made)
    longer = {name: torch.cat([v, v[:, :4]], 1) for name, v in batch.items()}
    with pytest.raises(ExecutionError, match=rf"\({SEQ + 4},\).*\({SEQ},\).*{axis}=2"):
        require_lengths(longer, made)
    labelled = batch | {"labels": longer["input_ids"]}
    with pytest.raises(ExecutionError, match="'labels' has samples of shape"):
        require_lengths(labelled, made)
    require_lengths(longer, make_plan("llama", dp_shard=2, zero_stage=1))
