"""Copies that train apart in rounds: what tests of their methods share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from executors import run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema import (
    InputSpec,
    Mesh,
    Optimizer,
    Plan,
    Stage,
    Strategy,
    TensorSharding,
    Workload,
)
from planner.schema.base import fingerprint_parameters
from planner.schema.methods.method import Synchronisation
from planner.schema.violations import executor_violations
from tests.distributed.cases import BATCH, build, make_plan

__all__ = [
    "ADAMW",
    "INPUTS",
    "MOMENTUM",
    "OTHER_AXES",
    "SGD",
    "axes_refused",
    "deal_without_training",
    "local",
    "loss_of",
    "make",
    "move",
    "numpy_of",
    "plan_of",
    "resume",
    "save_between",
    "train",
    "train_alone",
    "train_planned",
    "trainer_of",
]

SGD = Optimizer(name="SGD", learning_rate=0.1)
MOMENTUM = Optimizer(name="SGD", learning_rate=0.1, momentum=0.9)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3, weight_decay=0.1)
FEATURES, NODES = 6, 7


class Gcn(nn.Module):
    """Graph convolutions of dense subgraphs, each an adjacency matrix of its own."""

    def __init__(self, sizes: tuple[int, ...] = (FEATURES, 16, 24, 16, 5)) -> None:
        super().__init__()
        pairs = pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        """Shapes [batch, nodes, features] and [batch, nodes, nodes]."""
        # Each node takes a mean of its neighbours.
        adjacency = adjacency.softmax(-1)
        for index, layer in enumerate(self.layers):
            features = adjacency @ layer(features)
            if index < len(self.layers) - 1:
                features = torch.relu(features)
        return features


def _hidden() -> nn.Module:
    """One hidden layer, whose weights are all of the model's."""
    return nn.Sequential(
        nn.Linear(FEATURES, 48, bias=False), nn.ReLU(), nn.Linear(48, 5, bias=False)
    )


def _deep() -> nn.Module:
    """Three hidden layers."""
    return nn.Sequential(
        nn.Linear(FEATURES, 48),
        nn.ReLU(),
        nn.Linear(48, 24),
        nn.Tanh(),
        nn.Linear(24, 40, bias=False),
        nn.ReLU(),
        nn.Linear(40, 5),
    )


_OWN: dict[str, Callable[[], nn.Module]] = {
    "hidden": _hidden,
    "deep": _deep,
    "gcn": Gcn,
}
#: Shapes of a sample's inputs.
INPUTS: dict[str, dict[str, tuple[int, ...]]] = {
    "hidden": {"input": (FEATURES,)},
    "deep": {"input": (FEATURES,)},
    "gcn": {"features": (NODES, FEATURES), "adjacency": (NODES, NODES)},
}
_UNITS = {
    "hidden": ("0", "2"),
    "deep": ("0", "2", "4", "6"),
    "gcn": tuple(f"layers.{index}" for index in range(4)),
}


def make(name: str) -> nn.Module:
    """A model by name, seeded."""
    if name not in _OWN:
        return build(name)
    torch.manual_seed(0)
    return _OWN[name]()


def plan_of(model: str, patterns: Mapping[str, Any], **changes: Any) -> Plan:
    """Plan of a model of :func:`make`; arguments as for ``make_plan``."""
    made = make_plan("perceptron" if model in _OWN else model, **changes)
    update: dict[str, Any] = {"sharding": TensorSharding(patterns=dict(patterns))}
    if model not in _OWN:
        strategy = made.strategy.model_copy(update=update)
        return made.model_copy(update={"strategy": strategy})
    update["stages"] = (Stage(rank=0, modules=_UNITS[model]),)
    inputs = tuple(
        InputSpec(name=name, shape=shape, dtype="float32")
        for name, shape in INPUTS[model].items()
    )
    return made.model_copy(
        update={
            "strategy": made.strategy.model_copy(update=update),
            "model": made.model.model_copy(update=_reference(model)),
            "workload": Workload(global_batch=BATCH, inputs=inputs, loss="mean_square"),
        }
    )


def _reference(model: str) -> dict[str, Any]:
    shapes = [(name, tuple(p.shape)) for name, p in make(model).named_parameters()]
    return {
        "name": model,
        "parameters": sum(math.prod(shape) for _, shape in shapes),
        "tensors": len(shapes),
        "fingerprint": fingerprint_parameters(shapes),
    }


def trainer_of(plan: Plan) -> Trainer:
    """Build a trainer of a plan, on this rank; collective."""
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: make(plan.model.name), small_bytes=0)
    return Trainer(plan, model, place, recording)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """Part of a parameter that this rank holds."""
    return getattr(parameter, "to_local", lambda: parameter)().detach()


