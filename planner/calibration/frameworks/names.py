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
        (
            "vtrain",
            "bigscience",
            r"bloom\b",
            "megatron[-/ +]deepspeed",
            "(?:gpt)?-?neox",
        ),
        "megatron-deepspeed",
    ),
    (("dgxc", "nemo-framework-launcher", "long_sequence"), "megatron-2025"),
    (("bridge", r"nemo\b", "mlperf", "megatron[- ]core", "mcore"), "megatron"),
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
    """The framework of a run.

    Where the source does not say, the notes do; where neither does, what is usual.

    Args:
        point: The row.
    Returns:
        A key of :data:`planner.calibration.frameworks.FRAMEWORKS`, and what was
        assumed; empty if the source names it.
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


#: Devices of 2022 and later.
_NEW = re.compile(
    r"h100|h200|h800|h20e?\b|b100|b200|b300|mi3\d\d|\bl(?:4|20|40s?)\b|"
    r"(?:rtx ?)?[45]0[5-9]0\b|\bada\b|rtx pro"
)
#: Those before Ampere, which flash attention leaves out. Source:
#: Dao-AILab/flash-attention, README, "Requirements".
_OLD = re.compile(
    r"v100|\b(?:k[48]0|m[46]0|p(?:4|6|40|100|[456]000))\b|\bt\d{1,4}\b|titan|gtx|"
    r"rtx ?20\d0|quadro"
)
#: Peaks of these runs have scores in them: tables 4 and 10 of Qi et al. 2024.
_SCORES = re.compile(r"zero.bubble")
#: Where NVIDIA shows what Megatron-LM reaches, with all of its flags.
_OFFICIAL = re.compile(r"^nvidia\b|^megatron-lm readme|mlperf")
#: Releases of NeMo's containers before 25.11.
_BEFORE_BRIDGE = re.compile(r"(?<![\d.])(?:24\.(?:0[1-9]|1[0-2])|25\.0[1-9])(?!\d)")


def is_recent(point: Point) -> bool:
    """Whether a named framework's run had flash attention.

    From 2023 on, or on devices of 2022 and later, but on none before Ampere. What says
    no year, on a device between, is old.

    Args:
        point: The row.
    """
    gpu = point.gpu.lower()
    if _OLD.search(gpu):
        return False
    return _NEW.search(gpu) is not None or (year_of(point.source) or 0) >= 2023


def _unnamed(point: Point) -> str:
    """What nobody names.

    Before 2023, and on devices of before Ampere, as Megatron-LM of then. Later ones
    that state tp and pp are taken to overlap as Megatron-Core's do, whatever the two
    are, because plans of one source are compared; others, and ZeRO 3, to be torch's.
    """
    if _OLD.search(point.gpu.lower()) or (year_of(point.source) or 2023) < 2023:
        return "deepspeed" if point.zero == 3 else "megatron-2021"
    stated = point.tp is not None and point.pp is not None
    return "megatron" if stated and point.zero != 3 else "torchtitan"


def _of_age(name: str, point: Point) -> str:
    """NeMo of a release; Megatron-LM of 2021, of 2023 and newer, or not alone.

    From 2023 on it has flash attention, and overlap if asked to. ZeRO 3 beside it is
    DeepSpeed's, or FSDP's where that is said. Runs of 2026 with recipes that notes name
    use Megatron-Core of then.
    """
    source = point.source.lower()
    if name == "megatron-2025" and (year_of(source) or 0) >= 2026:
        return "megatron"
    if name == "megatron" and re.search(r"nemo|bridge", source):
        return "megatron-2025" if _BEFORE_BRIDGE.search(source) else name
    if name != "megatron-2021":
        return name
    said = f"{source} {point.notes.lower()}"
    if point.zero == 3:
        return "torch" if re.search(r"fsdp|fully.sharded", said) else "deepspeed"
    if _SCORES.search(said) or not is_recent(point):
        return "megatron-2021"
    return "megatron" if _OFFICIAL.search(source) else "megatron-lm"
