"""Processes of federations, as ranks that ``executors.launch`` starts."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from executors.checkpoints.snapshot import full_parameters
from executors.data import synthetic_batch
from executors.federation import run as federation_run
from executors.federation import run_federation
from planner.schema import Federation
from tests.distributed.cases import build

__all__ = ["train"]

Emit = Callable[[Any], None]


def train(args: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train by a federation; ``doom`` is (processes, step, signal) of the first try.

    The process that leads a member tells a digest of its weights after each step.
    ``evaluated`` are the steps whose batches are evaluated, ``options`` those of
    :func:`executors.run_federation` that are left.
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
        return synthetic_batch(workload, step)

    def told(run: Any, step: int) -> None:
        original(run, step)
        weights.update(full_parameters(run.trainer))
        found = hashlib.sha256()
        for name in sorted(weights):
            found.update(weights[name].numpy().tobytes())
        emit({"step": step, "digest": found.hexdigest()})

    original = federation_run._Run.after_step
    federation_run._Run.after_step = told  # type: ignore[method-assign]
    result = run_federation(
        federation,
        lambda: build(federation.members[0].plan.model.name),
        data,
        steps=args["steps"],
        rank_timeout_s=args.get("silence_s", 60.0),
        eval_data=[data(step) for step in args.get("evaluated", [])] or None,
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
        "weights": {name: one.tolist() for name, one in weights.items()},
    }
