from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from planner.errors import CalibrationError
from planner.measurements.cases import prepare
from planner.measurements.machines import machine_of, of_one_kind
from planner.measurements.points import Point, parse_points, read_points
from planner.measurements.store import shipped
from planner.units import gbit_per_s

POINTS = Path(os.environ.get("MESHWRIGHT_DATA", ""), "measured", "points.csv")
needs_points = pytest.mark.skipif(
    not POINTS.is_file(), reason="MESHWRIGHT_DATA does not hold measured/points.csv"
)
BLANK = parse_points(
    ["point_id,model,gpu,n_gpus,metric,value\n", "1,gpt,A100,8,iter_time_s,1\n"], "row"
)[0]


def row(gpu: str, count: int = 8, source: str = "", notes: str = "") -> Point:
    return replace(BLANK, gpu=gpu, n_gpus=count, source=source, notes=notes)


def outside(point: Point) -> float:
    """Bandwidth from the first device to the last."""
    return machine_of(point).cluster.link(0, point.n_gpus - 1)[0]


@needs_points
def test_every_row_has_a_machine_of_its_size() -> None:
    for point in {(p.gpu, p.n_gpus, p.source): p for p in read_points(POINTS)}.values():
        machine = machine_of(point)
        assert machine.cluster.num_devices == point.n_gpus
        assert machine.hosts * machine.devices_per_host == point.n_gpus
        assert machine.domain >= machine.devices_per_host
        (device,) = machine.cluster.device_types
        assert device.name == machine.device
        chip, _, memory = device.name.rpartition("-")
        text = point.gpu.lower()
        assert chip in text
        assert (
            "gb"
            not in text.replace("gb200", "")
            .replace("gb300", "")
            .replace("gbps", "")
            .replace("gb roce", "")
            or memory in text
        )


@pytest.mark.parametrize(
    ("gpu", "source", "count", "device", "per_host", "inside", "gbits"),
    [
        ("V100-16GB (p3.16xlarge)", "Alpa", 64, "v100-16", 8, 150e9 / 7, 25),
        ("V100 (DGX-2)", "Megatron-LM", 32, "v100-32", 16, 150e9, 800),
        ("A100-80GB (Selene)", "SC21", 3072, "a100-80", 8, 300e9, 1600),
        ("A100", "vTrain (MICRO24)", 512, "a100-80", 8, 300e9, 800),
        ("A100-80GB SXM4, 4x100Gb RoCE/node", "", 16, "a100-80", 8, 300e9, 400),
        ("A100-80GB 400Gbps", "IBM", 128, "a100-80", 8, 300e9, 400),
        ("a100_40gb", "MosaicML", 128, "a100-40", 8, 300e9, 1600),
        ("H100-80GB 800Gbps", "IBM", 96, "h100-80", 8, 450e9, 800),
        ("h100_80gb", "MosaicML", 64, "h100-80", 8, 450e9, 3200),
        ("H100-96GB HBM2e 500W", "torchtitan", 512, "h100-96", 8, 450e9, 3200),
        ("DGX-B300", "NVIDIA", 256, "b300-270", 8, 900e9, 6400),
        ("MI300X", "nnScaler", 16, "mi300x-192", 8, 64e9, 3200),
        ("p4d.24xlarge", "", 16, "a100-40", 8, 300e9, 400),
        ("p4de", "", 16, "a100-80", 8, 300e9, 400),
        ("8xH100 (p5.48xlarge)", "", 16, "h100-80", 8, 450e9, 3200),
        ("V100 p3dn.24xlarge", "", 16, "v100-32", 8, 150e9 / 7, 100),
        ("a2-megagpu-16g", "", 32, "a100-40", 16, 300e9, 100),
        ("ND A100 v4", "", 16, "a100-80", 8, 300e9, 1600),
        ("NDv5 H100", "", 16, "h100-80", 8, 450e9, 3200),
        ("A100-40GB Perlmutter", "", 16, "a100-40", 4, 300e9, 800),
        ("V100-16GB (DGX-1)", "", 16, "v100-16", 8, 150e9 / 7, 400),
    ],
)
def test_systems(
    gpu: str,
    source: str,
    count: int,
    device: str,
    per_host: int,
    inside: float,
    gbits: float,
) -> None:
    point = row(gpu, count, source)
    machine = machine_of(point)
    assert machine.device == device
    assert machine.devices_per_host == per_host
    assert machine.cluster.link(0, 1)[0] == inside
    assert outside(point) == pytest.approx(gbit_per_s(gbits) / per_host)


