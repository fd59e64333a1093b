"""Copies that take turns at stages, whose weights each stage's owner keeps."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist

import planner
from executors import run
from executors.data import synthetic_batch
from executors.dryrun import dry_runs
from executors.measuring.traffic import CollectiveCounter
from executors.replicas.sharded_cyclic import ShardedCyclicReplicas, ShardedTurn
from planner.schema import Mesh, Plan, Precision
from planner.schema.methods.cyclic import Cyclic
from planner.schema.verification import Verification
from planner.schema.violations import executor_violations
from tests.distributed.cases import build
from tests.distributed.planned import graph_of
from tests.distributed.pool import Pool
from tests.distributed.test_cyclic import (
    ADAMW,
    MOMENTUM,
    _plan,
    _serial,
    _trainer,
    gradients,
    measure,
    resume,
    train,
)

ZERO = Cyclic(sharded=True)


@pytest.mark.parametrize("copies", [1, 2, 3, 4, 7])
def test_weights_are_those_of_the_serial_rule(pool: Pool, copies: int) -> None:
    """Bit for bit, and so are all copies' losses."""
    plan = _plan(copies, "v2", optimizer=MOMENTUM, synchronisation=ZERO)
    expected = _serial(plan, 5)
    for copy, found in enumerate(pool.run(train, copies, plan.to_json(), 5)):
        assert found["losses"] == expected["losses"][copy]
        assert sorted(found["weights"]) == sorted(expected["weights"])
        for name, weight in found["weights"].items():
            assert np.array_equal(weight, expected["weights"][name]), name


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_bytes_are_those_of_the_plan(pool: Pool, copies: int) -> None:
    """Measured by a run, found by a dry run, and predicted: the first copy's."""
    made = _planned(copies)
    (dry,) = dry_runs(made, lambda: build("tiny-llama"), [0])
    assert dry.failure is None
    predicted = round(made.prediction.collective_bytes["send"])
    assert dry.bytes_of("send") == predicted
    measured = pool.run(measure, copies, made.to_json())[0]
    assert measured["send"] == predicted
    assert set(measured) == {"send", "recv"}


def _planned(copies: int, **changes: Any) -> Plan:
    pins = {"synchronisation": "cyclic-zero", "dp_replicate": copies}
    return planner.plan(
        graph_of("tiny-llama"),
        f"local:{copies}",
        global_batch=2 * copies,
        pin={**pins, "recompute": "none"},
        precision=Precision(compute="float32"),
        optimizer=ADAMW,
        **changes,
    )


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_memory_is_that_of_the_plan(copies: int) -> None:
    """Within a twentieth of what dry runs find of the fullest copy."""
    made = _planned(copies)
    found = dry_runs(made, lambda: build("tiny-llama"), range(copies))
    memory = Verification.of(made, found).deviations[0]
    fullest = max(sum(one.memory_bytes.values()) for one in found)
    assert memory.predicted == pytest.approx(fullest, rel=0.05)
    # An owner alone has states: two of each weight, and steps counted in 4 bytes.
    states = [one.memory_bytes["optimizer"] for one in found]
    parameters = list(build("tiny-llama").parameters())
    every = sum(parameter.numel() for parameter in parameters)
    tensors = len(parameters)
    assert sum(states) == 2 * 4 * every + 4 * tensors


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"optimizer": ADAMW}, id="AdamW"),
        pytest.param({"recompute": "full"}, id="full recomputation"),
        pytest.param({"recompute": "selective"}, id="selective recomputation"),
        pytest.param({"model": "nested"}, id="other loss"),
    ],
)
def test_the_rule_holds_with(pool: Pool, changes: dict[str, Any]) -> None:
    plan = _plan(2, "v2", synchronisation=ZERO, **changes)
    expected = _serial(plan, 4)
    for copy, found in enumerate(pool.run(train, 2, plan.to_json(), 4)):
        assert found["losses"] == expected["losses"][copy]
        for name, weight in found["weights"].items():
            assert np.array_equal(weight, expected["weights"][name]), name


