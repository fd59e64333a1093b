"""Strategies of measured runs, read from their rows, with the assumptions named."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from planner.cost import Recipe
from planner.errors import CalibrationError
from planner.graph import ModelGraph
from planner.measurements.catalogues import Framework, Variant, read_rows
from planner.measurements.framework_names import is_recent, year_of
from planner.measurements.points import Point
from planner.measurements.stage_assignment import assign_stages, outer_units
from planner.schema import Mesh, Precision, Strategy, TensorSharding

__all__ = [
    "AssumedPlan",
    "assume_plan",
    "batches",
    "expert_degree",
    "keeps_bfloat16_alone",
    "replicated_and_sharded",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedPlan:
    """A strategy with its precision and recipe.

    Attributes:
        strategy: Strategy, with stages.
        precision: Dtypes.
        product_dtype: Dtype of matrix products where it is not the compute dtype.
        recipe: Recipe of the framework, as this run used it.
        why: Assumptions where the row states nothing.
    """

    strategy: Strategy
    precision: Precision
    recipe: Recipe
    product_dtype: str | None
    why: tuple[str, ...]


def assume_plan(point: Point, graph: ModelGraph, framework: Framework) -> AssumedPlan:
    """Return the plan of a row.

    Raises:
        CalibrationError: If degrees do not multiply to the devices, or the schedule,
            recomputation or precision is in words that are not known.
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
        stages=assign_stages(graph, framework, pp, virtual, schedule, recompute),
        sharding=TensorSharding(
            patterns=graph.sharding if tp > 1 else {},  # type: ignore[arg-type]
            sequence_parallel=split,
        ),
    )
    precision, product_dtype = _precision_of(point, framework)
    return AssumedPlan(
        strategy=strategy,
        precision=precision,
        product_dtype=product_dtype,
        recipe=_as_run(point, framework, precision),
        why=tuple(why),
    )


