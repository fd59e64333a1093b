"""SLURM as a queue: ``sinfo``, ``squeue``, ``sbatch``, ``scancel`` and ``scontrol``.

A job that changes its devices is cancelled and submitted anew. ``scontrol update`` only
takes whole nodes from a running job, never gives any, and never changes the script,
which has the number of devices and the plan; and a requeued job waits for two minutes
and loses its log. What ``scontrol update`` writes is the promise, as the comment of the
job, and a longer time limit.

Seen with SLURM 22.05 and with records of 23.02 and 24.11, whose JSON differs.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from planner.admission.queues.base import (
    ANSWER_S,
    Cause,
    Command,
    Entry,
    Launch,
    NoAnswerError,
    QueueError,
    Snapshot,
    Status,
    answer,
    as_json,
    field_of,
)
from planner.schema.admission import StateHost

__all__ = [
    "SlurmQueue",
    "expand_hosts",
    "launch_command",
    "read_slurm",
    "update_command",
]

#: ``gpu:a100:8(S:0-1)``, ``gpu:8`` and ``gpu:a100:2(IDX:0-1)``.
_GPU = re.compile(r"gpu(?::(?P<type>[^:(,]+))?:(?P<count>\d+)(?:\([^)]*\))?")
_RANGE = re.compile(r"(?P<head>[^\[]*)\[(?P<list>[^\]]*)\](?P<tail>.*)")
#: States of a node in which it takes no new job.
_UNUSABLE = frozenset(
    (
        *("DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING"),
        *("FUTURE", "INVAL", "INVALID_REG", "MAINT", "NOT_RESPONDING", "POWERED_DOWN"),
        *("POWERING_DOWN", "REBOOT_ISSUED", "UNKNOWN"),
    )
)
#: States of a job.
_STATUS: Mapping[str, Status] = {
    **dict.fromkeys(
        ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"),
        "pending",
    ),
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING"),
        "running",
    ),
    "STAGE_OUT": "running",
    "COMPLETED": "done",
    **dict.fromkeys(
        (
            *("FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
            *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REVOKED", "LAUNCH_FAILED"),
        ),
        "failed",
    ),
}
#: Ends of a job that its command is not to blame for.
_CAUSES: Mapping[str, Cause] = {
    "TIMEOUT": "limit",
    "NODE_FAIL": "host",
    "BOOT_FAIL": "host",
}
#: Answers about jobs that have ended.
_ENDED = ("Invalid job id", "already finished", "already completing or completed")
#: Comments of launches begin so; other comments were given with ``--sbatch comment=``.
_NOTE = "meshwright"
#: The first that a job has decides: one that completes still holds its devices.
_ORDER = ("COMPLETING", "STAGE_OUT")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmQueue:
    """SLURM, by its commands.

    Attributes:
        claims: Folder that all nodes see. A launch makes a folder in it, by which it
            runs once even if it is submitted twice.
        options: Further options of sbatch, with their dashes.
        names: Type that SLURM gives devices to the name that throughputs have.
        answer_s: Time that a command may take.
    """

    claims: str
    options: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    answer_s: float = ANSWER_S

    @property
    def name(self) -> str:
        """Name of the kind of queue."""
        return "slurm"

    def read(self) -> Snapshot:
        """Return nodes with GPUs, and jobs."""
        nodes = answer(Command(words=("sinfo", "--json")), self.answer_s)
        words = ("squeue", "--json", "--states=all")
        jobs = answer(Command(words=words), self.answer_s)
        return read_slurm(
            as_json(nodes, "sinfo --json"), as_json(jobs, "squeue --json"), self.names
        )

    def launch(self, launch: Launch) -> str:
        """Submit a launch with sbatch; return the number of the job."""
        types = {ours: theirs for theirs, ours in self.names.items()}
        command = launch_command(launch, self.claims, self.options, types)
        # With several clusters: number;cluster.
        said = answer(command, self.answer_s).strip().partition(";")[0]
        if not said.isdigit():
            raise QueueError(
                f"sbatch answered {said[:60]!r}, which is no job's number; the next "
                f"look finds out whether it launched {launch.name}"
            )
        return said

    def stop(self, entry: str) -> None:
        """Cancel a job: SIGTERM, and SIGKILL after KillWait of slurm.conf."""
        _unless_ended(Command(words=("scancel", entry)), self.answer_s)

    def write_note(self, entry: str, text: str) -> None:
        """Write the comment of a job."""
        _unless_ended(update_command(entry, "Comment", text), self.answer_s)

    def extend(self, entry: Entry, until_s: float) -> None:
        """Raise the time limit of a job, which takes an operator of SLURM."""
        assert entry.start_s is not None
        minutes = math.ceil((until_s - entry.start_s) / 60.0)
        try:
            command = update_command(entry.id, "TimeLimit", str(minutes))
            _unless_ended(command, self.answer_s)
        except NoAnswerError:
            raise
        except QueueError as error:
            raise QueueError(
                f"job {entry.id} has to run for {minutes} minutes and SLURM ends it "
                f"before; give --sbatch time={minutes}, or serve as a user that may "
                f"raise time limits: {error}"
            ) from error

    def revoke(self, launch: str) -> None:
        """Make the folder by which the launch would claim to run."""
        try:
            (Path(self.claims) / launch).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QueueError(
                f"cannot write {self.claims}: {error.strerror}; nothing is done"
            ) from error


def read_slurm(
    nodes: Any, jobs: Any, names: Mapping[str, str] | None = None
) -> Snapshot:
    """Read answers of ``sinfo --json`` and ``squeue --json``.

    Args:
        nodes: The one.
        jobs: The other.
        names: Type that SLURM gives devices to the name that throughputs have.

    Raises:
        QueueError: If a field is missing, or a node has two types of GPUs.
    """
    for what, found in (("sinfo", nodes), ("squeue", jobs)):
        if found.get("errors"):
            raise QueueError(f"{what} --json reports {found['errors'][0]}")
    entries = tuple(map(_entry, field_of(jobs, "squeue --json", "jobs")))
    held: dict[str, int] = {}
    for entry in entries:
        for host, count in entry.devices.items():
            held[host] = held.get(host, 0) + count
    hosts: dict[str, StateHost] = {}
    for host, gres, states in _nodes(nodes):
        types, count = _gpus(gres)
        if not count:
            continue
        if len(types) > 1:
            raise QueueError(
                f"node {host} has GPUs of types {', '.join(sorted(types))}; give its "
                f"GPUs one type in gres.conf"
            )
        device = next(iter(types))
        # Jobs on a node that is being drained keep their devices.
        down = count - held.get(host, 0) if states & _UNUSABLE else 0
        hosts[host] = StateHost(
            name=host,
            device=(names or {}).get(device, device),
            devices=count,
            down=max(0, down),
        )
    if not hosts:
        raise QueueError(
            "sinfo --json names no node with GPUs; see Gres in slurm.conf, and "
            "GresTypes=gpu"
        )
    kept = tuple(entry for entry in entries if entry.ours or entry.devices)
    return Snapshot(hosts=tuple(hosts.values()), entries=kept)


def _nodes(data: Any) -> Iterator[tuple[str, str, set[str]]]:
    """Name, generic resources and states of each node."""
    for each in data.get("nodes", ()) if "sinfo" not in data else ():
        states = {*_texts(each.get("state")), *_texts(each.get("state_flags"))}
        yield field_of(each, "sinfo --json", "name"), each.get("gres") or "", states
    for each in data.get("sinfo", ()):
        states = set(_texts(field_of(each, "sinfo --json", "node", "state")))
        gres = field_of(each, "sinfo --json", "gres", "total")
        for host in field_of(each, "sinfo --json", "nodes", "nodes"):
            yield host, gres or "", states


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(each).upper() for each in values if each]


def _gpus(gres: str) -> tuple[set[str], int]:
    found = list(_GPU.finditer(gres))
    types = {each["type"] or "gpu" for each in found}
    return types, sum(int(each["count"]) for each in found)


def _number(value: Any) -> float | None:
    """Read a number: plain, or as ``{"set": …, "infinite": …, "number": …}``."""
    if isinstance(value, Mapping):
        if not value.get("set", False) or value.get("infinite", False):
            return None
        value = value.get("number")
    return float(value) if isinstance(value, int | float) else None


def _entry(job: Any) -> Entry:
    where = "squeue --json"
    number = str(field_of(job, where, "job_id"))
    states = _texts(field_of(job, where, "job_state"))
    states.sort(key=lambda state: state not in _ORDER)
    if not states or states[0] not in _STATUS:
        raise QueueError(
            f"job {number} has state {states}, which is not known here; nothing is done"
        )
    status = _STATUS[states[0]]
    start = _number(job.get("start_time"))
    limit = _number(job.get("time_limit"))
    running = status == "running"
    # Without a limit, SLURM writes an end in a year.
    until = start + 60.0 * limit if start is not None and limit else None
    comment = str(job.get("comment") or "")
    return Entry(
        id=number,
        name=str(job.get("name") or ""),
        status=status,
        devices=_devices(job, number) if running else {},
        start_s=start if running else None,
        until_s=until if running else None,
        cause=next((_CAUSES[each] for each in states if each in _CAUSES), None),
        note=comment if comment.startswith(_NOTE) else None,
    )


def _devices(job: Any, number: str) -> dict[str, int]:
    hosts = expand_hosts(str(job.get("nodes") or ""))
    counts = [_gpus(text)[1] for text in job.get("gres_detail") or ()]
    if not counts:
        return {}
    if len(counts) != len(hosts):
        raise QueueError(
            f"job {number} has GPUs on {len(counts)} nodes and runs on {len(hosts)}; "
            f"nothing is done till squeue agrees with itself"
        )
    return {host: count for host, count in zip(hosts, counts, strict=True) if count}


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of ``node[01-03,7],login``.

    Raises:
        QueueError: If it is no list of hosts.
    """
    found: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        match = _RANGE.fullmatch(part)
        if not match:
            found += [part] if part else []
            continue
        for piece in match["list"].split(","):
            first, _, last = piece.partition("-")
            last = last or first
            if not (first.isdigit() and last.isdigit()):
                raise QueueError(f"{text!r} is no list of hosts")
            for at in range(int(first), int(last) + 1):
                tails = expand_hosts(match["tail"]) or [""]
                found += [f"{match['head']}{at:0{len(first)}d}{t}" for t in tails]
    return found


