"""Queues that answer as SLURM's commands and kubectl do, and really run what they get.

``python fake_queues.py COMMAND …`` with the folder in FAKE_QUEUE. The file ``faults``
in it says how many of the next commands are to fail: ``nonsense`` answers, commands
that are ``refused`` or ``silent``, and ``lost`` or ``late`` answers of launches that
were carried out. ``COMMAND FAULT`` is a fault of one command.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(os.environ["FAKE_QUEUE"])
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


def _fault(command: str, kind: str) -> bool:
    path = FOLDER / "faults"
    faults = json.loads(path.read_text()) if path.exists() else {}
    key = next((k for k in (kind, f"{command} {kind}") if faults.get(k)), None)
    if key is None:
        return False
    faults[key] -= 1
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


def _create(jobs: list[dict], made: dict) -> str:
    name = made["metadata"]["name"]
    if any(job["name"] == name for job in jobs):
        sys.stderr.write(f"Error from server (AlreadyExists): {name} already exists\n")
        sys.exit(1)
    pods = [
        each["template"]["spec"]["template"]["spec"]
        for each in made["spec"]["replicatedJobs"]
    ]
    main = pods[0]["containers"][0]
    number = len(jobs) + 1
    (FOLDER / f"{number}.sh").write_text(shlex.join(main["command"]) + "\n")
    jobs.append(
        {
            "id": number,
            "name": name,
            "nodes": [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods],
            "gpus": int(main["resources"]["limits"]["nvidia.com/gpu"]),
            "state": "PENDING",
            "start": 0,
        }
    )
    return f"jobset.jobset.x-k8s.io/{name}\n"


def _items(jobs: list[dict], kind: str) -> Iterator[dict]:
    """Items of ``kubectl get``."""
    for node in NODES if kind == "nodes" else ():
        has = {"nvidia.com/gpu": str(GPUS)}
        ready = [{"type": "Ready", "status": "True"}]
        labels = {"nvidia.com/gpu.product": "a100"}
        status = {"capacity": has, "allocatable": has, "conditions": ready}
        yield {"metadata": {"name": node, "labels": labels}, "status": status}
    for job in jobs:
        name, state = job["name"], job["state"]
        if kind.startswith("jobsets"):
            over = {"COMPLETED": "Completed", "FAILED": "Failed"}.get(state)
            conditions = [{"type": over, "status": "True"}] if over else []
            yield {"metadata": {"name": name}, "status": {"conditions": conditions}}
        elif kind.startswith("workloads"):
            owner = [{"kind": "JobSet", "name": name}]
            data = {"name": f"w{job['id']}", "ownerReferences": owner}
            yield {"metadata": data, "spec": {"active": state != "CANCELLED"}}
        elif kind == "pods" and state == "RUNNING":
            limits = {"limits": {"nvidia.com/gpu": str(job["gpus"])}}
            label = {"jobset.sigs.k8s.io/jobset-name": name}
            for node in job["nodes"]:
                spec = {"nodeName": node, "containers": [{"resources": limits}]}
                status = {"phase": "Running"}
                data = {"name": f"{name}-{node}", "labels": label}
                yield {"metadata": data, "spec": spec, "status": status}


def _act(jobs: list[dict], command: str, words: list[str]) -> str:
    """Do what a command asks for; return its answer, if it is no list."""
    match [command, *words]:
        case ["sbatch", *_]:
            return f"{_sbatch(jobs, words)}\n"
        case ["scancel", number]:
            _scancel(jobs, int(number))
        case ["scontrol", *_]:
            _scontrol(jobs, words)
        case ["kubectl", "create", *_]:
            return _create(jobs, json.load(sys.stdin))
        case ["kubectl", "patch", _, workload, *_]:
            _scancel(jobs, int(workload[1:]))
    return ""


def _listed(jobs: list[dict], command: str, words: list[str]) -> str:
    match [command, *words]:
        case ["squeue", *_]:
            return json.dumps(_squeue(jobs))
        case ["sinfo", *_]:
            return json.dumps(_sinfo())
        case ["kubectl", "get", kind, *_]:
            return json.dumps({"items": list(_items(jobs, kind))})
    return ""


def main(command: str, words: list[str]) -> int:
    """Answer one command."""
    with (FOLDER / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = FOLDER / "jobs.json"
        jobs = json.loads(path.read_text()) if path.exists() else []
        verb = f"kubectl {words[0]}" if command == "kubectl" else command
        if _fault(verb, "refused"):
            sys.stderr.write("error: Unable to contact the controller\n")
            return 1
        if _fault(verb, "nonsense"):
            sys.stdout.write("{half")
            return 0
        silent = _fault(verb, "silent")
        said = ""
        if not silent:
            said = _act(jobs, command, words)
            _update(jobs)
            said = said or _listed(jobs, command, words)
            # Written whole, so that a kill leaves the one or the other.
            new = FOLDER / "jobs.new"
            new.write_text(json.dumps(jobs))
            new.rename(path)
        launches = verb in ("sbatch", "kubectl create")
        if launches and _fault(verb, "lost"):
            sys.stderr.write("slurm error: Socket timed out\n")
            return 1
        silent = silent or (launches and _fault(verb, "late"))
    if silent:
        time.sleep(600)
    sys.stdout.write(said)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