def numpy_of(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Arrays by name, which can be sent between processes."""
    return {name: weight.numpy() for name, weight in weights.items()}


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of a copy; by step bytes, whole models, and what has a gradient."""
    plan = Plan.from_json(text)
    trainer = trainer_of(plan)
    found: dict[str, Any] = {"losses": [], "traffic": [], "trained": []}
    found["weights"] = [numpy_of(full_parameters(trainer))]
    for step in range(steps):
        with CollectiveCounter() as counter:
            result = trainer.step(synthetic_batch(plan.workload, step))
        found["losses"].append(result.loss)
        traffic = counter.traffic().items()
        found["traffic"].append({kind: each.bytes for kind, each in traffic})
        named = trainer.named_parameters()
        found["trained"].append({name for name, p in named if p.grad is not None})
        found["weights"].append(numpy_of(full_parameters(trainer)))
    parameters = trainer.all_parameters()
    found["held"] = sum(local(p).untyped_storage().nbytes() for p in parameters)
    return found


def train_alone(
    plan: Plan, model: nn.Module, index: int, steps: Iterable[int]
) -> list[float]:
    """Train a model on the samples of one copy, in one process; its losses."""
    copies, spec = plan.strategy.mesh.dp_replicate, plan.strategy.optimizer
    options: dict[str, Any] = {"lr": spec.learning_rate}
    options["weight_decay"] = spec.used_weight_decay
    options |= {"momentum": spec.momentum} if spec.name == "SGD" else {}
    rule = getattr(torch.optim, spec.name)(model.parameters(), **options)
    losses = []
    for step in steps:
        batch = synthetic_batch(plan.workload, step)
        own = {name: value.chunk(copies)[index] for name, value in batch.items()}
        loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
        loss.prepare(own, 1)
        rule.zero_grad()
        value = loss(model(**own), loss.target(own))
        value.backward()  # type: ignore[no-untyped-call]
        rule.step()
        losses.append(value.item())
    return losses


def deal_without_training(text: str, turns: int) -> list[dict[str, Any]]:
    """The whole model before and after some rounds without a step of training."""
    trainer = trainer_of(Plan.from_json(text))
    found = [numpy_of(full_parameters(trainer))]
    for turn in range(turns):
        trainer.replicas.before_forward(turn)
        trainer.replicas.after_update(turn)
        found.append(numpy_of(full_parameters(trainer)))
    return found


# -- Checkpoints -----------------------------------------------------------------------


def resume(text: str, folder: str, every: int = 2) -> dict[str, list[float]]:
    """Losses of a run without a break, and of one that is resumed on its way.

    Args:
        text: Plan.
        folder: Of checkpoints.
        every: Steps from one to the next; the run has three times as many.
    """
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        result = run(plan, lambda: make(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": every}
    return {
        "straight": losses(3 * every),
        "first": losses(every, **kept),
        "rest": losses(3 * every, resume=True, **kept),
    }


def save_between(text: str, folder: str) -> str:
    """Message of a run that is to be saved within a round."""
    plan = Plan.from_json(text)
    with pytest.raises(ExecutionError) as caught:
        run(plan, lambda: make(plan.model.name), steps=3, checkpoint_dir=folder)
    return str(caught.value)


def move(text: str, other: str, folder: str) -> dict[str, Any]:
    """Train by one plan, go on by another; and the model where they meet."""
    first, second = Plan.from_json(text), Plan.from_json(other)
    trainer = trainer_of(first)
    for step in range(4):
        trainer.step(synthetic_batch(first.workload, step))
    trainer.replicas.settle()
    weights = numpy_of(full_parameters(trainer))
    run(first, lambda: make(first.model.name), steps=4, checkpoint_dir=folder)
    rest = run(
        second,
        lambda: make(second.model.name),
        steps=6,
        checkpoint_dir=folder,
        resume=True,
    )
    return {"weights": weights, "losses": list(rest.losses)}


def loss_of(plan: Plan, weights: Mapping[str, Any], step: int) -> float:
    """Loss of a whole model on a global batch, in one process."""
    model = make(plan.model.name)
    model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()})
    batch = synthetic_batch(plan.workload, step)
    loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
    loss.prepare(batch, 1)
    return float(loss(model(**batch), loss.target(batch)).detach())


# -- Refusals and plans ----------------------------------------------------------------

#: Fields of a strategy, and how a refusal of them begins.
OTHER_AXES = [
    ({"tp": 2}, "with tp=2; "),
    ({"pp": 2}, "with pp=2; "),
    ({"cp": 2}, "with cp=2; "),
    ({"dp_shard": 2, "zero_stage": 3}, "with dp_shard=2 and zero_stage=3; "),
    ({"dp_shard": 2, "ep": 2, "zero_stage": 1}, "dp_shard=2 and ep=2 and zero_"),
]


def axes_refused(value: Synchronisation, fields: dict[str, int]) -> str:
    """Reason why a method does not go with other axes: there is exactly one."""
    degrees = {name: size for name, size in fields.items() if name != "zero_stage"}
    strategy = Strategy(
        mesh=Mesh(dp_replicate=2, **degrees),
        zero_stage=fields.get("zero_stage", 0),  # type: ignore[arg-type]
        semantics="approximate",
        synchronisation=value,  # type: ignore[arg-type]
    )
    (reason,) = (
        one
        for one in executor_violations(strategy)
        if one.startswith(f"synchronisation={value} ")
    )
    return reason


def train_planned(text: str) -> list[float]:
    """Losses of four steps by a plan of the planner's."""
    made = Plan.from_json(text)
    return list(run(made, lambda: make(made.model.name), steps=4).losses)
