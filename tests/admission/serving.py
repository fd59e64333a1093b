"""``meshwright serve`` on a queue, by default one that answers as SLURM does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

FAKE = Path(__file__).parent / "fake_queues.py"
TABLE = "model,batch,device,degree,iterations_per_s\nnet,8,a100,1,2\nnet,8,a100,2,4\n"


class Serving:
    """A loop over a queue, and its endpoint.

    Args:
        folder: Folder for a fake queue, the journal and what jobs write.
        options: Options that name the queue.
    """

    def __init__(
        self, folder: Path, options: Sequence[str] = ("--queue", "slurm")
    ) -> None:
        self.folder, self.options = folder, options
        self.queue, self.journal = folder / "queue", folder / "journal"
        self.log = folder / "log"
        (folder / "bin").mkdir()
        self.queue.mkdir()
        for name in ("sinfo", "squeue", "sbatch", "scancel", "scontrol", "kubectl"):
            path = folder / "bin" / name
            path.write_text(f'#!/bin/sh\nexec {sys.executable} -I {FAKE} {name} "$@"\n')
            path.chmod(0o755)
        (folder / "table.csv").write_text(TABLE)
        self.environment = {
            **os.environ,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "FAKE_QUEUE": str(self.queue),
        }
        self.process: subprocess.Popen[str] | None = None

    def words(self, *more: str) -> list[str]:
        """Words of the command."""
        return [
            *(sys.executable, "-m", "planner.cli.main", "serve", *self.options),
            *("--journal", str(self.journal), "--port", "0", "--poll-s", "0.1"),
            *("--throughputs", str(self.folder / "table.csv")),
            *("--restart-s", "0.2", "--guard-s", "5", *more),
        ]

    def start(self) -> None:
        """Start the loop."""
        (self.journal / "endpoint.json").unlink(missing_ok=True)
        with (self.folder / "stderr").open("a") as stderr:
            self.process = subprocess.Popen(
                self.words(), env=self.environment, stderr=stderr, text=True
            )

    def kill(self) -> None:
        """Kill it as kill -9 does."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def run(self, *more: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return subprocess.run(
            self.words(*more),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def call(self, method: str, path: str, data: Any = None, **headers: str) -> Any:
        """Call the endpoint; return the code and the answer, or None without one."""
        try:
            end = json.loads((self.journal / "endpoint.json").read_text())
        except FileNotFoundError:
            return None
        body = None if data is None else json.dumps(data).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{end['port']}{path}",
            data=body,
            method=method,
            headers={"Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)
        except OSError:
            return None

    def job(self, name: str, seconds: float, **more: Any) -> dict[str, Any]:
        """Return a job that writes when it starts and ends."""
        line = f"echo {name} start >> {self.log}; sleep {seconds}; "
        line += f"echo {name} end >> {self.log}"
        return {
            "name": name,
            "model": "net",
            "batch": 8,
            "iterations": 4 * seconds,
            "submitted_s": 1.0,
            "deadline_s": time.time() + 300,
            "command": ["bash", "-c", line],
            "elastic": False,
            **more,
        }

    def jobs(self, name: str) -> list[dict[str, Any]]:
        """Return what the queue knows of a job, in order."""
        path = self.queue / "jobs.json"
        jobs = json.loads(path.read_text()) if path.exists() else []
        return [job for job in jobs if job["name"].startswith(f"mw-{name}-")]

    def lines(self) -> list[str]:
        """Return what jobs have written."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def faults(self, **count: int) -> None:
        """Let the next commands of the queue fail."""
        (self.queue / "faults").write_text(json.dumps(count))


def wait_for(found: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Wait until something is true, and return it."""
    end = time.monotonic() + timeout_s
    while not (value := found()):
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)
    return value
