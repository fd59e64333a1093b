"""Frameworks of measurements, and their age, read from sources and notes."""

from __future__ import annotations

import re
from functools import cache

from planner.measurements.catalogues import read_rows
from planner.measurements.points import Point

__all__ = ["framework_of", "is_recent", "year_of"]


#: Columns besides the source that may name a framework. Of names of models only
#: DeepSpeed counts: Megatron is one of a model, too.
_NAMING = ("notes", "schedule", "recompute", "precision", "inferred_fields")


def framework_of(point: Point) -> tuple[str, str]:
    """Return the framework of a run.

    The source names it, else another column does; where none does, the usual one
    counts.

    Args:
        point: The row.
    Returns:
        A key of :func:`planner.measurements.catalogues.frameworks`, and what was
        assumed; empty if the source names it.
    """
    name = _named(point.source)
    if name is not None:
        return _of_age(name, point), ""
    for column in (*_NAMING, "model"):
        name = _named(getattr(point, column))
        if name is not None and (column != "model" or name == "deepspeed"):
            name = _of_age(name, point)
            return name, f"framework {name} by the column {column}"
    name = _unnamed(point)
    return name, f"framework not named: constants of {name}"


def _named(text: str) -> str | None:
    """Return the first framework that a text names."""
    for pattern, name in _patterns():
        if pattern.search(text.lower()):
            return name
    return None


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Return patterns of a source's words and the framework of each, in order."""
    return tuple(
        (re.compile(rf"(?<![a-z])(?:{row['pattern']})"), row["framework"])
        for row in read_rows("framework_names.csv")
    )


#: Devices of 2022 and later.
_NEW = re.compile(
    r"h100|h200|h800|h20e?\b|b100|b200|b300|mi3\d\d|\bl(?:4|20|40s?)\b|"
    r"(?:rtx ?)?[45]0[5-9]0\b|\bada\b|rtx pro"
)
#: Devices before Ampere, which flash attention leaves out. Source:
#: Dao-AILab/flash-attention, README, "Requirements".
_OLD = re.compile(
    r"v100|\b(?:k[48]0|m[46]0|p(?:4|6|40|100|[456]000))\b|\bt\d{1,4}\b|titan|gtx|"
    r"rtx ?20\d0|quadro"
)
#: Peaks of these runs have scores in them: tables 4 and 10 of Qi et al. 2024.
_SCORES = re.compile(r"zero.bubble")
#: Sources in which NVIDIA runs Megatron-LM with all of its flags.
_OFFICIAL = re.compile(r"^nvidia\b|^megatron-lm readme|mlperf")
#: Releases of NeMo's containers before 25.11.
_BEFORE_BRIDGE = re.compile(r"(?<![\d.])(?:24\.(?:0[1-9]|1[0-2])|25\.0[1-9])(?!\d)")


def is_recent(point: Point) -> bool:
    """Say if a named framework's run had flash attention.

    It had from 2023 on, or on devices of 2022 and later, but on none before Ampere. A
    run of no year, on a device between, is old.

    Args:
        point: The row.
    """
    gpu = point.gpu.lower()
    if _OLD.search(gpu):
        return False
    return _NEW.search(gpu) is not None or (year_of(point.source) or 0) >= 2023


def _unnamed(point: Point) -> str:
    """Return the framework of a run that names none.

    Before 2023, and on devices of before Ampere, as Megatron-LM of then. Later ones
    that state tp and pp are taken to overlap as Megatron-Core's do, whatever the two
    are, because plans of one source are compared; others, and ZeRO 3, to be torch's.
    """
    if _OLD.search(point.gpu.lower()) or (year_of(point.source) or 2023) < 2023:
        return "deepspeed" if point.zero == 3 else "megatron-2021"
    stated = point.tp is not None and point.pp is not None
    return "megatron" if stated and point.zero != 3 else "torchtitan"


def _of_age(name: str, point: Point) -> str:
    """Return the framework of the run's age, for Megatron-LM and NeMo.

    From 2023 on Megatron-LM has flash attention, and overlap if asked to. ZeRO 3
    beside it is DeepSpeed's, or FSDP's where that is stated. Runs of 2026 with recipes
    that notes name use Megatron-Core of then.
    """
    source = point.source.lower()
    if name == "megatron-2025" and (year_of(source) or 0) >= 2026:
        return "megatron"
    if name == "megatron" and re.search(r"nemo|bridge", source):
        return "megatron-2025" if _BEFORE_BRIDGE.search(source) else name
    if name != "megatron-2021":
        return name
    words = f"{source} {point.notes.lower()}"
    if point.zero == 3:
        return "torch" if re.search(r"fsdp|fully.sharded", words) else "deepspeed"
    if _SCORES.search(words) or not is_recent(point):
        return "megatron-2021"
    return "megatron" if _OFFICIAL.search(source) else "megatron-lm"


# -- Years -----------------------------------------------------------------------

_YEAR = r"(1[5-9]|2\d|3[0-5])"
_VENUES = (
    "aaai|acl|asplos|cvpr|dac|emnlp|euromlsys|eurosys|hotnets|hpca|hpdc|icde|iclr|icml|"
    "icpp|ipdps|isca|kdd|mlsys|neurips|nips|nsdi|osdi|p?vldb|ppopp|sigcomm|sigmod|socc|"
    "sosp|tpds"
)
#: Venues that are words, or letters of one: a year follows without a space.
_WORDS = "atc|cluster|fast|ics|isc|micro|sc"
_COUNTED = r"(?!\s*(?:x\b|(?:gpu|device|node|host|rank)s?\b|[abhv]\d00))"
_YEARS = (
    re.compile(rf"(?<!\d)20{_YEAR}(?!\d){_COUNTED}"),
    re.compile(rf"(?<![a-z])(?:{_VENUES})[ _-]?['’]? ?{_YEAR}\b{_COUNTED}"),
    re.compile(rf"(?<![a-z])(?:{_WORDS})(?:[ _]?['’])?{_YEAR}\b"),
    re.compile(rf"(?<!\d){_YEAR}(?:0[1-9]|1[0-2])\.\d{{4,5}}(?!\d)"),
)


def year_of(source: str) -> int | None:
    """Return the latest year that a source's name states.

    Args:
        source: ``Qi et al. 2024``, ``OSDI22``, ``EuroSys '24`` and ``arXiv:2401.10241``
            state one; numbers of devices (``2024 GPUs``, ``cluster 32``) do not.
    Returns:
        From 2015 to 2035; None if it states none.
    """
    found = (year for pattern in _YEARS for year in pattern.findall(source.lower()))
    return max((2000 + int(year) for year in found), default=None)
