"""Copies that average their weights with a few others in each step, on gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from executors import build_model, run
from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.replicas import gossip
from executors.replicas.accumulating_adam import AccumulatingAdam
from executors.trainer import Trainer
from planner.schema import Mesh, Optimizer, Plan, Strategy
from planner.schema.methods import read_method
from planner.schema.methods.gossip import Gossip, copies_per_host, rounds_of
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, largest_gap, make_plan
from tests.distributed.pool import Pool

#: Meshes of two copies, by what is inside of a copy.
MESHES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "zero 3": {"dp_shard": 2, "zero_stage": 3},
    "zero 1": {"dp_shard": 2, "zero_stage": 1},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
}
LEFT_OUT = {"zero 1", "pp"}
SGD = Optimizer(name="SGD", learning_rate=0.1)
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3, weight_decay=0.1)
TOPOLOGIES = ("complete", "ring", "exponential", "exponential_ring")


def _cases(*names: str) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.further] if name in LEFT_OUT else [])
        for name in names
    ]


def _plan(mesh: str, pin: str = "gossip", copies: int = 2, **changes: Any) -> Plan:
    return make_plan(
        "llama",
        dp_replicate=copies,
        semantics="approximate",
        synchronisation=read_method("synchronisation", pin),
        **MESHES[mesh],
        **{"optimizer": SGD, **changes},
    )


def _trainer(plan: Plan) -> Trainer:
    """A trainer of copies of which two neighbours share a host."""
    place = build_mesh(plan.strategy, torch.device("cpu"))
    model, recording = record(lambda: build(plan.model.name), small_bytes=0)
    host = f"host {place.index('replicate') // 2}"
    with mock.patch.object(gossip, "host_name", return_value=host):
        return Trainer(plan, model, place, recording)


# -- Groups ----------------------------------------------------------------------------


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("copies", [1, 2, 3, 4, 6, 8, 12, 16])
@pytest.mark.parametrize("per_host", [1, 2, 3, 4])
def test_each_copy_is_in_one_group_of_each_round(
    topology: Any, copies: int, per_host: int
) -> None:
    if copies % per_host:
        per_host = 1
    rounds = rounds_of(topology, copies, per_host)
    for groups in rounds:
        assert sorted(copy for group in groups for copy in group) == [*range(copies)]
    # What one copy knows has reached all after some cycles.
    reached = {0}
    for _ in range(copies):
        for groups in rounds:
            reached |= {i for group in groups if reached & {*group} for i in group}
    assert reached == {*range(copies)}


def test_groups_are_those_of_the_definitions() -> None:
    assert rounds_of("complete", 3) == (((0, 1, 2),),)
    assert rounds_of("ring", 4) == (((0, 1), (2, 3)), ((0, 3), (1, 2)))
    assert rounds_of("ring", 2) == (((0, 1),),)
    assert rounds_of("exponential", 4) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    inside = ((0, 1), (2, 3), (4, 5), (6, 7))
    assert rounds_of("exponential_ring", 8, 2) == (
        inside,
        ((0, 1, 2, 3), (4, 5, 6, 7)),
        inside,
        ((0, 1, 4, 5), (2, 3, 6, 7)),
    )
    assert rounds_of("exponential_ring", 4, 1) == rounds_of("exponential", 4)
    assert rounds_of("exponential_ring", 4, 4) == rounds_of("complete", 4)


@pytest.mark.parametrize(
    ("hosts", "found"),
    [("aaaa", 4), ("aabb", 2), ("aaabbb", 3), ("aaaabb", 2), ("abab", 1), ("aab", 1)],
)
def test_hosts_are_the_common_divisor_of_runs(hosts: str, found: int) -> None:
    assert copies_per_host(hosts) == found


# -- Mixing ----------------------------------------------------------------------------


def mix(text: str, steps: int) -> list[tuple[np.ndarray, float]]:
    """Weights of this rank before and after each mix, and the bytes on their way."""
    trainer = _trainer(Plan.from_json(text))
    weights = trainer.all_parameters()
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []

    def all_of_them() -> np.ndarray:
        return torch.cat([w.detach().reshape(-1) for w in weights]).numpy()

    with torch.no_grad():
        for weight in weights:
            weight.copy_(torch.randn(weight.shape, generator=generator))
        found.append((all_of_them(), 0.0))
        for step in range(steps):
            with CollectiveCounter() as counter:
                trainer.replicas.before_forward(step)
                trainer.replicas.after_backward(step)
            (traffic,) = counter.traffic().values()
            found.append((all_of_them(), traffic.bytes))
    return found


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_mixing_keeps_the_mean_and_sends_the_weights_once(
    pool: Pool, topology: Any
) -> None:
    """4 copies on 2 hosts; on the wire an all-reduce of G sends 2 (G - 1)/G W."""
    plan = _plan("one rank", f"gossip:topology={topology},self_weight=0.375", 4)
    rounds = rounds_of(topology, 4, 2)
    steps = 2 * len(rounds) + 1
    found = pool.run(mix, 4, plan.to_json(), steps)
    weights = np.array([[values for values, _ in each] for each in found])
    mean = weights.mean(axis=0)
    assert np.abs(mean - mean[0]).max() <= 1e-6
    for step in range(steps):
        expected = np.empty_like(weights[:, 0])
        for group in rounds[step % len(rounds)]:
            for copy in group:
                others = [other for other in group if other != copy]
                of_others = weights[others, step].mean(axis=0)
                expected[copy] = 0.375 * weights[copy, step] + 0.625 * of_others
        assert weights[:, step + 1] == pytest.approx(expected, abs=1e-6)
    size = 4.0 * plan.model.parameters
    method = plan.strategy.synchronisation
    expected = method.expected_traffic(gradients=0.0, weights=size)
    assert expected == {"all_reduce": size}
    assert {sent for each in found for _, sent in each[1:]} == {size}


def train(text: str, steps: int) -> dict[str, Any]:
    """Losses of a copy, and the first copy's weights at the end."""
    plan = Plan.from_json(text)
    trainer = _trainer(plan)
    losses, counted = [], []
    for step in range(steps):
        with CollectiveCounter() as counter:
            losses.append(trainer.step(synthetic_batch(plan.workload, step)).loss)
        counted.append({kind: t.bytes for kind, t in counter.traffic().items()})
    return {
        "copy": trainer.place.index("replicate"),
        "losses": losses,
        "traffic": counted,
        "weights": {n: w.numpy() for n, w in full_parameters(trainer).items()},
        "bytes": sum(
            getattr(p, "to_local", lambda p=p: p)().nbytes
            for p in trainer.all_parameters()
        ),
    }