def _context_ways(point: Point, inner: int, why: list[str]) -> int:
    """Return a blank cp: 1, unless the batch has fewer samples than replicas.

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


def _unknown(point: Point, column: str, known: str) -> CalibrationError:
    return CalibrationError(
        f"point {point.point_id}: {column}={getattr(point, column)!r} is not known; "
        f"write {known}, or leave it blank"
    )


#: Words of schedules that are known: of those without a name, 1F1B is priced.
_SCHEDULES = re.compile(
    r"none|1f1b|pipedream.?flush|gpipe|afab|interleav|zb|zero.?bubble|dual-?pipe"
    r"|v-?(half|min)|pipeline \(alpa\)"
)


def _schedule(
    point: Point,
    graph: ModelGraph,
    framework: Framework,
    pp: int,
    count: int,
    why: list[str],
) -> tuple[str, int]:
    text = point.schedule.lower()
    if text and not _SCHEDULES.search(text):
        known = "none, gpipe, 1f1b, interleaved 1f1b, zb or dualpipe"
        raise _unknown(point, "schedule", known)
    if pp == 1:
        return "GPipe", 1
    found = re.search(r"vp\s*=\s*(\d+)", text)
    virtual = int(found[1]) if point.vp is None and found else point.vp
    most = max(1, len(graph.units) // pp)
    if most > 1 and re.search(r"dual-?pipe", text):
        return "DualPipeV", 2
    if most > 1 and re.search(r"zb-?v|\bv-?(zb|half|min)", text):
        return "ZBVZeroBubble", 2
    if "zero" in text or "zb" in text:
        return "InterleavedZeroBubble", virtual or 1
    if "gpipe" in text or "afab" in text:
        return "GPipe", 1
    if virtual is None and "interleav" in text:
        virtual = min(_even_stages(graph, pp, framework.virtual_stages), most)
        why.append(f"{virtual} virtual stages, not given")
    if not text or text == "none":
        why.append("schedule 1F1B")
    virtual = virtual or 1
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
    """Return the virtual stages of a rank that give all as many layers.

    Source: Megatron-LM, megatron/arguments.py: num_layers divides by pp times virtual
    stages.
    """
    ends = outer_units(graph)
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
    if text in ("yes", "true", "on", "1"):
        why.append(f"recompute {text!r} taken as full")
        return "full"
    raise _unknown(point, "recompute", "none, selective or full")


#: Share of tp's collectives behind products with torch's async tensor parallelism,
#: which splits both into pieces (Wang et al., "Introducing Async Tensor Parallelism in
#: PyTorch", 2024). The share itself is an assumption: no source states it.
_ASYNC_TP = 0.6


#: Runs whose host waits for every kernel. BLOOM's were, to keep them from hanging:
#: bigscience-workshop/bigscience, train/tr11-176B-ml/tr11-176B-ml.slurm, 2022.
_BLOCKING = re.compile(r"cuda_launch_blocking=1|\bbloom\b|tr11")


def _as_run(point: Point, framework: Framework, precision: Precision) -> Recipe:
    recipe, text = framework.recipe, f"{point.precision} {point.notes}".lower()
    if "eager" in text:
        recipe = replace(recipe, fusion="none")
    elif "torch.compile" in text and recipe.fusion == "none":
        recipe = replace(recipe, fusion="compiled")
    if "async tp" in text or "asynctp" in text:
        recipe = replace(recipe, layer_overlap=_ASYNC_TP)
    if _BLOCKING.search(f"{point.source} {point.notes}".lower()):
        recipe = replace(recipe, blocking=True)
    # Pax computes scores in memory, but for Transformer Engine's layers: praxis,
    # layers/attentions.py, DotProductAttention.
    if re.search(r"\bpax(ml)?\b", point.source.lower()) and "te" not in text.split():
        recipe = replace(recipe, fused_attention=False)
    for variant in framework.variants:
        if _applies(variant, point, precision):
            recipe = replace(recipe, **variant.recipe)
    return recipe


def _applies(variant: Variant, point: Point, precision: Precision) -> bool:
    text = point.precision.lower()
    # A row that names both dtypes, such as those of BLOOM's trials, determines neither.
    bfloat16 = precision.compute == "bfloat16" and "fp16" not in text
    return (
        variant.year_from <= (year_of(point.source) or 0) <= variant.year_to
        and (variant.unless_zero is None or point.zero != variant.unless_zero)
        and variant.word in f"{text} {point.notes.lower()}"
        and (bfloat16 or not variant.bfloat16)
        and not (variant.old and is_recent(point))
    )


# -- Batches ---------------------------------------------------------------------

#: Samples of a microbatch, at most, where a row leaves it out: an assumption.
_LARGEST_MICROBATCH = 4


def batches(
    point: Point, framework: Framework, ways: int, why: list[str]
) -> tuple[int, int]:
    """Return the samples of a microbatch, and the microbatches of a step.

    Args:
        point: The row.
        framework: Framework of the run.
        ways: Number of replicas, dp.
        why: Takes what was assumed.
    """
    pp = point.pp or 1
    point = _as_cut(point, framework, ways, why)
    microbatch, total = point.microbatch, point.global_batch
    if microbatch is None:
        most = None if framework.microbatches == "whole" else _LARGEST_MICROBATCH
        microbatch = _unstated((total or ways) / ways, most) if pp == 1 else 1
        why.append(f"microbatch {microbatch}, not given")
    stated = re.search(r"(\d+) grad-accum|grad accumulation (\d+)", point.notes.lower())
    if total is None and stated:
        return microbatch, int(stated[1] or stated[2])
    if total is None:
        count = 4 * pp if pp > 1 else 1
        why.append(f"{count} microbatches a step, global batch not given")
        return microbatch, count
    return microbatch, max(1, round(total / (microbatch * ways)))


def _as_cut(point: Point, framework: Framework, ways: int, why: list[str]) -> Point:
    """Return the row with the framework's microbatch where its own is a guess."""
    notes, pp = point.notes.lower(), point.pp or 1
    given = point.microbatch is not None and "inferred" not in notes
    if framework.microbatches != "stages" or pp == 1 or given:
        return point
    found = re.search(r"local batch (\d+)", notes)
    if found is None and point.global_batch is None:
        return point
    each = int(found[1]) if found else (point.global_batch or ways) // ways
    if each % pp:
        return point
    why.append(f"{pp} microbatches of {each // pp}, as many as stages")
    return replace(
        point, microbatch=each // pp, global_batch=point.global_batch or each * ways
    )


def _unstated(each: float, most: int | None) -> int:
    """Return the microbatch of a replica without a pipeline, of ``each`` samples.

    It has as many as divide them; where the replicas do not divide the batch, as many
    as may be: under ZeRO 3 every microbatch gathers the model, so that one sample at a
    time would be the slowest guess.
    """
    whole = max(1, round(each))
    if most is None or each != int(each):
        return min(whole, most or whole)
    return next(size for size in range(min(whole, most), 0, -1) if each % size == 0)


# -- Experts and shards ----------------------------------------------------------

#: Ranks of a host, within which runs whose tables leave ep out are taken to exchange
#: tokens: an assumption, and what the recipes of NVIDIA's tables do on H100 or exceed.
_EXPERT_HOST = 8


