"""Device types of measurements, read from the names that sources give them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from planner.cluster.presets import device_type, device_type_names, of_datasheet
from planner.errors import CalibrationError
from planner.measurements.catalogues import read_rows
from planner.measurements.hosts import KnownSystem
from planner.schema.cluster import PEAK_DTYPES, DeviceType
from planner.units import GB

__all__ = [
    "Chip",
    "accelerators",
    "chips",
    "chips_named",
    "plain_device_name",
    "read_device",
]


@cache
def accelerators() -> Mapping[str, DeviceType]:
    """Return the accelerators that Meshwright cannot drive: ``accelerators.csv``.

    They are no presets, because a plan for them could not be run. ``backend`` is nccl,
    a library of collectives that runs on the device, as theirs do. Memory is what the
    maker prints; what a driver reports is not known.
    """
    return {
        row["name"]: of_datasheet(
            row["name"],
            row["source"],
            memory_bytes=int(row["memory_bytes"]),
            memory_bandwidth_bytes_per_s=float(row["memory_bandwidth_gb_per_s"] + "e9"),
            efficiency=float(row["matmul_efficiency"]),
            processors=None,
            backend="nccl",
            **{
                dtype: float(row[f"{dtype}_tflops"])
                for dtype in PEAK_DTYPES
                if row.get(f"{dtype}_tflops")
            },
        )
        for row in read_rows("accelerators.csv")
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip by a name that people use.

    Attributes:
        name: For messages.
        pattern: Finds it in a text in lower case.
        variants: Device types, the most common first.
        pcie: Device types of the PCIe card, where it differs.
        nvl: Device type of the NVL card.
        rare: Variants that a row would name by their memory.
        also_sold_as: Device types with other numbers of GB that they are sold by:
            ``b200-180:192``.
        stated: False if the name does not determine the chip, which is then assumed.
    """

    name: str
    pattern: re.Pattern[str]
    variants: tuple[str, ...]
    pcie: tuple[str, ...]
    nvl: tuple[str, ...]
    rare: tuple[str, ...]
    also_sold_as: tuple[str, ...]
    stated: bool


@cache
def chips() -> tuple[Chip, ...]:
    """Return the chips that names are read as: ``chips.csv``.

    Where two match at the same place, the longer match counts.
    """
    found = []
    for row in read_rows("chips.csv"):
        stated = row["chip"] == "stated"
        text = row["pattern"] or re.escape(row["name"].lower())
        behind = r"(?!\d)" if stated else "(?![a-z0-9])"
        names = ("variants", "pcie", "nvl", "rare", "also_sold_as")
        found.append(
            Chip(
                name=row["name"],
                pattern=re.compile(rf"(?<![a-z0-9])(?:{text}){behind}"),
                stated=stated,
                **{name: tuple(row[name].split()) for name in names},
            )
        )
    return tuple(found)


_COUNT = re.compile(r"(?<![a-z0-9])\d+ ?[x×*] ?(?=[a-z])")
_MEMORY = re.compile(
    r"(?<![\w×*.])(\d{1,3}) ?g(?:i?b)?(?![a-z/0-9])"
    r"(?! ?(?:roce|ib\b|infiniband|eth|efa|rdma|nic|net|inter))"
)
_DIES = "mi250"


def plain_device_name(text: str) -> str:
    """Return a name in lower case, without makers, punctuation and counts in front."""
    text = re.sub(r"[_\-(),;:?]+", " ", text.lower())
    text = re.sub(
        r"\b(nvidia|amd|instinct|intel|google|huawei|tesla|geforce)\b", " ", text
    )
    text = re.sub(r"\b(dgx|hgx|nd)(?=[abhgp]\d|[gh][bh]\d)", r"\1 ", text)
    # The "16g" of an instance is its GPUs.
    text = re.sub(r"(?<=gpu) \d+g\b", " ", text)
    text = _COUNT.sub(" ", text)
    return re.sub(r"\s+", " ", text).strip()


def chips_named(text: str) -> tuple[str, ...]:
    """Return the names of the accelerators that a text has, each once, in its order."""
    return tuple(
        dict.fromkeys(chip.name for chip in _chips_in(plain_device_name(text)))
    )


