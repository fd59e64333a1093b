"""Which framework, and of which age, a measurement was taken with."""

from __future__ import annotations

import re

from planner.calibration.points import Point

__all__ = ["framework_of"]

#: Words of a source (lower case) and the framework they stand for; the first found.
_WORDS = (
    (("torchtitan", "fms-fsdp"), "torchtitan"),
    (("mosaic", "llm-foundry", "composer"), "fsdp"),
    (("vtrain", "bigscience", "bloom", "megatron-deepspeed"), "megatron-deepspeed"),
    (
        ("dgxc", "nemo-framework-launcher", "long_sequence", " 24.", " 25.0"),
        "megatron-2025",
    ),
    (
        ("bridge", "nemo", "mlperf", "megatron-core", "megatron core", "mcore"),
        "megatron",
    ),
    (("primus", "megascale"), "megatron"),
    (("alpa",), "alpa"),
    (("internevo", "internlm"), "internevo"),
    (("maxtext", "jax", "levanter", "tpu", "praxis"), "jax"),
    (("megatron-lm", "korthikanti", "megatron"), "megatron-2021"),
    # Its peaks have scores in them: tables 4 and 10 of Qi et al. 2024.
    (("zero bubble", "zero-bubble"), "megatron-2021"),
    (("deepspeed", "zero-infinity", "zero-offload", "zero-3"), "deepspeed"),
    (("nnscaler", "fsdp", "pytorch", "meshwright"), "torch"),
)


def framework_of(point: Point) -> tuple[str, str]:
    """Name of the framework, and what was assumed if the source does not say.

    Later Megatron-LM (from 2023 on, or on H100 and newer) has flash attention and
    overlap; earlier has not.
    """
    text = f"{point.source} {point.notes}".lower()
    for words, name in _WORDS:
        if any(word in point.source.lower() for word in words):
            return _of_age(name, point), ""
    for words, name in _WORDS:
        if any(word in text for word in words):
            name = _of_age(name, point)
            return name, f"framework {name} by the notes"
    name = "megatron" if (point.pp or 1) > 1 else "torchtitan"
    return name, f"framework not named: constants of {name}"


#: A year from 2023 on in a source's name.
_RECENT = re.compile(r"(?<!\d)20(?:2[3-9]|[3-9]\d)(?!\d)")


def _of_age(name: str, point: Point) -> str:
    """Megatron-LM of 2021, of 2023 and newer (or on GPUs of then), or not alone.

    ZeRO 3 beside it is DeepSpeed's, or FSDP's where that is said. Runs of 2026 with
    recipes that notes name use Megatron-Core of then.
    """
    if name == "megatron-2025" and re.search(
        r"(?<!\d)20(?:2[6-9]|[3-9]\d)", point.source
    ):
        return "megatron"
    if name != "megatron-2021":
        return name
    if point.zero == 3:
        said = f"{point.source} {point.notes}".lower()
        return "torch" if re.search(r"fsdp|fully.sharded", said) else "deepspeed"
    recent = ("h100", "h200", "h800", "b200", "b300", "mi3")
    if any(word in point.gpu.lower() for word in recent):
        return "megatron"
    named = "megatron" in point.source.lower()
    return "megatron" if named and _RECENT.search(point.source) else name
