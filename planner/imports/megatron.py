"""Megatron-LM's arguments (core 0.19) as a strategy."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from planner.errors import PlanFileError, StrategyError
from planner.imports.base import (
    Ignored,
    Imported,
    Wanted,
    assembled,
    checked_recompute,
    divided,
    ignored_keys,
    sort_unknown,
    unknown_error,
)
from planner.imports.shell import is_script, open_variables, read_script
from planner.schema import Mesh, Offload, Optimizer, Overlap, Precision
from planner.schema.strategy import MOST_STAGES

__all__ = ["megatron_flags", "megatron_strategy", "megatron_text"]

#: Flags without a value that mean something to a strategy.
_SWITCHES = (
    "sequence-parallel",
    "use-distributed-optimizer",
    "use-megatron-fsdp",
    "use-torch-fsdp2",
    "bf16",
    "fp16",
    "grad-reduce-in-bf16",
    "accumulate-allreduce-grads-in-fp32",
    "recompute-activations",
    "torch-fsdp2-no-reshard-after-forward",
    "optimizer-cpu-offload",
)
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d{1,9})|([A-Za-z])\*(\d{1,9})")
#: Longest layout, repetitions written out.
_LONGEST_LAYOUT = 20_000
_GRANULARITY = {"full": "full", "selective": "selective", None: "none"}
_CONTEXT = {"p2p": "ring", "a2a": "all_to_all", "allgather": "ring", "a2a+p2p": "ring"}
_FSDP = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit."""

    def error(self, message: str) -> NoReturn:
        """Refuse, with argparse's own words."""
        raise StrategyError(f"Megatron's arguments: {message}")


@functools.cache
def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)

    def number(name: str, default: int | None = 1, kind: type = int) -> None:
        parser.add_argument(f"--{name}", type=kind, default=default)

    for axis in ("tensor-model", "pipeline-model", "context", "expert-model"):
        number(f"{axis}-parallel-size")
    for name in (
        *("expert-tensor-parallel-size", "num-layers", "micro-batch-size"),
        *("global-batch-size", "num-layers-per-virtual-pipeline-stage"),
        *("num-virtual-stages-per-pipeline-rank", "ddp-bucket-size"),
        *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers"),
        "recompute-num-layers",
        "num-experts",
    ):
        number(name, None)
    number("num-distributed-optimizer-instances")
    for name, default in (
        ("lr", 3e-4),
        ("weight-decay", 0.01),
        ("clip-grad", 1.0),
        ("sgd-momentum", 0.9),
        ("optimizer-offload-fraction", 1.0),
    ):
        parser.add_argument(f"--{name}", type=float, default=default)
    parser.add_argument("--pipeline-model-parallel-layout")
    parser.add_argument("--cp-comm-type", nargs="+", choices=_CONTEXT, default=["p2p"])
    parser.add_argument("--recompute-granularity", choices=("full", "selective"))
    parser.add_argument("--recompute-method", choices=("uniform", "block"))
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="adam")
    parser.add_argument(
        "--data-parallel-sharding-strategy",
        choices=_FSDP,
        default="optim_grads_params",
    )
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"))
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name in ignored_keys("megatron"):
        parser.add_argument(f"--{name}", nargs="*", default=argparse.SUPPRESS)
    return parser


def megatron_flags() -> dict[str, tuple[Any, Any]]:
    """Every flag that is read: how many values it takes, as argparse says, and default.

    ``"*"`` is a flag that means nothing to a strategy, with whatever follows it.
    """
    return {
        flag: (action.nargs, None if action.nargs == "*" else action.default)
        for action in _parser()._actions
        for flag in action.option_strings
    }