def read_device(
    gpu: str, system: KnownSystem | None
) -> tuple[DeviceType, tuple[str, ...]]:
    """Return the device type that a name means, and what had to be assumed.

    Args:
        gpu: Name in the source: ``"A100-80GB SXM4"``, ``"h100_80gb"``.
        system: The machine that it stands in, where that is known.
    Raises:
        CalibrationError: If no known accelerator is named, or two kinds at once.
    """
    text = plain_device_name(gpu)
    found = _chips_in(text)
    if len({chip.variants for chip in found}) > 1:
        names = " and ".join(chip.name for chip in found)
        raise CalibrationError(
            f"gpu={gpu!r} names {names}, and not how many there are of each; name one, "
            f"or write '8x{found[0].name} + 8x{found[-1].name}'"
        )
    form = "pcie" if "pci" in text else "nvl" if re.search(r"\bnvl\b", text) else ""
    if not found:
        if system is None:
            raise CalibrationError(_unknown(gpu, text))
        candidates = system.devices
        assumed: tuple[str, ...] = ()
        return _with_memory(text, candidates, candidates, assumed)
    chip = found[0]
    candidates = {"pcie": chip.pcie, "nvl": chip.nvl}.get(form, ()) or chip.variants
    assumed = () if chip.stated else (f"{chip.name} is taken to be {chip.variants[0]}",)
    usual = tuple(name for name in candidates if name not in chip.rare)
    if system is not None:
        here = tuple(name for name in system.devices if name in candidates)
        usual = here or usual
    ordered = (*usual, *(name for name in candidates if name not in usual))
    return _with_memory(text, ordered, usual, assumed)


def _chips_in(text: str) -> list[Chip]:
    """Return the chips that a text names, each place counted once."""
    hits = [(m, chip) for chip in chips() for m in chip.pattern.finditer(text)]
    hits.sort(key=lambda hit: (hit[0].start(), -hit[0].end(), not hit[1].stated))
    found: list[Chip] = []
    end = -1
    for match, chip in hits:
        if match.start() >= end:
            found.append(chip)
            end = match.end()
    stated = [chip for chip in found if chip.stated]
    # "RTX ... Blackwell" is another chip than the one that a generation is named for.
    return stated or ([] if "rtx" in text else found)


def _with_memory(
    text: str,
    candidates: tuple[str, ...],
    usual: tuple[str, ...],
    assumed: tuple[str, ...],
) -> tuple[DeviceType, tuple[str, ...]]:
    sizes = [int(size) for size in _MEMORY.findall(text)]
    capacities = {name: int(name.rpartition("-")[2]) for name in candidates}
    for size in sizes:
        for name, capacity in capacities.items():
            # A system of eight may be called by the memory of all.
            if size in (capacity, 8 * capacity) or _also_sold_as(name, size):
                return _device(name), assumed
    first = _device(candidates[0])
    if not sizes:
        if len(usual) > 1:
            others = ", ".join(usual[1:])
            assumed = (*assumed, f"memory not stated: {first.name}, not {others}")
        return first, assumed
    size = sizes[0]
    if first.name.startswith(_DIES) and size == 2 * capacities[first.name]:
        note = f"a device is both dies of {first.name.rpartition('-')[0].upper()}"
        return _both_dies(first, size), (*assumed, note)
    near = min(capacities, key=lambda name: abs(capacities[name] - size))
    device = _device(near)
    changed = device.model_copy(
        update={"name": f"{near.rpartition('-')[0]}-{size}", "memory_bytes": size * GB}
    )
    note = f"{size} GB as stated, everything else of {near}"
    return changed, (*assumed, note)


def _also_sold_as(name: str, size: int) -> bool:
    return any(f"{name}:{size}" in chip.also_sold_as for chip in chips())


def _both_dies(die: DeviceType, size: int) -> DeviceType:
    return die.model_copy(
        update={
            "name": f"{die.name.rpartition('-')[0]}-{size}",
            "peak_flops_per_s": {k: 2 * v for k, v in die.peak_flops_per_s.items()},
            "memory_bytes": 2 * die.memory_bytes,
            "memory_bandwidth_bytes_per_s": 2 * die.memory_bandwidth_bytes_per_s,
        }
    )


def _device(name: str) -> DeviceType:
    return accelerators().get(name) or device_type(name)


def _unknown(gpu: str, text: str) -> str:
    known = [chip.name for chip in chips()]
    names = {plain_device_name(name): name for name in (*known, *device_type_names())}
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    nearest = ", ".join(names[n] for n in near) or ", ".join(known)
    return (
        f"gpu={gpu!r} is no accelerator that is known; nearest: {nearest}; "
        f"correct it, or add its datasheet to the presets"
    )
