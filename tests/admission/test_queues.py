"""Answers of SLURM, Kubernetes and Ray, and what is written back."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planner.admission.queues.base import (
    Command,
    Entry,
    Launch,
    QueueError,
    answer,
    as_json,
    occupied_by_others,
)
from planner.admission.queues.kueue import jobset_manifest, read_kueue, stop_command
from planner.admission.queues.ray_cluster import read_ray
from planner.admission.queues.slurm import (
    SlurmQueue,
    expand_hosts,
    launch_command,
    read_slurm,
)

DATA = Path(__file__).parent / "data"
TWO = Launch(
    name="mw-job-2",
    job="job",
    device="a100",
    devices={"h0": 4, "h1": 2},
    words=("train", "a b"),
    after="17",
)


def _load(name: str) -> Any:
    return json.loads((DATA / name).read_text())


def _slurm(version: str) -> tuple[Any, Any]:
    return _load(f"slurm-{version}-sinfo.json"), _load(f"slurm-{version}-squeue.json")


def test_slurm_22_05() -> None:
    found = read_slurm(*_slurm("22.05"), {"a100": "A100"})
    assert [(h.name, h.device, h.devices, h.down) for h in found.hosts] == [
        ("node0", "A100", 2, 0),
        ("node1", "A100", 2, 0),
    ]
    ours, theirs = found.entries
    assert (ours.id, ours.name, ours.status) == ("1", "mw-a-1", "running")
    assert ours.devices == {"node1": 2}
    assert ours.until_s is None
    assert theirs.devices == {"node0": 1}
    assert theirs.until_s == theirs.start_s + 600
    (other,) = occupied_by_others(found.entries, theirs.start_s)
    assert (other.name, other.until_s) == ("theirs (3)", theirs.until_s)
    # It should have ended and has not: nobody knows when it will.
    assert occupied_by_others(found.entries, 9e9)[0].until_s is None


def test_slurm_24_11() -> None:
    found = read_slurm(*_slurm("24.11"))
    assert [(h.name, h.device, h.devices, h.down) for h in found.hosts] == [
        ("gpu001", "l40s", 4, 0),
        ("gpu002", "l40s", 4, 0),
        ("gpu003", "l40s", 4, 4),
    ]
    entries = {each.name: each for each in found.entries}
    assert entries["mw-nightly-3"].devices == {"gpu001": 2, "gpu002": 2}
    assert entries["notebook"].until_s == 1755290346 + 3600
    assert entries["mw-sweep-1"].status == "pending"
    assert (entries["mw-old-1"].status, entries["mw-old-1"].devices) == ("done", {})


def test_lists_of_hosts() -> None:
    assert expand_hosts("a[01-03,7],b") == ["a01", "a02", "a03", "a7", "b"]
    assert expand_hosts("r[1-2]n[0-1]") == ["r1n0", "r1n1", "r2n0", "r2n1"]
    with pytest.raises(QueueError, match="is no list of hosts"):
        expand_hosts("a[x-y]")


def test_sbatch_gets_hosts_and_a_script_that_runs_once(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    words = launch_command(TWO, str(claims)).words
    assert "--job-name=mw-job-2" in words
    assert "--nodelist=h0,h1" in words
    assert "--gpus=a100:6" in words
    assert "--dependency=afterany:17" in words
    ran = tmp_path / "ran"
    one = Launch(
        name="mw-a-1",
        job="a",
        device="a100",
        devices={"h0": 2},
        words=("sh", "-c", f"echo once >> {ran}"),
    )
    command = launch_command(one, str(claims))
    assert "--gpus-per-node=a100:2" in command.words
    codes = [
        subprocess.run(["bash", "-c", command.stdin], check=False).returncode
        for _ in range(2)
    ]
    assert codes == [0, 83]
    assert ran.read_text() == "once\n"


def _scontrol(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a scontrol on PATH that answers as SLURM did."""
    cases = "".join(
        f"{shlex.quote(words)}) echo {shlex.quote(said)} >&2; exit {code};;\n"
        for words, (code, said) in _load("slurm-22.05-scontrol.json").items()
    )
    path = folder / "scontrol"
    path.write_text(f'#!/bin/sh\ncase "$*" in\n{cases}*) exit 99;;\nesac\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def test_scontrol_writes_notes_and_time_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _scontrol(tmp_path, monkeypatch)
    queue = SlurmQueue(claims=str(tmp_path / "claims"))
    note = "meshwright: promised by 2026-11-28T03:00"
    queue.write_note("3", note)
    # The job of that number has ended, and one is no longer known.
    queue.write_note("3", "meshwright: late")
    queue.write_note("9999", "meshwright: gone")
    with pytest.raises(QueueError, match="the DB index is being set"):
        queue.write_note("1", note)
    runs = Entry(id="3", name="mw-c-1", status="running", start_s=600.0)
    queue.extend(runs, 600.0 + 49.5 * 60)
    with pytest.raises(QueueError, match=r"give --sbatch time=90, .*permission denied"):
        queue.extend(runs, 600.0 + 90 * 60)


def test_notes_of_slurm_are_those_that_launches_were_given() -> None:
    nodes, jobs = _slurm("22.05")
    ours, theirs = read_slurm(nodes, jobs).entries
    assert (ours.note, ours.cause, theirs.note) == ("meshwright", None, None)
    jobs["jobs"][0] |= {"comment": "for the paper", "job_state": "TIMEOUT"}
    ours = read_slurm(nodes, jobs).entries[0]
    assert (ours.status, ours.note, ours.cause) == ("failed", None, "limit")


def _kueue() -> tuple[Any, ...]:
    kinds = ("nodes", "pods", "jobsets", "workloads")
    return tuple(_load(f"kueue-{kind}.json") for kind in kinds)


def test_kueue() -> None:
    found = read_kueue(*_kueue(), names={"NVIDIA-A100-SXM4-80GB": "a100"})
    assert [(h.name, h.device, h.devices, h.down) for h in found.hosts] == [
        ("gpu0", "a100", 8, 0),
        ("gpu1", "a100", 8, 0),
        # Cordoned: what runs there runs on.
        ("gpu2", "a100", 8, 7),
        ("gpu3", "a100", 8, 8),
    ]
    entries = {each.name: each for each in found.entries}
    assert entries["mw-nightly-2"].devices == {"gpu0": 8, "gpu1": 4}
    states = {name: each.status for name, each in entries.items() if each.ours}
    assert states == {
        "mw-nightly-2": "running",
        "mw-sweep-1": "pending",
        "mw-old-1": "done",
        "mw-paused-4": "failed",
    }
    notebook = entries["pod/notebook-0"]
    assert notebook.until_s == notebook.start_s + 3600


def test_kueue_with_a_number_that_is_none() -> None:
    nodes, *others = _kueue()
    nodes["items"][0]["status"]["capacity"]["nvidia.com/gpu"] = "eight"
    with pytest.raises(QueueError, match=r"'eight' nvidia.com/gpu of node gpu0, which"):
        read_kueue(nodes, *others)


def test_a_jobset_has_a_job_on_each_host() -> None:
    made = jobset_manifest(TWO, local_queue="user-queue", image="torch")
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "user-queue"}
    pods = [
        job["template"]["spec"]["template"]["spec"]
        for job in made["spec"]["replicatedJobs"]
    ]
    assert [pod["nodeSelector"]["kubernetes.io/hostname"] for pod in pods] == [
        "h0",
        "h1",
    ]
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods]
    assert limits == [{"nvidia.com/gpu": "4"}, {"nvidia.com/gpu": "2"}]
    assert pods[0]["containers"][0]["command"] == ["train", "a b"]