def test_compiled_blocks_train_alike(pool: Pool) -> None:
    """To their rounding."""
    compiled, plain = (
        pool.run(train, 2, _plan(2, "v2", synchronisation=ZERO, **more).to_json(), 4)
        for more in ({"compile": True}, {})
    )
    for one, other in zip(compiled, plain, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=1e-3)
        assert one["traffic"] == other["traffic"]


class _Watch:
    """Bytes of all stages' weights, and messages that are under way to each copy."""

    def __init__(self) -> None:
        self.turns: dict[int, ShardedTurn] = {}
        self.now: dict[int, int] = {}
        self._isend, self._hold = dist.isend, ShardedTurn.hold
        self.begin()

    def begin(self) -> None:
        """Forget what was most."""
        self.most_held = self.most_sent = self.most_to_one = 0

    def isend(self, values: Any, **options: Any) -> Any:
        work, to, watch = self._isend(values, **options), options["group_dst"], self
        self.now[to] = self.now.get(to, 0) + 1
        self.most_to_one = max(self.most_to_one, self.now[to])
        self.most_sent = max(self.most_sent, sum(self.now.values()))

        class Waited:
            def wait(self) -> None:
                work.wait()
                watch.now[to] -= 1

        return Waited()

    def hold(self, turn: ShardedTurn, times: int) -> Any:
        found = self._hold(turn, times)
        held = sum(one.values.untyped_storage().nbytes() for one in self.turns.values())
        self.most_held = max(self.most_held, held)
        return found


def count(text: str, steps: int) -> dict[str, Any]:
    """Traffic of each step; most weights held and messages under way from the 2nd."""
    plan, watch = Plan.from_json(text), _Watch()
    trainer, traffic = _trainer(plan), []
    assert isinstance(trainer.replicas, ShardedCyclicReplicas)
    watch.turns = trainer.replicas._turns

    def hold(turn: ShardedTurn, times: int) -> Any:
        return watch.hold(turn, times)

    with (
        mock.patch.object(dist, "isend", watch.isend),
        mock.patch.object(ShardedTurn, "hold", hold),
    ):
        for step in range(steps):
            with CollectiveCounter() as counter:
                trainer.step(synthetic_batch(plan.workload, step))
            traffic.append(
                {k: (t.count, t.bytes) for k, t in counter.traffic().items()}
            )
            if step == 0:
                watch.begin()
    trainer.replicas.settle()
    states = trainer.optimizer.state.values()
    return {
        "traffic": traffic,
        "parts": [turn.values.nbytes for turn in watch.turns.values()],
        "most": (watch.most_held, watch.most_sent, watch.most_to_one),
        "states": sum(s["momentum_buffer"].nbytes for s in states if s),
    }


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_messages_go_from_copy_to_copy_one_at_a_time(pool: Pool, copies: int) -> None:
    """No collective; of each stage weights twice at most, and a sum.

    The last copy has a second message under way, a sum to its owner.
    """
    plan = _plan(copies, "v2", optimizer=MOMENTUM, synchronisation=ZERO)
    every = pool.run(count, copies, plan.to_json(), 4)
    parts = every[0]["parts"]
    whole, total = sum(parts), 0
    for copy, found in enumerate(every):
        last = copy == copies - 1
        # What the next copy keeps; the last stage's weights go around once.
        theirs = parts[copies - 1 - (copy + 1) % copies]
        sent = 3 * whole - 2 * theirs - parts[-1]
        sent += parts[-1] - parts[0] if last else 0
        assert found["traffic"][-1]["send"][1] == sent
        for step in found["traffic"]:
            assert set(step) <= {"send", "recv"}
        assert found["traffic"][1:] == [found["traffic"][-1]] * 3
        assert found["most"][1:] == (1 + (last and copies > 2), 1)
        total += sent
    shares = [ZERO.shares_sent(copy, copies) for copy in range(copies)]
    assert total == sum(
        n * p for one in shares for n, p in zip(one, parts, strict=True)
    )
    assert total < 3 * copies * whole


