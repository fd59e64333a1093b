"""Metrics that sources print, and the seconds of a step that they follow from.

Rates, FLOP/s, MFU and days of training follow from the time of a step and back.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.measurements.catalogues import frameworks
from planner.measurements.framework_names import framework_of
from planner.measurements.points import Point
from planner.schema import Strategy
from planner.schema.cluster import DeviceType

__all__ = [
    "MEMORY_METRICS",
    "TIME_METRICS",
    "FlopCount",
    "TimeMetric",
    "convention_of",
    "step_seconds",
    "time_metric",
    "time_metric_named",
]

# -- Names -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeMetric:
    """A figure that follows from the seconds of a step.

    Attributes:
        about: Description.
        rank: Order among the figures of one run, which is judged by that of the lowest
            rank, the most direct one; None for a figure that no run is judged by.
        counts: Thing that is counted in a step: the step, samples, tokens, FLOPs, or
            those over what the device's peak would do.
        unit: Number of these in one; of a duration, the seconds of one, over how many
            it counts.
        lasts: Whether it is a duration, and not a rate.
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
#: Metrics of a device's memory, and of runs that did not fit.
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
    """Return the figure that a name stands for, if it follows from a step's time.

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


# -- Seconds of a step -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FlopCount:
    """A source's convention of counting FLOPs.

    Attributes:
        attention: Share of the s x s scores that it counts: 1, or 0.5 where what causal
            attention skips is left out.
        recompute: Whether what full recomputation does again counts.
    """

    attention: float = 1.0
    recompute: bool = False

    def of(self, graph: ModelGraph, samples: float, recompute: str) -> float:
        """Return the FLOPs of a step, forward and backward.

        Args:
            graph: The model.
            samples: Samples of a step.
            recompute: Recomputation of the run.
        """
        layers, head = 0.0, 0.0
        for block in graph.blocks:
            for kernel in block.kernels:
                share = self.attention if kernel.kind == "attention" else 1.0
                flops = kernel.count * kernel.forward_flops * share
                if block.kind == "head":
                    head += flops
                else:
                    layers += flops
        passes = 4.0 if self.recompute and recompute == "full" else 3.0
        return (passes * layers + 3.0 * head) * samples / graph.batch


#: Words of a source and what it counts of attention. NVIDIA's tables of 2025 and 2026
#: print tokens and FLOPs: 449.4 GFLOP a token of Llama-3 70B at 8,192 is 6 N without
#: embedding + half of the scores.
_ATTENTION = (("bridge", 0.5), ("dgxc", 0.5))
_WITH_RECOMPUTE = re.compile(
    r"\bhfu\b|hardware flop|(?:counts?|with|incl\w*)\W+(?:\w+\W+)?recomput"
)
_WITHOUT_RECOMPUTE = re.compile(r"\bmfu\b|model (?:t?flop)|(?:no|without|not) recomput")


def convention_of(point: Point) -> tuple[FlopCount, str]:
    """Return the way in which the row's source counts FLOPs, and what was assumed.

    The notes go first; model FLOP/s utilisation has no recomputation by its
    definition, hardware FLOP/s utilisation has (Chowdhery et al. 2022, PaLM, appendix
    B); else the framework's formula.
    """
    source, notes = point.source.lower(), point.notes.lower()
    share = next((share for word, share in _ATTENTION if word in source), 1.0)
    name, doubt = framework_of(point)
    metric = time_metric_named(point.metric)
    stated = metric.recompute if metric is not None else None
    counted = frameworks()[name].counts_recompute if stated is None else stated
    if not stated and (
        _WITH_RECOMPUTE.search(notes) or _WITHOUT_RECOMPUTE.search(notes)
    ):
        counted = _WITH_RECOMPUTE.search(notes) is not None
    words = f"FLOPs counted {'with' if counted else 'without'} recomputation"
    return (
        FlopCount(attention=share, recompute=counted),
        f"{words}, as {name} does, attention in full" if doubt else "",
    )


def _done(
    point: Point,
    graph: ModelGraph,
    strategy: Strategy,
    device: DeviceType,
) -> tuple[float, TimeMetric]:
    """Return a rate at a step of one second; a duration the other way round."""
    metric = time_metric_named(point.metric)
    if metric is None:
        raise CalibrationError(
            f"point {point.point_id}: metric {point.metric!r} does not follow from the "
            f"seconds of a step; those that do are {', '.join(sorted(TIME_METRICS))}"
        )
    samples = float(
        point.global_batch
        or strategy.microbatch_size
        * strategy.num_microbatches
        * strategy.mesh.data_parallel
    )
    count, _ = convention_of(point)
    flops = count.of(graph, samples, strategy.stages[0].recompute)
    done = {
        "step": 1.0,
        "samples": samples,
        "tokens": samples * (graph.seq_len or 1),
        "flops": flops,
        "peak": flops / peak_flops_per_s(device, "bfloat16"),
    }[metric.counts]
    each = point.n_gpus if metric.of_device else 1
    unit = 1 / metric.unit if metric.lasts else metric.unit
    return done / each / unit, metric


def time_metric(
    step_s: float,
    point: Point,
    graph: ModelGraph,
    strategy: Strategy,
    device: DeviceType,
) -> float:
    """Return the row's metric where a step takes ``step_s`` seconds."""
    done, metric = _done(point, graph, strategy, device)
    return step_s / done if metric.lasts else done / step_s


def step_seconds(
    value: float,
    point: Point,
    graph: ModelGraph,
    strategy: Strategy,
    device: DeviceType,
) -> float:
    """Return the seconds of a step at which the row's metric is ``value``."""
    done, metric = _done(point, graph, strategy, device)
    return value * done if metric.lasts else done / value
