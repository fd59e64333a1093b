"""Prices: what ships is what the planner says, and what is kept is read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.stream.jobs import BUILT_IN, JobType, built_in_jobs
from envs.stream.network import HostKind, Shape, StreamNetwork, sub_cluster
from envs.stream.prepare import PRESETS
from envs.stream.prices import (
    STRETCHES,
    PlanPrice,
    PriceBook,
    price_plan,
    price_plans,
    sequential_step_s,
)
from envs.stream.tables import stream_tables
from planner.cluster import Cluster, device_type
from planner.cost import CostModel, PricingContext
from planner.errors import PlanFileError, UnknownNameError
from planner.schema.cluster import MeasuredCollective
from planner.search import Request, get_partitioner


def _job(name: str) -> JobType:
    return next(job for job in BUILT_IN if job.name == name)


@pytest.fixture(scope="module")
def network() -> StreamNetwork:
    return StreamNetwork(Cluster.from_preset("a40-pcie", 4))


@pytest.fixture(scope="module")
def kind(network: StreamNetwork) -> HostKind:
    return network.kinds[0]


def _no_search(*_: object, **__: object) -> None:
    pytest.fail("prices that ship are missing: run python -m envs.stream.prepare")


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> PriceBook:
    """A book of the prices that ship; computing others fails."""
    monkeypatch.setattr("envs.stream.prices.price_plan", _no_search)
    monkeypatch.setattr("envs.stream.prices.sequential_step_s", _no_search)
    monkeypatch.setattr("envs.stream.prices.model_op_graph", _no_search)
    return PriceBook()


@pytest.mark.parametrize(("preset", "nodes", "degree"), PRESETS)
def test_prices_of_all_built_in_jobs_ship(
    preset: str, nodes: int, degree: int, shipped: PriceBook
) -> None:
    """They do not once a preset's figures change: an environment then takes minutes."""
    network = StreamNetwork(Cluster.from_preset(preset, nodes))
    shapes = network.shapes(degree, spread=1)
    tables = stream_tables(built_in_jobs(), network, shapes, shipped)
    assert tables.step_s.shape[:2] == (len(BUILT_IN), len(shapes))
    for job in BUILT_IN:
        assert len(shipped.graph(job).nodes) > 0


