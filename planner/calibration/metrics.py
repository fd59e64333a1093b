"""Between seconds of a step and what sources print: rates, FLOP/s, MFU, days."""

from __future__ import annotations

import re
from dataclasses import dataclass

from planner.calibration.frameworks.names import framework_of
from planner.calibration.metric_names import (
    TIME_METRICS,
    TimeMetric,
    time_metric_named,
)
from planner.calibration.points import Point
from planner.cost.kernels.low_precision import peak_flops_per_s
from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.schema import Strategy
from planner.schema.cluster import DeviceType

__all__ = ["FlopCount", "convention_of", "step_seconds", "time_metric"]


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
        """FLOPs of a step, forward and backward.

        Args:
            graph: The model.
            samples: Of a step.
            recompute: As the run did.
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
#: Frameworks whose logs count what full recomputation does again. Megatron-LM's formula
#: of 2021 is 96 B s l h^2 (1 + s / 6h + V / 16lh), Narayanan et al. 2021, section 5.1;
#: its README's tables of 2020 agree with it to 0.1 %. Megatron-DeepSpeed and Alpa take
#: the same, and InternEvo (doc/en/train_performance.md, FLOPS Testing); Megatron-LM of
#: 2023 and later does not.
_RECOMPUTING = ("megatron-2021", "megatron-deepspeed", "deepspeed", "alpa", "internevo")
_SAYS_WITH = re.compile(
    r"\bhfu\b|hardware flop|(?:counts?|with|incl\w*)\W+(?:\w+\W+)?recomput"
)
_SAYS_WITHOUT = re.compile(r"\bmfu\b|model (?:t?flop)|(?:no|without|not) recomput")


def convention_of(point: Point) -> tuple[FlopCount, str]:
    """How the row's source counts FLOPs, and what was assumed of it.

    What the notes say goes first; model FLOP/s utilisation has no recomputation by its
    definition, hardware FLOP/s utilisation has (Chowdhery et al. 2022, PaLM, appendix
    B); else the framework's formula.
    """
    source, notes = point.source.lower(), point.notes.lower()
    share = next((share for word, share in _ATTENTION if word in source), 1.0)
    name, doubt = framework_of(point)
    metric = time_metric_named(point.metric)
    stated = metric.recompute if metric is not None else None
    counted = name in _RECOMPUTING if stated is None else stated
    if not stated and (_SAYS_WITH.search(notes) or _SAYS_WITHOUT.search(notes)):
        counted = _SAYS_WITH.search(notes) is not None
    said = f"FLOPs counted {'with' if counted else 'without'} recomputation"
    return (
        FlopCount(attention=share, recompute=counted),
        f"{said}, as {name} does, attention in full" if doubt else "",
    )


def _done(
    point: Point,
    graph: ModelGraph,
    strategy: Strategy,
    device: DeviceType,
) -> tuple[float, TimeMetric]:
    """What a rate is in a step of a second, or a duration the other way round."""
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
    """The row's metric where a step takes ``step_s`` seconds."""
    done, metric = _done(point, graph, strategy, device)
    return step_s / done if metric.lasts else done / step_s


def step_seconds(
    value: float,
    point: Point,
    graph: ModelGraph,
    strategy: Strategy,
    device: DeviceType,
) -> float:
    """Seconds of a step at which the row's metric is ``value``."""
    done, metric = _done(point, graph, strategy, device)
    return value * done if metric.lasts else done / value
