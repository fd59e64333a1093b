"""Names of the figures that sources print, and what each is of a step or a device."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "MEMORY_METRICS",
    "TIME_METRICS",
    "TimeMetric",
    "time_metric_named",
    "time_rank",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMetric:
    """A figure that follows from the seconds of a step.

    Attributes:
        about: In words.
        rank: Of the figures of one run the one of the lowest rank speaks for it: the
            most direct one; none speaks by what has no rank.
        counts: What is done in a step: itself, samples, tokens, FLOPs, or those over
            what the device's peak would do.
        unit: How many of these one is; of what lasts, the seconds of one, over how many
            it counts.
        lasts: Whether it is how long one takes, and not how many are done a second.
        of_device: Whether it counts what each device does.
        recompute: Whether FLOPs that recomputation does again count; None where that is
            the source's convention.
    """

    about: str
    rank: int | None
    counts: Literal["step", "samples", "tokens", "flops", "peak"]
    unit: float = 1.0
    lasts: bool = False
    of_device: bool = False
    recompute: bool | None = None


def _step(about: str, unit: float) -> TimeMetric:
    return TimeMetric(about=about, rank=0, counts="step", unit=unit, lasts=True)


def _samples(about: str, *, of_device: bool = False) -> TimeMetric:
    return TimeMetric(about=about, rank=1, counts="samples", of_device=of_device)


def _flops(about: str, unit: float, *, of_device: bool = False) -> TimeMetric:
    return TimeMetric(
        about=about, rank=4, counts="flops", unit=unit, of_device=of_device
    )


_PER_CENT = 0.01
_UTILISATION = TimeMetric(
    about="per cent of the device's peak, by the source's convention",
    rank=3,
    counts="peak",
    unit=_PER_CENT,
    of_device=True,
    recompute=False,
)
#: By name.
TIME_METRICS: dict[str, TimeMetric] = {
    "iter_time_s": _step("seconds of a step", 1.0),
    "step_time_s": _step("seconds of a step", 1.0),
    "iter_time_ms": _step("milliseconds of a step", 1e-3),
    "step_time_ms": _step("milliseconds of a step", 1e-3),
    "samples_per_s": _samples("samples per second, all devices"),
    "sequences_per_s": _samples("samples per second, all devices"),
    "samples_per_s_per_gpu": _samples("samples per second and device", of_device=True),
    "sequences_per_s_per_gpu": _samples(
        "samples per second and device", of_device=True
    ),
    "tokens_per_s_per_gpu": TimeMetric(
        about="tokens per second and device", rank=2, counts="tokens", of_device=True
    ),
    "tokens_per_s": TimeMetric(
        about="tokens per second, all devices", rank=2, counts="tokens"
    ),
    "mfu_pct": _UTILISATION,
    "hfu_pct": replace(
        _UTILISATION,
        about="the same, counting what recomputation does again",
        recompute=True,
    ),
    "tflops_per_gpu": _flops(
        "10^12 FLOP per second and device, by the source's convention",
        1e12,
        of_device=True,
    ),
    "tflops_total": _flops("the same, all devices", 1e12),
    "pflops_total": _flops("10^15 FLOP per second, all devices", 1e15),
    "tflops_per_gpu_best_without_cp": TimeMetric(
        about="tflops_per_gpu under another plan than the row's: the best without cp",
        rank=None,
        counts="flops",
        unit=1e12,
        of_device=True,
    ),
}
#: Of a device, and what did not fit.
MEMORY_METRICS: dict[str, str] = {
    "peak_mem_gb": "peak memory of a device, 10^9 bytes",
    "peak_mem_gib": "peak memory of a device, 2^30 bytes",
    "mem_params_opt_gib": "parameters, gradients, optimizer of a device, 2^30 bytes",
    "mem_activations_gib": "activations of a device, 2^30 bytes",
    "oom_or_failed": "1 where the run did not fit",
    "feasible": "1 where the run fitted, 0 where not",
}

_DAY_S = 86_400.0
#: Days of training on some 300B or 2T tokens.
_DAYS = re.compile(r"days_for_(\d+(?:\.\d+)?)([BT])_tokens")
_TOKENS = {"B": 1e9, "T": 1e12}


def time_metric_named(name: str) -> TimeMetric | None:
    """What a name says of the time of a step; None if nothing.

    Args:
        name: One of :data:`TIME_METRICS`, or ``days_for_300B_tokens`` with any number
            of billions (B) or trillions (T).
    """
    days = _DAYS.fullmatch(name)
    if days is None or not float(days[1]):
        return TIME_METRICS.get(name)
    tokens = float(days[1]) * _TOKENS[days[2]]
    return TimeMetric(
        about=f"days that {tokens:g} tokens take",
        rank=5,
        counts="tokens",
        # So many tokens last days of as many seconds.
        unit=_DAY_S / tokens,
        lasts=True,
    )


def time_rank(name: str) -> int | None:
    """Rank among the figures of a run; None where a run cannot be judged by it."""
    found = time_metric_named(name)
    return None if found is None else found.rank
