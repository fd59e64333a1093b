"""Every way in which a file can be wrong is one line that names file and field."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import PlanFileError
from planner.schema import Document, Plan, Strategy
from planner.schema.cluster import ClusterDocument
from planner.schema.measurement import Measurement
from tests.plans import gpt2_plan
from tests.schema.documents import clusters, measurements, plans


def _data() -> dict[str, Any]:
    return copy.deepcopy(gpt2_plan().to_data())


def _error(data: Any, path: Path, kind: type[Document] = Plan) -> str:
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError) as caught:
        kind.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def _set(*place: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(data: Any) -> None:
        for key in place[:-1]:
            data = data[key]
        data[place[-1]] = value

    return change


CASES = {
    "unknown": (
        _set("strategy", "mesh", "xp", value=2),
        "field strategy.mesh.xp: is not known",
    ),
    "word for a number": (
        _set("strategy", "mesh", "tp", value="eight"),
        "field strategy.mesh.tp: must be a whole number",
    ),
    "half a device": (
        _set("strategy", "mesh", "tp", value=1.5),
        "(got 1.5)",
    ),
    "no device": (
        _set("strategy", "mesh", "tp", value=0),
        "field strategy.mesh.tp: must be at least 1 (got 0)",
    ),
    "list for an object": (
        _set("model", value=[]),
        "field model: must be",
    ),
    "unknown schedule": (
        _set("strategy", "schedule", value="2F2B"),
        "field strategy.schedule: unknown pipeline schedule '2F2B'; known: 1F1B",
    ),
    "NaN": (
        _set("prediction", "step_time_s", value=float("nan")),
        "field prediction.step_time_s: must be a finite number (got nan)",
    ),
    "NaN in a table": (
        _set("prediction", "breakdown_s", "compute", value=float("nan")),
        "field prediction.breakdown_s.compute: must be a finite number",
    ),
    "infinity": (
        _set("strategy", "optimizer", "learning_rate", value=float("inf")),
        "field strategy.optimizer.learning_rate: must be a finite number",
    ),
    "NaN as text": (
        _set("prediction", "samples_per_s", value="NaN"),
        "field prediction.samples_per_s: must be a finite number",
    ),
    "negative time": (
        _set("prediction", "step_time_s", value=-1.0),
        "field prediction.step_time_s: must be at least 0",
    ),
    "another batch": (
        _set("workload", "global_batch", value=63),
        "plan: strategy trains 64 samples a step",
    ),
    "device that is not there": (
        _set("strategy", "device_ranges", value=[[1, 9]]),
        "strategy uses device 8, the cluster has devices 0 to 7",
    ),
    "device used twice": (
        _set("strategy", "device_ranges", value=[[0, 4], [3, 7]]),
        "field strategy: device 3 is in two device_ranges",
    ),
    "range the wrong way round": (
        _set("strategy", "device_ranges", value=[[8, 0]]),
        "field strategy: device range [8, 0) is not 0 <= start < stop",
    ),
    "too many devices": (
        _set("strategy", "device_ranges", value=[[0, 9]]),
        "field strategy: device_ranges name 9 devices, the mesh has 8",
    ),
    "memory of a rank that is not there": (
        _set("prediction", "memory", 0, "rank", value=1),
        "prediction.memory has an entry for pp ranks [1], the mesh has pp=1",
    ),
    "hosts that hold too few": (
        _set("cluster", "hosts", value=[[1, 4]]),
        "field cluster: hosts hold 4 devices, num_devices is 8",
    ),
    "types of too few hosts": (
        _set("cluster", "host_types", value=[[3, "h100-80"]]),
        "field cluster: host_types name the type of 3 hosts, the cluster has ",
    ),
    "a version of tomorrow": (
        _set("schema_version", value=2),
        "schema_version 2 is newer than 1, the newest this Meshwright reads; upgrade",
    ),
    "a version that is none": (
        _set("schema_version", value="one"),
        "field schema_version: must be 1 (got 'one')",
    ),
    "a name with a line break": (
        _set("strategy", "a\nb", value=1),
        "field strategy.a b: is not known",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_field_is_named(case: str, tmp_path: Path) -> None:
    change, expected = CASES[case]
    data = _data()
    change(data)
    assert expected in _error(data, tmp_path / "plan.json")


@pytest.mark.parametrize("field", sorted(set(Plan.model_fields) - {"schema_version"}))
def test_a_missing_part_is_named_or_has_a_default(field: str, tmp_path: Path) -> None:
    data = _data()
    del data[field]
    if field in {"not_runnable", "timing_s", "certificate"}:
        assert Plan.from_data(data).to_data()[field] in ([], {}, None)
        return
    assert _error(data, tmp_path / "p.json") == f"field {field}: is missing"


def test_several_problems_are_counted(tmp_path: Path) -> None:
    data = _data()
    data["more"] = 1
    del data["model"]["name"], data["model"]["fingerprint"]
    assert _error(data, tmp_path / "p.json").endswith("(and 2 more)")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_plan_is_told_from_a_wrong_one(
    share: float, tmp_path: Path
) -> None:
    text = gpt2_plan().to_json().strip()
    path = tmp_path / "cut.json"
    path.write_text(text[: int(len(text) * share)])
    with pytest.raises(PlanFileError, match=r"not a whole JSON document .* cut off"):
        Plan.load(path)


@settings(max_examples=60, deadline=None)
@given(plan=plans(), share=st.floats(0, 1, exclude_max=True))
def test_no_prefix_of_a_plan_is_a_plan(plan: Plan, share: float) -> None:
    text = plan.canonical_bytes()
    with pytest.raises(PlanFileError, match="not a whole JSON document"):
        Plan.from_json(text[: int(len(text) * share)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "line 1 column 1"),
        (b"{]", "line 1 column 2"),
        (b"\x80\x04K\x01.", "is not UTF-8 text"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "not a whole JSON document"),
        (b"[1]", "a plan is an object with fields, this is list"),
        (b"null", "a plan is an object with fields, this is NoneType"),
    ],
)
def test_text_that_is_no_document(text: bytes, expected: str) -> None:
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(text, where="p.json")
    assert expected in str(caught.value)
    assert str(caught.value).startswith("p.json: ")
    assert "\n" not in str(caught.value)


def test_a_pickle_is_never_loaded(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (ran,))

    path = tmp_path / "plan.json"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(PlanFileError, match="is it not a plan"):
        Plan.load(path)
    assert not ran.exists()
    pickle.loads(path.read_bytes())
    assert ran.exists(), "the trap itself works"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot read plan .*No such file"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match=r"cannot read plan .*it is a folder"):
        Plan.load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "documents"),
    [(Plan, plans()), (ClusterDocument, clusters()), (Measurement, measurements)],
    ids=["plan", "cluster", "measurement"],
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_whatever_is_put_in_a_field_ends_in_one_line(
    kind: type[Document], documents: st.SearchStrategy[Document], data: st.DataObject
) -> None:
    """Any JSON value in any place is either taken or refused, never a crash."""
    whole = data.draw(documents).to_data()
    junk = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda part: (
            st.lists(part, max_size=2)
            | st.dictionaries(st.text(max_size=3), part, max_size=2)
        ),
        max_leaves=4,
    )
    inside: Any = whole
    while True:
        keys = list(inside) if isinstance(inside, dict) else list(range(len(inside)))
        key = data.draw(st.sampled_from(keys))
        deeper = isinstance(inside[key], dict | list) and inside[key]
        if not deeper or data.draw(st.booleans()):
            break
        inside = inside[key]
    inside[key] = data.draw(junk)
    try:
        taken = kind.from_data(whole, where="f.json")
    except PlanFileError as error:
        message = str(error)
        assert message.startswith("f.json: ")
        assert len(message.splitlines()) == 1
    else:
        assert kind.from_json(taken.to_json()) == taken or "NaN" in taken.to_json()


def test_a_strategy_says_what_it_is() -> None:
    with pytest.raises(PlanFileError, match="s: a strategy is an object with fields"):
        Strategy.from_data([], where="s")
    with pytest.raises(PlanFileError, match="s: strategy: 1 stages, but pp=2"):
        Strategy.from_data(
            {"mesh": {"pp": 2}, "stages": [{"rank": 0, "modules": []}]}, where="s"
        )
