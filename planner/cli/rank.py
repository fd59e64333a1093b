"""The work of each process that run, probe and verify start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from planner.schema import Federation, Plan

if TYPE_CHECKING:
    from executors.loop import Callback
    from executors.prepared import SchedulerFactory

__all__ = ["probe_rank", "train_member", "train_rank", "verify_ranks"]

#: Takes a message, any JSON value, for the launching process.
Emit = Callable[[Any], None]


def _scheduler(arguments: dict[str, Any]) -> SchedulerFactory | None:
    """Scheduler of the learning rate; None where it is constant."""
    from executors.learning_rates import learning_rate

    schedule = arguments.get("lr_schedule", "constant")
    warm_up = arguments.get("warm_up_steps", 0)
    if schedule == "constant" and not warm_up:
        return None
    return learning_rate(schedule, steps=arguments["steps"], warm_up_steps=warm_up)


def _callbacks(arguments: dict[str, Any]) -> list[Callback]:
    """Loggers and profiler that the command line asks for."""
    from executors.loop import ProfilerTrace, make_logger

    found = [
        make_logger(name, target)
        for name, target in arguments.get("loggers", {}).items()
    ]
    if arguments.get("profile"):
        found.append(ProfilerTrace(arguments["profile"], arguments["profile_dir"]))
    return found


def _of_member(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments with the files of one member: its own log, and folders of its name."""

    def own(kind: str, target: str) -> str:
        path = Path(target)
        if kind == "json":
            return str(path.with_name(f"{path.stem}-{name}{path.suffix}"))
        return target if kind == "wandb" else str(path / name)

    return {
        **arguments,
        "loggers": {
            kind: own(kind, target) for kind, target in arguments["loggers"].items()
        },
        "profile_dir": own("profile", arguments["profile_dir"]),
    }


def _model_fn(
    plan: Plan, ref: str, allow_remote_code: bool
) -> Callable[[], torch.nn.Module]:
    from planner.capture import load_model

    loaded = load_model(
        ref, seq_len=plan.workload.seq_len, allow_remote_code=allow_remote_code
    )
    return loaded.build


def train_rank(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train as one rank.

    Args:
        arguments: JSON values, from ``meshwright run``; ``plan_text`` goes before the
            file ``plan``, which other machines may not have.
        emit: Takes messages for the launching process.
    Returns:
        Losses, step times, the step that they begin with and, if asked for, the
        measurement and the check of the first step; JSON values.
    """
    from executors import run

    text = arguments.get("plan_text")
    plan = Plan.from_json(text) if text else Plan.load(arguments["plan"])
    result = run(
        plan,
        _model_fn(plan, arguments["model"], arguments["allow_remote_code"]),
        arguments["data"],
        steps=arguments["steps"],
        scheduler=_scheduler(arguments),
        eval_data=arguments.get("eval_data"),
        evaluate_every=arguments.get("evaluate_every"),
        document_separator=arguments.get("document_separator"),
        seed=arguments["seed"],
        device=arguments.get("device"),
        measure=arguments["measure"],
        force=arguments["force"],
        check_first_step=arguments.get("check_first_step", False),
        rank_timeout_s=arguments.get("rank_timeout_s", 60.0),
        check_replicas_every=arguments.get("check_replicas_every"),
        checkpoint_dir=arguments.get("checkpoint_dir"),
        checkpoint_every=arguments.get("checkpoint_every"),
        resume=arguments.get("resume", False),
        keep_checkpoints=arguments.get("keep_checkpoints", 2),
        background_checkpoints=arguments.get("background_checkpoints", False),
        init_from=arguments.get("init_from"),
        allow_missing_weights=arguments.get("allow_missing_weights", False),
        save_hf=arguments.get("save_hf"),
        save_dtype=arguments.get("save_dtype"),
        last_weights=arguments.get("last_weights", False),
        on_step=lambda report: emit({"step": report.step, "loss": report.loss}),
        callbacks=_callbacks(arguments),
        keep_best=arguments.get("keep_best", False),
        on_nonfinite=arguments.get("on_nonfinite", "stop"),
        stop_signals=arguments.get("signal", ()),
    )
    measured, checked = result.measurement, result.first_step_check
    return {
        "first_step": result.first_step,
        "losses": list(result.losses),
        "evaluations": [list(each) for each in result.evaluations],
        "step_times_s": list(result.step_times_s),
        "stopped": result.stopped,
        "skipped_steps": list(result.skipped_steps),
        "measurement": measured.to_data() if measured else None,
        "first_step_check": asdict(checked) if checked else None,
    }


def train_member(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Train as one process of a member of a federation.

    Args:
        arguments: JSON values, from ``meshwright run``.
        emit: Takes messages for the launching process.
    Returns:
        Results of the process, as JSON values; see
        :class:`executors.federation.FederationResult`.
    """
    from executors.federation import run_federation

    federation = Federation.from_json(arguments["federation"])
    plan = federation.members[0].plan
    # Of too many processes the run says more.
    member, _ = dict(enumerate(federation.processes)).get(
        int(os.environ.get("RANK", "0")), (0, 0)
    )
    own = _of_member(arguments, federation.members[member].name)
    result = run_federation(
        federation,
        _model_fn(plan, arguments["model"], arguments["allow_remote_code"]),
        arguments["data"],
        steps=arguments["steps"],
        seed=arguments["seed"],
        force=arguments["force"],
        rank_timeout_s=arguments["rank_timeout_s"],
        eval_data=arguments["eval_data"],
        evaluate_every=arguments["evaluate_every"],
        checkpoint_dir=arguments["checkpoint_dir"],
        checkpoint_every=arguments["checkpoint_every"],
        resume=arguments["resume"],
        keep_checkpoints=arguments["keep_checkpoints"],
        background_checkpoints=arguments["background_checkpoints"],
        init_from=arguments["init_from"],
        allow_missing_weights=arguments["allow_missing_weights"],
        save_hf=arguments["save_hf"],
        save_dtype=arguments["save_dtype"],
        scheduler=_scheduler(arguments),
        document_separator=arguments["document_separator"],
        check_replicas_every=arguments["check_replicas_every"],
        callbacks=_callbacks(own),
        on_nonfinite=arguments["on_nonfinite"],
        on_step=lambda report: emit({"step": report.step, "loss": report.loss}),
    )
    return asdict(result)


def probe_rank(arguments: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Measure the machine as one rank; see :func:`planner.cluster.probe`."""
    from executors.launching.process_group import process_group
    from executors.mesh import choose_device
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


def verify_ranks(arguments: dict[str, Any], emit: Emit) -> list[dict[str, Any]]:
    """Verify some ranks, in a process of their own.

    Args:
        arguments: JSON values, from ``meshwright verify``.
        emit: Takes the number of each rank that is done.

    Returns:
        A :class:`planner.schema.verification.RankVerification` a rank, as JSON data.
    """
    from executors.dryrun import dry_runs
    from planner.capture import load_model

    plan = Plan.from_json(arguments["plan"])
    loaded = load_model(arguments["model"], seq_len=plan.workload.seq_len)
    found = dry_runs(
        plan,
        loaded.build,
        arguments["ranks"],
        force=arguments["force"],
        every_microbatch=arguments["every_microbatch"],
        on_rank=lambda rank: emit(rank.rank),
    )
    return [rank.to_data() for rank in found]
