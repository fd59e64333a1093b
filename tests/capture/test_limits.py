"""Models that cannot be read end in an error that says why; nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from planner.capture import capture, load_model
from planner.errors import CaptureError, OpBudgetError, UnknownNameError
from tests.models.other import Branchy, Broken, Endless, Stack

_TOKENS = {"tokens": ((2, 8), "int64")}


def test_an_error_names_the_op_and_the_module() -> None:
    with pytest.raises(CaptureError, match=r"aten\.(add)?mm.*'bad\.inner'") as caught:
        capture(Broken(), {"x": ((2, 4), "float32")})
    text = str(caught.value)
    assert "on fake tensors:" in text
    assert "without saved-tensor hooks:" in text
    assert "real run:" in text
    assert "\n" not in text


def test_a_loop_that_does_not_end_meets_the_op_budget() -> None:
    with pytest.raises(
        OpBudgetError, match=r"op_budget=500 ops in module '(root|step)'"
    ):
        capture(Endless(), {"x": ((2, 4), "float32")}, op_budget=500)


def test_assumed_values_are_recorded() -> None:
    graph = capture(Branchy(), {"x": ((16, 8), "float32")})
    text = "\n".join(graph.assumptions)
    assert "a scalar read from a tensor is 0.0" in text
    assert "a mask selects 8 of 16 elements" in text


def test_a_transform_without_hooks_is_read_in_the_second_way() -> None:
    class Jacobian(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.jacrev(lambda y: self.inner(y).sin())(x)

    graph = capture(Jacobian(), {"x": ((4,), "float32")})
    assert any("every tensor of forward is kept" in text for text in graph.assumptions)
    assert graph.num_parameters == 20


def test_numpy_in_forward_is_read_by_a_real_run() -> None:
    class Outside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = float(x.detach().float().numpy().sum())
            return self.inner(x) * scale

    graph = capture(Outside(), {"x": ((3, 4), "float32")})
    assert graph.forward_flops == 2 * 3 * 4 * 4
    assert any("real run" in text for text in graph.assumptions)


def test_the_callers_module_and_torchs_state_are_left_as_they_were() -> None:
    module = Stack().eval()
    module.blocks[0].train()
    module.norm.register_forward_hook(lambda *_: None)
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    modes = [child.training for child in module.modules()]
    attributes = [set(vars(child)) for child in module.modules()]
    random, attention = torch.get_rng_state(), torch.nn.functional
    before = attention.scaled_dot_product_attention
    capture(module, _TOKENS)
    assert [child.training for child in module.modules()] == modes
    assert [set(vars(child)) for child in module.modules()] == attributes
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(type(p) is torch.nn.Parameter for p in module.parameters())
    assert module.head.weight is module.embed.weight
    for key, value in module.state_dict().items():
        assert torch.equal(value, weights[key])
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_default_dtype() == torch.float32
    assert attention.scaled_dot_product_attention is before
    assert "forward" not in vars(module.blocks[3])
    assert len(module.norm._forward_hooks) == 1


def test_a_constructor_that_fails_is_reported() -> None:
    def build() -> torch.nn.Module:
        raise ValueError("no such width")

    with pytest.raises(CaptureError, match=r"could not be built.*no such width"):
        capture(build, _TOKENS)


def test_state_is_put_back_after_a_failure() -> None:
    before = torch.nn.functional.scaled_dot_product_attention
    with pytest.raises(CaptureError):
        capture(Broken(), {"x": ((2, 4), "float32")})
    assert torch.nn.functional.scaled_dot_product_attention is before
    assert torch.get_default_dtype() == torch.float32
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    "inputs",
    [
        {"tokens": ((2, 8), "int64")},
        ((2, 8), "int64"),
        torch.zeros(2, 8, dtype=torch.int64),
        (torch.zeros(2, 8, dtype=torch.int64, device="meta"),),
    ],
)
def test_inputs_may_be_real_meta_or_shapes(inputs: object) -> None:
    graph = capture(Stack(), inputs)
    assert graph.inputs == (("tokens", (2, 8), "int64", 2),)
    assert (graph.batch, graph.seq_len) == (2, 8)


def test_inputs_without_a_tensor_are_refused() -> None:
    with pytest.raises(CaptureError, match="hold no tensor"):
        capture(Stack(), {"flag": True})


def test_a_module_without_a_config_needs_inputs() -> None:
    with pytest.raises(CaptureError, match="example_inputs are needed"):
        capture(Stack())


def test_an_output_without_gradient_is_refused() -> None:
    module = Stack().requires_grad_(requires_grad=False)
    with pytest.raises(CaptureError, match="nothing to train"):
        capture(module, _TOKENS)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'llama3-8b'"):
        load_model("llama-3-8b")


def _write(folder: Path, **config: object) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return f"hf:{folder}"


def test_a_config_that_brings_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the model ran')")
    ref = _write(
        tmp_path, model_type="llama", auto_map={"AutoConfig": "evil.EvilConfig"}
    )
    with pytest.raises(CaptureError, match=r"auto_map=.*evil\.EvilConfig"):
        load_model(ref)


def test_a_local_config_is_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    ref = _write(
        tmp_path,
        model_type="llama",
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        max_position_embeddings=48,
    )
    loaded = load_model(ref, batch=3)
    graph = capture(loaded)
    assert (graph.ref, graph.batch, graph.seq_len) == (ref, 3, 48)
    assert graph.inputs == (("input_ids", (3, 48), "int64", 100),)
    assert graph.config["num_layers"] == 3


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("{", "not a whole JSON document"),
        ("[]", "no 'model_type'"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
    ],
)
def test_a_malformed_config_is_refused(tmp_path: Path, text: str, match: str) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CaptureError, match=match):
        load_model(f"hf:{tmp_path}")


def test_a_missing_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot read config"):
        load_model(f"hf:{tmp_path / 'absent'}")


def test_a_factory_is_imported_only_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_model.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.nn.Linear(4, 2), {'input': ((3, 4), 'float32')}\n"
    )
    monkeypatch.chdir(tmp_path)
    graph = capture(load_model("own_model:make"))
    assert (graph.num_parameters, graph.batch) == (10, 3)
    with pytest.raises(CaptureError, match="no function 'absent'"):
        load_model("own_model:absent")
    with pytest.raises(CaptureError, match="cannot import"):
        load_model("no_such_module_here:make")


def test_a_sequence_beyond_learned_positions_is_refused() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(CaptureError, match="1024 learned positions"):
        load_model("gpt2", seq_len=2048)
