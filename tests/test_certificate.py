"""Plans that are certified before they are returned."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner import certificate, plan
from planner.capture import batch_check
from planner.certificate import Certifier
from planner.errors import NoFeasiblePlanError
from planner.schema import Plan
from planner.schema.plan_parts import Certificate

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def _plan(model: object, **more: object) -> Plan:
    return plan(model, "local:2", global_batch=8, certify=True, **more)  # type: ignore[arg-type]


def test_a_certificate_says_what_was_trained_and_is_kept(tmp_path: Path) -> None:
    made = _plan(TINY, seq_len=64, pin={"tp": 2})
    assert made.certificate is not None
    assert made.certificate.verdict == "right"
    assert made.certificate.steps == 3
    assert "certified" in made.summary()
    (file,) = tmp_path.rglob("certificates/*/*.json")
    kept = json.loads(file.read_text())
    kept["model"] = "as kept"
    file.write_text(json.dumps(kept))
    again = _plan(TINY, seq_len=64, pin={"tp": 2})
    assert again.certificate is not None
    assert again.certificate.model == "as kept"


class _Shifted(nn.Module):
    """Attention beside a shift of tokens, which no rank of a sequence's parts sees."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x + functional.pad(x, (0, 0, 1, -1))).chunk(3, -1)
        heads = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        out: torch.Tensor = x + self.out(seen.transpose(1, 2).flatten(2))
        return out


class _Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(_Shifted() for _ in range(2))
        self.head = nn.Linear(16, 64)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


_EXAMPLE = {"input_ids": torch.zeros(2, 16, dtype=torch.int64)}


def test_what_trains_wrongly_is_not_returned() -> None:
    pin = {"cp": 2, "num_microbatches": 1, "recompute": "none"}
    with pytest.raises(NoFeasiblePlanError, match="does not train as one process does"):
        _plan(_Tokens(), example_inputs=_EXAMPLE, pin=pin)


@pytest.mark.further
def test_what_trains_wrongly_one_way_is_planned_in_another() -> None:
    made = _plan(_Tokens(), example_inputs=_EXAMPLE)
    assert made.strategy.mesh.cp == 1
    assert made.certificate is not None
    assert made.certificate.verdict == "right"


def test_the_next_plan_is_handed_over_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the memory of its own ranks, or no process could read it."""
    seen = []

    def certify(_: Certifier, made: Plan) -> Certificate:
        seen.append(Plan.from_data(made.to_data(), where="a plan").strategy)
        late = made.strategy.mesh.pp > 1
        label = made.strategy.label()
        return Certificate(verdict="late" if late else "right", strategy=label)

    monkeypatch.setattr(Certifier, "certify", certify)
    monkeypatch.setattr(Certifier, "_start", lambda _: None)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    made = _plan(layers, example_inputs=torch.zeros(8, 16))
    assert seen[0].mesh.pp == 2
    assert made.strategy == seen[-1]
    assert [entry.rank for entry in made.prediction.memory] == [0]


def test_a_module_from_a_file_beside_the_script_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_script.py").write_text(
        "from torch import nn\n\n\n"
        "class Beside(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n"
        "        return self.layer(x).square().mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = importlib.import_module("beside_the_script").Beside()
    made = _plan(model, example_inputs=torch.zeros(2, 4))
    assert made.certificate is not None
    assert made.certificate.verdict == "right"


def test_own_code_without_values_is_unknown_and_starts_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Certifier, "_start", None)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    made = _plan(model, example_inputs=torch.zeros(2, 4))
    assert made.certificate is not None
    assert made.certificate.verdict == "unknown"
    assert "certified  no: no small model" in made.summary()


class _TimesSamples(torch.autograd.Function):
    """Gradients that depend on how many samples there are, which no op tells."""

    @staticmethod
    def forward(_: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, grad: torch.Tensor) -> torch.Tensor:
        return grad * len(grad)


class _Stack(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.counts = counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        x = _TimesSamples.apply(x) if self.counts else x
        return x.square().mean()


_PIN = {"dp_shard": 2, "zero_stage": 1, "num_microbatches": 1}


@pytest.mark.parametrize("counts", [False, True])
def test_a_large_module_of_own_code_is_certified_with_few_layers(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if these were many parameters.
    monkeypatch.setattr(certificate, "_MOST_PARAMETERS", 1000)
    monkeypatch.setattr(batch_check, "_MOST_PARAMETERS", 1000)
    torch.manual_seed(0)
    asked = {"example_inputs": torch.rand(8, 16) - 0.5, "pin": _PIN}
    if counts:
        with pytest.raises(NoFeasiblePlanError, match="does not train"):
            _plan(_Stack(counts), **asked)
        return
    found = _plan(_Stack(counts), **asked).certificate
    assert found is not None
    assert found.verdict == "right"
    assert found.model == "2 layers, 544 parameters"


def test_a_module_that_is_large_with_few_layers_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(certificate, "_MOST_PARAMETERS", 1000)
    monkeypatch.setattr(certificate, "_MOST_TRAINED", 2 * 543)
    monkeypatch.setattr(Certifier, "_start", None)
    made = _plan(_Stack(False), example_inputs=torch.rand(8, 16))
    assert made.certificate is not None
    assert made.certificate.verdict == "unknown"


def test_no_process_is_left() -> None:
    with Certifier(TINY) as certifier:
        certifier.prepare()
        process = certifier._process
        assert process is not None
        assert process.poll() is None
    assert process.returncode == -9


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(TINY, "local:2", global_batch=8, seq_len=64).certificate is None
    monkeypatch.setenv("MESHWRIGHT_CERTIFY", "1")
    made = plan(TINY, "local:2", global_batch=8, seq_len=64, certify=False)
    assert made.certificate is None
