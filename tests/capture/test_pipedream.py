"""PipeDream profiles, published ones and malformed ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from planner.capture import read_profile
from planner.errors import CaptureError

_DATA = os.environ.get("MESHWRIGHT_DATA")
_PROFILES = sorted(Path(_DATA, "pipedream").glob("*.txt")) if _DATA else []
_NODE = (
    "{name} -- {op} -- forward_compute_time={forward}, backward_compute_time=2.0, "
    "activation_size={size}, parameter_size={weight}\n"
)


def _node(
    name: str,
    op: str = "Linear(2, 2)",
    *,
    forward: object = 1.0,
    size: object = 8.0,
    weight: object = 16.0,
) -> str:
    return _NODE.format(name=name, op=op, forward=forward, size=size, weight=weight)


def _write(folder: Path, text: str) -> Path:
    path = folder / "graph.txt"
    path.write_text(text)
    return path


def test_times_sizes_and_order(tmp_path: Path) -> None:
    text = _node("node2") + _node("node1") + "\tnode1 -- node2\n"
    graph = read_profile(_write(tmp_path, text), batch=4)
    assert [block.name for block in graph.blocks] == ["node1", "node2"]
    assert graph.blocks[0].measured_forward_s == pytest.approx(1e-3)
    assert graph.blocks[0].measured_backward_s == pytest.approx(2e-3)
    assert graph.batch == 4
    assert graph.num_parameters == 8
    assert list(graph.cut_bytes) == [8.0]


def test_an_output_that_skips_ahead_crosses_every_cut(tmp_path: Path) -> None:
    text = "".join(_node(f"node{i}") for i in range(1, 4))
    text += "\tnode1 -- node2\n\tnode2 -- node3\n\tnode1 -- node3\n"
    graph = read_profile(_write(tmp_path, text))
    assert [(e.source, e.target) for e in graph.edges] == [(0, 1), (0, 2), (1, 2)]
    assert list(graph.cut_bytes) == [8.0, 16.0]


def test_getitem_reads_one_of_several_outputs(tmp_path: Path) -> None:
    text = _node("node1", "LSTM(4, 4)", size="[40.0; 4.0; 2.0]")
    text += _node("node2", "__getitem__(1)") + "\tnode1 -- node2\n"
    graph = read_profile(_write(tmp_path, text))
    assert graph.blocks[0].saved_bytes == 46
    assert graph.blocks[0].kind == "recurrent"
    assert list(graph.cut_bytes) == [4.0]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "has no nodes"),
        ("node1 -- Linear -- forward_compute_time=1.0\n", "line 1: .*lacks backward"),
        (_node("node1", forward="x"), "line 1: forward_compute_time='x'"),
        (_node("node1", size="[1.0; ]"), r"line 1: activation_size="),
        (_node("node1", size="-1.0"), "line 1: .*at least 0"),
        (_node("node1", size="nan"), "line 1: .*finite"),
        (_node("node1") * 2, "line 2: node 'node1' is listed twice"),
        (_node("node1") + "\tnode1 -- node9\n", "line 2: edge names 'node9'"),
        (_node("node1") + "\tnode1 node2\n", "line 2: .*not an edge"),
        (_node("a") + _node("b") + "\ta -- b\n\tb -- a\n", "line 3: .*cycle"),
    ],
)
def test_a_malformed_profile_names_the_line(
    tmp_path: Path, text: str, match: str
) -> None:
    with pytest.raises(CaptureError, match=match):
        read_profile(_write(tmp_path, text))


def test_a_missing_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="cannot read profile"):
        read_profile(tmp_path / "absent.txt")


@pytest.mark.skipif(not _PROFILES, reason="MESHWRIGHT_DATA is not set")
@pytest.mark.parametrize("path", _PROFILES, ids=lambda path: path.stem)
def test_a_published_profile(path: Path) -> None:
    graph = read_profile(path)
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    nodes = [line for line in lines if not line[0].isspace()]
    assert len(graph.blocks) == len(nodes)
    assert len(graph.edges) == len({line for line in lines if line[0].isspace()})
    assert all(edge.source < edge.target for edge in graph.edges)
    assert sum(block.measured_forward_s or 0.0 for block in graph.blocks) > 0
