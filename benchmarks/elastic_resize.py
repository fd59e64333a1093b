"""Seconds that a change of a job's devices costs our own executors, by part.

python -m benchmarks.elastic_resize
python -m benchmarks.elastic_resize --out docs/results

A model trains in 4 gloo processes of this machine; the run is ended by SIGTERM, goes on
in 2, is ended again, and goes on in 4, each by meshwright run. Printed are the bytes of
the checkpoint, the seconds from the signal to the first new step, by part, and the CPU
seconds of all processes in that time; and the two figures of
envs.elastic.costs.ReshardCost that fit them. Processes share the machine's cores and
its disk: the figures are of such a machine, not of a cluster.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not __package__:
    # Run as a file, Python looks for modules beside it and not in the repository.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import psutil

from benchmarks.fault_processes import free_port, rank_places
from benchmarks.tables import cpu_name
from planner import Cluster, plan
from planner.schema import Precision

__all__ = ["Resize", "fit", "main"]

_ROOT = Path(__file__).parents[1]
#: Models, large and small, and the tokens of a sample.
_MODELS: dict[str, int | None] = {"gpt2": 16, "benchmarks.fault_model:decoder": None}
#: Processes of the runs, each of which goes on from the last.
_WORLDS = (4, 2, 4)
#: More than a run gets to.
_STEPS = 1_000_000
#: Longest that a run may take, in seconds.
_LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """Seconds from the signal that ends a run to the first step of the next.

    Attributes:
        model: Reference of the model.
        before: Processes of the run that is ended.
        after: Processes of the run that goes on.
        size_bytes: Bytes of the checkpoint.
        step_s: To the end of the running step.
        write_s: To write the checkpoint.
        end_s: To end the processes.
        start_s: To start those of the next run, and to build the model.
        read_s: To read the checkpoint, each rank its shards.
        first_s: For the first step.
        cpu_s: CPU seconds of all processes in the whole time.
    """

    model: str
    before: int
    after: int
    size_bytes: int
    step_s: float
    write_s: float
    end_s: float
    start_s: float
    read_s: float
    first_s: float
    cpu_s: float

    @property
    def total_s(self) -> float:
        """Seconds of all parts."""
        return sum(getattr(self, name) for name in _PARTS)


_PARTS = ("step_s", "write_s", "end_s", "start_s", "read_s", "first_s")


class _Run:
    """A run of ``meshwright run``, a process a rank, as torchrun starts them.

    Each rank so tells when it has read or written a checkpoint.
    """

    def __init__(self, words: Sequence[str], world: int) -> None:
        path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
        self._lines: list[tuple[float, str]] = []
        self._begun_s = time.monotonic()
        self._cpu_s: dict[int, float] = {}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "planner.cli.main", "run", *words],
                env={
                    **os.environ,
                    **place,
                    "MESHWRIGHT_LOG": "INFO",
                    "PYTHONPATH": path,
                },
                cwd=_ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for place in rank_places(world, free_port())
        ]
        for process in self._processes:
            threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        for line in process.stderr:
            self._lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, pattern: str) -> tuple[float, re.Match[str]]:
        """Wait for a line; return its time and match.

        Raises:
            RuntimeError: If the run ends before, or takes too long.
        """
        while time.monotonic() - self._begun_s < _LIMIT_S:
            ended = all(process.poll() is not None for process in self._processes)
            for at_s, line in list(self._lines):
                found = re.search(pattern, line)
                if found:
                    return at_s, found
            if ended:
                break
            time.sleep(0.01)
        last = [line for _, line in self._lines[-5:]]
        raise RuntimeError(f"no line {pattern!r}, but at last {last}")

    def cpu_s(self) -> float:
        """CPU seconds of all ranks so far, those of ended ones as last seen."""
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                if process.poll() is None:
                    self._cpu_s[process.pid] = times.user + times.system
        return sum(self._cpu_s.values())

    def stop(self) -> float:
        """Ask all ranks to save and to end; return the time."""
        asked_s = time.monotonic()
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        return asked_s

    def wait(self) -> float:
        """Wait for the end of all ranks; return the time."""
        while any(process.poll() is None for process in self._processes):
            self.cpu_s()
            time.sleep(0.05)
        return time.monotonic()

    def kill(self) -> None:
        """End all ranks at once, whatever they do."""
        for process in self._processes:
            process.kill()
            process.wait()


def measure(model: str, seq_len: int | None, folder: Path) -> list[Resize]:
    """Resize one model from each number of processes to the next."""
    found: list[Resize] = []
    last: _Run | None = None
    kept = folder / "kept"
    try:
        plans = {world: _plan(model, seq_len, world, folder) for world in set(_WORLDS)}
        for number, world in enumerate(_WORLDS):
            words = [str(plans[world]), "--resume"]
            if ":" in model:
                words += ["--model", model]
            words += ["--steps", str(_STEPS), "--checkpoint-dir", str(kept)]
            # On a busy machine ranks come one after the other.
            words += ["--rank-timeout-s", "600"]
            if last is None:
                last = _Run(words, world)
                last.wait_for(rf"step \d+ of {_STEPS}")
                continue
            before_s = last.cpu_s()
            stopped_s = last.stop()
            saved_s, saved = last.wait_for(r"saved .* in ([\d.]+) s")
            ended_s = last.wait()
            ending_s = last.cpu_s() - before_s
            last = _Run(words, world)
            read_s, read = last.wait_for(r"resumed from .* in ([\d.]+) s")
            first_s, _ = last.wait_for(rf"step \d+ of {_STEPS}")
            write, reading = float(saved[1]), float(read[1])
            found.append(
                Resize(
                    model=model,
                    before=_WORLDS[number - 1],
                    after=world,
                    size_bytes=_newest(kept),
                    step_s=max(0.0, saved_s - write - stopped_s),
                    write_s=write,
                    end_s=ended_s - saved_s,
                    start_s=max(0.0, read_s - reading - ended_s),
                    read_s=reading,
                    first_s=first_s - read_s,
                    cpu_s=ending_s + last.cpu_s(),
                )
            )
    finally:
        if last is not None:
            last.kill()
    return found


def _plan(model: str, seq_len: int | None, world: int, folder: Path) -> Path:
    made = plan(
        model,
        Cluster.detect(processes=world),
        global_batch=4,
        seq_len=seq_len,
        pin={"dp_shard": world},
        partitioner="exhaustive",
        precision=Precision(compute="float32"),
        certify=False,
    )
    path = folder / f"plan{world}.json"
    made.save(path)
    return path


def _newest(kept: Path) -> int:
    """Bytes of the latest checkpoint."""
    latest = kept / (kept / "latest").read_text().strip()
    return sum(file.stat().st_size for file in latest.rglob("*") if file.is_file())


def fit(resizes: Sequence[Resize]) -> tuple[float, float]:
    """Fit the figures of ReshardCost: seconds of a restart, and bytes/s of a device.

    The restart is the mean of all parts but writing and reading; the rate moves the
    bytes in the time of those two, from and to as many devices as there are afterwards.

    Raises:
        ValueError: If there is no resize.
    """
    if not resizes:
        raise ValueError("no resize to fit; measure one at least")
    moved_s = [one.write_s + one.read_s for one in resizes]
    restart_s = sum(one.total_s for one in resizes) - sum(moved_s)
    each = sum(one.size_bytes / one.after for one in resizes)
    return restart_s / len(resizes), each / sum(moved_s)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=tuple(_MODELS), default=list(_MODELS)
    )
    parser.add_argument("--out", type=Path, help="folder for a results file")
    options = parser.parse_args(arguments)
    lines: list[str] = []

    def tell(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    tell("# Seconds of a resize, by part\n")
    tell(
        f"{cpu_name()}, {os.cpu_count()} cores, {date.today()}; "
        f"{os.getloadavg()[0]:.0f} processes wanted them besides.\n"
    )
    heads = ("step", "write", "end", "start", "read", "first step", "in all", "CPU")
    tell("| model | processes | MB | " + " | ".join(f"{h}, s" for h in heads) + " |")
    tell("|---|" + "---|" * (len(heads) + 2))
    found: list[Resize] = []
    for model in options.models:
        folder = Path(tempfile.mkdtemp(prefix="meshwright-resize-"))
        try:
            for one in measure(model, _MODELS[model], folder):
                seconds = [getattr(one, part) for part in _PARTS]
                seconds += [one.total_s, one.cpu_s]
                tell(
                    f"| {model.split(':')[-1]} | {one.before} to {one.after} | "
                    f"{one.size_bytes / 1e6:.1f} | "
                    + " | ".join(f"{value:.1f}" for value in seconds)
                    + " |"
                )
                found.append(one)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    restart_s, rate = fit([one for one in found if one.size_bytes > 1e8] or found)
    tell(f"\nReshardCost(restart_s={restart_s:.1f}, bytes_per_s={rate:.3g})")
    if options.out:
        file = options.out / f"elastic_resize_{date.today()}.md"
        file.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