def megatron_strategy(words: Sequence[str], wanted: Wanted) -> Imported:
    """Read arguments of a trainer; ``--flag value`` and ``--flag=value``.

    Args:
        words: Arguments as a shell splits them.
        wanted: At least ``world_size``: arguments do not say how many processes
            there are.

    Raises:
        StrategyError: If a flag is not known, lacks its value, or contradicts another.
    """
    args, noted = _parsed(words, wanted)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    cp = args.context_parallel_size
    if wanted.world_size is None:
        raise StrategyError(
            "Megatron's arguments do not say how many processes there are; give "
            "--world-size"
        )
    dp = divided(
        "world_size",
        wanted.world_size,
        by=tp * pp * cp,
        rule=f"tp={tp} x pp={pp} x cp={cp}",
    )
    mesh, stage = _data_parallel(args, Mesh(pp=pp, cp=cp, tp=tp), dp)
    cut, virtual = _read_cut(args, pp)
    size, many = _batch(args, wanted, dp)
    precision = _precision(args, wanted)
    fields: dict[str, Any] = {
        "zero_stage": stage,
        "schedule": "GPipe"
        if pp == 1
        else "Interleaved1F1B"
        if virtual > 1
        else "1F1B",
        "virtual_stages": virtual,
        "microbatch_size": size,
        "num_microbatches": many,
        "precision": precision,
        "optimizer": _optimizer(args),
        "grad_clip_norm": args.clip_grad or None,
        "context_algorithm": _CONTEXT[args.cp_comm_type[0]] if cp > 1 else "all_to_all",
        "sharding": {"sequence_parallel": args.sequence_parallel and tp > 1},
        "overlap": _overlap(args, precision),
        "offload": _offload(args, wanted, noted),
    }
    return assembled(
        "megatron",
        fields,
        mesh=mesh,
        recompute=checked_recompute(
            wanted, _recompute(args), "--recompute-granularity"
        ),
        ignored=[*_ignored(args), *noted],
        cut=cut,
    )


def megatron_text(text: str, wanted: Wanted, where: str) -> Imported:
    """Read arguments of a trainer, or a script that starts it.

    Args:
        text: Words of a shell with comments, or a script.
        wanted: A script may say how many processes there are.
        where: Its name, for messages.

    Raises:
        PlanFileError: If it is not words of a shell, or the script starts no trainer.
        StrategyError: As :func:`megatron_strategy`.
    """
    script = is_script(text)
    if wanted.script_words and not script:
        raise StrategyError(
            f"{where} is a list of arguments, so --args has no effect; put them into "
            f"the file"
        )
    try:
        given = shlex.split(wanted.script_words)
        words = [] if script else shlex.split(text, comments=True)
    except ValueError as error:
        raise PlanFileError(f"{where}: not words of a shell: {error}") from error
    if not script:
        return megatron_strategy(words, wanted)
    launch = read_script(text, where, given)
    noted = []
    world = wanted.world_size or launch.processes
    if launch.processes is not None and world != launch.processes:
        why = f"the script starts {launch.processes}; {world} are priced"
        noted.append(Ignored(key="--world-size", why=why))
    found = megatron_strategy(launch.words, replace(wanted, world_size=world))
    return replace(found, ignored=(*noted, *found.ignored))


def _groups(words: Sequence[str]) -> Iterator[list[str]]:
    """Every flag with the words up to the next one."""
    group: list[str] = []
    for word in words:
        if word.startswith("--") and group:
            yield group
            group = []
        group.append(word)
    if group:
        yield group


def _parsed(
    words: Sequence[str], wanted: Wanted
) -> tuple[argparse.Namespace, list[Ignored]]:
    """Arguments, and the flags that are passed over.

    Raises:
        StrategyError: Naming every flag that may change the strategy and is not known,
            or whose value a script leaves open.
    """
    parser = _parser()
    flags = megatron_flags()
    kept: list[str] = []
    unknown: list[str] = []
    wrong: list[str] = []
    left_open: list[str] = []
    for group in _groups(words):
        name, equals, value = group[0].partition("=")
        if not name.startswith("--"):
            wrong = [word for word in group if not open_variables([word])]
        elif name not in flags:
            unknown.append(name)
        else:
            number = flags[name][0]
            values = ([value] if equals else []) + group[1:]
            if number == 0:
                # A variable that is not set is no word at all.
                values = [word for word in values if not open_variables([word])]
            elif number is None:
                values = values[:1] + [w for w in values[1:] if not open_variables([w])]
            if number != "*" and (bare := open_variables(values)):
                left_open.append(f"{name} ${{{bare[0]}}}")
                continue
            kept += [name, *values]
    noted, problems = _sorted(list(dict.fromkeys(unknown)), wanted)
    if left_open:
        problems.append(
            f"the script leaves {', '.join(left_open)} open; give the values with "
            f'--args="NAME=value … arguments", as it is started'
        )
    if problems:
        raise StrategyError("Megatron's arguments: " + "; ".join(problems))
    args, rest = parser.parse_known_args(kept)
    wrong += rest
    if wrong:
        raise StrategyError(
            f"Megatron's arguments: {wrong[0]!r} belongs to no flag; give flags alone"
        )
    return args, noted


