"""Federations that save, resume and evaluate, on gloo processes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from executors import run_federation
from executors.data import synthetic_batch
from executors.losses import LossFunction
from planner.errors import ExecutionError
from planner.schema import Federation, Optimizer
from tests.distributed.cases import build
from tests.distributed.test_federation import (
    OUTER,
    RATE,
    SGD,
    _exchange,
    _far,
    _Run,
    _Serial,
)
from tests.federations import make_federation, member_plan

MOMENTUM = Optimizer(name="SGD", learning_rate=RATE, momentum=0.9)


def unlike(pin: str, optimizer: Optimizer, name: str = "perceptron") -> Federation:
    """A pipeline of two, and one alone."""
    plans = [
        member_plan(name, samples=4, pp=2, optimizer=optimizer),
        member_plan(name, samples=2, optimizer=optimizer),
    ]
    return make_federation(*plans, exchange=_exchange(pin))


def losses_of(results: list[Any]) -> list[list[float]]:
    return [one["losses"] for one in results]


@pytest.mark.parametrize("pin", ["diloco:period=2", "local_steps:period=2"])
def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path: Path, pin: str) -> None:
    """Inner and outer optimizer, on members of two meshes."""
    federation = unlike(pin, Optimizer(name="AdamW", learning_rate=1e-2))

    def train(steps: int, **options: Any) -> list[Any]:
        options = {"checkpoint_dir": str(tmp_path / "kept"), **options}
        tried = _Run(federation, steps=steps, options=options)
        return tried.start()

    straight = _Run(federation, steps=6).start()
    first = train(4, checkpoint_every=2)
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {
        "member0",
        "member1",
    }
    assert losses_of(first) == [one[:4] for one in losses_of(straight)]
    again = train(6, resume=True)
    assert [one["first"] for one in again] == [4, 4, 4]
    assert losses_of(again) == [one[4:] for one in losses_of(straight)]
    assert [one["weights"] for one in again] == [one["weights"] for one in straight]


def test_a_member_that_joins_goes_on_with_the_optimizer_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    """Its momentum is that of step 2; weights and step are those of the other."""
    federation = unlike(OUTER, MOMENTUM)
    tried = _Run(
        federation,
        doom=([2], 2, "SIGKILL"),
        flag=str(tmp_path / "died"),
        options={"checkpoint_dir": str(tmp_path / "kept"), "checkpoint_every": 2},
    )
    results = tried.start(on_failure="continue", max_restarts=1)
    assert {one["member"]: one["first"] for one in results} == {0: 0, 1: 4}
    assert tried.equal_after(5)
    serial, there = _Serial(federation), (0, 1)
    serial.train(range(2), there)
    serial.exchange(there)
    kept = copy.deepcopy(serial.rules[1].state_dict())
    serial.train(range(2, 4), (0,))
    serial.exchange((0,))
    serial.join(1)
    serial.rules[1].load_state_dict(kept)
    serial.train(range(4, 6), there)
    serial.exchange(there)
    for result in results:
        assert _far(result, serial.weights) <= 1e-5


def test_the_mean_is_saved_for_transformers_and_begun_with(tmp_path: Path) -> None:
    federation = unlike("local_steps:period=2", SGD, name="llama")
    options = {"save_hf": str(tmp_path / "saved")}
    first = _Run(federation, steps=3, options=options).start()[0]
    model = build("llama")
    saved = type(model).from_pretrained(tmp_path / "saved")
    found = dict(saved.named_parameters())
    assert found.keys() == first["weights"].keys()
    for name, value in first["weights"].items():
        assert torch.equal(found[name], torch.tensor(value)), name
    assert not all(torch.equal(one, found[n]) for n, one in model.named_parameters())
    # A run that begins with them goes on where the first one ended.
    options = {"init_from": str(tmp_path / "saved")}
    again = _Run(federation, steps=1, options=options).start()[0]
    longer = _Serial(federation)
    for one in (*longer.copies, longer.whole):
        one.load_state_dict(saved.state_dict())
    longer.train([0], (0, 1))
    longer.exchange((0, 1))
    assert _far(again, longer.weights) <= 1e-5


def test_members_evaluate_their_shares_of_equal_weights() -> None:
    """Their mean, by samples, is the loss of the whole batch."""
    federation = unlike("local_steps:period=2", SGD)
    tried = _Run(federation, steps=4, evaluated=[90, 91], options={"evaluate_every": 2})
    results = tried.start()
    by_member = {one["member"]: dict(one["evaluations"]) for one in results}
    assert {tuple(one) for one in by_member.values()} == {(2, 4)}
    serial, there = _Serial(federation), (0, 1)
    for steps in (range(2), range(2, 4)):
        serial.train(steps, there)
        serial.exchange(there)
        plan = federation.members[0].plan
        workload = plan.workload.model_copy(update={"global_batch": 6})
        model, expected = serial.whole, []
        for step in (90, 91):
            batch = synthetic_batch(workload, step)
            loss = LossFunction(kind=workload.loss, data_parallel=1)
            loss.prepare(batch, 1)
            with torch.no_grad():
                expected.append(float(loss(model(**batch), loss.target(batch))))
        found = (4 * by_member[0][steps[-1] + 1] + 2 * by_member[1][steps[-1] + 1]) / 6
        assert found == pytest.approx(sum(expected) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluate_every": 3}, "evaluate_every=3, but members are equal every 2"),
        ({"evaluate_every": 2}, "evaluate_every=2; give eval_data"),
        ({"eval_data": []}, "eval_data holds no batch"),
        ({"checkpoint_every": 2}, "checkpoint_every needs a folder"),
        ({"resume": True}, "resume needs a folder"),
        (
            {"checkpoint_dir": "x", "checkpoint_every": 3},
            "checkpoint_every=3, but members are equal every 2 steps alone; use 4",
        ),
        (
            {"checkpoint_dir": "x", "steps": 5},
            "steps=5 with checkpoints, but members are equal every 2 steps alone",
        ),
        ({"save_dtype": "float16"}, "save_dtype=float16 without save_hf"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: dict[str, Any], said: str
) -> None:
    federation = unlike("local_steps:period=2", SGD)
    with pytest.raises(ExecutionError, match=said):
        run_federation(
            federation, lambda: build("perceptron"), **{"steps": 4, **options}
        )


def test_members_without_a_common_checkpoint_are_told(tmp_path: Path) -> None:
    from executors.federation.saving import _Saved

    def steps(**found: list[int]) -> _Saved:
        return _Saved(steps={name: frozenset(one) for name, one in found.items()})

    assert steps(a=[2, 4], b=[4, 6]).common(tmp_path, True) == 4
    assert steps(a=[2, 4], b=[2, 4]).common(tmp_path, "step-000002") == 2
    assert steps(a=[], b=[]).common(tmp_path, True) is None
    with pytest.raises(ExecutionError, match="no checkpoint of the same step"):
        steps(a=[2], b=[]).common(tmp_path, True)
    with pytest.raises(ExecutionError, match=r"b has no step-000002.*step-000004"):
        steps(a=[2, 4], b=[4]).common(tmp_path, "step-000002")
