"""Training that is disturbed, and resumed to the curve of the undisturbed run.

python -m benchmarks.faults [--runs 100] [--seed 0] [--workers 2] [--kind NAME ...]

A run draws the plan and the time of the fault. ``meshwright run`` trains a small
decoder by it for 12 steps with a checkpoint every 2, is disturbed, and is started again
with ``--resume``. It passes if

- the disturbed command ends by itself, with one line that names what was wrong;
- none of its processes is left, and after the resumed run no temporary file;
- the resumed run begins at the last or last but one checkpoint, and its losses are
  those of the undisturbed run: bit for bit under the same plan, to a relative 1e-5
  under a plan made anew for fewer devices and for three replicas of DDP.

A full disk is a tmpfs of a few hundred kilobytes where this process may mount one, and
a limit on the size of files (RLIMIT_FSIZE) elsewhere.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.fault_processes import Ended, Started, free_port, rank_places
from benchmarks.tables import aligned
from executors.checkpoints.folder import CheckpointFolder, damage
from planner import Cluster, plan
from planner.capture import capture, load_model
from planner.graph import ModelGraph
from planner.schema import Plan, Precision

__all__ = ["KINDS", "MESHES", "main"]

STEPS, EVERY = 12, 2
#: Silence after which a rank is missing, in seconds: ranks start within this time of
#: each other on a busy machine.
RANK_TIMEOUT_S = 15
_MODEL = "benchmarks.fault_model:decoder"
#: Relative difference that another order of additions may make.
_RTOL = 1e-5
#: Plans whose resumed losses are not equal to the bit: DDP sorts its buckets after the
#: first step of a process, and gloo adds three and more summands in an order that
#: depends on their places in the bucket (torch 2.13).
_REORDERED = {"ddp of 3"}

#: Plans by the number of their processes.
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero3": (2, {"dp_shard": 2, "zero_stage": 3, "num_microbatches": 1}),
    "ddp": (2, {"dp_replicate": 2, "num_microbatches": 2}),
    "tp": (2, {"tp": 2, "num_microbatches": 1}),
    "pp": (2, {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}),
    "ddp of 3": (3, {"dp_replicate": 3, "num_microbatches": 1}),
    "zero3 x tp": (4, {"dp_shard": 2, "zero_stage": 3, "tp": 2, "num_microbatches": 1}),
    "pp x zero1": (4, {"pp": 2, "dp_shard": 2, "zero_stage": 1, "num_microbatches": 2}),
}


class FaultError(Exception):
    """A run did not do what it has to."""


class MissedError(Exception):
    """The disturbed command ended well before the fault reached it."""


@functools.cache
def _graph() -> ModelGraph:
    return capture(load_model(_MODEL), dtype="float32")


_PLANNING = threading.Lock()


def make_plan(world: int, pins: Mapping[str, Any]) -> Plan:
    """Plan the small decoder for processes of this machine."""
    with _PLANNING:
        made: Plan = plan(
            _graph(),
            Cluster.detect(processes=world),
            global_batch=12,
            pin=dict(pins),
            precision=Precision(compute="float32"),
            certify=False,
        )
    return made


@dataclass(kw_only=True)
class Trial:
    """One run: what it draws, and what it found.

    Attributes:
        chance: Source of all draws.
        folder: Of its own.
        mesh: Name of the plan.
        background: Whether checkpoints are written while training goes on.
    """

    chance: random.Random
    folder: Path
    mesh: str
    background: bool
    orphans: int = 0
    missed: int = 0
    fault_s: float = math.nan
    said: str = ""
    events: list[str] = field(default_factory=list)

    @property
    def world(self) -> int:
        """Processes of the plan."""
        return MESHES[self.mesh][0]

    @property
    def kept(self) -> Path:
        """Folder of checkpoints."""
        return self.folder / "kept"

    def words(self, plan_file: Path, *more: str) -> list[str]:
        """A command that trains."""
        background = ["--background-checkpoints"] if self.background else []
        return [
            *("run", str(plan_file), "--model", _MODEL, "--steps", str(STEPS)),
            *("--checkpoint-dir", str(self.kept), "--checkpoint-every", str(EVERY)),
            *("--rank-timeout-s", str(RANK_TIMEOUT_S), *background, *more),
        ]

    def end(self, started: Started) -> list[Ended]:
        """Wait for a command's end and count what it leaves."""
        ended = started.end()
        self.orphans += sum(one.orphans for one in ended)
        for one in ended:
            if one.hung:
                raise FaultError(f"a command hung: {one.lines[-3:]}")
            if one.traceback:
                raise FaultError(f"a traceback: {one.lines[-3:]}")
        return ended

    def fail(
        self, started: Started, pattern: str, codes: tuple[int, ...] = (1,)
    ) -> str:
        """Require that every process of a command ends with a certain line."""
        ended = self.end(started)
        if started.fault_at is not None and all(one.code == 0 for one in ended):
            raise MissedError
        for one in ended:
            if one.code not in codes:
                raise FaultError(f"exit code {one.code}, not {codes}: {one.lines[-3:]}")
            if re.search(pattern, one.error) is None:
                raise FaultError(f"no /{pattern}/ in {one.lines[-3:]}")
            self.fault_s, self.said = one.took_s, one.error
        return self.said


