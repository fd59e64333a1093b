"""Which accelerator a row means, read from what its source calls it."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from planner.calibration.machines.accelerators import ACCELERATORS
from planner.calibration.machines.systems import KnownSystem
from planner.cluster.presets import device_type, device_type_names
from planner.errors import CalibrationError
from planner.schema.cluster import DeviceType
from planner.units import GB

__all__ = ["chips_named", "known_names", "normal", "read_device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chip:
    """A name that people use.

    Attributes:
        name: For messages.
        pattern: Finds it in a text in lower case.
        variants: Device types, the most common first.
        pcie: Those of the PCIe card, where it differs.
        nvl: That of the NVL card.
        rare: Those among ``variants`` that a row would call by their memory.
        said: False if the name leaves the chip open, which is then assumed.
    """

    name: str
    pattern: re.Pattern[str]
    variants: tuple[str, ...]
    pcie: tuple[str, ...] = ()
    nvl: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    said: bool = True


def _chip(
    name: str,
    variants: str,
    pattern: str = "",
    *,
    pcie: str = "",
    nvl: str = "",
    rare: str = "",
) -> _Chip:
    text = pattern or re.escape(name.lower())
    return _Chip(
        name=name,
        pattern=re.compile(rf"(?<![a-z0-9])(?:{text})(?!\d)"),
        variants=tuple(variants.split()),
        pcie=tuple(pcie.split()),
        nvl=tuple(nvl.split()),
        rare=tuple(rare.split()),
    )


def _loose(name: str, variants: str, pattern: str) -> _Chip:
    return _Chip(
        name=name,
        pattern=re.compile(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])"),
        variants=tuple(variants.split()),
        said=False,
    )


#: Of two that fit at the same place the longer match is taken, whatever the order.
_CHIPS: tuple[_Chip, ...] = (
    _chip("GB300", "gb300-279"),
    _chip("GB200", "gb200-186"),
    _chip("B300", "b300-270"),
    _chip("B200", "b200-180"),
    _chip("B100", "b100-180"),
    _chip("GH200", "gh200-96 gh200-144", r"gh200|grace hopper", rare="gh200-144"),
    _chip("H800", "h800-80"),
    _chip("H200", "h200-141"),
    _chip(
        "H100", "h100-80 h100-96", pcie="h100pcie-80", nvl="h100nvl-94", rare="h100-96"
    ),
    _chip("H20", "h20-96"),
    _chip("A800", "a800-80"),
    _chip("A100", "a100-80 a100-40", pcie="a100pcie-80 a100pcie-40"),
    _chip("A40", "a40-48"),
    _chip("A30", "a30-24"),
    _chip("A10G", "a10g-24"),
    _chip("A10", "a10-24", r"a10(?!g)"),
    _chip("RTX A4000", "a4000-16", r"(rtx ?)?a4000"),
    _chip("RTX A5000", "a5000-24", r"(rtx ?)?a5000"),
    _chip("RTX A5500", "a5500-24", r"(rtx ?)?a5500"),
    _chip("RTX A6000", "a6000-48", r"(rtx ?)?a6000"),
    _chip("RTX 5000 Ada", "rtx5000ada-32", r"(rtx ?)?5000 ?ada"),
    _chip("RTX 6000 Ada", "rtx6000ada-48", r"(rtx ?)?6000 ?ada"),
    _chip("L40S", "l40s-48"),
    _chip("L40", "l40-48", r"l40(?!s)"),
    _chip("L20", "l20-48"),
    _chip("L4", "l4-24"),
    _chip("T4", "t4-16"),
    _chip("K80", "k80-12"),
    _chip("P40", "p40-24"),
    _chip("P100", "p100-16"),
    _chip("V100", "v100-32 v100-16", pcie="v100pcie-32 v100pcie-16"),
    _chip("Titan RTX", "titanrtx-24", r"titan ?rtx|rtx ?titan"),
    _chip("Titan V", "titanv-12", r"titan ?v(?![a-z])"),
    _chip("Titan Xp", "titanxp-12", r"titan ?xp"),
    _chip(
        "Quadro RTX 6000",
        "quadrortx6000-24 rtx6000ada-48",
        r"(quadro ?)?rtx ?6000",
        rare="rtx6000ada-48",
    ),
    _chip("Quadro RTX 8000", "quadrortx8000-48", r"(quadro ?)?rtx ?8000"),
    _chip("RTX PRO 6000", "rtxpro6000-96", r"(rtx ?)?pro ?6000"),
    _chip("GTX 1080 Ti", "gtx1080ti-11", r"(gtx ?)?1080 ?ti"),
    _chip("RTX 2080", "rtx2080-8", r"(rtx ?)?2080"),
    _chip("RTX 2080 Ti", "rtx2080ti-11", r"(rtx ?)?2080 ?ti"),
    _chip("RTX 3080", "rtx3080-10", r"(rtx ?)?3080(?! ?ti)"),
    _chip("RTX 3090", "rtx3090-24", r"(rtx ?)?3090"),
    _chip("RTX 3090 Ti", "rtx3090ti-24", r"(rtx ?)?3090 ?ti"),
    _chip("RTX 4080", "rtx4080-16", r"(rtx ?)?4080"),
    _chip("RTX 4090", "rtx4090-24", r"(rtx ?)?4090"),
    _chip("RTX 5090", "rtx5090-32", r"(rtx ?)?5090"),
    _chip("MI50", "mi50-16 mi50-32", rare="mi50-32"),
    _chip("MI100", "mi100-32"),
    _chip("MI210", "mi210-64"),
    _chip("MI250X", "mi250x-64", r"mi ?250x"),
    _chip("MI250", "mi250-64", r"mi ?250(?!x)"),
    _chip("MI300A", "mi300a-128", r"mi ?300a"),
    _chip("MI300X", "mi300x-192", r"mi ?300(?!a)x?"),
    _chip("MI325X", "mi325x-256", r"mi ?325x?"),
    _chip("MI350X", "mi350x-288", r"mi ?350x?"),
    _chip("MI355X", "mi355x-288", r"mi ?355x?"),
    _chip("Gaudi 2", "gaudi2-96", r"(habana )?gaudi ?2|hpu ?2|hl ?225"),
    _chip("Gaudi 3", "gaudi3-128", r"(habana )?gaudi ?3"),
    _chip(
        "Max 1550",
        "max1550-128",
        r"(data cent(er|re) gpu )?max ?1550|ponte vecchio|pvc",
    ),
    _chip("Max 1100", "max1100-48", r"(data cent(er|re) gpu )?max ?1100"),
    _chip("Ascend 910B", "ascend910b-64", r"(ascend ?)?910b\d?"),
    _chip("Ascend 910", "ascend910-32", r"ascend ?910(?![bc])a?"),
    _chip("Trainium 2", "trainium2-96", r"trainium ?2|trn2"),
    _chip("Trainium 3", "trainium3-144", r"trainium ?3|trn3"),
    _chip("Trainium", "trainium1-32", r"trainium( ?1)?|trn1n?"),
    _chip("TPU v2", "tpuv2-16", r"tpu ?v ?2"),
    _chip("TPU v3", "tpuv3-32", r"tpu ?v ?3"),
    _chip("TPU v4", "tpuv4-32", r"tpu ?v ?4"),
    _chip("TPU v5e", "tpuv5e-16", r"tpu ?v ?5 ?(e|lite(pod)?)|v5e|v5litepod"),
    _chip("TPU v5p", "tpuv5p-95", r"tpu ?v ?5 ?p|v5p"),
    _chip("TPU v6e", "tpuv6e-32", r"(tpu )?trillium|tpu ?v ?6e?|v6e"),
    _chip("TPU v7", "tpuv7-192", r"(tpu )?ironwood|tpu ?v ?7x?"),
    _loose("Blackwell", "b200-180", "blackwell"),
    _loose("Hopper", "h100-80", "hopper"),
    _loose("Ampere", "a100-80", "ampere"),
    _loose("Volta", "v100-32", "volta"),
    _loose("TPU v5", "tpuv5p-95", "tpu ?v ?5"),
)

_COUNT = re.compile(r"(?<![a-z0-9])\d+ ?[x×*] ?(?=[a-z])")
_MEMORY = re.compile(
    r"(?<![\w×*.])(\d{1,3}) ?g(?:i?b)?(?![a-z/0-9])"
    r"(?! ?(?:roce|ib\b|infiniband|eth|efa|rdma|nic|net|inter))"
)
_DIES = "mi250"


def normal(text: str) -> str:
    """A name in lower case, without makers, punctuation and counts in front."""
    text = re.sub(r"[_\-(),;:?]+", " ", text.lower())
    text = re.sub(
        r"\b(nvidia|amd|instinct|intel|google|huawei|tesla|geforce)\b", " ", text
    )
    text = re.sub(r"\b(dgx|hgx|nd)(?=[abhgp]\d|[gh][bh]\d)", r"\1 ", text)
    # The "16g" of an instance is its GPUs.
    text = re.sub(r"(?<=gpu) \d+g\b", " ", text)
    text = _COUNT.sub(" ", text)
    return re.sub(r"\s+", " ", text).strip()


def known_names() -> tuple[str, ...]:
    """Names that :func:`read_device` knows."""
    return tuple(chip.name for chip in _CHIPS)


def chips_named(text: str) -> tuple[str, ...]:
    """Accelerators that a text names, each once, in its order."""
    return tuple(dict.fromkeys(chip.name for chip in _found(normal(text))))


def read_device(
    gpu: str, system: KnownSystem | None
) -> tuple[DeviceType, tuple[str, ...]]:
    """The device type that a name means, and what had to be assumed.

    Args:
        gpu: As the source calls it: ``"A100-80GB SXM4"``, ``"h100_80gb"``.
        system: The machine that it stands in, where that is known.

    Raises:
        CalibrationError: If it is no accelerator that is known, or two kinds at once.
    """
    text = normal(gpu)
    chips = _found(text)
    if len({chip.variants for chip in chips}) > 1:
        names = " and ".join(chip.name for chip in chips)
        raise CalibrationError(
            f"gpu={gpu!r} names {names}, and not how many there are of each; name one, "
            f"or write '8x{chips[0].name} + 8x{chips[-1].name}'"
        )
    form = "pcie" if "pci" in text else "nvl" if re.search(r"\bnvl\b", text) else ""
    if not chips:
        if system is None:
            raise CalibrationError(_unknown(gpu, text))
        candidates = system.devices
        assumed: tuple[str, ...] = ()
        return _with_memory(text, candidates, candidates, assumed)
    chip = chips[0]
    candidates = {"pcie": chip.pcie, "nvl": chip.nvl}.get(form, ()) or chip.variants
    assumed = () if chip.said else (f"{chip.name} is taken to be {chip.variants[0]}",)
    usual = tuple(name for name in candidates if name not in chip.rare)
    if system is not None:
        here = tuple(name for name in system.devices if name in candidates)
        usual = here or usual
    ordered = (*usual, *(name for name in candidates if name not in usual))
    return _with_memory(text, ordered, usual, assumed)


def _found(text: str) -> list[_Chip]:
    """Chips that a text names, each place counted once."""
    hits = [(m, chip) for chip in _CHIPS for m in chip.pattern.finditer(text)]
    hits.sort(key=lambda hit: (hit[0].start(), -hit[0].end(), not hit[1].said))
    found: list[_Chip] = []
    end = -1
    for match, chip in hits:
        if match.start() >= end:
            found.append(chip)
            end = match.end()
    said = [chip for chip in found if chip.said]
    # "RTX ... Blackwell" is another chip than the one that a generation is named for.
    return said or ([] if "rtx" in text else found)


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
            if size in (capacity, 8 * capacity) or _same_part(name, size):
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


def _same_part(name: str, size: int) -> bool:
    """Whether a chip is also sold by this number of GB, which is not all usable."""
    also = {
        "b200-180": (186, 192),
        "b100-180": (192,),
        "gb200-186": (184, 185, 189, 192),
        "b300-270": (268, 288),
        "gb300-279": (278, 288),
        "h200-141": (140, 144),
        "h100-96": (95,),
        "gh200-96": (480,),  # of the CPU
        "tpuv5p-95": (96,),
    }
    return size in also.get(name, ())


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
    return ACCELERATORS[name] if name in ACCELERATORS else device_type(name)


def _unknown(gpu: str, text: str) -> str:
    names = {normal(name): name for name in (*known_names(), *device_type_names())}
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.4)
    nearest = ", ".join(names[n] for n in near) or ", ".join(known_names())
    return (
        f"gpu={gpu!r} is no accelerator that is known; nearest: {nearest}; "
        f"correct it, or add its datasheet to the presets"
    )
