"""What every process of ``meshwright run`` and ``meshwright probe`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from planner.errors import ExecutionError
from planner.schema import Plan, Workload

__all__ = ["probe_rank", "token_batches", "train_rank"]


def token_batches(
    path: str, workload: Workload, seed: int
) -> Callable[[int], dict[str, torch.Tensor]]:
    """Batches of consecutive windows of a token file, drawn at random places.

    Args:
        path: One-dimensional integer .npy file.
        workload: Must read ``input_ids`` of some length.
        seed: Of the places; the same step gives the same batch on every rank.
    Returns:
        From a step's number to its global batch.
    Raises:
        ExecutionError: If the file is not such a file, is too short, has tokens beyond
            the vocabulary, or the model reads something else.
    """
    spec = next((s for s in workload.inputs if s.name == "input_ids"), None)
    if spec is None or len(spec.shape) != 1 or len(workload.inputs) != 1:
        raise ExecutionError(
            f"--data holds tokens, but the model reads "
            f"{', '.join(s.name for s in workload.inputs)}; leave --data out"
        )
    length = spec.shape[0]
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise ExecutionError(f"cannot read tokens from {path}: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < length:
        raise ExecutionError(
            f"{path} has shape {tokens.shape} and dtype {tokens.dtype}; it must be one "
            f"row of at least {length} integer tokens"
        )
    if spec.high is not None and int(tokens.max()) >= spec.high:
        raise ExecutionError(
            f"{path} has token {int(tokens.max())}, the vocabulary has {spec.high}; use "
            f"the model's own tokenizer"
        )

    def batch(step: int) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng([seed, step])
        places = rng.integers(0, len(tokens) - length + 1, workload.global_batch)
        rows = np.stack([tokens[start : start + length] for start in places])
        return {"input_ids": torch.from_numpy(rows.astype(np.int64))}

    return batch


def _model_fn(plan: Plan, ref: str) -> Callable[[], torch.nn.Module]:
    from planner.capture.models import load_model

    loaded = load_model(ref, seq_len=plan.workload.seq_len)
    return loaded.build


def train_rank(arguments: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Train as one rank.

    Args:
        arguments: JSON values, from ``meshwright run``.
        emit: Takes messages for the launching process.
    Returns:
        Losses, step times and, if asked for, the measurement; JSON values.
    """
    from executors import run

    plan = Plan.load(arguments["plan"])
    data = (
        token_batches(arguments["data"], plan.workload, arguments["seed"])
        if arguments["data"]
        else None
    )
    result = run(
        plan,
        _model_fn(plan, arguments["model"]),
        data,
        steps=arguments["steps"],
        seed=arguments["seed"],
        measure=arguments["measure"],
        force=arguments["force"],
        on_step=lambda report: emit({"step": report.step, "loss": report.loss}),
    )
    measured = result.measurement
    return {
        "losses": list(result.losses),
        "step_times_s": list(result.step_times_s),
        "measurement": measured.model_dump(mode="json") if measured else None,
    }


def probe_rank(arguments: dict[str, Any], emit: Callable[[Any], None]) -> dict[str, Any]:
    """Measure the machine as one rank; see :func:`planner.cluster.probe`."""
    from executors.mesh import choose_device, process_group
    from planner.cluster.probe import probe_process_group

    device = choose_device(arguments["device"])
    with process_group(device, timeout_s=120.0):
        emit({"started": True})
        return probe_process_group(
            seconds=arguments["seconds"],
            seed=arguments["seed"],
            name=arguments["name"],
            date=arguments["date"],
        )


