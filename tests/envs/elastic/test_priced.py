"""Throughputs of priced plans: right prices, limits of plans, stand-ins, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from envs.elastic.models import vgg16
from envs.elastic.pools import HostPool
from envs.elastic.priced import (
    PLAN_LIMITS,
    PlanLimit,
    PricedHosts,
    PricedPlans,
    plan_throughputs,
    priced_hosts,
    stand_in_job,
    stand_ins,
)
from envs.elastic.session import ElasticConfig, ElasticSession
from envs.elastic.throughput import ModelKey
from envs.elastic.traces import retimed
from envs.stream.jobs import JobType
from envs.stream.network import Shape
from envs.stream.prices import STRETCHES, PlanPrice, PriceBook, price_plan
from planner import plan
from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError
from policies.elastic.registry import make_rule, play
from tests.envs.elastic.small import KEY, table, trace

_CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}
_JOB = JobType(name="net", ref="", global_batch=64, steps=1, seq_len=64, config=_CONFIG)


@pytest.fixture(scope="module")
def hosts() -> tuple[PricedHosts, ...]:
    return priced_hosts(Cluster.from_preset("dgx-a100-40", 2), kind="a100")


class _Book(PriceBook):
    """Prices of a limit of plans, by its pins; no search."""

    def __init__(self, **step_s: float) -> None:
        super().__init__(shipped=False)
        self._step_s = {
            str(dict(pins)): step_s.get(limit) for limit, pins in PLAN_LIMITS.items()
        }
        self.shapes: list[Shape] = []

    def prices(self, *what: Any) -> list[PlanPrice | None]:
        _, _, shapes, _, _, pins, _ = what
        self.shapes += shapes
        step_s = self._step_s[str(dict(pins))]
        if step_s is None:
            return [None] * len(shapes)
        times = (step_s,) * len(STRETCHES)
        made = PlanPrice(label="plan", step_s=times, duty=0.0, memory_bytes=7.0)
        return [made] * len(shapes)


def test_rates_are_those_of_the_best_plans(hosts: tuple[PricedHosts, ...]) -> None:
    found = plan_throughputs([_JOB], hosts, (1, 2), plans="data", book=PriceBook())
    one = hosts[0]
    for degree, spread, shape in (
        (0, 0, Shape(kind=0, hosts=1, per_host=1)),
        (1, 0, Shape(kind=0, hosts=1, per_host=2)),
        (1, 1, Shape(kind=0, hosts=2, per_host=1)),
    ):
        wanted = price_plan(
            _JOB,
            one.host,
            shape,
            one.between,
            one.collectives,
            PLAN_LIMITS["data"],
            "shipped",
        )
        assert wanted is not None
        assert found.rates()[0, 0, degree, spread] >= 1.0 / wanted.step_s[0]
        assert found.labels[0, 0, degree, spread]
    # One device cannot be spread.
    assert found.rates()[0, 0, 0, 1] == 0.0
    alone = plan(
        _JOB.read_graph(),
        Cluster.from_preset("dgx-a100-40", 1).part(range(1)),
        global_batch=64,
        partitioner="exhaustive",
        certify=False,
    )
    assert 1.0 / found.rates()[0, 0, 0, 0] == pytest.approx(
        alone.prediction.step_time_s, rel=0.05
    )


def test_closed_forms_need_no_search(
    hosts: tuple[PricedHosts, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = PriceBook(shipped=False)
    searched = plan_throughputs([_JOB], hosts, (1, 2, 8), book=known)
    monkeypatch.setattr("envs.stream.prices.price_plan", pytest.fail)
    book = PriceBook(shipped=False, search="closed_forms")
    found = plan_throughputs([_JOB], hosts, (1, 2, 8), book=book)
    np.testing.assert_array_equal(found.rates() > 0, searched.rates() > 0)
    np.testing.assert_array_less(0.97 * searched.rates() - 1e-9, found.rates())


def test_replicas_are_whole(hosts: tuple[PricedHosts, ...]) -> None:
    found = plan_throughputs([_JOB], hosts, (4,), plans="replicas", book=PriceBook())
    label = str(found.labels[0, 0, 0, 0])
    assert "dp_replicate4" in label
    assert "zero" not in label


@pytest.mark.parametrize(
    ("plans", "rate"), [("replicas", 0.0), ("data", 0.5), ("all", 0.5)]
)
def test_wider_limit_is_never_slower(
    plans: PlanLimit, rate: float, hosts: tuple[PricedHosts, ...]
) -> None:
    # The search among all plans stops before it finds what the narrower one found.
    book = _Book(data=2.0, all=3.0)
    found = plan_throughputs([_JOB], hosts, (1,), plans=plans, book=book)
    assert found.rates()[0, 0, 0, 0] == rate
    assert found.memory_bytes[0, 0, 0, 0] == (7.0 if rate else 0.0)


def test_degrees_lie_on_the_fewest_hosts_and_on_twice_as_many(
    hosts: tuple[PricedHosts, ...],
) -> None:
    four = tuple(replace(one, host=one.host.part(4)) for one in hosts)
    book = _Book(replicas=1.0)
    found = plan_throughputs([_JOB], four, (1, 4, 6, 8), plans="replicas", book=book)
    laid = [(shape.hosts, shape.per_host) for shape in book.shapes]
    assert laid == [(1, 1), (1, 4), (2, 2), (2, 3), (2, 4), (4, 2)]
    # 6 devices are no equal parts of four hosts.
    assert found.rates()[0, 0, :, 1].tolist() == [0.0, 1.0, 0.0, 1.0]


def test_second_call_computes_nothing(
    tmp_path: Path, hosts: tuple[PricedHosts, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prices.json"
    book = PriceBook(path, shipped=False)
    first = plan_throughputs([_JOB], hosts, (1,), plans="data", book=book)
    book.save()
    monkeypatch.setattr("envs.stream.prices.price_plan", pytest.fail)
    again = PriceBook(path, shipped=False)
    second = plan_throughputs([_JOB], hosts, (1,), plans="data", book=again)
    np.testing.assert_array_equal(first.rates(), second.rates())
    other = replace(_JOB, config={**_CONFIG, "num_hidden_layers": 3})
    assert other.fingerprint != _JOB.fingerprint


def test_bad_requests_are_refused(hosts: tuple[PricedHosts, ...]) -> None:
    book = _Book(replicas=1.0)
    with pytest.raises(UnknownNameError, match=r"limit of plans 'dat'.*'data'"):
        plan_throughputs([_JOB], hosts, (1,), plans="dat", book=book)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match=r"jobs net/64, net/64.*each once"):
        plan_throughputs([_JOB, _JOB], hosts, (1,), book=book)
    with pytest.raises(StrategyError, match=r"device types none.*at least one"):
        plan_throughputs([_JOB], (), (1,), book=book)
    with pytest.raises(StrategyError, match=r"degrees=\(2, 1\).*ascending"):
        plan_throughputs([_JOB], hosts, (2, 1), book=book)
    with pytest.raises(StrategyError, match=r"devices=9 of hosts of 8 a100-40.*1 to 8"):
        priced_hosts(Cluster.from_preset("dgx-a100-40", 1), devices=9)


def test_hosts_have_the_devices_that_are_used() -> None:
    (found,) = priced_hosts(Cluster.from_preset("dgx2-v100", 2), devices=4)
    assert (found.kind, found.host.size) == ("v100-32", 4)
    assert found.between is not None


def test_models_of_traces_have_stand_ins() -> None:
    names = set(stand_ins())
    assert {"bert", "gpt2", "vgg16", "moe__10B", "wide_resnet__6.8B"} <= names
    job = stand_in_job(ModelKey("bert__1.3B", 128))
    assert (job.name, job.global_batch, job.seq_len) == ("bert__1.3B", 128, 1024)
    assert job.config is not None
    assert job.config["hidden_size"] == 2048
    assert all(one.source and one.stands for one in stand_ins().values())
    with pytest.raises(UnknownNameError, match=r"'bert__15B'; did you mean 'bert__1"):
        stand_in_job(ModelKey("bert__15B", 256))


def test_vgg16_has_its_parameters() -> None:
    with torch.device("meta"):
        model, inputs = vgg16()
    # Simonyan and Zisserman 2015, table 2: 138 million.
    assert sum(one.numel() for one in model.parameters()) == 138_357_544
    assert inputs["input"].shape == (1, 3, 224, 224)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in stand_ins() if "__" in name])
def test_stand_ins_have_the_parameters_of_their_names(name: str) -> None:
    text = name.split("__")[1]
    wanted = float(text[:-1]) * {"M": 1e6, "B": 1e9}[text[-1]]
    graph = stand_in_job(ModelKey(name, 1)).read_graph()
    assert graph.num_parameters == pytest.approx(wanted, rel=0.2)


def _priced(rates: dict[str, tuple[float, ...]]) -> PricedPlans:
    given = table(rates)
    return PricedPlans(
        name="priced",
        models=given.models,
        kinds=given.kinds,
        degrees=given.degrees,
        table=given.table,
        labels=np.full(given.table.shape, "", dtype=np.object_),
        memory_bytes=np.zeros(given.table.shape),
    )


def test_jobs_of_another_source_take_as_long() -> None:
    one = trace((0, 100, 30, 1), (0, 100, 30, 2), (0, 100, 30, 4))
    found = retimed(one, table(), _priced({"gpu": (0.0, 8.0, 12.0)}))
    # 2 devices do 2 per second before and 8 now; 1 is unknown now, and 2 the nearest.
    assert found.iterations.tolist() == [120.0, 120.0, 120.0]
    assert found.deadline_s.tolist() == one.deadline_s.tolist()
    with pytest.raises(StrategyError, match="no device type and number in common"):
        retimed(one, table(), _priced({"tpu": (1.0, 1.0, 1.0)}))
    with pytest.raises(StrategyError, match=f"{KEY} has no device type and number"):
        retimed(one, table(), _priced({"gpu": (0.0, 0.0, 0.0)}))


@pytest.mark.parametrize("rule", ["elasticflow", "edf", "edf+admission"])
def test_job_that_no_single_device_holds(rule: str) -> None:
    source = _priced({"gpu": (0.0, 2.0, 3.0)})
    one = trace((0, 100, 30, 1), (0, 100, 30, 1))
    cluster = (HostPool(kind="gpu", hosts=1, devices=4),)
    session = ElasticSession(ElasticConfig(trace=one, source=source, cluster=cluster))
    play(session, make_rule(rule))
    assert session.summary().met == 2
