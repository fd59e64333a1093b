"""``meshwright serve`` on SLURM itself: one machine, two nodes, killed now and then.

Run ``apt-get install slurm-wlm munge``, then ``python -m benchmarks.slurm_admission``
as root. It starts munged, slurmctld and two slurmd in a folder of its own, and ends
them. Devices are files; jobs sleep. The partition has a time limit of a minute, which
the loop raises where a job needs more.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_CONF = """ClusterName=meshwright
SlurmctldHost={host}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/ctld.log
SlurmdLogFile={folder}/%n.log
SlurmctldPort=16817
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
GresTypes=gpu
KillWait=5
NodeName=node[0-1] NodeHostname={host} Port=[17000-17001] CPUs={cores} Gres=gpu:a100:2
PartitionName=gpu Nodes=ALL Default=YES DefaultTime=1 State=UP
"""
_TABLE = (
    "model,batch,device,degree,iterations_per_s,spread_iterations_per_s\n"
    + "".join(f"net,8,a100,{degree},{degree},{degree}\n" for degree in (1, 2, 4))
)


def _run(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@contextlib.contextmanager
def _slurm(folder: Path) -> Iterator[None]:
    """Run SLURM's daemons."""
    host = socket.gethostname().partition(".")[0]
    for name in ("state", "spool-node0", "spool-node1"):
        (folder / name).mkdir()
    for at in range(2):
        # The null device under another name stands for a GPU.
        os.mknod(folder / f"gpu{at}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    conf = folder / "slurm.conf"
    cores = os.cpu_count() or 1
    conf.write_text(_CONF.format(host=host, folder=folder, cores=cores))
    (folder / "gres.conf").write_text(f"Name=gpu Type=a100 File={folder}/gpu[0-1]\n")
    os.environ["SLURM_CONF"] = str(conf)
    munge = None
    if subprocess.run(("munge", "-n"), capture_output=True, check=False).returncode:
        Path("/run/munge").mkdir(exist_ok=True)
        shutil.chown("/run/munge", "munge", "munge")
        munge = subprocess.Popen(("runuser", "-u", "munge", "--", "munged", "-F"))
        time.sleep(1.0)
    daemons: list[tuple[str, ...]] = [("slurmctld", "-D", "-c")]
    daemons += [("slurmd", "-D", "-N", f"node{at}") for at in range(2)]
    started = []
    try:
        for words in daemons:
            started.append(subprocess.Popen(words, stderr=subprocess.DEVNULL))
            time.sleep(1.0)
        end = time.monotonic() + 60
        while "idle" not in _run("sinfo", "--noheader", "--format=%T"):
            if time.monotonic() > end:
                raise SystemExit(_run("sinfo", "-R"))
            time.sleep(0.5)
        yield
    finally:
        for process in (*reversed(started), *([munge] if munge else [])):
            process.terminate()
            process.wait(20)


def _serve(folder: Path) -> subprocess.Popen[bytes]:
    words = ("serve", "--queue", "slurm", "--journal", str(folder / "journal"))
    more = ("--throughputs", str(folder / "table.csv"), "--port", "0")
    times = ("--poll-s", "1", "--restart-s", "3", "--guard-s", "15")
    (folder / "journal" / "endpoint.json").unlink(missing_ok=True)
    program = (sys.executable, "-m", "planner.cli.main")
    return subprocess.Popen((*program, *words, *more, *times))


def _call(folder: Path, path: str, data: Any = None) -> Any:
    for _ in range(100):
        with contextlib.suppress(OSError, ValueError):
            end = json.loads((folder / "journal" / "endpoint.json").read_text())
            asked = urllib.request.Request(
                f"http://127.0.0.1:{end['port']}{path}",
                data=None if data is None else json.dumps(data).encode(),
                headers={"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=5) as answer:
                return json.load(answer)
        time.sleep(0.2)
    raise SystemExit("meshwright serve does not answer")


def _print_queue() -> None:
    print(_run("squeue", "--format=%.12j %.10T %.11N %.6l %k"))


def _job(folder: Path, name: str, seconds: float, due: float | None) -> dict[str, Any]:
    log = folder / "log"
    words = f"echo {name} start >> {log}; sleep {seconds}; echo {name} end >> {log}"
    return {
        "name": name,
        "model": "net",
        "batch": 8,
        "iterations": (4 if due is None else 2) * seconds,
        "deadline_s": None if due is None else time.time() + due,
        "command": ["bash", "-c", words],
        "elastic": due is None,
    }


def main() -> int:
    """Submit jobs, kill the loop twice, and print what became of them."""
    with tempfile.TemporaryDirectory() as name, _slurm(folder := Path(name)):
        folder.chmod(0o755)
        (folder / "table.csv").write_text(_TABLE)
        loop = _serve(folder)
        try:
            _call(folder, "/jobs", _job(folder, "free", 80, None))
            time.sleep(6)
            half = {**_job(folder, "half", 100, 150), "min_degree": 2, "max_degree": 2}
            _call(folder, "/jobs", half)
            time.sleep(9)
            _print_queue()
            for at in range(4):
                job = {**_job(folder, f"job{at}", 10, 90), "min_degree": 2}
                _call(folder, "/jobs", job)
            _call(folder, "/jobs", _job(folder, "late", 100, 30))
            for _ in range(2):
                time.sleep(4.3)
                _print_queue()
                loop.kill()
                loop.wait()
                loop = _serve(folder)
            end = time.monotonic() + 240
            while True:
                jobs = _call(folder, "/status")["jobs"]
                if all(each["ended_s"] for each in jobs) or time.monotonic() > end:
                    break
                time.sleep(1)
            events = _call(folder, "/status")["events"]
            print(_run("squeue", "--states=all", "--format=%.6i %.12j %.10T %.8M %R"))
        finally:
            loop.terminate()
            loop.wait(20)
        for each in jobs:
            kept = each["promised"] and each["ended_s"] <= each["deadline_s"]
            print(
                f"{each['name']}: {each['status']}, {each['launches']} launches, "
                f"{'promise kept' if kept else each['reason']}"
            )
        for each in events:
            if each["kind"] in ("change", "problem", "lost", "promise broken"):
                print(f"{each['kind']}: {each['job']} {each['text']}")
        print((folder / "log").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
