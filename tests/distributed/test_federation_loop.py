"""Options of the training loop in federations, on gloo processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executors import run_federation
from planner.errors import ExecutionError
from tests.distributed.cases import build
from tests.distributed.test_federation import RATE, _Run
from tests.distributed.test_federation_saving import MOMENTUM, losses_of, unlike
from tests.federations import make_federation, member_plan


def test_learning_rates_follow_a_schedule_which_a_resumed_run_goes_on_with(
    tmp_path: Path,
) -> None:
    federation = unlike("local_steps:period=2", MOMENTUM)

    def train(steps: int, **options: Any) -> list[Any]:
        tried = _Run(federation, steps=steps, schedule="linear", options=options)
        return tried.start()

    straight = train(4)
    for one in straight:
        # Two steps of warm-up, then a fall to nothing over the other six of eight.
        assert one["rates"] == pytest.approx([RATE / 2, RATE, RATE, RATE * 4 / 5])
    kept = {"checkpoint_dir": str(tmp_path / "kept")}
    train(2, **kept)
    again = train(4, resume=True, **kept)
    assert [one["rates"] for one in again] == [one["rates"][2:] for one in straight]
    assert losses_of(again) == [one[2:] for one in losses_of(straight)]


def test_a_member_leaves_out_a_step_that_is_not_finite() -> None:
    """The sample is of the second member; the first one trains on."""
    federation = unlike("local_steps:period=2", MOMENTUM)
    tried = _Run(federation, steps=2, spoiled=(4, 0), options={"on_nonfinite": "skip"})
    first, second = (
        next(one for one in tried.start() if one["member"] == number)
        for number in (0, 1)
    )
    assert first["skipped"] == []
    assert second["skipped"] == [0]
    assert all(map(math.isfinite, first["losses"]))
    assert not math.isfinite(second["losses"][0])
    for name, weight in first["weights"].items():
        assert np.isfinite(weight).all()
        assert weight == second["weights"][name]


def test_members_end_together() -> None:
    """A callback cannot stop one of them."""
    federation = make_federation(member_plan(samples=2, optimizer=MOMENTUM))
    tried = _Run(federation, steps=3, stop_after=1)
    with pytest.raises(
        ExecutionError, match=r"stops the run after step 1 \(patience\), but members"
    ):
        tried.start()


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