def test_shipped_prices_are_those_of_the_planner(
    network: StreamNetwork,
    kind: HostKind,
    shipped: PriceBook,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job, link, device = _job("bert-large"), network.levels[0], device_type("a100-80")
    shapes = Shape(kind=0, hosts=1, per_host=2), Shape(kind=0, hosts=2, per_host=4)
    prices = [shipped.price(job, kind, shape, link) for shape in shapes]
    alone_s = shipped.sequential_step_s(job, device)
    monkeypatch.undo()
    for shape, kept in zip(shapes, prices, strict=True):
        fresh = price_plan(job, kind, shape, link)
        assert kept is not None
        assert fresh is not None
        assert kept.label == fresh.label, "run python -m envs.stream.prepare"
        assert kept.step_s == pytest.approx(fresh.step_s, rel=1e-9)
        assert kept.duty == pytest.approx(fresh.duty, rel=1e-9)
    assert alone_s == pytest.approx(sequential_step_s(job, device), rel=1e-9)


def test_prices_with_slower_links_are_the_cost_model_s(
    network: StreamNetwork, kind: HostKind
) -> None:
    job, link = _job("bert-large"), network.levels[0]
    shape = Shape(kind=0, hosts=2, per_host=2)
    price = price_plan(job, kind, shape, link)
    assert price is not None
    context = PricingContext(
        graph=job.read_graph(),
        cluster=sub_cluster(kind, shape, link),
        order=np.arange(4, dtype=np.int64),
    )
    request = Request(
        context=context, global_batch=job.global_batch, evaluation_budget=12
    )
    best = get_partitioner("exhaustive").search(request).candidates[0]
    assert price.label == best.strategy.label()
    for stretch, step_s in zip(STRETCHES, price.step_s, strict=True):
        slowed = sub_cluster(kind, shape, link, stretch)
        cost = CostModel(replace(context, cluster=slowed)).cost(best.strategy)
        assert step_s == pytest.approx(cost.step_time_s)
    # Traffic that nothing hides, over the step.
    assert price.step_s[-1] - price.step_s[-2] == pytest.approx(
        8 * price.duty * price.step_s[0]
    )
    alone = price_plan(job, kind, Shape(kind=0, hosts=1, per_host=4), None)
    assert alone is not None
    assert len(set(alone.step_s)) == 1
    assert alone.duty == 0


def test_frugal_plans_send_less(network: StreamNetwork, kind: HostKind) -> None:
    job, link = _job("bert-large"), network.levels[0]
    shape = Shape(kind=0, hosts=2, per_host=2)
    best = price_plan(job, kind, shape, link)
    frugal = price_plan(job, kind, replace(shape, frugal=True), link)
    assert best is not None
    assert frugal is not None
    assert best.step_s[0] < frugal.step_s[0] <= 1.5 * best.step_s[0]
    assert frugal.duty <= 0.5 * best.duty
    # Where links are crowded it is the faster one.
    assert frugal.step_s[2] < best.step_s[2]
    inside = Shape(kind=0, hosts=1, per_host=2, frugal=True)
    assert price_plan(job, kind, inside, None) is None


@pytest.fixture(scope="module")
def shapes(network: StreamNetwork) -> tuple[Shape, ...]:
    return network.shapes(16, spread=1)


def test_plans_by_closed_forms_are_nearly_those_of_a_search(
    network: StreamNetwork, kind: HostKind, shapes: tuple[Shape, ...]
) -> None:
    """All shapes at once; each is as fast as by a search, on slower links too."""
    job, link = _job("gpt2-xl"), network.levels[0]
    together = price_plans(job, kind, shapes, link)
    searched = PriceBook().prices(job, kind, shapes, link)
    assert sum(price is not None for price in searched) > 5
    for price, other in zip(together, searched, strict=True):
        assert (price is None) == (other is None)
        if price is not None and other is not None:
            np.testing.assert_array_less(price.step_s, 1.03 * np.array(other.step_s))
            assert sorted(price.step_s) == list(price.step_s)
            assert price.duty == pytest.approx(other.duty, abs=0.03)


@pytest.mark.parametrize("shared", [{}, {"compute_slots": 4.0}, {"nics": 2}])
def test_a_shape_has_the_price_that_it_has_alone(
    shared: dict[str, float], network: StreamNetwork, kind: HostKind
) -> None:
    job, link = _job("bert-large"), network.levels[0]
    some = replace(kind, group=kind.group.model_copy(update=shared))
    shapes = [
        Shape(kind=0, hosts=hosts, per_host=each)
        for hosts, each in ((1, 1), (1, 4), (2, 1), (2, 4))
    ]
    measured = (
        MeasuredCollective(
            kind="all_reduce",
            group_size=4,
            alpha_s=1e-3,
            bandwidth_bytes_per_s=1e10,
        ),
    )
    for collectives in ((), measured):
        together = price_plans(job, some, shapes, link, collectives)
        for shape, price in zip(shapes, together, strict=True):
            between = None if shape.hosts == 1 else link
            (alone,) = price_plans(job, some, [shape], between, collectives)
            assert price is not None
            assert alone is not None
            assert price.step_s == pytest.approx(alone.step_s)


def test_prices_by_closed_forms_stay_apart(
    network: StreamNetwork,
    kind: HostKind,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search never finds them, and they are not made where it has been."""
    job, link = replace(_job("bert-large"), global_batch=16), network.levels[0]
    shapes = [Shape(kind=0, hosts=1, per_host=1), Shape(kind=0, hosts=2, per_host=1)]
    path = tmp_path / "prices.json"
    with monkeypatch.context() as patch:
        patch.setattr("envs.stream.prices.price_plan", pytest.fail)
        book = PriceBook(path, search="closed_forms")
        made = book.prices(job, kind, shapes, link)
        alone_s = book.sequential_step_s(job, kind.device)
        book.save()
        monkeypatch.setattr("envs.stream.prices.price_plans", pytest.fail)
        again = PriceBook(path, search="closed_forms")
        assert again.prices(job, kind, shapes, link) == made
        assert again.sequential_step_s(job, kind.device) == alone_s
    marked = PlanPrice(label="searched", step_s=(1.0,) * 5, duty=0.0, memory_bytes=1.0)
    monkeypatch.setattr("envs.stream.prices.price_plan", lambda *_: marked)
    assert PriceBook(path).price(job, kind, shapes[0], link) == marked
    book = PriceBook(path)
    assert book.prices(job, kind, shapes, link) == [marked, marked]
    book.save()
    known = PriceBook(path, search="closed_forms")
    assert known.prices(job, kind, shapes, link) == [marked, marked]
    frugal = replace(shapes[1], frugal=True)
    assert known.price(job, kind, frugal, link) == marked


def test_searches_that_there_are_not() -> None:
    with pytest.raises(UnknownNameError, match=r"search of plans 'closed'.*'closed_fo"):
        PriceBook(search="closed")  # type: ignore[arg-type]


def test_what_does_not_fit_has_no_price_but_a_yardstick(kind: HostKind) -> None:
    book, job = PriceBook(), _job("llama3-8b")
    alone = Shape(kind=0, hosts=1, per_host=1)
    assert book.price(job, kind, alone, None) is None
    assert 1 < book.sequential_step_s(job, device_type("a100-80")) < 1000


def test_new_prices_are_kept_in_a_file(
    tmp_path: Path, kind: HostKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shape = tmp_path / "prices.json", Shape(kind=0, hosts=1, per_host=1)
    job = replace(_job("bert-large"), name="smaller", global_batch=8)
    book = PriceBook(path)
    made = book.price(job, kind, shape, None)
    graph = book.graph(_job("bert-large"))
    assert isinstance(made, PlanPrice)
    book.save()
    monkeypatch.setattr("envs.stream.prices.price_plan", None)
    again = PriceBook(path, shipped=False)
    assert again.price(job, kind, shape, None) == made
    kept = again.graph(_job("bert-large"))
    np.testing.assert_array_equal(kept.nodes, graph.nodes)
    np.testing.assert_array_equal(kept.edge_index, graph.edge_index)


def test_files_that_are_no_price_book(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text("{")
    with pytest.raises(PlanFileError, match="cannot be read"):
        PriceBook(path)
    path.write_text('{"version": 99, "prices": {}, "graphs": {}}')
    with pytest.raises(PlanFileError, match="not of version 1"):
        PriceBook(path)