def _serial(plan: Plan, steps: int) -> dict[str, Any]:
    """The same in one process: x_i ← W x - rate · (gradient of copy i at x_i)."""
    settings, copies = plan.strategy.synchronisation, plan.strategy.mesh.dp_replicate
    assert isinstance(settings, Gossip)
    rounds = rounds_of(settings.topology, copies, 2)
    models = [build_model(lambda: build(plan.model.name)) for _ in range(copies)]
    spec = plan.strategy.optimizer
    kind = getattr(torch.optim, spec.name)
    options = {"lr": spec.learning_rate, "weight_decay": spec.used_weight_decay}
    rules = [kind(model.parameters(), **options) for model in models]
    losses: list[list[float]] = [[] for _ in models]
    for step in range(steps):
        batch = synthetic_batch(plan.workload, step)
        for index, model in enumerate(models):
            own = {name: value.chunk(copies)[index] for name, value in batch.items()}
            loss = LossFunction(kind=plan.workload.loss, data_parallel=1)
            loss.prepare(own, 1)
            rules[index].zero_grad()
            value = loss(model(**own), loss.target(own))
            value.backward()  # type: ignore[no-untyped-call]
            limit = plan.strategy.grad_clip_norm
            if limit is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
            losses[index].append(value.item())
        w = settings.self_weight
        with torch.no_grad():
            for weights in zip(*(model.parameters() for model in models), strict=True):
                old = [weight.clone() for weight in weights]
                for group in rounds[step % len(rounds)]:
                    for copy in group if len(group) > 1 else ():
                        others = [old[j] for j in group if j != copy]
                        mean = torch.stack(others).mean(0)
                        weights[copy].copy_(w * old[copy] + (1 - w) * mean)
        for rule in rules:
            rule.step()
    first = {n: p.detach().numpy() for n, p in models[0].named_parameters()}
    return {"losses": losses, "weights": first}


