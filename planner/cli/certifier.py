"""The process that certifies plans: it reads jobs, forks one for each, and answers.

It reads one JSON object a line from stdin and writes one a line to stdout. It has
imported what the jobs need, so that each takes a second instead of ten, and has never
used a GPU, so that it may fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining
import torch.export
from torch import nn

from executors.certifying.compare import compare_with_whole
from executors.certifying.small_plan import SMALL_LENGTH, small_plan
from executors.data import synthetic_batch
from planner.capture.models import load_config, load_model
from planner.capture.small import small_config
from planner.capture.volumes import small_volume, volume_side
from planner.certificate import own_twin, twin_layers
from planner.errors import MeshwrightError
from planner.schema import Plan

__all__ = ["main"]


def main() -> None:
    """Answer jobs until stdin ends."""
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What models print must not stand among the answers.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    torch.set_num_threads(1)
    # Before the first job comes: most models are of its classes.
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.modeling_utils")
    # Jobs collect what they leave, and do not go through imports, which would copy
    # their pages in each forked process.
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        answers.write(_in_child(line) + "\n")
        answers.flush()


def _in_child(line: str) -> str:
    """Do one job in a forked process; a crash is its answer, too."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(read)
            answer = json.dumps(_certify(json.loads(line)))
            with os.fdopen(write, "w", encoding="utf-8") as stream:
                stream.write(answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as stream:
        answer = stream.read()
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return answer or json.dumps({"verdict": "unknown", "reason": f"exit code {code}"})


def _certify(job: dict[str, Any]) -> dict[str, Any]:
    reason = "no small model of it can be built"
    try:
        plan = Plan.from_data(job["plan"])
        side = volume_side(job["model"].get("ref"))
        for model, what in _small_models(job["model"], plan):
            high = getattr(getattr(model, "config", None), "vocab_size", None)
            try:
                small = small_plan(plan, model, high=high, side=side)
                _try_forward(model, small)
            except Exception as error:  # whatever a model's code raises
                reason = _line(error)
                continue
            found = compare_with_whole(small, model, steps=job["steps"])
            return {
                "verdict": found.verdict,
                "reason": found.violation,
                "model": what,
                "strategy": _label(small, plan),
                "steps": found.steps,
            }
    except Exception as error:  # whatever a model's code raises
        traceback.print_exc()
        reason = _line(error)
    return {"verdict": "unknown", "reason": reason}


def _line(error: Exception) -> str:
    text = " ".join(str(error).split())[:200]
    return (
        text
        if isinstance(error, MeshwrightError)
        else f"{type(error).__name__}: {text}"
    )


def _label(small: Plan, plan: Plan) -> str:
    """Label of the twin's strategy, without what every twin is trained with."""
    asked = plan.strategy
    same = {"precision": asked.precision, "optimizer": asked.optimizer}
    return small.strategy.model_copy(update=same).label()


def _try_forward(model: nn.Module, plan: Plan) -> None:
    """Run the model once, as it is trained; raises what it raises."""
    batch = synthetic_batch(plan.workload, 0)
    names = {spec.name for spec in plan.workload.inputs}
    with torch.no_grad():
        model(**{name: value for name, value in batch.items() if name in names})


def _small_models(named: dict[str, Any], plan: Plan) -> Iterator[tuple[nn.Module, str]]:
    """Small models that may stand for the large one, the smallest first.

    Args:
        named: ``ref``, ``config``, or ``pickle`` (a file).
        plan: Says how many layers are needed.
    """
    volume = small_volume(named.get("ref"))
    if volume is not None:
        torch.manual_seed(0)
        width = sum(p.numel() for p in volume.parameters())
        yield volume.train(), f"{width:,} parameters"
        return
    config, made = _named(named)
    if made is None:
        module: nn.Module = config
        # A pickle is of a twin.
        twin = (module, named["what"]) if "pickle" in named else None
        twin = twin or own_twin(module, plan.strategy)
        if twin is not None:
            yield _without_dropout(twin[0]).train(), twin[1]
        return
    for size in (16, None):
        for count in dict.fromkeys((twin_layers(plan.strategy), 4, 8)):
            try:
                torch.manual_seed(0)
                small = small_config(config, layers=count, head_size=size)
                model = made(small).train()
            except Exception:  # whatever a model's code raises
                traceback.print_exc()
                continue
            width = sum(p.numel() for p in model.parameters())
            yield _without_dropout(model), f"{count} layers, {width:,} parameters"


def _named(named: dict[str, Any]) -> tuple[Any, Callable[[Any], nn.Module] | None]:
    """Config and maker of a model of transformers; a module and None of own code."""
    if "pickle" in named:
        with Path(named["pickle"]).open("rb") as stream:
            given = pickle.load(stream)  # noqa: S301, written by the process that asks
        return given if isinstance(given, tuple) else (given, None)
    if "config" in named:
        loaded = load_config(named["config"], seq_len=SMALL_LENGTH)
    else:
        loaded = load_model(named["ref"], allow_remote_code=named["remote_code"])
    if loaded.config is None:
        return loaded.build(), None
    return loaded.config, loaded.made


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            module.dropout = 0.0
    return model
