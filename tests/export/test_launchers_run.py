"""Exported scripts train, with stand-ins for the launcher.

Two nodes are two processes of this machine, each of which is told that it is a node.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from planner.export import export_files
from planner.schema import Plan
from tests.export.plans import HOSTILE, on
from tests.marked import cases
from tests.plans import TINY, local_plan

NODES = 2


@pytest.fixture(scope="module")
def two_nodes() -> Plan:
    """A plan for two machines with one device each, and a name that bites."""
    plan = local_plan(2, dp_shard=2)
    return plan.model_copy(
        update={
            "model": plan.model.model_copy(update={"name": HOSTILE}),
            "cluster": plan.cluster.model_copy(update={"hosts": ((NODES, 1),)}),
        }
    )


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _environment(folder: Path) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {
        **{k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}},
        "PATH": os.pathsep.join((str(folder / "bin"), here, os.environ["PATH"])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": _free_port(),
    }


def _nodes(script: str, folder: Path, environments: list[dict[str, str]]) -> str:
    """Run a script on every node at once.

    Returns:
        What all of them wrote to stdout.
    """
    running = [
        subprocess.Popen(
            ["bash", "-c", script, "node", "--steps", "2"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for environment in environments
    ]
    try:
        said = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, error) in zip(running, said, strict=True):
        assert process.returncode == 0, error
    return "".join(out for out, _ in said)


def _check(out: str, folder: Path) -> None:
    lines = [line for line in out.splitlines() if line.startswith("loss ")]
    assert len(lines) == 1, out
    assert "in 2 steps on 2 processes (dp_shard2" in lines[0]
    assert not (folder / "pwned").exists()


def _executable(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


#: Hosts of the job, and its steps: the command on each of them, at the same time.
_SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node[1-2]" || exit 1
printf '127.0.0.1\\n127.0.0.2\\n'
"""
_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


@pytest.mark.further
def test_the_batch_script_of_slurm_trains(two_nodes: Plan, tmp_path: Path) -> None:
    two_nodes.export("slurm", tmp_path)
    _executable(tmp_path / "bin" / "scontrol", _SCONTROL)
    _executable(tmp_path / "bin" / "srun", _SRUN)
    environment = _environment(tmp_path) | {
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    # sbatch runs a copy that lies elsewhere.
    spooled = tmp_path / "spool" / "slurm_script"
    spooled.parent.mkdir()
    spooled.write_text((tmp_path / "job.sbatch").read_text())
    script = f'exec bash "{spooled}" "$@"'
    _check(_nodes(script, tmp_path, [environment]), tmp_path)


#: Two components of one node: nodes are numbered in a component, tasks in the step.
_HET_SCONTROL = """#!/bin/sh
test "$*" = "show hostnames node1" || exit 1
echo 127.0.0.1
"""
_HET_SRUN = """#!/bin/bash
[[ $1 == --het-group=0-1 ]] || exit 1
while [[ $1 == --* ]]; do shift; done
for task in 0 1; do
  SLURM_NODEID=0 SLURM_PROCID=$task "$@" & jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


@pytest.mark.slow
def test_the_batch_script_of_unlike_hosts_trains(
    two_nodes: Plan, tmp_path: Path
) -> None:
    types = ((1, "a100-80"), (1, "h100-80"))
    on(two_nodes, types, a100_80=1, h100_80=1).export("slurm", tmp_path)
    _executable(tmp_path / "bin" / "scontrol", _HET_SCONTROL)
    _executable(tmp_path / "bin" / "srun", _HET_SRUN)
    environment = _environment(tmp_path) | {
        "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "node2",
        "SLURM_JOB_ID": "7",
        "SLURM_SUBMIT_DIR": str(tmp_path),
    }
    script = f'exec bash "{tmp_path}/job.sbatch" "$@"'
    _check(_nodes(script, tmp_path, [environment]), tmp_path)


def test_the_batch_script_says_where_it_looks_for_the_plan(
    two_nodes: Plan, tmp_path: Path
) -> None:
    two_nodes.export("slurm", tmp_path)
    ran = subprocess.run(
        ["bash", str(tmp_path / "job.sbatch")],
        env={"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": "/no such"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "no plan at /no such/plan.json; call sbatch in the folder" in ran.stderr


@pytest.mark.parametrize(
    "target", cases(["kubeflow", "jobset"], further=["kubeflow"], slow=["jobset"])
)
def test_the_pods_of_kubernetes_train(
    target: str, two_nodes: Plan, tmp_path: Path
) -> None:
    files = export_files(two_nodes, target)
    (name,) = set(files) - {"plan.json"}
    job, config = yaml.safe_load_all(files[name])
    plan = tmp_path / "plan.json"
    plan.write_text(config["data"]["plan.json"])
    if target == "kubeflow":
        script = job["spec"]["trainer"]["command"][2]
    else:
        template = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        script = template["spec"]["containers"][0]["command"][2]
    common = _environment(tmp_path)
    common |= {
        "MESHWRIGHT_INSTALL": "",
        "PLAN": str(plan),
        "MASTER_ADDR": "127.0.0.1",
        # What the runtime torch-distributed sets.
        "PET_NNODES": str(NODES),
        "PET_NPROC_PER_NODE": "1",
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": common["MASTER_PORT"],
    }
    if target == "jobset":
        common = {k: v for k, v in common.items() if not k.startswith("PET_")}
    key = "PET_NODE_RANK" if target == "kubeflow" else "JOB_COMPLETION_INDEX"
    nodes = [common | {key: str(rank)} for rank in range(NODES)]
    _check(_nodes(script, tmp_path, nodes), tmp_path)


@pytest.mark.slow
def test_the_run_section_of_skypilot_trains(two_nodes: Plan, tmp_path: Path) -> None:
    files = export_files(two_nodes, "skypilot")
    (tmp_path / "plan.json").write_text(files["plan.json"])
    task = yaml.safe_load(files["task.yaml"])
    common = _environment(tmp_path) | task["envs"]
    common |= {
        "STEPS": "2",
        "MODEL": f"hf:{TINY}",
        "DATA": str(TINY / "genesis.npy"),
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_NUM_NODES": str(NODES),
    }
    nodes = [common | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(NODES)]
    _check(_nodes(task["run"], tmp_path, nodes), tmp_path)