@pytest.mark.parametrize("mesh", _cases("one rank", "zero 3", "zero 1", "tp", "pp"))
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
def test_a_complete_graph_is_the_serial_rule_one_step_late(
    pool: Pool, mesh: str, clip: float | None
) -> None:
    plan = _plan(
        mesh, "gossip-complete", optimizer=ADAMW if clip else SGD, grad_clip_norm=clip
    )
    found = pool.run(train, plan.strategy.mesh.num_devices, plan.to_json(), 4)
    expected = _serial(plan, 4)
    for each in found:
        wanted = expected["losses"][each["copy"]]
        assert each["losses"] == pytest.approx(wanted, rel=1e-5)
    assert largest_gap(found[0]["weights"], expected["weights"]) <= 3e-5


@pytest.mark.parametrize("pin", ["gossip-ring", "gossip-exp", "gossip-aer"])
def test_other_graphs_are_the_serial_rule_too(pool: Pool, pin: str) -> None:
    plan = _plan("one rank", pin, copies=4)
    found = pool.run(train, 4, plan.to_json(), 5)
    expected = _serial(plan, 5)
    for each in found:
        wanted = expected["losses"][each["copy"]]
        assert each["losses"] == pytest.approx(wanted, rel=1e-5)
    assert largest_gap(found[0]["weights"], expected["weights"]) <= 1e-5


def test_copies_share_a_loss_every_few_steps_alone(pool: Pool) -> None:
    plan = _plan("one rank", "gossip-complete")
    found = pool.run(train, 2, plan.to_json(), Gossip.LOSS_EVERY)
    sent = [[step["all_reduce"] for step in each["traffic"]] for each in found]
    for each, of_steps in zip(found, sent, strict=True):
        assert of_steps == [each["bytes"]] * 9 + [each["bytes"] + 4]
    one, other = (each["losses"] for each in found)
    assert all(a != b for a, b in zip(one[:-1], other[:-1], strict=True))
    assert one[-1] == other[-1]


# -- Adam with moments that wait -------------------------------------------------------


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_moments_that_do_not_wait_are_adam(name: Any) -> None:
    torch.manual_seed(0)
    spec = Optimizer(name=name, learning_rate=0.01, weight_decay=0.1)
    ours = torch.nn.Parameter(torch.randn(5, 3))
    theirs = torch.nn.Parameter(ours.detach().clone())
    rule = AccumulatingAdam([{"params": [ours]}], spec, commit_every=1)
    adam = getattr(torch.optim, name)([theirs], lr=0.01, weight_decay=0.1)
    for _ in range(6):
        ours.grad = torch.randn(5, 3)
        theirs.grad = ours.grad.clone()
        rule.step()
        adam.step()
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


def test_moments_take_the_mean_gradient_of_the_steps_that_they_waited() -> None:
    generator = np.random.default_rng(0)
    grads = generator.normal(size=(7, 4))
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    spec = Optimizer(name="Adam", learning_rate=0.01)
    rule = AccumulatingAdam([{"params": [weight]}], spec, commit_every=3)
    mean, square, expected = np.zeros(4), np.zeros(4), np.zeros(4)
    for step, grad in enumerate(grads):
        weight.grad = torch.from_numpy(grad.copy())
        rule.step()
        commits = step // 3 + 1
        first = (0.9 * mean + 0.1 * grad) / (1 - 0.9**commits)
        second = (0.999 * square + 0.001 * grad**2) / (1 - 0.999**commits)
        expected -= 0.01 * first / (np.sqrt(second) + 1e-8)
        if step % 3 == 2:
            waited = grads[step - 2 : step + 1].mean(axis=0)
            mean = 0.9 * mean + 0.1 * waited
            square = 0.999 * square + 0.001 * waited**2
        assert weight.detach().numpy() == pytest.approx(expected, rel=1e-9)


