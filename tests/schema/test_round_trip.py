"""Whatever is saved is loaded again, equal to the byte."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schema import Document, Federation, Plan, Strategy
from planner.schema.cluster import ClusterDocument
from planner.schema.elastic import ElasticRecord
from planner.schema.measurement import Measurement
from planner.schema.probe import ProbeDocument
from planner.schema.stream import StreamRecord
from tests.schema.documents import (
    clusters,
    elastic_records,
    federations,
    measurements,
    plans,
    probes,
    strategies,
    stream_records,
)

KINDS = {
    Plan: plans(),
    Strategy: strategies(),
    ClusterDocument: clusters(),
    Federation: federations(),
    Measurement: measurements,
    ProbeDocument: probes,
    StreamRecord: stream_records(),
    ElasticRecord: elastic_records(),
}


def _turned(value: Any) -> Any:
    """The same JSON with every object's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: _turned(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_turned(part) for part in value]
    return value


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_saved_document_loads_equal(
    kind: type[Document], data: st.DataObject
) -> None:
    document = data.draw(KINDS[kind])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "document.json"
        document.save(path)
        loaded = kind.load(path)
    assert loaded == document
    assert loaded.canonical_bytes() == document.canonical_bytes()
    assert loaded.to_json() == document.to_json()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_key_order_and_spacing_do_not_change_the_bytes(
    kind: type[Document], data: st.DataObject
) -> None:
    document = data.draw(KINDS[kind])
    turned = json.dumps(_turned(json.loads(document.to_json())))
    again = kind.from_json(turned)
    assert again.canonical_bytes() == document.canonical_bytes()


@settings(max_examples=20, deadline=None)
@given(plan=plans(), seconds=st.floats(0, 1e6))
def test_clock_times_are_not_in_the_canonical_bytes(plan: Plan, seconds: float) -> None:
    later = plan.model_copy(update={"timing_s": {"search": seconds}})
    assert later.canonical_bytes() == plan.canonical_bytes()
    assert later.to_data()["timing_s"] == {"search": seconds}
    assert "timing_s" not in json.loads(plan.canonical_bytes())


@settings(max_examples=20, deadline=None)
@given(plan=plans())
def test_any_other_change_shows_in_the_canonical_bytes(plan: Plan) -> None:
    renamed = plan.model.model_copy(update={"name": plan.model.name + "x"})
    other = plan.model_copy(update={"model": renamed})
    assert other.canonical_bytes() != plan.canonical_bytes()


@settings(max_examples=20, deadline=None)
@given(plan=plans())
def test_canonical_bytes_are_plain_sorted_json(plan: Plan) -> None:
    data = json.loads(plan.canonical_bytes())
    assert list(data) == sorted(data)
    plain = json.dumps(data, sort_keys=True, separators=(",", ":"))
    assert plain.encode() == plan.canonical_bytes()


def test_a_run_that_diverged_is_still_measured(tmp_path: Path) -> None:
    measured = Measurement(
        plan_label="one",
        model_name="m",
        model_fingerprint="f",
        step_times_s=(1.0,),
        warm_up_steps=0,
        median_step_time_s=1.0,
        peak_memory_bytes=(1,),
        collectives=({},),
        losses=(2.5, math.inf, -math.inf, math.nan),
    )
    measured.save(tmp_path / "m.json")
    text = (tmp_path / "m.json").read_text()
    assert json.loads(text)["losses"] == [2.5, "Infinity", "-Infinity", "NaN"]
    losses = Measurement.load(tmp_path / "m.json").losses
    assert losses[:3] == (2.5, math.inf, -math.inf)
    assert math.isnan(losses[3])
