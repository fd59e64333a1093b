"""Options of the training loop in federations, on gloo processes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from executors import run_federation
from executors.loop import Callback, LoopState, StepReport
from planner.errors import ExecutionError
from tests.distributed.cases import build
from tests.distributed.test_federation import RATE, _Run
from tests.distributed.test_federation_saving import MOMENTUM, losses_of, unlike
from tests.federations import free_ports, make_federation, member_plan


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Results of runs by a pipeline of two and one alone, of the same processes."""
    kept = {"checkpoint_dir": str(tmp_path_factory.mktemp("kept"))}
    wanted: dict[str, dict[str, Any]] = {
        "straight": {"steps": 4, "schedule": "linear"},
        "first": {"steps": 2, "schedule": "linear", "options": kept},
        "again": {
            "steps": 4,
            "schedule": "linear",
            "options": {**kept, "resume": True},
        },
        # The sample is of the second member.
        "spoiled": {
            "steps": 2,
            "spoiled": (4, 0),
            "options": {"on_nonfinite": "skip"},
        },
    }
    tried = _Run(unlike("local_steps:period=2", MOMENTUM))
    return dict(zip(wanted, tried.start_each(*wanted.values()), strict=True))


def test_learning_rates_follow_a_schedule_which_a_resumed_run_goes_on_with(
    runs: dict[str, list[Any]],
) -> None:
    straight, again = runs["straight"], runs["again"]
    for one in straight:
        # Two steps of warm-up, then a fall to nothing over the other six of eight.
        assert one["rates"] == pytest.approx([RATE / 2, RATE, RATE, RATE * 4 / 5])
    assert [one["rates"] for one in again] == [one["rates"][2:] for one in straight]
    assert losses_of(again) == [one[2:] for one in losses_of(straight)]


def test_a_member_leaves_out_a_step_that_is_not_finite(
    runs: dict[str, list[Any]],
) -> None:
    """The other one trains on."""
    first, second = (
        next(one for one in runs["spoiled"] if one["member"] == number)
        for number in (0, 1)
    )
    assert first["skipped"] == []
    assert second["skipped"] == [0]
    assert all(map(math.isfinite, first["losses"]))
    assert not math.isfinite(second["losses"][0])
    for name, weight in first["weights"].items():
        assert np.isfinite(weight).all()
        assert weight == second["weights"][name]


class _Patience(Callback):
    """Stops after the first step."""

    def on_step(self, state: LoopState, report: StepReport) -> None:
        state.stop("patience")


def test_members_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback cannot stop one of them."""
    (port,) = free_ports(1)
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }.items():
        monkeypatch.setenv(name, value)
    federation = make_federation(member_plan(samples=2, optimizer=MOMENTUM))
    with pytest.raises(
        ExecutionError, match=r"stops the run after step 1 \(patience\), but members"
    ):
        run_federation(
            federation, lambda: build("perceptron"), steps=3, callbacks=[_Patience()]
        )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on_nonfinite": "ignore"}, "use one of stop, skip, continue"),
        ({"check_replicas_every": 0}, "give a number of at least 1"),
    ],
)
def test_numbers_and_words_out_of_range_are_refused(
    options: dict[str, Any], said: str
) -> None:
    federation = unlike("local_steps:period=2", MOMENTUM)
    with pytest.raises(ExecutionError, match=said):
        run_federation(federation, lambda: build("perceptron"), steps=2, **options)