def _plan_file(where: Path, mesh: str) -> Path:
    return where / f"{mesh.replace(' ', '-')}.json"


@dataclass(kw_only=True)
class Curves:
    """Plans and losses of undisturbed runs, each made once."""

    folder: Path
    _losses: dict[str, list[float]] = field(default_factory=dict)
    _locks: dict[str, threading.Lock] = field(
        default_factory=lambda: {mesh: threading.Lock() for mesh in MESHES}
    )

    def of(self, mesh: str) -> tuple[Path, list[float]]:
        """Plan file and losses under a plan."""
        path = _plan_file(self.folder, mesh)
        with self._locks[mesh]:
            if mesh not in self._losses:
                make_plan(*MESHES[mesh]).save(path)
                words = [
                    *("run", str(path), "--model", _MODEL),
                    *("--steps", str(STEPS), "--json"),
                ]
                (ended,) = Started(words=words).end()
                if ended.code:
                    raise FaultError(f"the undisturbed run failed: {ended.lines[-3:]}")
                self._losses[mesh] = json.loads(ended.out)["losses"]
        return path, self._losses[mesh]


def _start(trial: Trial, plan_file: Path) -> Started:
    return Started(words=trial.words(plan_file))


def _at_a_random_time(trial: Trial, started: Started) -> list[psutil.Process]:
    """Wait for a random time; ranks that run then."""
    ranks = started.wait_for_ranks(trial.world)
    if trial.chance.random() < 0.2:
        time.sleep(trial.chance.uniform(0.0, 5.0))
    else:
        step = trial.chance.randrange(1, STEPS - 4)
        if not started.wait_for_step(step):
            raise FaultError(f"it ended before step {step}: {started.lines[0][-3:]}")
        time.sleep(trial.chance.uniform(0.0, 0.2))
    if not started.running:
        trial.end(started)
        raise MissedError
    started.fault()
    return ranks


def kill_ranks(trial: Trial, plan_file: Path) -> None:
    """Kill -9 of one or more random ranks."""
    started = _start(trial, plan_file)
    ranks = _at_a_random_time(trial, started)
    for rank in trial.chance.sample(ranks, trial.chance.randrange(1, trial.world + 1)):
        with contextlib.suppress(psutil.NoSuchProcess):
            rank.kill()
    trial.fail(started, rf"rank \d of {trial.world} was killed by SIGKILL; the other")


def kill_launcher(trial: Trial, plan_file: Path) -> None:
    """Kill -9 of the command itself."""
    started = _start(trial, plan_file)
    _at_a_random_time(trial, started)
    started.processes[0].kill()
    (ended,) = trial.end(started)
    trial.fault_s = ended.took_s