def test_a_workload_is_made_inactive() -> None:
    *_, workloads = _kueue()
    command = stop_command(workloads, "mw-nightly-2", "default")
    assert command.words[3] == "jobset-mw-nightly-2-0f3c1"
    assert command.words[-1] == '--patch={"spec": {"active": false}}'
    assert stop_command(workloads, "mw-gone-1", "default") is None


def test_ray() -> None:
    nodes, groups = _load("ray-nodes.json"), _load("ray-groups.json")
    codes = {"mw-nightly-1": [None, None], "mw-sweep-1": [None]}
    found = read_ray(nodes, groups, codes, names={"A100": "a"})
    assert [(h.name, h.device, h.devices) for h in found.hosts] == [
        ("ray0", "a", 4),
        ("ray1", "a", 4),
    ]
    entries = {each.id: each for each in found.entries}
    assert entries["mw-nightly-1"].devices == {"ray0": 4, "ray1": 2}
    assert entries["0c02"].devices == {"ray1": 1}
    assert entries["mw-sweep-1"].status == "pending"
    assert "mw-old-1" not in entries
    for codes, status in (
        ([0, 0], "done"),
        ([0, 1], "failed"),
        ([0, None], "running"),
        ([None], "failed"),
    ):
        ended = read_ray(nodes, groups, {"mw-nightly-1": codes})
        entry = ended.entries[0]
        assert (entry.status, entry.kept) == (status, status != "running")
    groups["0c01"]["state"] = "RESCHEDULING"
    groups["0c01"]["bundles_to_node_id"]["1"] = ""
    lost = read_ray(nodes, groups, {"mw-nightly-1": [None]}).entries[0]
    assert (lost.status, lost.cause, lost.kept) == ("failed", "host", True)
    assert lost.devices == {"ray0": 4}
    # Of a launch that was broken off no actor may be left.
    groups["0c01"]["state"] = "PENDING"
    assert read_ray(nodes, groups, {}).entries[0].status == "failed"


def test_ray_nodes_have_names_of_their_own() -> None:
    nodes, groups = _load("ray-nodes.json"), _load("ray-groups.json")
    nodes[1]["NodeManagerHostname"] = nodes[0]["NodeManagerHostname"]
    with pytest.raises(QueueError, match="named ray0; start each with its own ray sta"):
        read_ray(nodes, groups, {})
    nodes[1]["NodeName"] = "second"
    assert [each.name for each in read_ray(nodes, groups, {}).hosts] == [
        "ray0",
        "second",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("slurm_load_jobs error: Unable to contact", "which is not JSON"),
        ("[]", "answered list, not an object"),
    ],
)
def test_nonsense_is_refused(text: str, said: str) -> None:
    with pytest.raises(QueueError, match=said):
        as_json(text, "squeue --json")


def test_unknown_states_and_missing_fields_are_refused() -> None:
    nodes, jobs = _slurm("24.11")
    jobs["jobs"][0]["job_state"] = ["PONDERING"]
    with pytest.raises(QueueError, match="job 525 has state"):
        read_slurm(nodes, jobs)
    del jobs["jobs"][0]["job_state"]
    with pytest.raises(QueueError, match="answered without job_state"):
        read_slurm(nodes, jobs)
    with pytest.raises(QueueError, match="answered without jobs"):
        read_slurm(nodes, {})


def test_commands_that_fail_are_told() -> None:
    with pytest.raises(QueueError, match="does not start"):
        answer(Command(words=("no-such-command",)))
    with pytest.raises(QueueError, match=r"failed \(3\): gone"):
        answer(Command(words=("sh", "-c", "echo gone >&2; exit 3")))
    with pytest.raises(
        QueueError, match=r"did not answer .sleep 5. within 0\.1 s.*--answer-s"
    ):
        answer(Command(words=("sleep", "5")), timeout_s=0.1)
