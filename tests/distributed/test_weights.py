"""Weights of transformers: read into any mesh, trained, saved, read by transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from executors import run
from executors.checkpoints import dcp
from executors.checkpoints.snapshot import Inventory, full_parameters
from executors.deferred.model import record
from executors.mesh import build_mesh
from executors.trainer import Trainer
from executors.weights import WeightOptions
from planner.errors import MeshwrightError
from planner.schema import Optimizer, Plan
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool

SGD = Optimizer(name="SGD", learning_rate=0.1)
PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}
ZERO3 = {"dp_shard": 2, "zero_stage": 3}
LOCAL = {
    "dp_replicate": 2,
    "synchronisation": {"kind": "local_steps", "period": 1},
    "semantics": "approximate",
}


def other(name: str, tied: bool) -> Any:
    """The model with weights that no seed of a run gives."""
    model = build(name, tied=tied)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    return model


def load(plan_json: str, tied: bool, folder: str) -> dict[str, Any] | None:
    """Weights that a run begins with, whole."""
    plan = Plan.from_json(plan_json)

    def model_fn() -> torch.nn.Module:
        return build(plan.model.name, tied=tied)

    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(model_fn, small_bytes=0)
    inventory = Inventory.of(model)
    trainer = Trainer(plan, model, place, recording)
    options = WeightOptions.of(model_fn, folder, False, None, None)
    options.load(trainer, inventory)
    found = full_parameters(trainer)
    if place.rank:
        return None
    return {inventory.name(name): tensor.numpy() for name, tensor in found.items()}


def train(plan_json: str, tied: bool, options: dict[str, Any]) -> Any:
    """Losses of two steps, or what they were refused for."""
    plan = Plan.from_json(plan_json)
    try:
        model_fn = lambda: build(plan.model.name, tied=tied)  # noqa: E731
        return run(plan, model_fn, steps=2, check_first_step=True, **options).losses
    except MeshwrightError as error:
        return type(error).__name__, str(error)


CASES = [
    ("llama", False, ZERO3 | {"tp": 2}),
    ("llama", True, PIPELINE | {"tp": 2}),
    ("mixtral", False, {"dp_shard": 2, "ep": 2, "zero_stage": 1}),
    ("mixtral", False, ZERO3 | {"tp": 2, "ep": 4, "sequence_parallel": True}),
    ("llama", False, {"cp": 2, "zero_stage": 3}),
    ("mixtral", False, ZERO3),
    ("gpt2", True, {"dp_shard": 2, "zero_stage": 1}),
    ("bert", True, {"tp": 2}),
    ("llama", False, LOCAL),
]


@pytest.mark.parametrize(("name", "tied", "mesh"), CASES)
def test_every_rank_begins_with_its_part_of_the_files(
    pool: Pool, tmp_path: Path, name: str, tied: bool, mesh: dict[str, Any]
) -> None:
    model = other(name, tied)
    model.save_pretrained(tmp_path / "weights", max_shard_size="20KB")
    assert len(list((tmp_path / "weights").glob("*.safetensors"))) > 1
    plan = make_plan(name, tied=tied, optimizer=SGD, **mesh)
    world = plan.strategy.mesh.num_devices
    found = pool.run(load, world, plan.to_json(), tied, str(tmp_path / "weights"))[0]
    wanted = {key: value.detach() for key, value in model.named_parameters()}
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(torch.from_numpy(found[key]), value), key


# The first step of copies apart is not that of one process.
@pytest.mark.parametrize(("name", "tied", "mesh"), CASES[:-1])
def test_transformers_reads_what_was_trained(
    pool: Pool, tmp_path: Path, name: str, tied: bool, mesh: dict[str, Any]
) -> None:
    model = other(name, tied)
    model.save_pretrained(tmp_path / "weights")
    (tmp_path / "weights" / "tokenizer.json").write_text("{}")
    plan = make_plan(name, tied=tied, optimizer=SGD, **mesh)
    options = {
        "init_from": tmp_path / "weights",
        "save_hf": tmp_path / "saved",
        "checkpoint_dir": tmp_path / "kept",
    }
    world = plan.strategy.mesh.num_devices
    losses = pool.run(train, world, plan.to_json(), tied, options)[0]
    assert isinstance(losses[0], float), losses
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "{}"
    saved = type(model).from_pretrained(tmp_path / "saved")
    again = kept(build(name, tied=tied), tmp_path / "kept" / "step-000002")
    tokens = torch.arange(12).view(1, 12)
    with torch.no_grad():
        ours, theirs = (m.eval()(tokens).logits for m in (again, saved))
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-6)
    assert not torch.allclose(ours, other(name, tied).eval()(tokens).logits, atol=1e-4)


def kept(model: Any, checkpoint: Path) -> Any:
    """The model with the weights of a checkpoint."""
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    dcp.load(tensors, checkpoint, None)
    return model


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (None, {"allow_missing_weights": True}, "of another model"),
        ("drop", {}, r"lacks 1 of \d+ parameters: model.norm.weight"),
        ("drop", {"allow_missing_weights": True}, None),
        (None, {"save_hf": "."}, "exists; name a new folder"),
        ("code", {}, "quantized weights: model.norm.weight is stored as float8_e4m3fn"),
    ],
)
def test_files_of_another_model_are_refused(
    pool: Pool,
    tmp_path: Path,
    change: str | None,
    options: dict[str, Any],
    said: str | None,
) -> None:
    model = other("llama", False)
    model.save_pretrained(tmp_path / "weights")
    path = tmp_path / "weights" / "model.safetensors"
    tensors = load_file(path)
    if change == "drop":
        del tensors["model.norm.weight"]
    elif change == "code":
        coded = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
        tensors["model.norm.weight"] = coded
    elif said == "of another model":
        tensors["model.norm.weight"] = torch.ones(3)
    save_file(tensors, path, metadata={"format": "pt"})
    plan = make_plan("llama", optimizer=SGD, **ZERO3)
    options = {"init_from": tmp_path / "weights"} | options
    answer = pool.run(train, 2, plan.to_json(), False, options)
    if said is None:
        assert isinstance(answer[0][0], float)
        return
    assert answer[0] == answer[1]
    assert re.search(said, answer[0][1]), answer[0]