def expert_degree(
    point: Point, experts: int, framework: Framework, ways: int, why: list[str]
) -> int:
    """Return the ep that a row is priced with.

    Where it is blank, frameworks built like Megatron-LM spread experts over as many
    ranks of a host as divide both: one rank can hardly hold those of a measured model.
    Others are taken to keep or gather all of them.

    Args:
        point: The row.
        experts: Experts of a layer; 0 without.
        framework: Framework of the run.
        ways: Number of ranks over which plans may spread them: dp x cp.
        why: Takes what was assumed.
    """
    if point.ep is None:
        if not experts or not framework.spreads_experts:
            return 1
        ep = max(
            d for d in range(1, _EXPERT_HOST + 1) if ways % d == 0 and experts % d == 0
        )
        why.append(f"ep={ep}, not given: experts over a host's ranks")
        return ep
    fits = [d for d in range(1, point.ep + 1) if ways % d == 0 and point.ep % d == 0]
    if fits[-1] != point.ep:
        why.append(
            f"ep={point.ep} priced as {fits[-1]}: dp x cp={ways}, and plans spread "
            f"experts over no tp"
        )
    return fits[-1]


#: Words of InternEvo for the ranks over which ZeRO 1 splits, and of a hybrid's degree.
_STATED = re.compile(r"\b(?:zero1(?: group)?|dp_shard|shard_group)\s*=\s*(\d+)")

#: Fully sharded inside of a host, copies across: torch's HYBRID_SHARD takes the ranks
#: of a host where it is told no other group. Source: torch.distributed.fsdp.api,
#: ShardingStrategy.
_HYBRID = re.compile(r"\bhsdp\b|\bhybrid[ _-]shard")

#: Devices of such a host: an assumption.
_SHARD_HOST = 8


def replicated_and_sharded(
    point: Point, zero: int, ways: int, tp: int, why: list[str]
) -> tuple[int, int]:
    """Return the row's dp_replicate and dp_shard.

    Args:
        point: The row, whose notes may name a group.
        zero: ZeRO stage.
        ways: Number of replicas, the product of both.
        tp: Number of ranks of a replica on its host.
        why: Takes what was assumed.
    """
    if not zero:
        return ways, 1
    notes = point.notes.lower()
    stated, hybrid = _STATED.search(notes), _HYBRID.search(notes)
    if stated:
        size = int(stated[1])
    elif hybrid:
        size = max(1, _SHARD_HOST // tp)
    else:
        return 1, ways
    if stated and (size < 1 or ways % size):
        why.append(
            f"notes={stated[0]!r}, but that does not divide dp={ways}: sharded over "
            f"all; correct notes or dp"
        )
    if size < 1 or size >= ways or ways % size:
        return 1, ways
    why.append(f"sharded over {size} of {ways} replicas, copies of that")
    return ways // size, size


# -- Precision -------------------------------------------------------------------

#: Runs that reduce gradients in bfloat16. Source: foundation-model-stack/fms-fsdp,
#: fms_fsdp/policies/mixed_precision.py, bfSixteen.
_BFLOAT16_REDUCTIONS = re.compile(r"\bfms-fsdp\b")


def keeps_bfloat16_alone(point: Point) -> bool:
    """Say if weights, gradients and states of a run are all in bfloat16.

    Args:
        point: The row, whose precision states ``pure bf16``.
    """
    text = point.precision.lower()
    return "pure" in text and re.search(r"bf16|bfloat16", text) is not None


def _precision_of(point: Point, framework: Framework) -> tuple[Precision, str | None]:
    """Return the precision of a run, and a dtype of products that it cannot state.

    ``precisions.csv`` is read in order; where it has no dtype of reductions, the
    framework's counts.
    """
    text = point.precision.lower()
    rows = read_rows("precisions.csv")
    row = next((row for row in rows if re.search(row["pattern"], text)), None)
    if row is None:
        known = "bf16, fp16, fp32, tf32, fp8, mxfp8 or nvfp4"
        raise _unknown(point, "precision", known)
    reduce = row["reduce"] or framework.reduce
    sources = f"{point.source} {point.notes}".lower()
    if row["compute"] == "bfloat16" and _BFLOAT16_REDUCTIONS.search(sources):
        reduce = "bfloat16"
    precision = Precision(
        parameter=row["parameter"],  # type: ignore[arg-type]
        compute=row["compute"],  # type: ignore[arg-type]
        reduce=reduce,  # type: ignore[arg-type]
    )
    return precision, row["product"] or None