def launch_command(
    launch: Launch,
    claims: str,
    options: Sequence[str] = (),
    types: Mapping[str, str] | None = None,
) -> Command:
    """Return the sbatch command of a launch; its script is read from stdin.

    Args:
        launch: The launch.
        claims: Folder of claims.
        options: Further options of sbatch.
        types: Name of devices to the type that SLURM gives them.
    """
    device = (types or {}).get(launch.device, launch.device)
    kind = "" if device == "gpu" else f"{device}:"
    counts = set(launch.devices.values())
    gpus = (
        f"--gpus-per-node={kind}{next(iter(counts))}"
        if len(counts) == 1
        else f"--gpus={kind}{launch.degree}"
    )
    words = [
        "sbatch",
        "--parsable",
        f"--job-name={launch.name}",
        f"--comment={_NOTE}",
        "--no-requeue",
        f"--nodes={len(launch.devices)}",
        f"--nodelist={','.join(launch.devices)}",
        gpus,
    ]
    if launch.after is not None:
        words.append(f"--dependency=afterany:{launch.after}")
    return Command(words=(*words, *options), stdin=_script(launch, claims))


def _script(launch: Launch, claims: str) -> str:
    claim = shlex.quote(f"{claims}/{launch.name}")
    command = shlex.join(launch.words)
    if len(launch.devices) > 1:
        command = f"srun --kill-on-bad-exit=1 --ntasks-per-node=1 {command}"
    return (
        "#!/bin/bash\n"
        f"# Whoever makes this folder runs; a second submission ends here.\n"
        f"mkdir -p {shlex.quote(claims)} || exit 1\n"
        f"mkdir {claim} || exit 83\n"
        f'echo "$SLURM_JOB_ID" > {claim}/job\n'
        f"exec {command}\n"
    )


def update_command(entry: str, field: str, value: str) -> Command:
    """Return the scontrol command that changes a field of a job."""
    return Command(words=("scontrol", "update", f"JobId={entry}", f"{field}={value}"))


def _unless_ended(command: Command, answer_s: float) -> None:
    """Run a command on a job that may have ended by now."""
    try:
        answer(command, answer_s)
    except QueueError as error:
        if not any(text in str(error) for text in _ENDED):
            raise
