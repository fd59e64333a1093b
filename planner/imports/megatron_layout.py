"""How Megatron's arguments cut a model: layers of every virtual stage."""

from __future__ import annotations

import argparse
import re

from planner.errors import StrategyError
from planner.imports.base import divided

__all__ = ["read_cut"]

_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z])\*(\d+)")


def read_cut(args: argparse.Namespace, pp: int) -> tuple[tuple[int, ...], int]:
    """Layers of every virtual stage (empty if not said), and stages a rank.

    Args:
        args: Parsed arguments.
        pp: Pipeline degree.

    Raises:
        StrategyError: If several flags say it, or stages do not divide layers.
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
        raise StrategyError(f"{' and '.join(given)} both say how it is cut; keep one")
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
    bare = text.replace(",", "").replace(" ", "")
    while match := _REPEATED.search(bare):
        part = match[1] if match[1] is not None else match[3]
        count = int(match[2] or match[4])
        if count > 4096:
            raise StrategyError(
                f"--pipeline-model-parallel-layout repeats {count} times"
            )
        bare = bare[: match.start()] + part * count + bare[match.end() :]
    wrong = set(bare) - set("EtmL|")
    if wrong:
        raise StrategyError(
            f"--pipeline-model-parallel-layout {text!r} has {sorted(wrong)[0]!r}; it "
            f"is made of E, t, m, L, | and repetitions"
        )
    return tuple(stage.count("t") for stage in bare.split("|"))
