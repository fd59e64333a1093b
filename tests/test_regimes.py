"""Ways of training whose steps are not exact: chosen by evidence, never unasked."""

from __future__ import annotations

from typing import Any

import pytest

from planner.api import plan_graph
from planner.cluster import Cluster
from planner.errors import StrategyError, UnknownNameError
from planner.measurements.convergence import convergence, efficiency_of
from planner.report.build import build_report
from planner.report.markdown import markdown_page
from planner.request import PlanOptions
from planner.schema import Mesh, Optimizer, Plan, Precision, Strategy
from planner.schema.methods import methods_of, read_method
from planner.search.families import NEAR
from tests.cost.made import device, hosts, uniform_graph

#: 10 MB/s, and 10 TB/s, between eight hosts of one device.
SLOW = hosts((8, 1, device()), between=1e7)
FAST = hosts((8, 1, device()), between=1e13)


def ask(cluster: Cluster, **options: Any) -> Plan:
    given = {
        "allow_approximate": True,
        "precision": Precision(compute="float32"),
        # By the predicted time alone, which these tests read.
        "risk": "none",
    }
    return plan_graph(
        uniform_graph(8),
        cluster,
        PlanOptions(global_batch=64, **{**given, **options}),
        partitioner="exhaustive",
    )


def is_exact(made: Plan) -> bool:
    return not any(method.inexact for method, _ in methods_of(made.strategy))


def test_nothing_inexact_is_returned_unasked() -> None:
    made = ask(SLOW, allow_approximate=False)
    assert is_exact(made)
    assert made.provenance.regimes == ()
    assert made.prediction.efficiency is None
    assert "allow_approximate=True" in made.explain()


def test_what_evidence_speaks_for_is_chosen_where_links_are_slow() -> None:
    exact, made = ask(SLOW, allow_approximate=False), ask(SLOW)
    assert not is_exact(made)
    assert made.strategy.semantics == "approximate"
    found = made.prediction.efficiency
    assert found is not None
    assert found.basis == "published"
    seconds = made.prediction.step_time_s / found.eta
    assert seconds < exact.prediction.step_time_s
    (other,) = [one for one in made.provenance.regimes if one.method == "exact"]
    assert other.step_time_s == exact.prediction.step_time_s
    assert other.label == exact.strategy.label()
    # At this efficiency both take as long to the same loss.
    even = made.prediction.step_time_s / exact.prediction.step_time_s
    assert other.break_even == pytest.approx(even)
    told = f"exact training would win below {even:.2f}"
    assert told in made.summary()
    assert "other ways of training:" in made.explain()
    page = markdown_page([build_report(made)])
    assert "Other ways of training" in page


def test_exact_training_stays_where_links_are_fast() -> None:
    exact, made = ask(FAST, allow_approximate=False), ask(FAST)
    assert made.strategy == exact.strategy
    assert made.prediction == exact.prediction
    assert {one.method for one in made.provenance.regimes} == {
        one.name for one in convergence() if one.efficiency.basis != "smoke"
    }
    for one in made.provenance.regimes:
        assert one.efficiency is not None
        assert one.step_time_s is None or (
            one.step_time_s / one.efficiency.eta >= made.prediction.step_time_s / NEAR
        )


def test_own_evidence_decides() -> None:
    (other,) = [one for one in ask(SLOW).provenance.regimes if one.method == "exact"]
    assert other.break_even is not None
    below, above = other.break_even * 0.9, min(1.0, other.break_even * 1.1)
    for eta, exact in ((below, True), (above, False)):
        # It stands for the published one, which is better.
        made = ask(SLOW, efficiency={"diloco": eta})
        assert is_exact(made) == exact
        found = made.prediction.efficiency
        assert exact or (found is not None and (found.eta, found.basis) == (eta, "own"))
        told = [one for one in made.provenance.regimes if one.method != "exact"]
        assert [one.method for one in told] == (["diloco"] if exact else [])


def test_the_time_that_was_given_is_told() -> None:
    made = ask(SLOW, time_budget_s=8.0)
    assert made.provenance.time_budget_s == 8.0
    assert made.provenance.regimes


