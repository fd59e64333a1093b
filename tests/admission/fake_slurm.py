"""A queue that answers as SLURM's commands do, and really runs what it is given.

``python fake_slurm.py COMMAND …`` with the folder in FAKE_SLURM. The file ``faults``
in it says how many of the next commands are to fail: ``nonsense`` answers, commands
that are ``refused``, and ``lost`` answers of commands that were carried out.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM"])
NODES, GPUS = ("n0", "n1"), 2


def _update(jobs: list[dict]) -> None:
    """End what has ended, and start what has room."""
    used = dict.fromkeys(NODES, 0)
    for job in jobs:
        code = FOLDER / f"{job['id']}.code"
        if job["state"] == "RUNNING" and code.exists() and code.read_text():
            job["state"] = "COMPLETED" if code.read_text() == "0\n" else "FAILED"
        if job["state"] == "RUNNING":
            for node in job["nodes"]:
                used[node] += job["gpus"]
    for job in jobs:
        room = all(used[node] + job["gpus"] <= GPUS for node in job["nodes"])
        if job["state"] == "PENDING" and room:
            job |= {"state": "RUNNING", "start": int(time.time())}
            for node in job["nodes"]:
                used[node] += job["gpus"]
            path = FOLDER / f"{job['id']}.sh"
            line = f"bash {path}; echo $? > {FOLDER}/{job['id']}.code"
            environment = {**os.environ, "SLURM_JOB_ID": str(job["id"])}
            started = subprocess.Popen(
                ["bash", "-c", line],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            job["pid"] = started.pid


def _fault(kind: str) -> bool:
    path = FOLDER / "faults"
    faults = json.loads(path.read_text()) if path.exists() else {}
    if not faults.get(kind):
        return False
    faults[kind] -= 1
    path.write_text(json.dumps(faults))
    return True


def _squeue(jobs: list[dict]) -> dict:
    return {
        "jobs": [
            {
                "job_id": job["id"],
                "name": job["name"],
                "job_state": [job["state"]],
                "comment": job.get("comment", ""),
                "nodes": ",".join(job["nodes"]) if job["state"] == "RUNNING" else "",
                "gres_detail": [f"gpu:a100:{job['gpus']}(IDX:0)"] * len(job["nodes"])
                if job["state"] == "RUNNING"
                else [],
                "start_time": {"set": True, "infinite": False, "number": job["start"]},
                "time_limit": {"set": True, "infinite": True, "number": 0},
            }
            for job in jobs
        ],
        "errors": [],
    }


def _sinfo() -> dict:
    return {
        "sinfo": [
            {
                "node": {"state": ["IDLE"]},
                "nodes": {"nodes": [node]},
                "gres": {"total": f"gpu:a100:{GPUS}", "used": ""},
            }
            for node in NODES
        ],
        "errors": [],
    }


def _sbatch(jobs: list[dict], words: list[str]) -> int:
    options = dict(word[2:].partition("=")[::2] for word in words)
    number = len(jobs) + 1
    gpus = options["gpus-per-node"].rpartition(":")[2]
    (FOLDER / f"{number}.sh").write_text(sys.stdin.read())
    jobs.append(
        {
            "id": number,
            "name": options["job-name"],
            "nodes": options["nodelist"].split(","),
            "gpus": int(gpus),
            "comment": options["comment"],
            "state": "PENDING",
            "start": 0,
        }
    )
    return number


def _scontrol(jobs: list[dict], words: list[str]) -> None:
    what, job, comment = (word.partition("=")[::2] for word in words)
    assert (what[0], job[0], comment[0]) == ("update", "JobId", "Comment")
    jobs[int(job[1]) - 1]["comment"] = comment[1]


def _scancel(jobs: list[dict], number: int) -> None:
    for job in jobs:
        if job["id"] != number:
            continue
        if job["state"] == "PENDING":
            job["state"] = "CANCELLED"
        elif job["state"] == "RUNNING":
            os.killpg(job["pid"], signal.SIGTERM)
            (FOLDER / f"{number}.code").write_text("143\n")


def main(command: str, words: list[str]) -> int:
    """Answer one command."""
    with (FOLDER / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = FOLDER / "jobs.json"
        jobs = json.loads(path.read_text()) if path.exists() else []
        if _fault("refused"):
            sys.stderr.write("slurm error: Unable to contact slurm controller\n")
            return 1
        if _fault("nonsense"):
            sys.stdout.write("{half")
            return 0
        said = ""
        if command == "sbatch":
            said = f"{_sbatch(jobs, words)}\n"
        elif command == "scancel":
            _scancel(jobs, int(words[0]))
        elif command == "scontrol":
            _scontrol(jobs, words)
        _update(jobs)
        if command == "squeue":
            said = json.dumps(_squeue(jobs))
        elif command == "sinfo":
            said = json.dumps(_sinfo())
        # Written whole, so that a kill leaves the one or the other.
        new = FOLDER / "jobs.new"
        new.write_text(json.dumps(jobs))
        new.rename(path)
        if command == "sbatch" and _fault("lost"):
            sys.stderr.write("slurm error: Socket timed out\n")
            return 1
        sys.stdout.write(said)
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
