"""Pods and hosts in openb's format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from envs.elastic.pods import PodRoom, at_demand, read_nodes, read_pods
from planner.errors import StrategyError, UnknownNameError

NODES = "sn,cpu_milli,memory_mib,gpu,model\na,8000,100,2,T4\nb,8000,100,1,V100\n"
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n"


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_room_for_parts_and_wholes(tmp_path: Path) -> None:
    nodes = read_nodes(_write(tmp_path, "nodes.csv", NODES))
    assert nodes.kinds == ("T4", "V100")
    rows = "p,1000,10,1,400,\nq,1000,10,2,1000,\nr,9000,10,0,0,\ns,1000,10,1,700,V100\n"
    pods = read_pods(_write(tmp_path, "pods.csv", PODS + rows), nodes.kinds)
    room = PodRoom(nodes)
    assert room.able(pods, 0).tolist() == [0, 1]
    assert room.able(pods, 1).tolist() == [0]
    assert room.able(pods, 2).tolist() == []
    assert room.able(pods, 3).tolist() == [1]
    room.place(pods, 0, 0, 1)
    assert room.gpu.tolist() == [[1000, 600], [1000, 0]]
    assert room.able(pods, 1).tolist() == []
    assert room.share == pytest.approx(0.4 / 3)
    with pytest.raises(StrategyError, match="host 0 has no room for 2 x 1000 GPU"):
        room.place(pods, 1, 0, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("p,1,1,2,500,\n", "gpu_milli=500 of num_gpu=2; give"),
        ("p,1,1,1,1500,\n", "gpu_milli=1500"),
        ("p,-1,1,1,500,\n", "line 2: cpu_milli='-1'; give a whole number"),
    ],
)
def test_bad_pods(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        read_pods(_write(tmp_path, "pods.csv", PODS + row), ("T4",))
    path = _write(tmp_path, "pods.csv", PODS + "p,1,1,1,500,V10O\n")
    with pytest.raises(UnknownNameError, match="V10O"):
        read_pods(path, ("T4", "V100"))
    with pytest.raises(StrategyError, match="no column cpu_milli, memory_mib"):
        read_nodes(_write(tmp_path, "nodes.csv", "sn\na\n"))


@pytest.mark.parametrize("demand", [0.5, 1.0, 3.0])
def test_demand_is_reached_by_drawing_pods(tmp_path: Path, demand: float) -> None:
    nodes = read_nodes(_write(tmp_path, "nodes.csv", NODES))
    rows = "".join(f"p{n},1,1,1,{100 * (n + 1)},\n" for n in range(5))
    pods = read_pods(_write(tmp_path, "pods.csv", PODS + rows), nodes.kinds)
    asked = at_demand(pods, nodes, demand, seed=4)
    total = int((asked.gpus * asked.milli).sum())
    assert demand * 3000 - 500 < total <= demand * 3000
    again = at_demand(pods, nodes, demand, seed=4)
    assert np.array_equal(asked.milli, again.milli)
    with pytest.raises(StrategyError, match=r"demand=0\.0"):
        at_demand(pods, nodes, 0.0)
