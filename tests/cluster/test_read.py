from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.cluster import Cluster
from planner.errors import ClusterError, PlanFileError, TopologyError, UnknownNameError

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.yaml"


def test_names_and_counts() -> None:
    assert Cluster.parse("dgx-h100").num_devices == 8
    assert Cluster.parse(" DGX-H100:3 ").num_devices == 24
    assert Cluster.parse("gb200-nvl72").num_devices == 72
    assert Cluster.parse("dgx-h100:3").ref == "dgx-h100:3"


@pytest.mark.parametrize("count", ["0", "-2", "two", "", "1.5"])
def test_count_must_be_a_number(count: str) -> None:
    with pytest.raises(ClusterError, match="number of at least 1"):
        Cluster.parse(f"dgx-h100:{count}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("dgx-h10", "dgx-h100"), ("dgx_a100", "dgx-a100"), ("locl", "local")],
)
def test_typos_get_the_nearest_name(typed: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=f"did you mean '{meant}'"):
        Cluster.parse(typed)


def test_fixed_clusters_have_no_count() -> None:
    with pytest.raises(ClusterError, match="one cluster of fixed size"):
        Cluster.parse("ramp:2")


def test_example_file() -> None:
    cluster = Cluster.from_file(EXAMPLE)
    assert cluster.num_devices == 16
    assert cluster.num_free == 14
    assert cluster.link(0, 1)[0] == 300e9
    assert cluster.link(0, 8) == (0.3e9, 30e-6)
    assert cluster.reference().device_types == {"a100-40": 8, "lab-card": 8}


def test_file_without_suffix_is_read_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(Cluster.parse("dgx-h100").document.to_json())
    assert Cluster.parse("mine").num_devices == 8


def test_truncated_json(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(Cluster.parse("dgx-h100:2").document.to_json()[:300])
    with pytest.raises(PlanFileError, match=r"cluster.json: not a whole JSON document"):
        Cluster.parse(str(path))


def test_broken_yaml_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: lab\nhosts: [\n  - name: a\n")
    with pytest.raises(PlanFileError, match=r"not YAML \(line \d") as caught:
        Cluster.parse(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1\n", "just words\n"])
def test_yaml_that_is_no_cluster(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.yml"
    path.write_text(text)
    with pytest.raises(PlanFileError, match="a cluster is an object with fields"):
        Cluster.from_file(path)


def test_missing_file_and_newer_schema(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match=r"cannot read cluster .*No such file"):
        Cluster.parse(str(tmp_path / "none.json"))
    data = {**Cluster.parse("dgx-h100").document.model_dump(), "schema_version": 9}
    path = tmp_path / "new.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match="schema_version 9 is newer than 1"):
        Cluster.from_file(path)


def test_wrong_field_is_named(tmp_path: Path) -> None:
    data = Cluster.parse("dgx-h100").document.model_dump()
    data["hosts"][0]["count"] = 0
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanFileError, match=r"field hosts\.0\.count"):
        Cluster.from_file(path)


def test_unknown_device_type_by_name(tmp_path: Path) -> None:
    path = tmp_path / "lab.yaml"
    path.write_text(EXAMPLE.read_text().replace("- a100-40", "- a100-4"))
    with pytest.raises(UnknownNameError, match="did you mean 'a100-40'"):
        Cluster.from_file(path)


def test_missing_link_in_a_file_names_both_devices(tmp_path: Path) -> None:
    device = Cluster.parse("dgx-h100").device_types[0].model_dump()
    link = {"bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}
    data = {
        "name": "hole",
        "device_types": [device],
        "hosts": [
            {
                "name": "h",
                "count": 3,
                "devices_per_host": 1,
                "device": device["name"],
                "link": link,
            }
        ],
        "topology": "matrix",
        "matrices": {
            "bandwidth_bytes_per_s": [[None, 1, 1], [1, None, None], [1, 1, None]],
            "latency_s": [[0, 0, 0]] * 3,
        },
    }
    path = tmp_path / "hole.json"
    path.write_text(json.dumps(data))
    with pytest.raises(TopologyError, match="from device 1 to device 2"):
        Cluster.parse(str(path))
