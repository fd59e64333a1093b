"""Laws of arrivals by load, and traces."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.ramp.arrivals import BetaLaw
from envs.stream.arrivals import StreamLaw, mean_interval_s, read_stream
from planner.errors import StrategyError, UnknownNameError
from tests.envs.stream.conftest import MakeTables, job


def test_load_one_offers_as_much_as_there_is(make_tables: MakeTables) -> None:
    # Shapes are equally efficient: 80 and 240 device-seconds on eight devices.
    tables = make_tables(job("a", 80), job("b", 240))
    names = ("a", "b")
    assert StreamLaw().mean_interval_s(names, tables) == pytest.approx(160 / 8)
    assert StreamLaw(load=0.5).mean_interval_s(names, tables) == pytest.approx(40)
    law = StreamLaw(models=("b",), sizes=(0.5, 2.5))
    assert law.mean_interval_s(names, tables) == pytest.approx(240 * 1.5 / 8)
    assert StreamLaw(interval_s=7.0).mean_interval_s(names, tables) == 7.0
    with pytest.raises(UnknownNameError, match="model of a law 'c'"):
        StreamLaw(models=("c",)).mean_interval_s(names, tables)


def test_the_most_efficient_shape_counts(make_tables: MakeTables) -> None:
    tables = make_tables(job("a", 80), share={"a": 0.5}, least={"a": 8})
    # It needs all four hosts, and takes longer over the spine: 10 s, 5 of them twice.
    assert tables.work_device_s.tolist() == [8 * 15.0]


@pytest.mark.parametrize("process", ["fixed", "poisson", "bursty"])
def test_arrivals_are_as_often_as_the_law_says(process: Any) -> None:
    law = StreamLaw(process=process, beta=BetaLaw(values=(0.25, 0.5)), sizes=(1.0, 3.0))
    drawn = law.draw(("a", "b", "c"), 10.0, 50_000.0, 3)
    assert len(drawn.time_s) == pytest.approx(5000, rel=0.1)
    assert (np.diff(drawn.time_s) >= 0).all()
    assert drawn.time_s[0] == 0
    counts = np.bincount(drawn.model)
    assert counts.min() > 0.9 * len(drawn.time_s) / 3
    assert set(drawn.beta.tolist()) == {0.25, 0.5}
    assert drawn.size.mean() == pytest.approx(2.0, rel=0.05)
    again = law.draw(("a", "b", "c"), 10.0, 50_000.0, 3)
    assert all((a == b).all() for a, b in zip(drawn, again, strict=True))


def test_a_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,model,beta\n0,b,0.5\n10,a,1\n40,b,0.1\n")
    stream = read_stream(path, ("a", "b"))
    assert stream.model.tolist() == [1, 0, 1]
    assert stream.size.tolist() == [1, 1, 1]
    assert mean_interval_s(stream, 100.0) == 20.0
    path.write_text("arrival_s,model,beta\n0,c,0.5\n")
    with pytest.raises(UnknownNameError, match="model of an arrival 'c'"):
        read_stream(path, ("a", "b"))
    path.write_text("arrival_s,model,beta\n0,a,1.5\n")
    with pytest.raises(StrategyError, match=r"beta=1\.5"):
        read_stream(path, ("a", "b"))
    path.write_text("arrival_s,model,beta\n")
    with pytest.raises(StrategyError, match="has no arrivals"):
        read_stream(path, ("a", "b"))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"load": 0.0}, StrategyError, r"load=0\.0"),
        ({"load": math.nan}, StrategyError, "load=nan"),
        ({"interval_s": -1.0}, StrategyError, r"interval_s=-1\.0"),
        ({"sizes": ()}, StrategyError, r"sizes=\(\)"),
        ({"sizes": (1.0, 0.0)}, StrategyError, r"sizes=\(1\.0, 0\.0\)"),
        ({"process": "daily"}, UnknownNameError, "arrival process 'daily'"),
        ({"burst": 0.5}, StrategyError, r"burst=0\.5"),
    ],
)
def test_laws_that_are_none(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        StreamLaw(**options)


def test_deadlines_that_are_no_distribution() -> None:
    with pytest.raises(StrategyError, match=r"values=\(0\.5, 1\.2\)"):
        StreamLaw(beta=BetaLaw(values=(0.5, 1.2)))
    with pytest.raises(StrategyError, match="weights"):
        StreamLaw(beta=BetaLaw(values=(0.5, 1.0), weights=(0.5, -0.5)))