def _sorted(names: list[str], wanted: Wanted) -> tuple[list[Ignored], list[str]]:
    """Flags that 0.19 does not have or Meshwright not price: noted, and refused."""
    others = {f"--{key}": why for key, why in ignored_keys("megatron.others").items()}
    priceless = {f"--{k}": why for k, why in ignored_keys("megatron.refused").items()}
    bare = [name for name in names if name not in others and name not in priceless]
    refused, passed = sort_unknown(bare, _known(), _harmless())
    reasons = {name: others[name] for name in names if name in others} | passed
    problems = [str(unknown_error("Megatron arguments", refused))] if refused else []
    for name in names:
        if name not in priceless:
            continue
        if wanted.without_offload and "offload" in priceless[name]:
            reasons[name] = "priced without offloading, as asked"
        else:
            why = priceless[name]
            problems.append(f"{name}: {why}; take it out to price the rest")
    noted = [Ignored(key=name, why=reasons[name]) for name in names if name in reasons]
    return noted, problems


def _known() -> list[str]:
    return [name for name, (number, _) in megatron_flags().items() if number != "*"]


def _harmless() -> list[str]:
    names = (*ignored_keys("megatron"), *ignored_keys("megatron.others"))
    return [f"--{name}" for name in names]


def _data_parallel(args: argparse.Namespace, inner: Mesh, dp: int) -> tuple[Mesh, int]:
    stage = 1 if args.use_distributed_optimizer else 0
    if args.use_megatron_fsdp:
        stage = _FSDP[args.data_parallel_sharding_strategy]
    if args.use_torch_fsdp2:
        stage = 2 if args.torch_fsdp2_no_reshard_after_forward else 3
    copies = args.num_distributed_optimizer_instances
    shard = divided(
        "data parallel", dp, by=copies, rule="--num-distributed-optimizer-instances"
    )
    if not stage or shard * inner.cp == 1:
        stage, shard = 0, 1
    ep = _expert_ranks(args, inner.tp)
    ranks = shard * inner.cp * inner.tp
    if ep > 1 and ranks % ep:
        # Its experts are dealt out over all data-parallel ranks, sharded or not.
        remedy = (
            "add --use-distributed-optimizer"
            if shard * inner.cp == 1
            else (f"use a divisor of {ranks}")
        )
        raise StrategyError(
            f"--expert-model-parallel-size {args.expert_model_parallel_size} does not "
            f"divide what is sharded, {ranks} ranks with tp; Meshwright deals experts "
            f"out over those: {remedy}"
        )
    sizes = {"dp_replicate": dp // shard, "dp_shard": shard, "ep": ep}
    return inner.model_copy(update=sizes), stage


def _expert_ranks(args: argparse.Namespace, tp: int) -> int:
    """Ranks over which the experts of a layer are dealt out.

    Megatron splits each expert over ``--expert-tensor-parallel-size`` ranks, tp of
    them by default. Meshwright deals experts out whole, over as many ranks together:
    every rank holds the same bytes.

    Raises:
        StrategyError: If there are too few experts for that.
    """
    ep, etp = args.expert_model_parallel_size, args.expert_tensor_parallel_size
    experts = args.num_experts
    if etp is None:
        # Without experts there is nothing to split.
        etp = tp if experts or ep > 1 else 1
    if experts and experts % (ep * etp):
        remedy = f"use a divisor of {experts} as --expert-model-parallel-size"
        if experts % ep == 0:
            remedy = "set --expert-tensor-parallel-size 1"
        raise StrategyError(
            f"--num-experts {experts} with --expert-model-parallel-size {ep} and "
            f"--expert-tensor-parallel-size {etp}: Meshwright deals experts out whole, "
            f"over {ep * etp} ranks, which do not divide them; {remedy}"
        )
    return int(ep * etp)


def _recompute(args: argparse.Namespace) -> str:
    if args.recompute_activations:
        # An older name, and Megatron lets it win.
        return "selective"
    return _GRANULARITY[args.recompute_granularity]


def _batch(args: argparse.Namespace, wanted: Wanted, dp: int) -> tuple[int, int]:
    size = args.micro_batch_size or wanted.microbatch_size
    if wanted.microbatch_size not in (None, size):
        raise StrategyError(
            f"--micro-batch-size {size}, but microbatch_size={wanted.microbatch_size} "
            f"is asked for; give what the arguments say"
        )
    if size is None:
        raise StrategyError(
            "Megatron's arguments lack --micro-batch-size; add it, or --microbatch-size"
        )
    batch = args.global_batch_size or wanted.global_batch or size * dp
    if wanted.global_batch and batch != wanted.global_batch:
        raise StrategyError(
            f"--global-batch-size {batch}, but global_batch={wanted.global_batch} is "
            f"asked for; give what the arguments say"
        )
    rule = f"--micro-batch-size {size} x data parallel {dp}"
    return size, divided("--global-batch-size", batch, by=size * dp, rule=rule)


def _precision(args: argparse.Namespace, wanted: Wanted) -> Precision:
    if args.bf16 and args.fp16:
        raise StrategyError("--bf16 and --fp16 are both given; keep one")
    if args.fp8_format and not args.bf16:
        raise StrategyError(
            f"--fp8-format {args.fp8_format} without --bf16; float8 is priced beside "
            f"bfloat16: add --bf16"
        )
    whole = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    compute = "float8" if args.fp8_format else whole
    # Of 16 bits: --bf16 sums in float32 unless told otherwise, --fp16 only if told to.
    low = args.grad_reduce_in_bf16 if args.bf16 else args.fp16
    low = low and not args.accumulate_allreduce_grads_in_fp32
    if wanted.dtype not in (None, compute):
        raise StrategyError(
            f"--dtype {wanted.dtype}, but the arguments compute in {compute}; change "
            f"them, or leave --dtype out"
        )
    return Precision(
        compute=compute,  # type: ignore[arg-type]
        reduce="bfloat16" if low else "float32",
    )


def _optimizer(args: argparse.Namespace) -> Optimizer:
    sgd = args.optimizer == "sgd"
    return Optimizer(
        name="SGD" if sgd else "AdamW",
        learning_rate=args.lr,
        weight_decay=args.weight_decay,
        momentum=args.sgd_momentum if sgd else 0.0,
    )


def _offload(args: argparse.Namespace, wanted: Wanted, noted: list[Ignored]) -> Offload:
    """Optimizer states in the host's memory, all or none of them.

    Raises:
        StrategyError: If a part of them is.
    """
    share = args.optimizer_offload_fraction
    if not 0 <= share <= 1:
        raise StrategyError(
            f"--optimizer-offload-fraction {share:g} is not a share; give 0 to 1"
        )
    if not args.optimizer_cpu_offload or share == 0:
        return Offload()
    if wanted.without_offload:
        why = "priced without offloading, as asked"
        noted.append(Ignored(key="--optimizer-cpu-offload", why=why))
        return Offload()
    if share < 1:
        raise StrategyError(
            f"--optimizer-offload-fraction {share:g}: Meshwright prices all states in "
            f"the host's memory, or none; give 1, or --without-offload"
        )
    return Offload(states="optimizer")


def _overlap(args: argparse.Namespace, precision: Precision) -> Overlap:
    if args.ddp_bucket_size is None:
        return Overlap()
    # Megatron counts elements, a strategy bytes.
    each = 2 if precision.reduce == "bfloat16" else 4
    return Overlap(bucket_bytes=args.ddp_bucket_size * each)


def _ignored(args: argparse.Namespace) -> list[Ignored]:
    given = vars(args)
    found = [
        Ignored(key=f"--{name}", why=why)
        for name, why in ignored_keys("megatron").items()
        if name.replace("-", "_") in given
    ]
    if args.recompute_granularity == "full" and args.recompute_method == "block":
        found.append(
            Ignored(
                key="--recompute-method",
                why="block recomputes some layers of a stage; all of them are priced",
            )
        )
    etp = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    split = args.num_experts or args.expert_model_parallel_size > 1
    if split and etp > 1:
        found.append(
            Ignored(
                key="--expert-tensor-parallel-size",
                why=f"experts are split over {etp} ranks, and priced as dealt out "
                f"whole over as many: the same bytes on a rank, other traffic",
            )
        )
    chunk = args.recompute_num_layers or 1
    uniform = args.recompute_method == "uniform"
    if args.recompute_granularity == "full" and uniform and chunk > 1:
        found.append(
            Ignored(
                key="--recompute-num-layers",
                why=f"inputs of every layer are priced, of which uniform keeps one in "
                f"{chunk}",
            )
        )
    return found


def _read_cut(args: argparse.Namespace, pp: int) -> tuple[tuple[int, ...], int]:
    """Layers of every virtual stage (empty if not given), and stages a rank.

    Args:
        args: Parsed arguments.
        pp: Pipeline degree.

    Raises:
        StrategyError: If several flags give it, or stages do not divide layers.
    """
    each = args.num_layers_per_virtual_pipeline_stage
    virtual = args.num_virtual_stages_per_pipeline_rank
    layout = args.pipeline_model_parallel_layout
    given = [
        name
        for name, value in (
            ("--num-layers-per-virtual-pipeline-stage", each),
            ("--num-virtual-stages-per-pipeline-rank", virtual),
            ("--pipeline-model-parallel-layout", layout),
        )
        if value is not None
    ]
    if len(given) > 1:
        raise StrategyError(f"{' and '.join(given)} both cut the model; keep one")
    if pp == 1:
        return (), 1
    if layout is not None:
        cut = _layout(layout)
        count = divided(given[0], len(cut), by=pp, rule=f"stages, pp={pp}")
        if args.num_layers is not None and sum(cut) != args.num_layers:
            raise StrategyError(
                f"{given[0]} has {sum(cut)} layers, --num-layers {args.num_layers}"
            )
        return cut, count
    layers = args.num_layers
    if layers is None:
        if each is not None:
            raise StrategyError(f"{given[0]} {each} needs --num-layers")
        return (), virtual or 1
    if each is not None:
        rule = f"--num-layers-per-virtual-pipeline-stage {each} x pp={pp}"
        virtual = divided("--num-layers", layers, by=each * pp, rule=rule)
    return _even(args, layers, pp, virtual or 1), virtual or 1


def _even(
    args: argparse.Namespace, layers: int, pp: int, virtual: int
) -> tuple[int, ...]:
    first = args.decoder_first_pipeline_num_layers
    last = args.decoder_last_pipeline_num_layers
    if first is None and last is None:
        rule = f"pp={pp} x {virtual} stages a rank"
        if pp * virtual > MOST_STAGES:
            raise StrategyError(
                f"{rule} = {pp * virtual:,} stages; use at most {MOST_STAGES:,}"
            )
        each = divided("--num-layers", layers, by=pp * virtual, rule=rule)
        return (each,) * (pp * virtual)
    if virtual > 1:
        raise StrategyError(
            "--decoder-first-pipeline-num-layers and --decoder-last-… with several "
            "stages a rank are not read; write --pipeline-model-parallel-layout"
        )
    ends = [n for n in (first, last) if n is not None]
    inner = pp - len(ends)
    rest = layers - sum(ends)
    if inner == 0 and rest == 0:
        return tuple(ends)
    each = divided("layers between", rest, by=max(inner, 1), rule=f"{inner} stages")
    middle = (each,) * inner
    return (*([first] if first else []), *middle, *([last] if last else []))


def _layout(text: str) -> tuple[int, ...]:
    """Layers of each stage of ``E|(t|)*3,m|L``."""
    bare = text[:_LONGEST_LAYOUT].replace(",", "").replace(" ", "")
    while match := _REPEATED.search(bare):
        part = match[1] if match[1] is not None else match[3]
        count = int(match[2] or match[4])
        if count > 4096:
            raise StrategyError(
                f"--pipeline-model-parallel-layout repeats {count} times"
            )
        if len(bare) + len(part) * count > _LONGEST_LAYOUT:
            raise StrategyError(
                f"--pipeline-model-parallel-layout has more than {_LONGEST_LAYOUT:,} "
                f"layers and stages once its repetitions are written out"
            )
        bare = bare[: match.start()] + part * count + bare[match.end() :]
    wrong = set(bare) - set("EtmL|")
    if wrong:
        raise StrategyError(
            f"--pipeline-model-parallel-layout {text!r} has {sorted(wrong)[0]!r}; it "
            f"is made of E, t, m, L, | and repetitions"
        )
    return tuple(stage.count("t") for stage in bare.split("|"))