@pytest.mark.parametrize(
    ("gpu", "device"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("A100 PCIe 40G", "a100pcie-40"),
        ("NVIDIA A100 80GB PCIe", "a100pcie-80"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("V100 PCIe", "v100pcie-32"),
        ("V100-32GB", "v100-32"),
        ("nvidia_h100_80gb_hbm3", "h100-80"),
        ("H100 PCIe", "h100pcie-80"),
        ("H100 NVL 94GB", "h100nvl-94"),
        ("HGX H100", "h100-80"),
        ("DGXH200", "h200-141"),
        ("H800", "h800-80"),
        ("A800-80GB", "a800-80"),
        ("H20-96GB", "h20-96"),
        ("GH200 480GB", "gh200-96"),
        ("GH200 144GB", "gh200-144"),
        ("L40S", "l40s-48"),
        ("L40", "l40-48"),
        ("L4", "l4-24"),
        ("A10G", "a10g-24"),
        ("NVIDIA A10", "a10-24"),
        ("A40", "a40-48"),
        ("RTX TITAN 24GB", "titanrtx-24"),
        ("RTX PRO 6000 Blackwell", "rtxpro6000-96"),
        ("L20", "l20-48"),
        ("RTX A5000", "a5000-24"),
        ("TPU v7 (Ironwood)", "tpuv7-192"),
        ("Trainium3", "trainium3-144"),
        ("A30", "a30-24"),
        ("RTX A6000", "a6000-48"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000ada-48"),
        ("Tesla T4", "t4-16"),
        ("P100", "p100-16"),
        ("Tesla P40", "p40-24"),
        ("K80 (p2.8xlarge)", "k80-12"),
        ("GTX 1080Ti", "gtx1080ti-11"),
        ("TITAN Xp", "titanxp-12"),
        ("Titan V", "titanv-12"),
        ("RTX TITAN", "titanrtx-24"),
        ("RTX 2080", "rtx2080-8"),
        ("Quadro RTX 6000", "quadrortx6000-24"),
        ("RTX 6000 48GB", "rtx6000ada-48"),
        ("RTX8000", "quadrortx8000-48"),
        ("RTX3080", "rtx3080-10"),
        ("RTX 3090 Ti", "rtx3090ti-24"),
        ("RTX 4080", "rtx4080-16"),
        ("RTX A4000", "a4000-16"),
        ("RTX A5500", "a5500-24"),
        ("RTX 5000 Ada", "rtx5000ada-32"),
        ("MI50-32GB", "mi50-32"),
        ("MI100", "mi100-32"),
        ("GeForce RTX 2080 Ti", "rtx2080ti-11"),
        ("RTX3090", "rtx3090-24"),
        ("4x RTX 4090", "rtx4090-24"),
        ("RTX 5090 32GB", "rtx5090-32"),
        ("AMD Instinct MI210", "mi210-64"),
        ("MI250X", "mi250x-64"),
        ("MI250-128GB", "mi250-128"),
        ("MI300A", "mi300a-128"),
        ("MI300X 192GB", "mi300x-192"),
        ("MI325X", "mi325x-256"),
        ("MI355X", "mi355x-288"),
        ("B100", "b100-180"),
        ("B200 192GB", "b200-180"),
        ("GB200 NVL72", "gb200-186"),
        ("Gaudi2", "gaudi2-96"),
        ("Intel Gaudi 3", "gaudi3-128"),
        ("Intel Data Center GPU Max 1550", "max1550-128"),
        ("PVC", "max1550-128"),
        ("Max 1100", "max1100-48"),
        ("TPU v2", "tpuv2-16"),
        ("TPU v3", "tpuv3-32"),
        ("TPUv4", "tpuv4-32"),
        ("v5litepod-256", "tpuv5e-16"),
        ("TPU v5e", "tpuv5e-16"),
        ("TPU v5p-128", "tpuv5p-95"),
        ("Trillium (TPU v6e)", "tpuv6e-32"),
        ("Ascend 910B3", "ascend910b-64"),
        ("Trainium1", "trainium1-32"),
        ("trn2", "trainium2-96"),
        ("A100-SXM-64GB", "a100-64"),
        ("Hopper", "h100-80"),
    ],
)
@pytest.mark.parametrize("count", [1, 2, 8, 24])
def test_names(gpu: str, device: str, count: int) -> None:
    machine = machine_of(row(gpu, count))
    assert machine.device == device
    assert machine.cluster.num_devices == count


def test_a_name_that_leaves_the_memory_open_says_so() -> None:
    assumed = machine_of(row("A100")).assumed
    assert any("a100-80, not a100-40" in note for note in assumed)
    assert not any("memory" in note for note in machine_of(row("A100-80GB")).assumed)
    assert not any("memory" in note for note in machine_of(row("H100")).assumed)


def test_a_memory_that_no_variant_has_is_taken_as_stated() -> None:
    machine = machine_of(row("A100-SXM-64GB"))
    (device,) = machine.cluster.device_types
    assert device.memory_bytes == 64e9
    assert device.peak_flops_per_s["bfloat16"] == 312e12
    assert any("64 GB as stated" in note for note in machine.assumed)


def test_both_dies_of_an_mi250_are_twice_one() -> None:
    (both,) = machine_of(row("MI250-128GB")).cluster.device_types
    (die,) = machine_of(row("MI250")).cluster.device_types
    assert both.peak_flops_per_s["bfloat16"] == 2 * die.peak_flops_per_s["bfloat16"]
    assert both.memory_bytes == 2 * die.memory_bytes


@pytest.mark.parametrize(
    ("gpu", "near"), [("Z100-80GB", "nearest"), ("H10O", "H100"), ("MI400Z", "MI")]
)
def test_an_unknown_name_gets_the_nearest(gpu: str, near: str) -> None:
    with pytest.raises(CalibrationError, match=near) as caught:
        machine_of(row(gpu))
    assert repr(gpu) in str(caught.value)


def test_a_professional_blackwell_card_is_no_b200() -> None:
    with pytest.raises(CalibrationError, match="no accelerator that is known"):
        machine_of(row("RTX PRO 4500 Blackwell"))


@pytest.mark.parametrize(
    ("gpu", "notes"),
    [
        ("A100-40GB, 4 GPUs/node", ""),
        ("A100-40GB 4x per node", ""),
        ("A100", "4xA100 a node"),
    ],
)
def test_devices_of_a_host_as_the_row_states(gpu: str, notes: str) -> None:
    point = row(gpu, 16, notes=notes)
    assert machine_of(point).devices_per_host == 4
    # Half of the host's devices come with half of its NICs.
    assert outside(point) == pytest.approx(25e9)


@pytest.mark.parametrize(
    ("count", "per_host", "hosts"), [(1, 1, 1), (4, 4, 1), (8, 8, 1), (12, 6, 2)]
)
def test_hosts_divide_the_count(count: int, per_host: int, hosts: int) -> None:
    machine = machine_of(row("A100-80GB", count))
    assert (machine.devices_per_host, machine.hosts) == (per_host, hosts)
    assert any("12 devices are no multiple of 8" in x for x in machine.assumed) == (
        count == 12
    )


@pytest.mark.parametrize(
    ("count", "domain"), [(8, 8), (64, 64), (72, 72), (128, 64), (144, 72), (512, 64)]
)
def test_nvlink_domains_of_a_rack(count: int, domain: int) -> None:
    machine = machine_of(row("DGX-GB200", count))
    assert machine.domain == domain
    assert machine.devices_per_host == 4
    assert machine.cluster.link(0, domain - 1)[0] == 900e9
    if count > domain:
        assert machine.cluster.link(0, domain)[0] == 50e9


def test_a_slice_of_tpus_is_one_domain() -> None:
    machine = machine_of(row("TPU v4", 512))
    assert machine.domain == 512
    assert machine.cluster.link(0, 511)[0] == 300e9


@pytest.mark.parametrize(
    ("gpu", "notes", "gbits"),
    [
        ("H100 3.2Tbps", "", 3200),
        ("H100 400 Gb/s per GPU", "", 3200),
        ("B200 (8 a node, 400 Gb/s IB per GPU)", "", 3200),
        ("H100, 4x200Gb/s RoCE", "", 800),
        ("H100 8x400Gb IB", "", 3200),
        ("H100 50 GB/s per GPU", "", 3200),
        ("H100 InfiniBand HDR", "", 1600),
        ("H100-80GB, 100GbE", "", 100),
        ("H100, 100Gb IB EDR", "", 100),
        ("H100 80GB 3.35TB/s", "", 3200),
        ("H100-80GB NVLink 900GB/s", "", 3200),
        ("H100", "nodes joined by 8x200 Gb/s InfiniBand", 1600),
        ("H100", "inter-node bandwidth 100Gbps, TCP", 100),
        ("H100", "NVLink 900 GB/s in a node", 3200),
        ("H100", "took 200Gb of disk", 3200),
        ("8x80GB H100", "", 3200),
    ],
)
def test_rates_that_a_row_states(gpu: str, notes: str, gbits: float) -> None:
    assert outside(row(gpu, 16, notes=notes)) == pytest.approx(gbit_per_s(gbits) / 8)


def test_ethernet_is_slower_to_answer_than_rdma() -> None:
    tcp = machine_of(row("H100-80GB, 100GbE", 16)).cluster.link(0, 15)[1]
    rdma = machine_of(row("H100-80GB, 4x100Gb RoCE", 16)).cluster.link(0, 15)[1]
    assert tcp == 20e-6
    assert rdma == 4e-6


def test_a_system_of_other_chips_is_not_taken() -> None:
    # MosaicML's A100s have 1,600 Gbit/s; of its H100s nothing is said.
    machine = machine_of(row("h100_80gb", 16, "MosaicML llm-foundry"))
    assert any("as usual for h100-80" in note for note in machine.assumed)


def test_a_gpu_that_its_source_is_not_sure_of_says_so() -> None:
    machine = machine_of(row("16x V100? (type not stated)", 16))
    assert machine.device == "v100-32"
    assert any("not state the GPU for sure" in note for note in machine.assumed)


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
