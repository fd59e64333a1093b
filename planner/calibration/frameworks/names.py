"""Which framework, and of which age, a measurement was taken with."""

from __future__ import annotations

import re

from planner.calibration.points import Point
from planner.calibration.years import year_of

__all__ = ["framework_of", "is_recent"]

#: Beginnings of a source's words (lower case), as patterns, and the framework they
#: stand for; the first found.
_WORDS = (
    (("torchtitan", "fms-fsdp"), "torchtitan"),
    (("mosaic", "llm-foundry", "composer"), "fsdp"),
    (
        ("vtrain", "bigscience", "bloom", "megatron-deepspeed", "neox"),
        "megatron-deepspeed",
    ),
    (
        ("dgxc", "nemo-framework-launcher", "long_sequence", r"\b24\.\d", r"\b25\.0"),
        "megatron-2025",
    ),
    (
        ("bridge", "nemo", "mlperf", "megatron-core", "megatron core", "mcore"),
        "megatron",
    ),
    (("primus", "modelzoo"), "megatron"),
    (("alpa(?!ca)",), "alpa"),
    (("internevo", "internlm"), "internevo"),
    (("nanotron", "picotron"), "nanotron"),
    (("maxtext", "jax", "levanter", "easylm", "t5x", "tpu", "praxis"), "jax"),
    (("megatron-lm", "korthikanti", "megatron"), "megatron-2021"),
    (("megascale",), "megatron"),
    (("zero bubble", "zero-bubble"), "megatron-2021"),
    (("deepspeed", "zero-infinity", "zero-offload", "zero-3"), "deepspeed"),
    (("nnscaler", "fsdp", "pytorch", "meshwright", "colossal"), "torch"),
    (("fairscale", "metaseq", "hugging face", "huggingface"), "torch"),
)


def framework_of(point: Point) -> tuple[str, str]:
    """Name of the framework, and what was assumed if the source does not say.

    Where the source does not say, the notes do; where neither does, what is usual.
    """
    name = _named(point.source)
    if name is not None:
        return _of_age(name, point), ""
    name = _named(point.notes)
    if name is not None:
        name = _of_age(name, point)
        return name, f"framework {name} by the notes"
    name = _unnamed(point)
    return name, f"framework not named: constants of {name}"


def _named(text: str) -> str | None:
    """The first framework that a text names."""
    for words, name in _WORDS:
        if re.search(rf"(?<![a-z])(?:{'|'.join(words)})", text.lower()):
            return name
    return None


#: Devices of 2022 and later, and those before Ampere, which flash attention leaves out.
#: Source: Dao-AILab/flash-attention, README, "Requirements".
_NEW = re.compile(
    r"h100|h200|h800|h20\b|gh200|b100|b200|b300|mi3\d\d|l40?s?\b|[45]0\d0"
)
_OLD = re.compile(r"v100|p100|p40|k80|\bt4\b|titan|[12]0[678]0|rtx ?[68]000\b(?! ?ada)")
#: Peaks of these runs have scores in them: tables 4 and 10 of Qi et al. 2024.
_SCORES = re.compile(r"zero.bubble")
#: Where NVIDIA shows what Megatron-LM reaches, with all of its flags.
_OFFICIAL = re.compile(r"nvidia|readme|performance.summary|mlperf")


def is_recent(point: Point) -> bool:
    """Whether a run has flash attention: from 2023 on, on a device that it knows.

    A source without a year is as old as its devices.
    """
    gpu = point.gpu.lower()
    if _OLD.search(gpu):
        return False
    return _NEW.search(gpu) is not None or (year_of(point.source) or 0) >= 2023


def _unnamed(point: Point) -> str:
    """What nobody names: of before flash attention as Megatron-LM of then.

    Later runs of several axes are taken to overlap as Megatron-Core's do, all others as
    torch's. Which one must not depend on pp alone: plans of one source are compared.
    """
    year, old = year_of(point.source), _OLD.search(point.gpu.lower()) is not None
    if (year or 2023) < 2023 or (year is None and old):
        return "deepspeed" if point.zero == 3 else "megatron-2021"
    axes = max(point.tp or 1, point.pp or 1) > 1 or point.zero in (0, 1, 2)
    if point.zero == 3 or not axes:
        return "torchtitan"
    return "megatron-2021" if old else "megatron"


def _of_age(name: str, point: Point) -> str:
    """Megatron-LM of 2021, of 2023 and newer (or on GPUs of then), or not alone.

    From 2023 on it has flash attention, and overlap if asked to. ZeRO 3 beside it is
    DeepSpeed's, or FSDP's where that is said. Runs of 2026 with recipes that notes name
    use Megatron-Core of then.
    """
    year = year_of(point.source) or 0
    if name == "megatron-2025" and year >= 2026:
        return "megatron"
    if name != "megatron-2021":
        return name
    if point.zero == 3:
        said = f"{point.source} {point.notes}".lower()
        return "torch" if re.search(r"fsdp|fully.sharded", said) else "deepspeed"
    source = point.source.lower()
    if _SCORES.search(source) or not is_recent(point):
        return "megatron-2021"
    return "megatron" if _OFFICIAL.search(source) else "megatron-lm"