@pytest.mark.parametrize("copies", [2, 3, 4])
def test_a_copy_holds_weights_of_few_stages(pool: Pool, copies: int) -> None:
    """Its own, with its states; those at work, those that come, those that are sent."""
    plan = _plan(copies, "v2", optimizer=MOMENTUM, synchronisation=ZERO)
    for copy, found in enumerate(pool.run(count, copies, plan.to_json(), 4)):
        parts, own = found["parts"], copies - 1 - copy
        others = [0 if stage == own else size for stage, size in enumerate(parts)]
        slots = [sum(others[max(s - 1, 0) : s + 2]) for s in range(copies)]
        # Behind weights there is room for a sum, but in the last stage.
        wide = [2 * size for size in others[:-1]] + others[-1:]
        slots += [sum(wide[max(s - 1, 0) : s + 2]) for s in range(copies)]
        assert found["most"][0] == parts[own] + max(slots)
        assert found["states"] == parts[own]


@pytest.mark.parametrize("copies", [2, 4])
def test_a_resumed_run_is_one_without_a_break(
    pool: Pool, tmp_path: Path, copies: int
) -> None:
    """Bit for bit on every copy, wherever it is broken."""
    plan = _plan(copies, "v2", optimizer=ADAMW, synchronisation=ZERO)
    for each in pool.run(resume, copies, plan.to_json(), str(tmp_path / "kept")):
        assert each["parts"] == each["straight"]


def go_on(first: str, second: str, folder: str) -> list[float]:
    """Train by one plan, then by another that goes on; losses of both."""
    losses: list[float] = []
    for steps, text in ((3, first), (6, second)):
        plan = Plan.from_json(text)
        found = run(
            plan,
            lambda: build("llama"),
            steps=steps,
            checkpoint_dir=folder,
            resume=steps > 3,
        )
        losses += found.losses
    return losses


@pytest.mark.parametrize("sharded_first", [True, False])
def test_checkpoints_are_those_of_whole_copies(
    pool: Pool, tmp_path: Path, sharded_first: bool
) -> None:
    """A run goes on bit for bit where copies keep all stages, and the other way."""
    plans = [
        _plan(3, "v2", optimizer=ADAMW, synchronisation=one).to_json()
        for one in (ZERO, Cyclic())
    ]
    first, second = plans if sharded_first else plans[::-1]
    mixed = pool.run(go_on, 3, first, second, str(tmp_path / "mixed"))
    plain = pool.run(go_on, 3, plans[1], plans[1], str(tmp_path / "plain"))
    assert mixed == plain


def test_backward_alone_is_of_the_newest_weights(pool: Pool) -> None:
    """The rule as copies that keep all stages compute it."""
    texts = (_plan(3, "v2", synchronisation=one).to_json() for one in (ZERO, Cyclic()))
    sharded, whole = (pool.run(gradients, 3, text)[0] for text in texts)
    assert sharded.keys() == whole.keys()
    for name, found in sharded.items():
        assert np.array_equal(found, whole[name]), name


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"synchronisation": Cyclic(version="v1", sharded=True)}, "use version=v2"),
        ({"precision": Precision(compute="bfloat16")}, "use one precision"),
        ({"mesh": Mesh(dp_replicate=2, dp_shard=2)}, "use dp_shard=1"),
        ({"grad_clip_norm": 1.0}, "leave it out"),
    ],
)
def test_what_does_not_compose_is_refused(changes: dict[str, Any], said: str) -> None:
    strategy = _plan(2, "v2", synchronisation=ZERO).strategy
    assert executor_violations(strategy) == ()
    found = executor_violations(strategy.model_copy(update=changes))
    assert any(re.search(said, one) for one in found), found
