from __future__ import annotations

from dataclasses import replace

import pytest

from planner.calibration.cases import prepare
from planner.calibration.machines.machines import machine_of
from planner.calibration.machines.mixed import of_one_kind
from planner.calibration.points import parse_points
from planner.calibration.store import shipped
from planner.errors import CalibrationError

HEADER = (
    "point_id,model,layers,hidden,heads,seq,vocab,gpu,n_gpus,tp,pp,microbatch,"
    "global_batch,schedule,recompute,precision,metric,value,notes\n"
)
ROW = "1,GPT,24,1024,16,1024,51200,A100,8,1,4,4,64,1f1b,none,fp16,iter_time_s,1,DDP\n"
POINT = parse_points([HEADER, ROW], "row")[0]


@pytest.mark.parametrize(
    ("gpu", "count", "expected"),
    [
        ("16xA100+16xV100", 32, [("a100-80", 16), ("v100-32", 16)]),
        ("A100 + V100", 32, [("a100-80", 16), ("v100-32", 16)]),
        ("A100-40GB & A100-80GB", 16, [("a100-40", 8), ("a100-80", 8)]),
        ("4x RTX 3090 and 12x 2080 Ti", 32, [("rtx3090-24", 8), ("rtx2080ti-11", 24)]),
        ("RTX 3090 + RTX 4090", 16, [("rtx3090-24", 8), ("rtx4090-24", 8)]),
        ("A100-40GB x 4, V100-16GB x 12", 16, [("a100-40", 4), ("v100-16", 12)]),
        ("V100 (8) / T4 (16)", 24, [("v100-32", 8), ("t4-16", 16)]),
        ("8 GPUs of A100, 8 GPUs of H20", 16, [("a100-80", 8), ("h20-96", 8)]),
    ],
)
def test_a_row_of_several_kinds_has_hosts_of_each(
    gpu: str, count: int, expected: list[tuple[str, int]]
) -> None:
    cluster = machine_of(replace(POINT, gpu=gpu, n_gpus=count)).cluster
    found = [
        (group.device, group.count * group.devices_per_host)
        for group in cluster.document.hosts
    ]
    assert found == expected
    assert cluster.num_devices == count


@pytest.mark.parametrize(
    "gpu", ["A100-80GB SXM4, 4x100Gb RoCE/node", "DGX-A100, A100-80GB", "8x RTX 3090"]
)
def test_a_row_of_one_kind_is_left_as_it_is(gpu: str) -> None:
    point = replace(POINT, gpu=gpu)
    assert of_one_kind(point) == ((point,), ())


def test_kinds_meet_in_the_slower_network() -> None:
    point = replace(POINT, gpu="8xH100 + 8xV100", n_gpus=16)
    slower = replace(POINT, gpu="V100", n_gpus=16)
    across = machine_of(point).cluster.link(0, 15)
    assert across == machine_of(slower).cluster.link(0, 15)


@pytest.mark.parametrize("gpu", ["A100 + V100", "2xA100 + 4xV100"])
def test_counts_that_do_not_add_up_are_refused(gpu: str) -> None:
    with pytest.raises(CalibrationError, match="16xA100"):
        machine_of(replace(POINT, gpu=gpu, n_gpus=9))


def test_kinds_run_together_in_one_name_are_refused() -> None:
    with pytest.raises(CalibrationError, match="8xGH200"):
        machine_of(replace(POINT, gpu="GH200 (H100)"))


def test_the_slower_kind_sets_the_pace() -> None:
    def step_s(gpu: str) -> float:
        return prepare(replace(POINT, gpu=gpu)).step_s(shipped())

    fast, slow, mixed = (step_s(gpu) for gpu in ("A100", "V100", "4xA100+4xV100"))
    assert 0.7 * slow < mixed < 1.05 * slow
    assert mixed > 1.5 * fast
