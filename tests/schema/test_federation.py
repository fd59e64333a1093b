"""Federations round-trip; what an editor can get wrong is told in one line."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.errors import PlanFileError
from planner.schema import Federation, Optimizer
from planner.schema.federation import assign_owners, rings_of
from planner.schema.methods.local_steps import LocalSteps
from tests.federations import make_federation, member_plan


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Two processes of a pipeline, and one alone."""
    return make_federation(member_plan(samples=8, pp=2), member_plan(samples=4))


def test_a_federation_loads_equal(federation: Federation, tmp_path: Path) -> None:
    path = tmp_path / "federation.json"
    federation.save(path)
    loaded = Federation.load(path)
    assert loaded == federation
    assert loaded.canonical_bytes() == federation.canonical_bytes()


def _member(index: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["members"][index].update(fields)


def _rate(data: dict[str, Any]) -> None:
    data["members"][1]["plan"]["strategy"]["optimizer"]["learning_rate"] = 0.25


def _other_model(data: dict[str, Any]) -> None:
    data["members"][1]["plan"]["model"]["fingerprint"] = "abc"


def _apart(data: dict[str, Any]) -> None:
    strategy = data["members"][0]["plan"]["strategy"]
    strategy["synchronisation"] = {"kind": "local_steps", "period": 4}
    strategy["semantics"] = "approximate"


CASES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "device in two": (
        _member(1, devices=[1]),
        "device 1 is in members 'member0' and 'member1'; a device trains in one",
    ),
    "device twice": (
        _member(0, devices=[1, 1]),
        "devices of member 'member0' are [1, 1]; list each once, in ascending order",
    ),
    "no such device": (
        _member(1, devices=[3]),
        "device 3 is not in the fleet, which has devices 0 to 2",
    ),
    "fewer devices": (
        _member(0, devices=[0]),
        "member 'member0' lists 1 devices, its plan is for 2",
    ),
    "one name": (_member(1, name="member0"), "two members are called 'member0'"),
    "another model": (_other_model, "member 'member1' has model=abc, 'member0' has"),
    "another rate": (_rate, "member 'member1' has optimizer="),
    "apart inside": (
        _apart,
        "member 'member0' has synchronisation=local_steps:period=4, whose copies",
    ),
    "batch": (
        lambda data: data.update(global_batch=16),
        "members train 12 samples a step, global_batch says 16",
    ),
    "left out and in": (
        lambda data: data.update(left_out=[2]),
        "device 2 is left out and in member 'member1'",
    ),
    "period": (
        lambda data: data["exchange"].update(period=0),
        "exchange.period: must be at least 1 (got 0)",
    ),
    "fragments": (
        lambda data: data["exchange"].update(fragments=2),
        "exchange has fragments=2, but in a federation all weights are exchanged at "
        "once; use fragments=1",
    ),
    "replicas": (
        lambda data: data["exchange"].update(on_failure="continue", min_replicas=3),
        "exchange has min_replicas=3 with 2 members; use 2 or fewer",
    ),
    "prediction": (
        lambda data: data["prediction"].update(exchange_bytes=[1.0]),
        "prediction.exchange_bytes has 1 entries for 2 members",
    ),
    "nobody": (lambda data: data.update(members=[]), "field members: "),
    "unknown": (
        lambda data: data.update(member=[]),
        "field member: is not known",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_file_edited_by_hand_is_refused(federation: Federation, name: str) -> None:
    change, said = CASES[name]
    data = copy.deepcopy(federation.to_data())
    change(data)
    with pytest.raises(PlanFileError) as caught:
        Federation.from_data(data, where="federation.json")
    message = str(caught.value)
    assert message.startswith("federation.json: ")
    assert said in message
    assert "\n" not in message


def test_processes_are_in_the_order_of_devices() -> None:
    plans = member_plan(samples=8, pp=2), member_plan(samples=4)
    mixed = make_federation(*plans)
    first, second = mixed.members
    mixed = make_federation(
        *plans,
        members=(
            first.model_copy(update={"devices": (0, 2)}),
            second.model_copy(update={"devices": (1,)}),
        ),
    )
    assert mixed.processes == ((0, 0), (1, 0), (0, 1))
    assert mixed.first_samples == (0, 8)


def test_members_count_by_their_samples(federation: Federation) -> None:
    assert federation.shares([0, 1]) == {0: 8 / 12, 1: 4 / 12}
    assert federation.shares([1]) == {1: 1.0}
    equal = federation.model_copy(update={"weighting": "equal"})
    assert equal.shares([0, 1]) == {0: 0.5, 1: 0.5}


def test_members_of_other_optimizers_are_refused() -> None:
    adam = Optimizer(name="AdamW")
    with pytest.raises(ValueError, match="has optimizer="):
        make_federation(member_plan(), member_plan(optimizer=adam))


def test_a_summary_names_members_and_the_exchange(federation: Federation) -> None:
    said = federation.summary()
    assert "3 of 3 devices of local, 2 members" in said
    assert "exchange every 2 steps: 500 ms, 25.0% of the time" in said
    assert "(devices 0-1): 8 samples a step in 1 s, waits 0%; pp2" in said


def test_the_least_loaded_holder_exchanges_a_weight() -> None:
    sizes = {"a": 4, "b": 2, "c": 2, "d": 1}
    holders = {"a": [0, 1], "b": [0, 1], "c": [0, 1], "d": [2]}
    assert assign_owners(sizes, holders) == {"a": 0, "b": 1, "c": 1, "d": 2}


def test_a_ring_for_each_tuple_of_owners() -> None:
    pipeline = {"a": 0, "b": 0, "c": 1}
    alone = dict.fromkeys("abc", 0)
    other = {"a": 0, "b": 1, "c": 1}
    found = rings_of([pipeline, alone, other])
    assert found == {(0, 0, 0): ("a",), (0, 0, 1): ("b",), (1, 0, 1): ("c",)}


def test_defaults_of_the_exchange_are_a_mean() -> None:
    assert LocalSteps().takes_mean
