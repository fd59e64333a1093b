from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from planner.cluster import Cluster, device_type, device_type_names
from planner.cluster.documents import whole_number
from planner.errors import ClusterError
from planner.schema.cluster import (
    PEAK_DTYPES,
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
    Matrices,
    MeasuredCollective,
)

rates = st.floats(1e-3, 1e18, allow_nan=False)
times = st.floats(0, 10, allow_nan=False)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
links = st.builds(
    Link,
    bandwidth_bytes_per_s=rates,
    latency_s=times,
    name=words,
    mesh=st.booleans(),
    source=words,
)
devices = st.builds(
    DeviceType,
    name=words,
    peak_flops_per_s=st.dictionaries(st.sampled_from(PEAK_DTYPES), rates, min_size=1),
    memory_bytes=rates,
    memory_bandwidth_bytes_per_s=rates,
    matmul_efficiency=st.floats(0.01, 1),
    half_efficiency_flops=st.floats(0, 1e12),
    kernel_overhead_s=times,
    backend=st.sampled_from(["nccl", "gloo", "rccl"]),
    source=words,
)
measured = st.builds(
    MeasuredCollective,
    kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    group_size=st.integers(2, 512),
    alpha_s=times,
    bandwidth_bytes_per_s=rates,
)


@st.composite
def documents(draw: st.DrawFn) -> ClusterDocument:
    types = draw(st.lists(devices, min_size=1, max_size=3, unique_by=lambda d: d.name))
    names = [device.name for device in types]
    groups = draw(
        st.lists(
            st.builds(
                HostGroup,
                name=words,
                count=st.integers(1, 3),
                devices_per_host=st.integers(1, 3),
                device=st.sampled_from(names),
                link=links,
                compute_slots=st.none() | st.floats(0.5, 8),
                nic=st.none() | links,
            ),
            min_size=1,
            max_size=3,
        )
    )
    count = sum(group.count * group.devices_per_host for group in groups)
    start = draw(st.integers(0, count - 1))
    given_parts: dict[str, Any] = {
        "name": draw(words),
        "device_types": tuple(types),
        "hosts": tuple(groups),
        "occupied": draw(st.sampled_from([(), ((start, count),)])),
        "collectives": tuple(draw(st.lists(measured, max_size=3))),
        "source": draw(words),
    }
    if draw(st.booleans()):
        row = st.lists(st.none() | rates, min_size=count, max_size=count)
        matrix = st.lists(row, min_size=count, max_size=count)
        given_parts["topology"] = "matrix"
        given_parts["matrices"] = Matrices.model_validate(
            {"bandwidth_bytes_per_s": draw(matrix), "latency_s": draw(matrix)}
        )
    else:
        size = draw(st.sampled_from([None, 2, tuple(group.count for group in groups)]))
        inner = (Level(name="rack", hosts=size, link=draw(links)),)
        given_parts["levels"] = (*inner, Level(name=draw(words), link=draw(links)))
    return ClusterDocument(**given_parts)


@settings(max_examples=40, deadline=None)
@given(documents())
def test_round_trip_through_json_and_yaml(document: ClusterDocument) -> None:
    again = ClusterDocument.from_json(document.to_json())
    assert again == document
    assert again.canonical_bytes() == document.canonical_bytes()
    # Escaped, because PyYAML folds U+0085 into a space when it writes it plainly.
    written = yaml.safe_dump(document.model_dump(mode="json"))
    assert ClusterDocument.from_data(yaml.safe_load(written)) == document


@settings(max_examples=20, deadline=None)
@given(documents())
def test_every_valid_document_numbers_its_devices(document: ClusterDocument) -> None:
    cluster = Cluster(document)
    assert len(cluster.type_index) == len(cluster.host_of_device) == cluster.num_devices
    assert len(cluster.free) == cluster.num_devices - sum(
        stop - start for start, stop in document.occupied
    )


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_files_round_trip(tmp_path: Path, suffix: str) -> None:
    cluster = Cluster.from_preset("mi300x", 2).with_occupied([4])
    path = tmp_path / f"cluster{suffix}"
    if suffix == ".json":
        cluster.document.save(path)
    else:
        path.write_text(yaml.safe_dump(cluster.document.model_dump(mode="json")))
    again = Cluster.parse(str(path))
    assert again == cluster
    assert again.ref == str(path)


def base() -> dict[str, Any]:
    data: dict[str, Any] = Cluster.from_preset("dgx-h100", 4).document.model_dump()
    return data


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hosts": ()}, "hosts is empty"),
        ({"levels": ()}, "4 hosts but no levels"),
        ({"occupied": ((30, 33),)}, r"occupied range \[30, 33\)"),
        ({"topology": "matrix"}, "matrices is missing"),
        (
            {"matrices": {"bandwidth_bytes_per_s": (), "latency_s": ()}},
            "matrices given",
        ),
    ],
)
def test_contradictions_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ClusterDocument.model_validate({**base(), **change})


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([2], "joins 2 hosts, the cluster has 4"),
        ([3, None], None),
        ([2, 3], "cuts through"),
        ([(3, 2), None], "joins 5 hosts"),
        ([(3, 1), None], None),
    ],
)
def test_levels_must_nest_and_reach_all(hosts: list[Any], message: str | None) -> None:
    link = Link(bandwidth_bytes_per_s=1.0, latency_s=0.0)
    levels = [Level(name=f"l{i}", hosts=n, link=link) for i, n in enumerate(hosts)]
    data = {**base(), "levels": [level.model_dump() for level in levels]}
    if message is None:
        assert ClusterDocument.model_validate(data).num_devices == 32
        return
    with pytest.raises(ValidationError, match=message):
        ClusterDocument.model_validate(data)


def test_unknown_peak_dtype() -> None:
    data = device_type(device_type_names()[0]).model_dump()
    with pytest.raises(ValidationError, match="peak_flops_per_s has 'bf16'"):
        DeviceType.model_validate({**data, "peak_flops_per_s": {"bf16": 1.0}})


def test_ints_of_any_kind_count() -> None:
    assert whole_number("nodes", np.int32(4)) == 4
    assert whole_number("device", -2, least=None) == -2


@pytest.mark.parametrize("wrong", [1.5, float("nan"), 2.0, "4", True, None])
def test_numbers_that_are_not_whole_are_refused(wrong: Any) -> None:
    said = "is no whole number; give an int"
    with pytest.raises(ClusterError, match=rf"nodes={wrong!r} {said}"):
        Cluster.from_preset("dgx-h100", wrong)
    with pytest.raises(ClusterError, match=rf"occupied device={wrong!r} {said}"):
        Cluster.from_preset("dgx-h100").with_occupied([0, wrong])
    if wrong is not None:
        with pytest.raises(ClusterError, match=rf"processes={wrong!r} {said}"):
            Cluster.detect(wrong)


def test_too_few_and_too_many() -> None:
    with pytest.raises(ClusterError, match="dgx-h100: nodes=0; use at least 1"):
        Cluster.from_preset("dgx-h100", 0)
    with pytest.raises(ClusterError, match="processes=-3; use at least 1"):
        Cluster.detect(-3)
    with pytest.raises(ClusterError, match=f"device {10**30} does not exist"):
        Cluster.from_preset("dgx-h100").with_occupied([10**30])
