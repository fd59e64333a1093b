"""Low-rank adapters of peft: planned, trained on any mesh, saved as peft reads them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from executors import run
from executors.data import synthetic_batch
from planner import plan
from planner.capture import capture, load_model
from planner.errors import CaptureError, MeshwrightError
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.cases import build
from tests.distributed.pool import Pool

peft = pytest.importorskip("peft")
# It asks transformers for what goes by another name there.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)

STEPS, BATCH, LENGTH = 3, 4, 16
SGD = Optimizer(name="SGD", learning_rate=0.1)
LAYERS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
MESHES: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "zero3-recompute": {"dp_shard": 2, "zero_stage": 3, "recompute": "full"},
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp-sequence": {"tp": 2, "sequence_parallel": True},
    "pp-zero2": {"pp": 2, "dp_shard": 2, "zero_stage": 2, "num_microbatches": 2},
    "cp": {"cp": 2},
}


def adapted(folder: Path, *, trained: bool = True, **changes: Any) -> Path:
    """Write a base and adapters of it whose values no seed gives; return the folder."""
    torch.manual_seed(3)
    base = build("llama")
    base.save_pretrained(folder / "base")
    said: dict[str, Any] = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": list(LAYERS),
        "task_type": "CAUSAL_LM",
    } | changes
    model = peft.get_peft_model(base, peft.LoraConfig(**said))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(folder / "adapters")
    config = folder / "adapters" / "adapter_config.json"
    data = json.loads(config.read_text()) | {"base_model_name_or_path": "../base"}
    config.write_text(json.dumps(data))
    if not trained:
        (folder / "adapters" / "adapter_model.safetensors").unlink()
    return folder / "adapters"


def made_plan(folder: Path, **pins: Any) -> Plan:
    count = 2 ** len({"dp_replicate", "dp_shard", "tp", "pp", "cp"} & set(pins))
    found: Plan = plan(
        capture(load_model(f"hf:{folder}", seq_len=LENGTH), dtype="float32"),
        f"local:{count}",
        global_batch=BATCH,
        pin=pins,
        precision=Precision(compute="float32"),
        optimizer=SGD,
    )
    return found


def train(text: str, folder: str, options: dict[str, Any]) -> Any:
    """Losses, or what the run was refused for."""
    try:
        result = run(
            Plan.from_json(text),
            load_model(f"hf:{folder}", seq_len=LENGTH).build,
            steps=STEPS,
            check_first_step=True,
            **options,
        )
    except MeshwrightError as error:
        return str(error)
    return result.losses


def reference(folder: Path, plan: Plan) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and adapters by plain gradient descent, as peft trains."""
    from transformers import LlamaForCausalLM

    base = LlamaForCausalLM.from_pretrained(folder.parent / "base")
    model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for step in range(STEPS):
        tokens = synthetic_batch(plan.workload, step)["input_ids"]
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, peft.get_peft_model_state_dict(model, save_embedding_layers=False)


@pytest.mark.parametrize("mesh", MESHES)
def test_adapters_are_trained_and_saved_as_peft_does(
    pool: Pool, tmp_path: Path, mesh: str
) -> None:
    folder = adapted(tmp_path)
    made = made_plan(folder, **MESHES[mesh])
    losses, wanted = reference(folder, made)
    options = {"init_from": folder, "save_hf": tmp_path / "out"}
    world = made.strategy.mesh.num_devices
    found = pool.run(train, world, made.to_json(), str(folder), options)
    assert found[0] == pytest.approx(losses, rel=1e-5), found[0]
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-6)
    # peft reads the folder, whose config names the base.
    config = peft.PeftConfig.from_pretrained(tmp_path / "out")
    assert (tmp_path / "base").samefile(config.base_model_name_or_path)
    base = build("llama")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "out")
    assert again.peft_config["default"].r == 4
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_tp_splits_the_adapted_layers(tmp_path: Path) -> None:
    patterns = made_plan(adapted(tmp_path), tp=2).strategy.sharding.patterns
    column = {name for name, style in patterns.items() if style == "colwise"}
    row = {name for name, style in patterns.items() if style == "rowwise"}
    block = "model.layers.*"
    assert f"{block}.self_attn.q_proj.lora_B.default" in column
    # Not adapted itself.
    assert f"{block}.self_attn.k_proj" in column
    assert row == {
        f"{block}.{layer}.{part}"
        for layer in ("self_attn.o_proj", "mlp.down_proj")
        for part in ("base_layer", "lora_A.default")
    }


def test_only_adapters_have_gradients_and_states(tmp_path: Path) -> None:
    graph = capture(load_model(f"hf:{adapted(tmp_path)}", seq_len=LENGTH))
    trained = {p.name for p in graph.parameters if p.trainable}
    assert trained == {p.name for p in graph.parameters if ".lora_" in p.name}


def test_a_head_that_is_saved_whole_is_trained_and_saved(
    pool: Pool, tmp_path: Path
) -> None:
    folder = adapted(tmp_path, modules_to_save=["lm_head"])
    made = made_plan(folder, dp_shard=2, zero_stage=3)
    losses, wanted = reference(folder, made)
    options = {"init_from": folder, "save_hf": tmp_path / "out"}
    found = pool.run(train, 2, made.to_json(), str(folder), options)
    assert found[0] == pytest.approx(losses, rel=1e-5), found[0]
    saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert saved.keys() == wanted.keys()
    head = next(name for name in saved if "lm_head" in name)
    torch.testing.assert_close(saved[head], wanted[head], rtol=1e-4, atol=1e-6)


def test_fresh_adapters_begin_as_the_base(pool: Pool, tmp_path: Path) -> None:
    folder = adapted(tmp_path, trained=False)
    made = made_plan(folder, dp_replicate=2)
    options = {"init_from": folder}
    found = pool.run(train, 2, made.to_json(), str(folder), options)[0]
    base = type(build("llama")).from_pretrained(tmp_path / "base")
    tokens = synthetic_batch(made.workload, 0)["input_ids"]
    plain = base(input_ids=tokens, labels=tokens).loss
    assert found[0] == pytest.approx(float(plain.detach()), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("half", r"lacks 1 of \d+ tensors of adapters: model.layers.0"),
        ("shape", "of another model"),
        ("no base", r"base_model_name_or_path='../base', which is no folder"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    pool: Pool, tmp_path: Path, change: str, said: str
) -> None:
    folder = adapted(tmp_path)
    made = made_plan(folder, dp_replicate=2)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    if change == "half":
        del tensors[first]
    elif change == "shape":
        tensors[first] = torch.ones(3)
    save_file(tensors, path, metadata={"format": "pt"})
    options = {"init_from": folder}
    if change == "no base":
        (tmp_path / "base").rename(tmp_path / "moved")
        with pytest.raises(CaptureError, match=said):
            load_model(f"hf:{folder}")
        return
    found = pool.run(train, 2, made.to_json(), str(folder), options)
    assert re.search(said, found[0]), found[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "IA3"}, "is of IA3; only LORA"),
        ({"use_dora": True}, "is of use_dora; only LORA"),
        ({"target_modules": ["nowhere"]}, 'correct target_modules=\\["nowhere"\\]'),
        ({"peft_type": None}, "has no 'peft_type'"),
    ],
)
def test_configs_that_cannot_be_trained_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    folder = adapted(tmp_path)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CaptureError, match=said):
        capture(load_model(f"hf:{folder}", seq_len=LENGTH))
