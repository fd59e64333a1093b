"""Futures are of the law told, or of what was seen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.ramp.arrivals import LAWS, ArrivalLaw, BetaLaw
from envs.ramp.state import Past
from planner.errors import StrategyError, UnknownNameError
from policies.futures import LawFutures, SeenFutures

_NONE = Past(np.zeros(0), np.zeros(0, dtype=np.int64), np.zeros(0))


@pytest.mark.parametrize("process", ["fixed", "poisson", "bursty"])
def test_a_law_told_is_drawn_from(process: str) -> None:
    law = replace(
        LAWS["A"],
        process=process,
        models=("c", "a"),
        interval_s=50.0,
        beta=BetaLaw(values=(0.2, 0.6), weights=(3.0, 1.0)),
    )
    source = LawFutures(law, ("a", "b", "c"))
    drawn = source.draw(_NONE, 1.0, (100, 300), np.random.default_rng(0))
    assert set(drawn.model.ravel().tolist()) == {0, 2}
    assert (drawn.beta == 0.2).mean() == pytest.approx(0.75, abs=0.02)
    assert drawn.gap_s.mean() == pytest.approx(50.0, rel=0.05)
    zero, spread = (drawn.gap_s == 0).mean(), drawn.gap_s.std()
    if process == "fixed":
        assert spread == 0
    else:
        # Groups of four on average: three of four jobs come with the one before.
        assert zero == pytest.approx(0.75 if process == "bursty" else 0.0, abs=0.02)
        assert spread > 45


def test_what_was_seen_takes_over_from_the_prior() -> None:
    source = SeenFutures(3, prior=20.0)
    generator = np.random.default_rng(0)
    none = source.draw(_NONE, 70.0, (50, 50), generator)
    assert (none.gap_s == 70.0).all()
    assert none.beta.mean() == pytest.approx(0.55, abs=0.02)
    assert set(none.model.ravel().tolist()) == {0, 1, 2}
    past = Past(np.arange(60) * 5.0, np.full(60, 1, dtype=np.int64), np.full(60, 0.333))
    drawn = source.draw(past, 70.0, (50, 50), generator)
    assert (drawn.gap_s == 5.0).all()
    # 60 jobs of 60 + 20 are like those seen.
    assert (drawn.beta == 0.333).mean() == pytest.approx(0.75, abs=0.03)
    assert (drawn.model == 1).mean() == pytest.approx(0.75 + 0.25 / 3, abs=0.03)


def test_what_cannot_be_drawn_from_is_refused() -> None:
    law = ArrivalLaw(beta=LAWS["A"].beta, models=("d",))
    with pytest.raises(UnknownNameError, match="model of a law 'd'"):
        LawFutures(law, ("a", "b"))
    with pytest.raises(StrategyError, match="prior=0"):
        SeenFutures(3, prior=0)