def test_a_pinned_method_or_exact_steps_are_left_as_they_are() -> None:
    for pin in ({"synchronisation": "all_reduce"}, {"semantics": "exact"}):
        made = ask(SLOW, pin=pin)
        assert is_exact(made)
        assert made.provenance.regimes == ()
    # Evidence is of each method by itself.
    made = ask(SLOW, pin={"gradient_compression": "float16"})
    assert made.provenance.regimes == ()
    made = ask(SLOW, pin={"synchronisation": "local_steps:period=4"})
    assert str(made.strategy.synchronisation) == "local_steps:period=4"
    assert "no evidence how far" in made.summary()


def test_no_more_copies_than_were_tried() -> None:
    made = ask(SLOW, pin={"dp_replicate": 8})
    assert made.strategy.mesh.dp_replicate == 8
    most = max(one.copies for one in convergence())
    many = hosts((4 * most, 1, device()), between=1e7)
    found = plan_graph(
        uniform_graph(8),
        many,
        PlanOptions(global_batch=8 * most, allow_approximate=True),
        partitioner="exhaustive",
    )
    assert is_exact(found) or found.strategy.mesh.dp_replicate <= most


@pytest.mark.parametrize(
    ("method", "copies", "known"),
    [
        ("diloco", 8, True),
        ("diloco:period=100", 2, True),
        ("diloco:period=1000", 8, False),
        ("diloco:mix=0.5", 8, False),
        ("diloco", 16, False),
        ("local-sgd", 8, False),
    ],
)
def test_evidence_is_of_settings_that_were_tried(
    method: str, copies: int, known: bool
) -> None:
    strategy = Strategy(
        mesh=Mesh(dp_replicate=copies),
        synchronisation=read_method("synchronisation", method),
        semantics="approximate",
    )
    assert (efficiency_of(strategy) is not None) == known
    assert efficiency_of(Strategy(mesh=Mesh(dp_replicate=copies))) is None


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"efficiency": {"diloco": 1.5}}, StrategyError, "1.5 is not above 0"),
        ({"accept_gap": float("nan")}, StrategyError, "accept_gap=nan"),
        ({"efficiency": {"dilico": 0.9}}, UnknownNameError, "dilico"),
        (
            {"efficiency": {"diloco": 0.9}, "allow_approximate": False},
            StrategyError,
            "without allow_approximate=True",
        ),
    ],
)
def test_wrong_evidence_is_refused(
    options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        ask(SLOW, **options)


def test_stages_that_do_not_wait_are_chosen_by_evidence_of_ones_own() -> None:
    """A pipeline is idle while it is flushed; replicas of it sum gradients."""
    sgd = Optimizer(name="SGD", learning_rate=0.1)
    given: dict[str, Any] = {"pin": {"pp": 8, "schedule": "1F1B"}, "optimizer": sgd}
    exact = ask(FAST, **given)
    assert is_exact(exact)
    made = ask(FAST, efficiency={"pipedream": 0.99}, **given)
    assert made.strategy.asynchrony == read_method("asynchrony", "pipedream")
    assert made.strategy.mesh == Mesh(pp=8)
    assert made.prediction.step_time_s < exact.prediction.step_time_s
    (rule,) = (one for one in made.provenance.regimes if one.method == "exact")
    assert rule.break_even == pytest.approx(
        made.prediction.step_time_s / exact.prediction.step_time_s, rel=1e-6
    )
    assert "exact training would win below 0." in made.summary()
    replicated = {**given, "pin": {"pp": 4, "schedule": "1F1B"}}
    made = ask(FAST, efficiency={"pipedream": 0.99}, **replicated)
    assert made.strategy.asynchrony == read_method("asynchrony", "pipedream")
    assert made.strategy.mesh == Mesh(pp=4, dp_replicate=2)
    # What gradients of older weights harm is not planned with them.
    adam = ask(FAST, efficiency={"pipedream": 0.99}, pin=given["pin"])
    assert is_exact(adam)
    told = {one.method: one.reason for one in adam.provenance.regimes}
    assert "by this method" in told["pipedream"]
