"""Figures of presets agree with each other, with their sources and with the chips.

A figure that is mistyped, halved twice or taken from the column with sparsity breaks
a product of units, width and clock: those are from other tables than the figure.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

import pytest
import yaml

from planner.cluster import Cluster, device_type, device_type_names
from planner.cluster.presets import ethernet, known_links, known_systems
from planner.schema.cluster import PEAK_DTYPES, DeviceType
from planner.units import GIB, gbit_per_s

_DATA = files("planner.cluster").joinpath("data")
_DEVICES = list(csv.DictReader(_DATA.joinpath("devices.csv").read_text().splitlines()))
_SYSTEMS = _DATA.joinpath("systems.yaml").read_text()
_SOURCED = re.compile(r"\b(19|20)\d\d\b|\bassumption\b")
#: Columns of figures to the column that has their source.
_SOURCE_OF = {
    **dict.fromkeys((f"{dtype}_tflops" for dtype in PEAK_DTYPES), "rates_source"),
    "memory_mib": "memory_source",
    "memory_bandwidth_gb_per_s": "bandwidth_source",
    "matmul_efficiency": "efficiency_source",
    "half_efficiency_mflops": "efficiency_source",
    "kernel_overhead_us": "overhead_source",
    "processors": "processors_source",
}


def test_every_field_of_a_device_has_a_column() -> None:
    units = r"_(bytes_per_s|bytes|flops_per_s|flops|s)$"
    columns = re.sub(r"_(tflops|mib|gb_per_s|mflops|us)\b", "", " ".join(_DEVICES[0]))
    fields = {re.sub(units, "", field) for field in DeviceType.model_fields}
    # Rates have a column a dtype; nothing of a datasheet was measured here.
    assert fields - set(columns.split()) == {"peak", "measured"}
    assert set(PEAK_DTYPES) <= set(columns.split())
    stated = set(_DEVICES[0]) - {"name", "backend", "source"}
    assert stated == {*_SOURCE_OF, *_SOURCE_OF.values()}


def _unsourced(row: Mapping[str, str]) -> list[str]:
    """Columns of a device that state a figure without its source."""
    return [
        column
        for column, source in _SOURCE_OF.items()
        if row[column] and not _SOURCED.search(row[source])
    ]


@pytest.mark.parametrize("row", _DEVICES, ids=lambda row: row["name"])
def test_every_figure_of_a_device_has_its_source(row: Mapping[str, str]) -> None:
    assert None not in row
    assert _SOURCED.search(row["source"])
    assert _unsourced(row) == []
    bare = {**row, **dict.fromkeys(set(_SOURCE_OF.values()), "")}
    assert len(_unsourced(bare)) >= 6


def _entries(value: Any, path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Entries of ``systems.yaml`` that state a figure, with their path."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        where = f"{path}/{key}"
        if isinstance(item, dict | list):
            yield from _entries(item, where)
        if isinstance(item, dict) and (
            "source" in item or any(isinstance(x, int | float) for x in item.values())
        ):
            yield where, item


def test_every_link_and_system_has_its_source() -> None:
    data = yaml.safe_load(_SYSTEMS)
    # One latency a line, each with its source in a comment.
    lines = re.search(r"^latencies_us:\n((?:  .*\n)+)", _SYSTEMS, re.MULTILINE)
    assert lines is not None
    assert len(lines[1].splitlines()) == len(data.pop("latencies_us"))
    assert all(_SOURCED.search(line) for line in lines[1].splitlines())
    entries = dict(_entries(data))
    assert len(entries) > 30
    # The document has its source at its head.
    inside = ("/documents/ramp/hosts/0", "/documents/ramp/levels")
    bare = [
        where
        for where, entry in entries.items()
        if not _SOURCED.search(entry.get("source", "")) and not where.startswith(inside)
    ]
    assert bare == []


# Multiprocessors, dense FLOPs of one in one clock, boost clock (GHz): whitepapers of
# Volta 2017, Ampere 2020 and 2021, Hopper 2022, Ada 2023, RTX Blackwell 2025; AMD CDNA
# 3 white paper 2023.
@pytest.mark.parametrize(
    ("name", "units", "flops", "clock"),
    [
        ("v100-32", 80, 1024, 1.53),
        ("a100-40", 108, 2048, 1.41),
        ("h100-80", 132, 4096, 1.83),
        ("h200-141", 132, 4096, 1.83),
        ("mi300x-192", 304, 2048, 2.1),
        ("mi210-64", 104, 1024, 1.7),
        ("mi250-64", 104, 1024, 1.7),
        ("mi250x-64", 110, 1024, 1.7),
        ("mi300a-128", 228, 2048, 2.1),
        ("mi325x-256", 304, 2048, 2.1),
        ("mi350x-288", 256, 4096, 2.2),
        ("mi355x-288", 256, 4096, 2.4),
        ("mi50-16", 60, 256, 1.725),
        ("mi100-32", 120, 1024, 1.502),
        ("k80-12", 13, 384, 0.875),
        ("p40-24", 30, 256, 1.531),
        ("gtx1080ti-11", 28, 256, 1.582),
        ("titanxp-12", 30, 256, 1.582),
        ("p100-16", 56, 256, 1.48),
        ("titanv-12", 80, 1024, 1.345),
        ("rtx2080-8", 46, 512, 1.71),
        ("quadrortx6000-24", 72, 1024, 1.77),
        ("quadrortx8000-48", 72, 1024, 1.77),
        ("rtx3080-10", 68, 512, 1.71),
        ("rtx3090ti-24", 84, 512, 1.86),
        ("a4000-16", 48, 1024, 1.56),
        ("a5500-24", 80, 1024, 1.665),
        ("rtx4080-16", 76, 512, 2.505),
        ("rtx5000ada-32", 100, 1024, 2.55),
        ("t4-16", 40, 1024, 1.59),
        ("a30-24", 56, 2048, 1.44),
        ("a10-24", 72, 1024, 1.695),
        ("a10g-24", 80, 512, 1.71),
        ("a6000-48", 84, 1024, 1.8),
        ("a5000-24", 64, 1024, 1.695),
        ("titanrtx-24", 72, 1024, 1.77),
        ("rtxpro6000-96", 188, 1024, 2.617),
        ("a40-48", 84, 1024, 1.74),
        ("rtx6000ada-48", 142, 1024, 2.505),
        ("l4-24", 58, 1024, 2.04),
        ("l40-48", 142, 512, 2.49),
        ("l40s-48", 142, 1024, 2.52),
        ("h100pcie-80", 114, 4096, 1.62),
        ("rtx2080ti-11", 68, 512, 1.545),
        ("rtx3090-24", 82, 512, 1.695),
        ("rtx4090-24", 128, 512, 2.52),
        ("rtx5090-32", 170, 512, 2.407),
    ],
)
def test_half_precision_is_units_times_width_times_clock(
    name: str, units: int, flops: int, clock: float
) -> None:
    rate = device_type(name).peak_flops_per_s["float16"]
    assert rate == pytest.approx(units * flops * clock * 1e9, rel=5e-3)


# As above for FP32: Hopper's clock is then higher, AMD's rate is of its matrix cores.
# The last column: FP64 (tensor cores if it has them) is that part of FP32.
@pytest.mark.parametrize(
    ("name", "units", "flops", "clock", "double"),
    [
        ("v100-32", 80, 128, 1.53, 1 / 2),
        ("a100-40", 108, 128, 1.41, 1),
        ("h100-80", 132, 256, 1.98, 1),
        ("mi300x-192", 304, 256, 2.1, 1),
        ("a40-48", 84, 256, 1.74, None),
        ("l40s-48", 142, 256, 2.52, None),
        ("rtx3090-24", 82, 256, 1.695, None),
        ("rtx4090-24", 128, 256, 2.52, None),
        ("rtx5090-32", 170, 256, 2.407, None),
    ],
)
def test_single_precision_is_units_times_width_times_clock(
    name: str, units: int, flops: int, clock: float, double: float | None
) -> None:
    rates = device_type(name).peak_flops_per_s
    assert rates["float32"] == pytest.approx(units * flops * clock * 1e9, rel=5e-3)
    assert ("float64" in rates) == (double is not None)
    if double is not None:
        assert rates["float64"] == pytest.approx(double * rates["float32"], rel=1e-2)


# What NVIDIA prints for a whole board or rack, PFLOP/s; from TF32 on with sparsity.
@pytest.mark.parametrize(
    ("name", "count", "printed"),
    [
        ("b100-180", 8, (0.24, 0.48, 14, 28, 28, 56, 112)),  # HGX B100 page 2024
        ("b200-180", 8, (0.296, 0.6, 18, 36, 36, 72, 144)),  # HGX B200 page 2025
        # FP4 of the two below is printed dense: 108 a board, 1,080 a rack.
        ("b300-270", 8, (0.01, 0.6, 18, 36, 36, 72, 216)),  # HGX B300 page 2025
        ("gb200-186", 72, (2.88, 5.76, 180, 360, 360, 720, 1440)),  # NVL72 page 2025
        ("gb300-279", 72, (0.1, 6, 180, 360, 360, 720, 2160)),  # NVL72 page 2025
    ],
)
def test_gpus_sum_to_their_board_or_rack(
    name: str, count: int, printed: tuple[float, ...]
) -> None:
    rates = device_type(name).peak_flops_per_s
    dense = [value if n < 2 else value / 2 for n, value in enumerate(printed)]
    expected = [value * 1e15 / count for value in dense]
    assert list(rates) == [
        *("float64", "float32", "tensorfloat32", "bfloat16", "float16"),
        *("float8_e4m3fn", "float4_e2m1fn_x2"),
    ]
    # 6 PFLOP/s are 5.76 rounded; the others fit much better.
    rounding = 0.05 if name == "gb300-279" else 5e-3
    assert list(rates.values()) == pytest.approx(expected, rel=rounding)


# Chips whose tensor cores accumulate in FP32 at half rate.
_HALVED = {
    *("rtx2080-8", "rtx2080ti-11", "rtx3080-10", "rtx3090-24", "rtx3090ti-24"),
    *("rtx4080-16", "rtx4090-24", "rtx5090-32"),
    *("a10g-24", "l20-48", "l40-48"),
}


@pytest.mark.parametrize("name", device_type_names())
def test_rates_of_one_device_keep_their_ratios(name: str) -> None:
    rates = device_type(name).peak_flops_per_s
    half = rates["float16"]
    # AMD's first matrix cores take bfloat16 at half the rate.
    share = 0.5 if name == "mi100-32" else 1.0
    assert rates.get("bfloat16", share * half) == pytest.approx(share * half)
    eighth = rates.get("float8_e4m3fn", 2 * half)
    assert eighth == pytest.approx(2 * half, rel=1e-3)
    if "float4_e2m1fn_x2" in rates:
        # Blackwell Ultra has three times the FP4 of FP8, the others twice.
        ratio = 3 if "b300" in name else 2
        quarter = rates["float4_e2m1fn_x2"]
        assert quarter == pytest.approx(ratio * eighth, rel=1e-3)
    if name in _HALVED and "tensorfloat32" in rates:
        assert rates["tensorfloat32"] == rates["float32"]
    elif "tensorfloat32" in rates:
        assert half == pytest.approx(2 * rates["tensorfloat32"], rel=2e-3)


# Width of the memory bus (bits) and data rate of one pin (Gbit/s): the same papers,
# and for Blackwell its HBM3E's clock of 3,996 MHz as drivers report it.
@pytest.mark.parametrize(
    ("name", "bits", "gbits"),
    [
        ("v100-16", 4096, 1.752),
        ("v100-32", 4096, 1.752),
        ("a100-40", 5120, 2.43),
        ("a100-80", 5120, 3.186),
        ("h100-80", 5120, 5.238),
        ("h200-141", 6144, 6.25),
        ("b200-180", 7680, 7.992),
        ("b300-270", 7680, 7.992),
        ("mi300x-192", 8192, 5.2),
        ("mi300a-128", 8192, 5.2),
        ("mi210-64", 4096, 3.2),
        ("mi250x-64", 4096, 3.2),
        ("mi50-16", 4096, 2),
        ("mi100-32", 4096, 2.4),
        ("k80-12", 384, 5),
        ("p40-24", 384, 7.2),
        ("gtx1080ti-11", 352, 11),
        ("titanxp-12", 384, 11.4),
        ("titanv-12", 3072, 1.7),
        ("rtx2080-8", 256, 14),
        ("quadrortx6000-24", 384, 14),
        ("quadrortx8000-48", 384, 14),
        ("rtx3080-10", 320, 19),
        ("rtx3090ti-24", 384, 21),
        ("a4000-16", 256, 14),
        ("a5500-24", 384, 16),
        ("rtx4080-16", 256, 22.4),
        ("rtx5000ada-32", 256, 18),
        ("p100-16", 4096, 1.43),
        ("t4-16", 256, 10),
        ("rtx2080ti-11", 352, 14),
        ("a100pcie-80", 5120, 3.024),
        ("a30-24", 3072, 2.43),
        ("a10-24", 384, 12.5),
        ("a6000-48", 384, 16),
        ("a5000-24", 384, 16),
        ("titanrtx-24", 384, 14),
        ("rtxpro6000-96", 512, 28),
        ("rtx6000ada-48", 384, 20),
        ("l4-24", 192, 12.5),
        ("l40-48", 384, 18),
        ("gh200-96", 6144, 5.2),
        ("a40-48", 384, 14.5),
        ("l40s-48", 384, 18),
        ("rtx3090-24", 384, 19.5),
        ("rtx4090-24", 384, 21),
        ("rtx5090-32", 512, 28),
    ],
)
def test_memory_bandwidth_is_bus_times_rate(name: str, bits: int, gbits: float) -> None:
    bandwidth = device_type(name).memory_bandwidth_bytes_per_s
    assert bandwidth == pytest.approx(bits * gbit_per_s(gbits), rel=6e-3)


@pytest.mark.parametrize("name", device_type_names())
def test_memory_is_below_the_capacity_in_the_name(name: str) -> None:
    # In decimal GB it would be 7 % lower; with ECC or a reserve it is not all there.
    gibs = float(name.rpartition("-")[2])
    assert 0.92 < device_type(name).memory_bytes / (gibs * GIB) < 1


# Cables of one GPU and GB/s of one cable and direction: NVIDIA's NVLink page, 2025.
@pytest.mark.parametrize(
    ("name", "cables", "rate"),
    [
        ("nvlink2", 6, 25e9),
        ("nvlink3", 12, 25e9),
        ("nvlink4", 18, 25e9),
        ("nvlink5", 18, 50e9),
    ],
)
def test_nvlink_is_cables_of_one_direction(name: str, cables: int, rate: float) -> None:
    assert known_links()[name].bandwidth_bytes_per_s == cables * rate
    assert not known_links()[name].mesh


def test_mesh_links_are_one_cable_of_seven() -> None:
    nvlink, fabric = known_links()["nvlink2-mesh"], known_links()["infinity-fabric"]
    assert nvlink.mesh
    assert fabric.mesh
    assert 7 * nvlink.bandwidth_bytes_per_s == pytest.approx(6 * 25e9)
    assert 7 * fabric.bandwidth_bytes_per_s == 448e9  # AMD, "one way", 2025


@pytest.mark.parametrize(("name", "transfers"), [("pcie4", 16e9), ("pcie5", 32e9)])
def test_pcie_is_lanes_times_rate_times_encoding(name: str, transfers: float) -> None:
    expected = transfers * 16 / 8 * 128 / 130
    assert known_links()[name].bandwidth_bytes_per_s == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.parametrize(
    ("name", "devices", "hosts", "gbits"),
    [
        ("dgx-v100", 8, 1, 4 * 100),
        ("dgx2-v100", 16, 1, 8 * 100),
        ("dgx-a100-40", 8, 1, 8 * 200),
        ("dgx-a100", 8, 1, 8 * 200),
        ("dgx-h100", 8, 1, 8 * 400),
        ("dgx-h200", 8, 1, 8 * 400),
        ("dgx-b200", 8, 1, 8 * 400),
        ("dgx-b300", 8, 1, 8 * 800),
        ("gb200-nvl72", 72, 18, 4 * 400),
        ("gb300-nvl72", 72, 18, 4 * 800),
        ("mi300x", 8, 1, 8 * 400),
        ("a40-pcie", 8, 1, 2 * 100),
        ("l40s-pcie", 8, 1, 2 * 100),
    ],
)
def test_shares_of_a_host_sum_to_its_nics(
    name: str, devices: int, hosts: int, gbits: float
) -> None:
    cluster = Cluster.from_preset(name, nodes=2)
    assert cluster.num_devices == 2 * devices
    share = cluster.link(0, cluster.num_devices - 1)[0]
    assert share * devices == hosts * gbit_per_s(gbits)


def test_latencies_of_one_hop() -> None:
    network = known_systems()["dgx-h100"].outside.latency_s
    # NCCL's table, 2023: NVLink 1.9, PCI 2.5, network 4.0 us; TCP is far slower.
    assert known_links()["nvlink4"].latency_s == 1.9e-6
    assert known_links()["pcie4"].latency_s == 2.5e-6
    assert network == 4.0e-6
    assert 4 * network < ethernet(10, 1, "").latency_s < ethernet(1, 1, "").latency_s


def test_internet_and_ramp_are_as_published() -> None:
    # Borzunov et al. 2023: 100 Mbit/s, 100 ms there and back.
    homes = Cluster.from_preset("internet-pcs", nodes=2)
    assert homes.link(0, 1) == (gbit_per_s(100) / 1000, 0.1 / 2)
    # Parsonson et al. 2023: 4 groups x 4 racks x 2 servers; 1.6 TB/s over 4 channels.
    ramp = Cluster.from_preset("ramp")
    assert [level.hosts for level in ramp.document.levels] == [2, 2 * 4, None]
    assert ramp.link(0, 1) == pytest.approx((1.6e12 / 4, 250e-9))