def sigterm(trial: Trial, plan_file: Path) -> None:
    """SIGTERM of the command, as a scheduler sends it."""
    started = _start(trial, plan_file)
    _at_a_random_time(trial, started)
    started.processes[0].terminate()
    trial.fail(started, "", (128 + signal.SIGTERM,))


def stop_rank(trial: Trial, plan_file: Path) -> None:
    """SIGSTOP of a random rank: it lives and does nothing."""
    started = _start(trial, plan_file)
    rank = trial.chance.choice(_at_a_random_time(trial, started))
    rank.suspend()
    trial.fail(
        started, rf"rank \d of {trial.world} (gave no sign|did not (start|answer))"
    )


def missing_rank(trial: Trial, plan_file: Path) -> None:
    """One rank is never started, by a launcher that does not notice."""
    places = rank_places(trial.world, free_port())
    gone = trial.chance.randrange(trial.world)
    del places[gone]
    started = Started(words=trial.words(plan_file), places=places)
    trial.fail(started, rf"^rank {gone} of {trial.world} did not (start|answer)")


def port_in_use(trial: Trial, plan_file: Path) -> None:
    """Another program listens at MASTER_PORT."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        places = rank_places(trial.world, port)
        started = Started(words=trial.words(plan_file), places=places)
        said = (
            rf"^rank 0 (cannot listen at|of {trial.world} did not answer at) .*:{port}"
        )
        trial.fail(started, said)


def full_disk(trial: Trial, plan_file: Path) -> None:
    """The disk is full in the middle of a checkpoint."""
    with _small_disk(trial) as fill:
        started = _start(trial, plan_file)
        fill(started)
        trial.fail(started, r"cannot write .*(No space left|File too large).*make room")
    left = [path.name for path in trial.kept.glob("*.tmp")]
    if left:
        raise FaultError(f"the disk is full of {left}")


def corrupt(trial: Trial, plan_file: Path) -> None:
    """A file of the latest checkpoint is damaged; the one before is named."""
    started = _start(trial, plan_file)
    _at_a_random_time(trial, started)
    folder = CheckpointFolder(trial.kept)
    while started.running and len(folder.steps()) < 2:
        time.sleep(0.01)
    started.processes[0].kill()
    trial.end(started)
    if len(folder.steps()) < 2:
        raise FaultError(f"two checkpoints were to be there, not {folder.steps()}")
    latest = folder.choose(True)
    assert latest is not None
    how = _damage(trial.chance, trial.kept / latest)
    again = Started(words=trial.words(plan_file, "--resume"))
    said = trial.fail(again, r"(damaged|missing|cannot read).*; resume from step-\d+ ")
    trial.events.append(f"{how}: {said}")
    match = re.search(r"--resume (step-\d+)", said)
    assert match is not None
    trial.events.append(match[1])


def _damage(chance: random.Random, folder: Path) -> str:
    path = chance.choice(sorted(path for path in folder.iterdir()))
    content = bytearray(path.read_bytes())
    how = chance.choice(["flipped", "truncated", "deleted"])
    if how == "deleted":
        path.unlink()
    else:
        at = chance.randrange(len(content))
        content[at] ^= 1 << chance.randrange(8)
        path.write_bytes(content if how == "flipped" else content[:at])
    return f"{path.name} {how}"


def fewer_devices(trial: Trial, plan_file: Path) -> None:
    """A rank is killed; the plan is made anew for fewer devices."""
    kill_ranks(trial, plan_file)


#: What each kind of fault does to a run.
KINDS: dict[str, Callable[[Trial, Path], None]] = {
    "kill -9 of ranks": kill_ranks,
    "kill -9 of the launcher": kill_launcher,
    "SIGTERM": sigterm,
    "SIGSTOP of a rank": stop_rank,
    "a rank never starts": missing_rank,
    "port in use": port_in_use,
    "full disk": full_disk,
    "corrupted shard": corrupt,
    "fewer devices": fewer_devices,
}


@contextlib.contextmanager
def _small_disk(trial: Trial) -> Iterator[Callable[[Started], None]]:
    """The folder of checkpoints on a disk that fills up; yields what fills it."""
    mounted = trial.kept
    mounted.mkdir()
    if not _mount(mounted):
        mounted.rmdir()
        yield lambda started: _limit_files(trial, started)
        return
    try:
        yield lambda started: _fill(trial, started)
        # The operator makes room; the folder is kept on the ordinary disk from now on.
        (mounted / "filler").unlink(missing_ok=True)
        shutil.copytree(mounted, trial.folder / "copy")
    finally:
        subprocess.run(["umount", "-l", str(mounted)], check=False)
        mounted.rmdir()
    (trial.folder / "copy").rename(mounted)


def _mount(folder: Path) -> bool:
    """Mount a small tmpfs; False where this process may not."""
    words = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(folder)]
    try:
        done = subprocess.run(words, capture_output=True, check=False)
    except FileNotFoundError:
        return False
    return done.returncode == 0


def _fill(trial: Trial, started: Started) -> None:
    """Leave less room than a checkpoint needs, at a random time."""
    _at_a_random_time(trial, started)
    free = trial.chance.randrange(1, 1 << 20)
    with (trial.kept / "filler").open("wb") as stream, contextlib.suppress(OSError):
        while True:
            disk = os.statvfs(trial.kept)
            room = disk.f_bavail * disk.f_frsize - free
            if room <= 0:
                break
            stream.write(bytes(min(room, 1 << 20)))
            stream.flush()


def _limit_files(trial: Trial, started: Started) -> None:
    """Let the ranks write no file beyond some size, from a random time on."""
    for rank in _at_a_random_time(trial, started):
        limit = trial.chance.randrange(1, 1 << 18)
        resource.prlimit(rank.pid, resource.RLIMIT_FSIZE, (limit, limit))


def _resume(trial: Trial, kind: str, plan_file: Path, curve: Sequence[float]) -> None:
    """Start again and require the rest of the undisturbed curve."""
    rtol = _RTOL if trial.mesh in _REORDERED else 0.0
    name = trial.events[-1] if kind == "corrupted shard" else None
    if kind == "fewer devices":
        devices = trial.chance.randrange(1, trial.world)
        plan_file, rtol = trial.folder / "fewer.json", _RTOL
        anew = make_plan(devices, {})
        anew.save(plan_file)
        trial.events.append(anew.strategy.label())
    before = CheckpointFolder(trial.kept).steps()
    resume = ["--resume", *([name] if name else []), "--json"]
    if kind in {"a rank never starts", "port in use"}:
        places = rank_places(trial.world, free_port())
        started = Started(words=trial.words(plan_file, *resume), places=places)
    else:
        started = Started(words=trial.words(plan_file, *resume))
    first = trial.end(started)[0]
    if first.code:
        raise FaultError(f"it did not resume: {first.lines[-3:]}")
    result = json.loads(first.out)
    begin, losses = result["first_step"], result["losses"]
    allowed = [int(name.removeprefix("step-"))] if name else before[-2:] or [0]
    if begin not in allowed:
        raise FaultError(f"resumed at {begin}, checkpoints were {before}")
    wanted = curve[begin:]
    if len(losses) != len(wanted) or not all(
        math.isclose(a, b, rel_tol=rtol) for a, b in zip(losses, wanted, strict=True)
    ):
        raise FaultError(f"from step {begin} {losses}, undisturbed {wanted}")
    _require_clean(trial)


def _require_clean(trial: Trial) -> None:
    """Require that the checkpoints are whole and nothing else is in the folder."""
    folder = CheckpointFolder(trial.kept)
    left = [path.name for path in trial.kept.rglob("*") if "tmp" in path.name]
    if left:
        raise FaultError(f"temporary files were left: {left}")
    if folder.choose(True) != folder.of(STEPS).name:
        raise FaultError(f"latest names {folder.choose(True)}")
    for step in folder.steps():
        for name, written in folder.read_record(folder.of(step).name).files.items():
            problem = damage(folder.of(step) / name, written)
            if problem is not None:
                raise FaultError(problem)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a run.

    Attributes:
        kind: Of the fault.
        mesh: Name of the plan.
        failure: Why it failed; None if it was resumed to the curve.
        orphans: Processes left.
        fault_s: From the fault (or the start) to the end of the disturbed command.
        took_s: All of it.
        said: What the disturbed command said.
    """

    kind: str
    mesh: str
    failure: str | None
    orphans: int
    fault_s: float
    took_s: float
    said: str


