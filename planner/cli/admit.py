"""The command ``meshwright admit``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from planner.cli.options import OptionalFile, OutFile, SeqLen
from planner.cli.output import emit_json, emit_table, emit_text, note, working
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.schema.admission import (
    AdmissionDecision,
    ClusterState,
    JobRequest,
    Throughputs,
)
from planner.schema.base import require_writable

__all__ = ["AdmitCommand", "print_decision", "read_presets"]

Presets = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="DEVICE=PRESET",
        help="Take throughputs from plans, for hosts such as those of a cluster "
        "preset; once for each device type.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class AdmitCommand:
    """Decide whether a shared cluster can promise a job its deadline."""

    job: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="JOB")]
    """A job file, YAML or JSON."""
    cluster_state: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """State of the cluster, JSON or YAML."""
    throughputs: OptionalFile = None
    """Throughputs: a CSV table, or JSON; by default those of the state."""
    plan_on: Presets = ()
    plans: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "plans"
    """Folder that --plan-on writes its plans to."""
    seq_len: SeqLen = None
    partitioner: Annotated[str, tyro.conf.arg(metavar="NAME")] = "auto"
    """Partitioner of --plan-on."""
    prefer: Literal["room", "finish"] = "room"
    """Give the job the fewest device-seconds, or the shape with which it ends first."""
    out: OutFile = None
    """File for the decision."""
    json: bool = False
    """Print the decision as JSON."""

    def run(self) -> None:
        """Decide, print, write.

        Raises:
            NoFeasiblePlanError: If the job is declined, after the decision is printed.
            StrategyError: If throughputs come from two sources.
        """
        from planner.admission import admit
        from planner.admission.throughputs import load_job, load_state

        if self.out is not None:
            require_writable(self.out)
        job, state = load_job(self.job), load_state(self.cluster_state)
        throughputs = self._throughputs(job, state)
        with working(f"looking for a schedule with {job.name}"):
            made = admit(job, state, throughputs=throughputs, prefer=self.prefer)
        if self.out is not None:
            made.save(self.out)
            note(f"wrote {self.out}")
        if self.json:
            emit_json(made.to_data())
        else:
            print_decision(made)
        if not made.admitted:
            raise NoFeasiblePlanError((f"{job.name} is declined",))

    def _throughputs(self, job: JobRequest, state: ClusterState) -> Throughputs | None:
        from planner.admission.throughputs import load_throughputs, throughputs_of_plans

        if self.throughputs is not None and self.plan_on:
            raise StrategyError(
                "--throughputs and --plan-on are two sources of throughputs; a "
                "decision takes one, leave one out"
            )
        if self.throughputs is not None:
            return load_throughputs(self.throughputs)
        if not self.plan_on:
            return None
        jobs = (job, *(each.request for each in state.jobs))
        presets = read_presets(self.plan_on)
        options = {"partitioner": self.partitioner, "seq_len": self.seq_len}
        with working("planning every shape of the cluster"):
            return throughputs_of_plans(state, jobs, presets, self.plans, **options)


def read_presets(texts: tuple[str, ...]) -> Mapping[str, str]:
    """Read ``a100=dgx-a100``.

    Raises:
        StrategyError: If a text is written otherwise, or a type is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        device, _, preset = (part.strip() for part in text.partition("="))
        if not device or not preset or device in found:
            raise StrategyError(
                f"--plan-on {text!r}; write DEVICE=PRESET once for each device type, "
                f"for example a100=dgx-a100"
            )
        found[device] = preset
    return found


def print_decision(made: AdmissionDecision) -> None:
    """Print a decision for people."""
    verdict = "admitted" if made.admitted else "declined"
    if not made.admitted and made.proven:
        verdict = "declined, and no schedule could meet the deadline"
    for reason in made.reasons:
        emit_text(f"{made.job}: {verdict}: {reason}")
    if made.promise is not None:
        promise = made.promise
        emit_text(
            f"promised: ends by {promise.deadline_s:.10g} s, expected "
            f"{promise.finish_s:.10g} s"
        )
    for job, why in made.broken.items():
        emit_text(f"{job}: its promise cannot be kept: {why}")
    given = None if made.job is None else made.reservation(made.job)
    if made.admitted and given is not None and given.segments:
        rows = [
            (
                f"{each.start_s:.10g}",
                f"{each.end_s:.10g}",
                f"{each.degree} {each.device}",
                _devices(each.devices),
                each.plan or "",
            )
            for each in given.segments
        ]
        emit_table(("from s", "to s", "devices", "hosts", "plan"), rows)
    if made.changes:
        emit_table(
            ("change at s", "job", "", "from", "to", "reason"),
            [
                (
                    f"{each.at_s:.10g}",
                    each.job,
                    each.kind,
                    _devices(each.before),
                    _devices(each.after),
                    each.reason,
                )
                for each in made.changes
            ],
        )
    emit_text(f"throughputs: {made.source} ({made.origin})")


def _devices(devices: Mapping[str, int]) -> str:
    return " ".join(f"{host}:{count}" for host, count in devices.items()) or "none"
