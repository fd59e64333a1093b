"""Processes of federations, as ranks that ``executors.launch`` starts."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.federation import run as federation_run
from executors.federation import run_federation
from executors.learning_rates import learning_rate
from executors.loop import Callback, LoopState, StepReport
from planner.schema import Federation
from tests.distributed.cases import build

__all__ = ["train", "train_each"]

Emit = Callable[[Any], None]


class _Told(Callback):
    """Notes rates and steps that are left out."""

    def __init__(self) -> None:
        self.rates: list[float | None] = []
        self.skipped: list[int] = []

    def on_step(self, state: LoopState, report: StepReport) -> None:
        self.rates.append(report.learning_rate)
        if report.skipped:
            self.skipped.append(report.step)


def train_each(args: dict[str, Any], emit: Emit) -> list[dict[str, Any]]:
    """Train several times in processes that have started once.

    Args:
        args: ``runs`` are the changes of each run's arguments, with a port of its own;
            the others are those of all.
        emit: As of :func:`train`.
    """
    found = []
    for run in args["runs"]:
        os.environ["MASTER_PORT"] = str(run["port"])
        found.append(train({**args, **run}, emit))
    return found


def train(args: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train by a federation; ``doom`` is (processes, step, signal) of the first try.

    The process that leads a member tells a digest of its weights after each step.
    ``evaluated`` are the steps whose batches are evaluated, ``spoiled`` is the sample
    and the step of an input that is not finite, ``schedule`` that of the learning rate,
    ``options`` those of :func:`executors.run_federation` that are left.
    """
    federation = Federation.from_json(args["federation"])
    process, doom = int(os.environ["RANK"]), args.get("doom")
    emit({"pid": os.getpid()})
    weights: dict[str, Any] = {}

    def data(step: int) -> dict[str, torch.Tensor]:
        if doom and process in doom[0] and step == doom[1]:
            flag = Path(f"{args['flag']}.{process}")
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), getattr(signal, doom[2]))
        workload = federation.members[0].plan.workload.model_copy(
            update={"global_batch": federation.global_batch}
        )
        batch = synthetic_batch(workload, step)
        sample, when = args.get("spoiled") or (0, None)
        if step == when:
            next(v for v in batch.values() if v.is_floating_point())[sample] = torch.nan
        return batch

    told_of = _Told()

    def told(run: Any, step: int) -> None:
        original(run, step)
        weights.update(full_parameters(run.trainer))
        found = hashlib.sha256()
        for name in sorted(weights):
            found.update(weights[name].numpy().tobytes())
        emit({"step": step, "digest": found.hexdigest()})

    original = federation_run._Run.after_step
    with mock.patch.object(federation_run._Run, "after_step", told):
        result = run_federation(
            federation,
            lambda: build(federation.members[0].plan.model.name),
            data,
            steps=args["steps"],
            rank_timeout_s=args.get("silence_s", 60.0),
            eval_data=[data(step) for step in args.get("evaluated", [])] or None,
            scheduler=learning_rate(args["schedule"], steps=8, warm_up_steps=2)
            if "schedule" in args
            else None,
            callbacks=[told_of],
            **args.get("options", {}),
        )
    return {
        "member": result.member,
        "rank": result.rank,
        "first": result.first_step,
        "losses": list(result.losses),
        "sent_bytes": result.sent_bytes,
        "exchanges": len(result.exchange_times_s),
        "evaluations": [list(one) for one in result.evaluations],
        "rates": told_of.rates,
        "skipped": told_of.skipped,
        "weights": {name: one.tolist() for name, one in weights.items()},
    }