def run_one(number: int, seed: int, kind: str, curves: Curves) -> Outcome:
    """Do one run; everything in it is drawn from its number and the seed."""
    chance = random.Random(f"{seed}/{number}")
    mesh = chance.choice(list(MESHES))
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    trial = Trial(
        chance=chance, folder=folder, mesh=mesh, background=chance.random() < 0.3
    )
    plan_file, curve = curves.of(mesh)
    begin, failure = time.monotonic(), None
    try:
        while True:
            try:
                KINDS[kind](trial, plan_file)
                break
            except MissedError:
                shutil.rmtree(trial.kept, ignore_errors=True)
                trial.missed += 1
                if trial.missed > 5:
                    raise
        _resume(trial, kind, plan_file, curve)
    except FaultError as error:
        failure = str(error)
    except Exception:
        failure = traceback.format_exc()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(
        kind=kind,
        mesh=mesh,
        failure=failure,
        orphans=trial.orphans,
        fault_s=trial.fault_s,
        took_s=time.monotonic() - begin,
        said=trial.said,
    )


def table(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Lines of the table: each kind of fault, and all."""
    lines = [
        [
            "fault",
            "runs",
            "resumed to the curve",
            "orphans",
            "to the end (s)",
            "run (s)",
        ]
    ]
    for kind in [*KINDS, "all"]:
        some = [one for one in outcomes if kind in {one.kind, "all"}]
        if not some:
            continue
        ends = [one.fault_s for one in some if not math.isnan(one.fault_s)]
        lines.append(
            [
                kind,
                str(len(some)),
                str(sum(one.failure is None for one in some)),
                str(sum(one.orphans for one in some)),
                f"{statistics.median(ends):.1f}, at most {max(ends):.1f}"
                if ends
                else "",
                f"{statistics.median(one.took_s for one in some):.0f}",
            ]
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time")
    parser.add_argument("--kind", action="append", choices=list(KINDS), default=[])
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    given = parser.parse_args()
    kinds = given.kind or list(KINDS)
    outcomes: list[Outcome] = []
    with (
        tempfile.TemporaryDirectory(prefix="faults-curves-") as folder,
        ThreadPoolExecutor(given.workers) as pool,
    ):
        curves = Curves(folder=Path(folder))
        numbers = range(given.first, given.first + given.runs)
        futures = [
            # Kinds in turn, so that ten runs have each of them.
            pool.submit(run_one, n, given.seed, kinds[n % len(kinds)], curves)
            for n in numbers
        ]
        for number, future in zip(numbers, futures, strict=True):
            one = future.result()
            outcomes.append(one)
            good = one.failure is None and not one.orphans
            print(
                f"{number}: {one.kind}, {one.mesh}, {one.took_s:.0f} s: "
                f"{'resumed' if good else f'FAILED, {one.orphans} orphans, '}"
                f"{one.failure or ''} ({one.said})",
                file=sys.stderr,
                flush=True,
            )
    print(aligned(table(outcomes)))
    return int(any(one.failure is not None or one.orphans for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
