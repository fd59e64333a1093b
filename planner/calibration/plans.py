"""From a measured run's row to the Strategy that it ran, assumptions named."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner.calibration.batches import batches
from planner.calibration.dealing import ends_of, stages_of
from planner.calibration.expert_degrees import expert_degree
from planner.calibration.frameworks import Framework
from planner.calibration.frameworks.names import is_recent
from planner.calibration.points import Point
from planner.calibration.precisions import precision_of, product_dtype_of
from planner.calibration.shard_groups import replicated_and_sharded
from planner.calibration.years import year_of
from planner.cost import Recipe
from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.schema import Mesh, Precision, Strategy, TensorSharding

__all__ = ["AssumedPlan", "assume_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedPlan:
    """A strategy and how it is trained.

    Attributes:
        strategy: With stages.
        precision: Dtypes.
        product_dtype: Of matrix products where it is not the compute dtype.
        recipe: The framework's, as this run used it.
        why: What the row does not say.
    """

    strategy: Strategy
    precision: Precision
    recipe: Recipe
    product_dtype: str | None
    why: tuple[str, ...]


def assume_plan(point: Point, graph: ModelGraph, framework: Framework) -> AssumedPlan:
    """The plan of a row.

    Raises:
        CalibrationError: If degrees do not multiply to the devices, or the batch does
            not divide.
    """
    why: list[str] = []
    tp, pp = _or(point.tp, 1), _or(point.pp, 1)
    cp = point.cp or _context_ways(point, tp * pp, why)
    for name, value in (("tp", point.tp), ("pp", point.pp)):
        if value is None:
            why.append(f"{name}=1, not given")
    ways, rest = divmod(point.n_gpus, tp * pp * cp)
    if rest:
        raise CalibrationError(
            f"point {point.point_id}: tp={tp} x pp={pp} x cp={cp} do not divide "
            f"n_gpus={point.n_gpus}; correct the degrees"
        )
    microbatch, count = batches(point, framework, ways, why)
    zero = _or(point.zero, framework.zero_stage)
    if point.zero is None:
        why.append(f"ZeRO {zero}")
    copies, shard = replicated_and_sharded(point, zero, ways, tp, why)
    ep = expert_degree(point, graph.num_experts, framework, ways * cp, why)
    schedule, virtual = _schedule(point, graph, framework, pp, count, why)
    recompute = _recompute(point, framework, why)
    split = _sequence_parallel(point, framework, tp)
    strategy = Strategy(
        # Megatron-LM's default (p2p) and torchtitan's.
        context_algorithm="ring",
        mesh=Mesh(
            pp=pp,
            dp_replicate=copies,
            dp_shard=shard,
            cp=cp,
            tp=tp,
            ep=ep,
        ),
        zero_stage=zero,  # type: ignore[arg-type]
        schedule=schedule,
        virtual_stages=virtual,
        microbatch_size=microbatch,
        num_microbatches=count,
        stages=stages_of(graph, framework, pp, virtual, schedule, recompute),
        sharding=TensorSharding(
            patterns=graph.sharding if tp > 1 else {},  # type: ignore[arg-type]
            sequence_parallel=split,
        ),
    )
    precision = precision_of(point, framework)
    return AssumedPlan(
        strategy=strategy,
        precision=precision,
        product_dtype=product_dtype_of(point),
        recipe=_as_run(point, framework, precision),
        why=tuple(why),
    )


def _context_ways(point: Point, inner: int, why: list[str]) -> int:
    """A blank cp: 1, but of a batch of fewer samples than there would be replicas.

    A replica takes a sample at least, so that the others must share one: where nothing
    says how, along its tokens.
    """
    ways, rest = divmod(point.n_gpus, inner)
    samples = point.global_batch
    if point.dp or rest or not samples or samples >= ways or ways % samples:
        return 1
    why.append(f"cp={ways // samples}: {samples} samples on {ways} replicas")
    return ways // samples


def _or(value: int | None, other: int) -> int:
    return other if value is None else value


def _schedule(
    point: Point,
    graph: ModelGraph,
    framework: Framework,
    pp: int,
    count: int,
    why: list[str],
) -> tuple[str, int]:
    if pp == 1:
        return "GPipe", 1
    text = point.schedule.lower()
    virtual = point.vp
    found = re.search(r"vp\s*=\s*(\d+)", text)
    if virtual is None and found:
        virtual = int(found[1])
    most = max(1, len(graph.units) // pp)
    if most > 1 and re.search(r"dual-?pipe", text):
        return "DualPipeV", 2
    if most > 1 and re.search(r"zb-?v|\bv-?(zb|half|min)", text):
        return "ZBVZeroBubble", 2
    if "zero" in text or "zb" in text:
        return "InterleavedZeroBubble", min(virtual or 1, most)
    if "gpipe" in text:
        return "GPipe", 1
    if virtual is None and "interleav" in text:
        virtual = min(_even_stages(graph, pp, framework.virtual_stages), most)
        why.append(f"{virtual} virtual stages, not given")
    if not text or text == "none":
        why.append("schedule 1F1B")
    virtual = min(virtual or 1, most)
    # Megatron-LM interleaves whole rounds of pp microbatches.
    if virtual > 1 and count % pp == 0:
        return "Interleaved1F1B", virtual
    if virtual > 1:
        why.append(f"1F1B: {count} microbatches are no whole rounds of pp={pp}")
    if count < pp:
        # The first rank has forwards for all of them before a backward comes, the last
        # has one at a time: so it is in an interleaved schedule of whole rounds of few.
        why.append(f"1F1B of {count} microbatches on {pp} stages as interleaved in one")
        return "Interleaved1F1B", 1
    return "1F1B", 1


def _even_stages(graph: ModelGraph, pp: int, fewest: int) -> int:
    """Virtual stages of a rank, so that all have as many layers, as Megatron-LM asks.

    Source: megatron/arguments.py: num_layers divides by pp times virtual stages.
    """
    ends = ends_of(graph)
    each, rest = divmod(len(graph.units) - sum(ends), pp)
    if rest or not each:
        return fewest
    return next((v for v in range(fewest, each + 1) if each % v == 0), 1)


def _sequence_parallel(point: Point, framework: Framework, tp: int) -> bool:
    notes = point.notes.lower()
    if "selective row uses sequence parallel" in notes:
        return tp > 1 and "selective" in point.recompute.lower()
    if "no sequence parallel" in notes:
        return False
    stated = "sequence parallel" in notes
    return tp > 1 and (stated or framework.sequence_parallel)


def _recompute(point: Point, framework: Framework, why: list[str]) -> str:
    text = point.recompute.lower()
    if not text:
        why.append(f"recompute {framework.recompute}")
        return framework.recompute
    if text in ("no", "false", "off", "0"):
        return "none"
    for name in ("none", "selective", "full"):
        if name in text:
            return name
    if "minimal" in text:
        return "selective"
    why.append(f"recompute {text!r} taken as full")
    return "full"


def _said(point: Point) -> str:
    return f"{point.source} {point.notes}".lower()


#: Share of tp's collectives behind products with torch's async tensor parallelism,
#: which splits both into pieces (Wang et al., "Introducing Async Tensor Parallelism in
#: PyTorch", 2024). The share itself is an assumption: no source states it.
_ASYNC_TP = 0.6


#: Of what the links reach, what Megatron-LM's reductions that nothing hides get: the
#: fit of that constant begins at .9, and ends at .89 for Megatron-LM of 2021.
_IN_BUCKETS = 0.9


#: Runs whose host waits for every kernel. BLOOM's were, to keep them from hanging:
#: bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm, 2022.
_BLOCKING = re.compile(r"cuda_launch_blocking=1|\bbloom\b|tr11")


def _as_run(point: Point, framework: Framework, precision: Precision) -> Recipe:
    recipe, text = framework.recipe, f"{point.precision} {point.notes}".lower()
    # A row that names both, such as those of BLOOM's trials, says neither.
    wide = precision.compute == "bfloat16" and "fp16" not in point.precision.lower()
    if wide and framework.bfloat16_passes is not None:
        recipe = replace(recipe, gradient_passes=framework.bfloat16_passes)
    if wide and framework.bfloat16_gradients is not None:
        recipe = replace(recipe, gradients=framework.bfloat16_gradients)
    if "eager" in text:
        recipe = replace(recipe, elementwise=1.0)
    if "async tp" in text or "asynctp" in text:
        recipe = replace(recipe, layer_overlap=_ASYNC_TP)
    if _BLOCKING.search(_said(point)):
        recipe = replace(recipe, blocking=True)
    # Pax computes scores in memory, but for Transformer Engine's layers: praxis,
    # layers/attentions.py, DotProductAttention.
    if re.search(r"\bpax(ml)?\b", point.source.lower()) and "te" not in text.split():
        recipe = replace(recipe, fused_attention=False)
    year = year_of(point.source) or 0
    if recipe.name == "deepspeed":
        recipe = replace(recipe, fused_attention=is_recent(point))
        if point.zero != 3:
            # Gradients are reduced in buckets of 5e8, as others do it: DeepSpeed's
            # reduce_bucket_size (deepspeed/runtime/zero/config.py). What was fitted is
            # of gathers under ZeRO 3.
            recipe = replace(recipe, pieces=1.0, replica_efficiency=_IN_BUCKETS)
    # Weight gradients are added up by the products that make them since the spring of
    # 2022 (fused_weight_gradient_mlp_cuda: NVIDIA/apex, pull request 1317).
    if recipe.name == "megatron-2021" and year >= 2022:
        recipe = replace(recipe, gradient_passes=0.0)
    # It compiles the loss, too: torchtitan/components/loss.py, from 2025 on.
    if recipe.name == "torchtitan" and year >= 2025:
        recipe = replace(recipe, fused_loss="compile" in text)
    return recipe