# -- Checkpoints -----------------------------------------------------------------------


def resume(text: str, folder: str) -> dict[str, list[float]]:
    """Losses of a run without a break, and of one that is resumed halfway."""
    plan = Plan.from_json(text)

    def losses(steps: int, **options: Any) -> list[float]:
        host = f"host {dist.get_rank() // 2}"
        with mock.patch.object(gossip, "host_name", return_value=host):
            result = run(plan, lambda: build(plan.model.name), steps=steps, **options)
        return list(result.losses)

    kept = {"checkpoint_dir": folder, "checkpoint_every": 3}
    return {
        "straight": losses(7),
        "first": losses(3, **kept),
        "rest": losses(7, resume=True, **kept),
    }


@pytest.mark.parametrize(
    ("mesh", "pin", "copies"),
    [
        ("one rank", "accum-adam", 4),
        ("one rank", "gossip-exp", 2),
        ("zero 3", "accum-adam:commit_every=2", 2),
        pytest.param("pp", "gossip-aer", 2, marks=pytest.mark.further),
    ],
)
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, mesh: str, pin: str, copies: int
) -> None:
    """Bit for bit on every rank: each copy gets its own weights and states again."""
    plan = _plan(mesh, pin, copies, optimizer=ADAMW)
    world = plan.strategy.mesh.num_devices
    found = pool.run(resume, world, plan.to_json(), str(tmp_path / "kept"))
    for each in found:
        assert each["first"] + each["rest"] == each["straight"]
    assert len({tuple(each["straight"]) for each in found}) == copies


def move(text: str, other: str, folder: str) -> list[float]:
    """Train by one plan, go on by another."""
    first, second = Plan.from_json(text), Plan.from_json(other)
    run(first, lambda: build(first.model.name), steps=3, checkpoint_dir=folder)
    rest = run(
        second,
        lambda: build(second.model.name),
        steps=5,
        checkpoint_dir=folder,
        resume=True,
    )
    return list(rest.losses)


def test_another_plan_goes_on_from_the_mean_of_copies(
    pool: Pool, tmp_path: Path
) -> None:
    plan = _plan("one rank", "gossip", optimizer=ADAMW)
    exact = make_plan("llama", dp_shard=2, zero_stage=3, optimizer=ADAMW)
    for number, order in enumerate([(plan, exact), (exact, plan)]):
        texts = [one.to_json() for one in order]
        for losses in pool.run(move, 2, *texts, str(tmp_path / str(number))):
            assert np.isfinite(losses).all()
            assert len(losses) == 2


# -- Refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pin", "fields", "said"),
    [
        ("gossip", {"dp_replicate": 1}, "with dp_replicate=1; .* use dp_replicate > 1"),
        ("gossip", {"dp_replicate": 2, "cp": 2}, "cp=2 and zero_stage=0; .*or cp=1"),
        ("gossip-ring", {"dp_replicate": 3}, "even number of copies, use .*=4 or"),
        ("gossip-exp", {"dp_replicate": 6}, "power of two, use dp_replicate=4 or 8"),
        (
            "accum-adam",
            {"dp_replicate": 2, "optimizer": SGD},
            "commit_every is of Adam's moments, use optimizer Adam",
        ),
    ],
)
def test_what_gossip_cannot_do_is_refused(
    pin: str, fields: dict[str, Any], said: str
) -> None:
    degrees = {name: value for name, value in fields.items() if name != "optimizer"}
    method = read_method("synchronisation", pin)
    assert isinstance(method, Gossip)
    strategy = Strategy(
        mesh=Mesh(**degrees),
        optimizer=fields.get("optimizer", ADAMW),
        semantics="approximate",
        synchronisation=method,
    )
    found = executor_violations(strategy)
    (reason,) = (one for one in found if one.startswith("synchronisation="))
    assert reason.count(";") == 1
    assert re.search(said, reason), reason
