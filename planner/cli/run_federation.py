"""``meshwright run`` by a federation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from planner.cli.options import model_of_plan
from planner.cli.output import emit_json, emit_table, emit_text, note, tell_of_run
from planner.errors import CaptureError, ExecutionError
from planner.reading import read_bytes
from planner.schema import Federation, Plan
from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.cli.run import RunCommand

__all__ = ["load_plan", "run_federation"]

#: Says in a file that it is a federation; no part of a plan is of this kind.
_KIND = re.compile(rb'"kind"\s*:\s*"federation"')


def load_plan(path: str) -> Plan | Federation:
    """Read a plan or a federation, whichever the file holds.

    Raises:
        PlanFileError: If it is neither.
    """
    text = read_bytes(path, Plan.KIND, pipe=True)
    if _KIND.search(text):
        return Federation.from_json(text, where=path)
    return Plan.from_json(text, where=path)


def run_federation(
    options: RunCommand,
    federation: Federation,
    *,
    check_cluster: Callable[[Any], None],
    progress: AbstractContextManager[Callable[[int, Any], None]],
) -> None:
    """Train by a federation, in processes of this machine or as one of its own.

    Args:
        options: Of the command.
        federation: What to do.
        check_cluster: Refuses a fleet that is not this machine.
        progress: Shows steps while it is open.
    """
    arguments = _arguments(options, federation)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if launched:
        from planner.cli.rank import train_member

        result = train_member(arguments, lambda _: None)
        if os.environ["RANK"] == "0":
            _report(options, federation, [result])
        return
    if not options.force:
        check_cluster(federation.cluster)
    from executors import launch

    processes = len(federation.processes)
    note(f"starting {processes} processes of {_members(federation)}")
    with progress as heard:
        results = launch(
            "planner.cli.rank:train_member",
            arguments,
            processes=processes,
            on_message=heard,
            on_failure="continue" if federation.exchange.fewest_copies else "stop",
            max_restarts=options.max_restarts,
        )
    _report(options, federation, results)


def _members(federation: Federation) -> str:
    count = len(federation.members)
    return f"{count} member{'s' if count > 1 else ''}"


def _arguments(options: RunCommand, federation: Federation) -> dict[str, Any]:
    """Arguments of each process; mistakes that are known before are refused.

    Raises:
        ExecutionError: If an option does not go with a federation.
        CaptureError: If code may run, and no model is named.
        PlanFileError: If the plans name no model.
    """
    _require_options(options)
    if options.steps < 1:
        raise ExecutionError(f"--steps {options.steps}; a run has at least 1 step")
    if not options.rank_timeout_s > 0:
        raise ExecutionError(
            f"--rank-timeout-s {options.rank_timeout_s:g}; give a number above 0"
        )
    continues = federation.exchange.fewest_copies > 0
    if options.max_restarts < 0 or (options.max_restarts and not continues):
        raise ExecutionError(
            f"--max-restarts {options.max_restarts}, but the run stops when a member "
            f"fails; federate with --exchange local_steps:on_failure=continue, or "
            f"drop it"
        )
    for member in federation.members:
        if member.plan.not_runnable:
            raise ExecutionError(
                f"{member.name} cannot be run: {member.plan.not_runnable[0]}"
            )
    _check_steps(options, federation)
    plan = federation.members[0].plan
    tell_of_run(plan)
    ref = model_of_plan(plan, options.plan, options.model)
    if options.allow_remote_code and options.model is None:
        raise CaptureError(
            f"--allow-remote-code without --model; name whose code may run: "
            f"--model {ref}"
        )
    for file in (options.data, options.eval_data):
        if file is not None:
            from executors.data import require_data

            require_data(file, plan.workload)
    return {
        "federation": federation.to_json(),
        "model": ref,
        "data": str(Path(options.data).absolute()) if options.data else None,
        "steps": options.steps,
        "seed": options.seed,
        "force": options.force,
        "allow_remote_code": options.allow_remote_code,
        "rank_timeout_s": options.rank_timeout_s,
        **options.checkpoints(),
        **options.weights(),
        **options.evaluation(),
        **_loop(options),
    }


def _require_options(options: RunCommand) -> None:
    """Refuse options of a plan's run that members which train apart cannot have.

    Raises:
        ExecutionError: If one is given.
    """
    for flag, given, remedy in (
        ("--on", options.on != "local", "start each process where it belongs"),
        ("--measure", options.measure, "measure a member's own plan"),
        ("--measurement", options.measurement, "measure a member's own plan"),
        ("--check-first-step", options.check_first_step, "check a member's own plan"),
        (
            "--signal",
            options.signal,
            "one that ends behind a step of its own leaves the others waiting at the "
            "exchange: leave it out, and resume from the last checkpoint",
        ),
        (
            "--keep-best",
            options.keep_best,
            "each evaluates its own samples, and would keep another step: leave it out",
        ),
        ("--last-weights", options.last_weights, "leave it out"),
    ):
        if given:
            raise ExecutionError(
                f"{flag} with the federation {options.plan}, whose members train "
                f"apart; {remedy}"
            )


def _loop(options: RunCommand) -> dict[str, Any]:
    """Options of the loop of each member; mistakes are refused.

    Raises:
        ExecutionError: If one is wrong, or a library is not installed.
    """
    from executors.learning_rates import learning_rate

    learning_rate(
        options.lr_schedule, steps=options.steps, warm_up_steps=options.warm_up_steps
    )
    every = options.check_replicas_every
    if every is not None and every < 1:
        raise ExecutionError(
            f"--check-replicas-every {every}; give a number of at least 1"
        )
    return {
        "lr_schedule": options.lr_schedule,
        "warm_up_steps": options.warm_up_steps,
        "document_separator": options.document_separator,
        "check_replicas_every": every,
        **options.loop(),
    }


def _check_steps(options: RunCommand, federation: Federation) -> None:
    """Refuse steps behind which members are not equal, before a process is started.

    Raises:
        ExecutionError: If evaluations or checkpoints would fall between exchanges.
    """
    from executors.federation import require_exchange

    require_exchange(federation, "--evaluate-every", options.evaluate_every)
    if options.checkpoint_dir is not None:
        every = options.checkpoint_every
        require_exchange(federation, "--checkpoint-every", every)
        require_exchange(federation, "--steps", options.steps, "with checkpoints")


def _report(
    options: RunCommand,
    federation: Federation,
    results: Sequence[Mapping[str, Any] | None],
) -> None:
    """Print losses, times and bytes of each member, beside the predicted ones."""
    by_member = [
        [one for one in results if one is not None and one["member"] == number]
        for number in range(len(federation.members))
    ]
    found = [
        _of_member(federation, number, mine, options.steps)
        for number, mine in enumerate(by_member)
    ]
    evaluations = _evaluations(federation, by_member)
    if options.json:
        emit_json({"members": found, "evaluations": evaluations})
        return
    there = [
        (member.plan.workload.global_batch, one["losses"])
        for member, one in zip(federation.members, found, strict=True)
        if one["losses"]
    ]
    if not there:
        emit_text(f"nothing to do: {options.steps} steps were done before")
        return
    total = sum(size for size, _ in there)
    first = sum(size * losses[0] for size, losses in there) / total
    last = sum(size * losses[-1] for size, losses in there) / total
    emit_text(
        f"loss {first:.4f} -> {last:.4f} in {options.steps} steps on "
        f"{len(federation.processes)} processes of {_members(federation)}"
    )
    for step, loss in evaluations:
        emit_text(f"evaluation after step {step}: loss {loss:.4f}")
    emit_table(
        ("", "loss", "step", "predicted", "exchange", "predicted", "sent", "predicted"),
        [_cells(federation, number, one) for number, one in enumerate(found)],
        numbers=True,
    )


def _evaluations(
    federation: Federation, by_member: Sequence[Sequence[Mapping[str, Any]]]
) -> list[tuple[int, float]]:
    """Mean losses over the members that were there, by their samples."""
    sums: dict[int, tuple[float, int]] = {}
    for member, mine in zip(federation.members, by_member, strict=True):
        size = member.plan.workload.global_batch
        for step, loss in mine[0]["evaluations"] if mine else ():
            total, samples = sums.get(step, (0.0, 0))
            sums[step] = (total + size * loss, samples + size)
    return [(step, total / samples) for step, (total, samples) in sorted(sums.items())]


def _of_member(
    federation: Federation, number: int, mine: Sequence[Mapping[str, Any]], steps: int
) -> dict[str, Any]:
    """Results of a member's processes as one."""
    name = federation.members[number].name
    if not mine:
        return {"name": name, "losses": [], "first_step": None}
    one = mine[0]
    times, period = one["step_times_s"], federation.exchange.period
    plain = [
        seconds
        for step, seconds in enumerate(times, one["first_step"])
        if len(federation.members) == 1 or ((step + 1) % period and step + 1 != steps)
    ]
    exchanges = one["exchange_times_s"]
    return {
        "name": name,
        "first_step": one["first_step"],
        "losses": list(one["losses"]),
        "step_time_s": median(plain) if plain else None,
        "exchange_time_s": median(exchanges) if exchanges else None,
        "sent_bytes": max(each["sent_bytes"] for each in mine) / max(len(exchanges), 1),
    }


def _cells(
    federation: Federation, number: int, found: Mapping[str, Any]
) -> tuple[str, ...]:
    prediction = federation.prediction
    predicted = (
        format_seconds(prediction.member_step_times_s[number]),
        format_seconds(prediction.exchange_time_s),
        format_bytes(prediction.exchange_bytes[number]),
    )
    if not found["losses"]:
        lost = "was lost" if found["first_step"] is None else "joined last"
        return (
            found["name"],
            lost,
            "",
            predicted[0],
            "",
            predicted[1],
            "",
            predicted[2],
        )
    step, exchange = found["step_time_s"], found["exchange_time_s"]
    return (
        found["name"],
        f"{found['losses'][-1]:.4f}",
        format_seconds(step) if step is not None else "",
        predicted[0],
        format_seconds(exchange) if exchange is not None else "",
        predicted[1],
        format_bytes(found["sent_bytes"]),
        predicted[2],
    )
