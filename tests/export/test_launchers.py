"""Launchers that start Meshwright's own executors: what is written, what is refused."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import ExportError
from planner.export import export_files
from planner.export.texts import label_name, run_name
from planner.schema import Communication, Plan, Stage
from planner.schema.strategy_parts import Collective
from planner.targets import get_target
from tests.export.golden_files import check_golden
from tests.export.plans import HOSTILE, MIXED, PLANS, make_plan, named, on

#: Of each target the file beside plan.json.
FILES = {
    "torchrun": "run.sh",
    "slurm": "job.sbatch",
    "kubeflow": "trainjob.yaml",
    "jobset": "jobset.yaml",
    "skypilot": "task.yaml",
    "ray": "train.py",
}
CLUSTER = frozenset(FILES) - {"torchrun"}
#: Those that are told the type of each host.
TYPED = ("jobset", "slurm")
LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
CPU = make_plan(((1, 4),), "cpu", mesh={"dp_replicate": 4})


def _text(plan: Plan, target: str) -> str:
    files = export_files(plan, target)
    assert set(files) == {"plan.json", FILES[target]}
    assert Plan.from_json(files["plan.json"]) == plan
    return files[FILES[target]]


def _documents(plan: Plan, target: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(_text(plan, target)))


def _shell(plan: Plan, target: str) -> list[str]:
    """Every shell script in an export."""
    if target in {"torchrun", "slurm"}:
        return [_text(plan, target)]
    first = _documents(plan, target)[0]
    if target == "skypilot":
        return [first["setup"], first["run"]]
    if target == "jobset":
        pods = [_pod(one) for one in first["spec"]["replicatedJobs"]]
        return [pod["containers"][0]["command"][2] for pod in pods]
    return [_container(first)["command"][2]]


def _container(job: dict[str, Any]) -> dict[str, Any]:
    if job["kind"] == "TrainJob":
        trainer: dict[str, Any] = job["spec"]["trainer"]
        return trainer
    container: dict[str, Any] = _pod(job["spec"]["replicatedJobs"][0])["containers"][0]
    return container


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("target", sorted(FILES))
@pytest.mark.parametrize("name", ["pipeline", "tensor"])
def test_golden_files(target: str, name: str) -> None:
    check_golden(PLANS[name], target, name)


@pytest.mark.parametrize("target", TYPED)
def test_golden_files_of_unlike_hosts(target: str) -> None:
    check_golden(MIXED, target, "mixed")


@pytest.mark.parametrize("target", sorted(set(FILES) - {"ray"}))
@pytest.mark.parametrize("plan", [*PLANS.values(), CPU, named(CPU, HOSTILE)])
def test_bash_parses_every_script(target: str, plan: Plan) -> None:
    for script in _shell(plan, target):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


@pytest.mark.parametrize("target", sorted(FILES))
def test_names_are_never_read_by_what_runs_the_files(target: str) -> None:
    plain, evil = make_plan(name="evil"), named(make_plan(), HOSTILE)
    ours, theirs = _text(plain, target), _text(evil, target)
    if target in {"kubeflow", "jobset"}:
        # All of the plan is in there, as one text.
        *_, config = yaml.safe_load_all(theirs)
        assert Plan.from_json(config["data"]["plan.json"]) == evil
        ours, theirs = (t[: t.index("kind: ConfigMap")] for t in (ours, theirs))
    assert ours.replace(run_name(plain), "") == theirs.replace(run_name(evil), "")


def test_python_compiles_for_hostile_names() -> None:
    compile(_text(named(make_plan(), HOSTILE), "ray"), "train.py", "exec")


@pytest.mark.parametrize(
    "name",
    [
        HOSTILE,
        "",
        "-",
        "日本語",
        "9lives",
        "UPPER_case/with.dots",
        "a" * 300,
        "x" * 19 + "-" * 5,
        "null",
        "y\x00\x1b[31m",
    ],
)
def test_objects_have_labels_for_names(name: str) -> None:
    assert LABEL.fullmatch(label_name(name))
    plan = named(PLANS["zero3"], name)
    made = run_name(plan)
    assert LABEL.fullmatch(made)
    assert len(made) <= 38
    for target in ("kubeflow", "jobset"):
        job, config = _documents(plan, target)
        assert job["metadata"]["name"] == config["metadata"]["name"] == made
    # The longest name that is made of it, of the last pod of many, with its suffix.
    assert len(f"{made}-node-0-65535-abcde") <= 63


def test_plans_for_one_model_have_names_of_their_own() -> None:
    names = {run_name(plan) for plan in PLANS.values()}
    assert len(names) == len(PLANS)


def test_slurm_asks_for_whole_nodes() -> None:
    script = _text(PLANS["pipeline"], "slurm")
    asked = re.findall(r"^#SBATCH --(\S+)$", script, re.MULTILINE)
    assert {"nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "exclusive"} <= {*asked}
    assert "--nnodes=4 " in script
    assert "--nproc-per-node=8 " in script


def test_slurm_leaves_what_a_plan_does_not_use_to_others() -> None:
    plan = make_plan(((2, 8),), mesh={"dp_shard": 8}, zero_stage=3)
    ranges = ((0, 4), (8, 12))
    strategy = plan.strategy.model_copy(update={"device_ranges": ranges})
    script = _text(plan.model_copy(update={"strategy": strategy}), "slurm")
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "--exclusive" not in script
    # Which four SLURM hands out is not for the plan to say.
    assert "CUDA_VISIBLE_DEVICES" not in script


def test_cores_are_asked_for_where_devices_are_cores() -> None:
    script = _text(CPU, "slurm")
    assert "#SBATCH --cpus-per-task=4\n" in script
    assert "gpus" not in script
    for target in ("kubeflow", "jobset"):
        container = _container(_documents(CPU, target)[0])
        key = "resourcesPerNode" if target == "kubeflow" else "resources"
        assert container[key] == {"requests": {"cpu": "4"}}
    assert _documents(CPU, "skypilot")[0]["resources"] == {"cpus": "4+"}
    assert "USE_GPU = False\n" in _text(CPU, "ray")


@pytest.mark.parametrize(
    ("device", "resource"),
    [
        ("h100-80", "nvidia.com/gpu"),
        ("mi300x-192", "amd.com/gpu"),
        ("rtx4090-24", "nvidia.com/gpu"),
        ("gh200-96", "nvidia.com/gpu"),
    ],
)
def test_kubernetes_has_a_name_for_each_vendor(device: str, resource: str) -> None:
    plan = make_plan(device=device, mesh={"dp_replicate": 8})
    job = _documents(plan, "jobset")[0]
    assert _container(job)["resources"] == {"limits": {resource: "8"}}
    assert _container(job)["image"].startswith(
        "rocm/" if resource.startswith("amd") else "pytorch/"
    )


def test_a_trainjob_has_what_torchrun_does_not_say() -> None:
    job, _ = _documents(PLANS["pipeline"], "kubeflow")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": "8"}}
    # Kubernetes would read $(NAME) itself.
    assert "$(" not in trainer["command"][2]


def test_a_jobset_names_its_first_pod() -> None:
    job, _ = _documents(PLANS["pipeline"], "jobset")
    name = job["metadata"]["name"]
    template = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert template["completions"] == template["parallelism"] == 4
    env = {e["name"]: e["value"] for e in _container(job)["env"]}
    assert env["MASTER_ADDR"] == f"{name}-node-0-0.{name}"
    assert job["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": name}
    assert "$(" not in _container(job)["command"][2]


def test_skypilot_is_told_the_very_device() -> None:
    for device, name in (("a100-40", "A100"), ("a100-80", "A100-80GB")):
        plan = make_plan(((2, 8),), device, mesh={"dp_shard": 16}, zero_stage=3)
        task = _documents(plan, "skypilot")[0]
        assert task["num_nodes"] == 2
        assert task["resources"]["accelerators"] == f"{name}:8"


def test_a_rack_of_72_is_18_machines() -> None:
    plan = make_plan(((1, 72),), "gb200-186", mesh={"dp_shard": 72}, zero_stage=3)
    assert "#SBATCH --nodes=18\n" in _text(plan, "slurm")
    assert _documents(plan, "skypilot")[0]["resources"]["accelerators"] == "GB200:4"
    assert "--nnodes=18 " in _text(plan, "torchrun")


def test_ray_numbers_ranks_by_host() -> None:
    script = _text(PLANS["pipeline"], "ray")
    assert "WORKERS, PER_HOST = 32, 8\n" in script
    assert 'placement_strategy="PACK"' in script
    assert 'placement_strategy="STRICT_PACK"' in _text(PLANS["tensor"], "ray")


@pytest.mark.parametrize("target", sorted(CLUSTER))
def test_hosts_of_unknown_types_are_refused(target: str) -> None:
    plan = on(PLANS["zero3"], h100_80=8, a100_80=8)
    with pytest.raises(ExportError, match=r"cluster\.device_types=h100-80, a100-80: "):
        export_files(plan, target)


@pytest.mark.parametrize("target", sorted(CLUSTER - {*TYPED}))
def test_unlike_hosts_are_refused(target: str) -> None:
    with pytest.raises(ExportError, match=r"types=a100-80, h100-80: .*slurm or jobset"):
        export_files(MIXED, target)


@pytest.mark.parametrize("target", TYPED)
@pytest.mark.parametrize("plan", [MIXED, named(MIXED, HOSTILE)])
def test_bash_parses_scripts_of_unlike_hosts(target: str, plan: Plan) -> None:
    for script in _shell(plan, target):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_slurm_has_a_component_for_each_run_of_like_hosts() -> None:
    script = _text(MIXED, "slurm")
    head, body = script.split("\nset -euo pipefail\n")
    asked = [
        re.findall(r"^#SBATCH --(nodes|gpus-per-node)=(\S+)$", part, re.MULTILINE)
        for part in head.split("#SBATCH hetjob\n")
    ]
    assert asked == [
        [("nodes", "2"), ("gpus-per-node", "a100:8")],
        [("nodes", "1"), ("gpus-per-node", "h100:8")],
        [("nodes", "1"), ("gpus-per-node", "a100:8")],
    ]
    assert head.count("#SBATCH --exclusive\n") == 3
    assert head.count("#SBATCH --ntasks-per-node=1\n") == 3
    assert "srun --het-group=0-2 " in body
    assert '"$SLURM_JOB_NODELIST_HET_GROUP_0"' in body
    # In a component, SLURM_NODEID begins at 0 again.
    assert 'NODE_RANK="$SLURM_PROCID"' in body


def test_slurm_asks_for_the_type_that_a_plan_uses() -> None:
    ranges = ((0, 16), (24, 32))
    part = make_plan(((4, 8),), mesh={"dp_shard": 24}, device_ranges=ranges)
    plan = part.model_copy(update={"cluster": MIXED.cluster})
    script = _text(plan, "slurm")
    assert "#SBATCH --nodes=3\n" in script
    assert "#SBATCH --gpus-per-node=a100:8\n" in script
    assert "het" not in script
    (job,) = _documents(plan, "jobset")[0]["spec"]["replicatedJobs"]
    assert job["name"] == "node"
    assert _pod(job)["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"
    }


def test_slurm_tells_memories_of_one_chip_apart() -> None:
    types = ((1, "a100-40"), (1, "a100-80"))
    script = _text(on(PLANS["zero3"], types, a100_40=8, a100_80=8), "slurm")
    assert re.findall(r"gpus-per-node=(\S+)", script) == ["a100-40:8", "a100-80:8"]


def test_racks_beside_hosts_are_as_many_machines_as_they_have() -> None:
    plan = make_plan(((1, 72), (2, 4)), mesh={"dp_shard": 80}, zero_stage=3)
    types = ((1, "gb200-186"), (2, "h100-80"))
    script = _text(on(plan, types, gb200_186=72, h100_80=8), "slurm")
    assert re.findall(r"^#SBATCH --nodes=(\d+)$", script, re.MULTILINE) == ["18", "2"]


def test_pods_of_unlike_hosts_are_numbered_through(tmp_path: Path) -> None:
    jobset = _documents(MIXED, "jobset")[0]
    name, jobs = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    stub = tmp_path / "torchrun"
    stub.write_text('#!/bin/sh\necho "$NODE_RANK"\n')
    stub.chmod(0o755)
    ranks, products = [], []
    for job in jobs:
        (container,) = _pod(job)["containers"]
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert env["MASTER_ADDR"] == f"{name}-node-0-0-0.{name}"
        for index in range(job["template"]["spec"]["completions"]):
            ran = subprocess.run(
                ["bash", "-c", container["command"][2]],
                env=env
                | {
                    "PATH": f"{tmp_path}:/usr/bin:/bin",
                    "JOB_COMPLETION_INDEX": str(index),
                    "MESHWRIGHT_INSTALL": "",
                },
                capture_output=True,
                text=True,
                check=True,
            )
            ranks.append(ran.stdout.strip())
            products.append(_pod(job)["nodeSelector"]["nvidia.com/gpu.product"])
    assert ranks == ["0", "1", "2", "3"]
    a100, h100 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3"
    assert products == [a100, a100, h100, a100]
    assert all("$(" not in script for script in _shell(MIXED, "jobset"))


def test_images_are_those_of_each_vendor() -> None:
    types = ((1, "mi300x-192"), (1, "h100-80"))
    plan = on(PLANS["zero3"], types, mi300x_192=8, h100_80=8)
    amd, nvidia = map(_pod, _documents(plan, "jobset")[0]["spec"]["replicatedJobs"])
    assert amd["containers"][0]["image"].startswith("rocm/")
    assert amd["nodeSelector"] == {
        "amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"
    }
    assert nvidia["containers"][0]["image"].startswith("pytorch/")


@pytest.mark.parametrize("target", TYPED)
def test_cores_of_several_types_are_refused(target: str) -> None:
    plan = on(PLANS["zero3"], ((1, "cpu"), (1, "cpu-old")), cpu=8, cpu_old=8)
    with pytest.raises(ExportError, match=r"types=cpu, cpu-old: jobs ask for CPU core"):
        export_files(plan, target)


def test_hosts_whose_label_nobody_knows_are_refused() -> None:
    # A device plugin hands them out, but the product's name is not known.
    types = ((1, "h100-80"), (1, "a5500-24"))
    plan = on(PLANS["zero3"], types, h100_80=8, a5500_24=8)
    with pytest.raises(ExportError, match=r"types=a5500-24: .* nodes of Kubernetes"):
        export_files(plan, "jobset")
    assert "gpus-per-node=a5500:8" in _text(plan, "slurm")


@pytest.mark.parametrize("target", sorted(FILES))
def test_ranks_out_of_order_change_the_plan_alone(target: str) -> None:
    """Processes are numbered by device; the executors look their ranks up."""
    plan = PLANS["zero3"]

    def started(ranges: tuple[tuple[int, int], ...]) -> str:
        """All but names, which end with a hash of the plan, and the plan itself."""
        strategy = plan.strategy.model_copy(update={"device_ranges": ranges})
        text = _text(plan.model_copy(update={"strategy": strategy}), target)
        text = text.partition("kind: ConfigMap")[0].replace(" devices 8-15,0-7", "")
        return re.sub(r"-[0-9a-f]{6}\b", "", text)

    assert started(((8, 16), (0, 8))) == started(((0, 16),))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("skypilot", "wafer-1: SkyPilot has no accelerator.*plan for one of a10-24"),
        ("kubeflow", "wafer-1: it is not known what a device plugin"),
        ("jobset", "wafer-1: it is not known what a device plugin"),
    ],
)
def test_devices_that_nobody_knows_are_refused(target: str, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        export_files(on(PLANS["zero3"], wafer_1=16), target)


@pytest.mark.parametrize("device", ["h100pcie-80", "a100pcie-80", "rtx2080ti-11"])
def test_skypilot_is_not_told_a_sibling(device: str) -> None:
    plan = make_plan(device=device, mesh={"dp_replicate": 8})
    with pytest.raises(ExportError, match=f"device_types={device}"):
        export_files(plan, "skypilot")


def test_ray_fills_hosts_before_it_goes_on() -> None:
    plan = make_plan(((2, 8),), mesh={"dp_shard": 8}, zero_stage=3)
    for ranges, fine in ((((0, 4), (8, 12)), False), (((8, 16),), True)):
        strategy = plan.strategy.model_copy(update={"device_ranges": ranges})
        part = plan.model_copy(update={"strategy": strategy})
        if fine:
            assert "WORKERS, PER_HOST = 8, 8\n" in _text(part, "ray")
            continue
        with pytest.raises(ExportError, match="4 ranks on each of 2 hosts"):
            export_files(part, "ray")


def test_a_plan_too_large_for_kubernetes_is_refused(tmp_path: Path) -> None:
    plan = PLANS["zero3"]
    blocks = tuple(f"model.layers.{index}.{'x' * 200}" for index in range(5000))
    stage = Stage(rank=0, modules=blocks)
    strategy = plan.strategy.model_copy(update={"stages": (stage,)})
    large = plan.model_copy(update={"strategy": strategy})
    for target in ("kubeflow", "jobset"):
        with pytest.raises(ExportError, match=r"1,1\d\d,\d\d\d bytes, a ConfigMap"):
            large.export(target, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert large.export("slurm", tmp_path / "out")


@pytest.mark.parametrize("target", sorted(CLUSTER))
def test_what_executors_do_not_run_is_refused(target: str) -> None:
    plan = PLANS["zero3"].model_copy(update={"not_runnable": ("cp=2 is not run yet",)})
    with pytest.raises(ExportError, match="do not run it: cp=2"):
        export_files(plan, target)


@pytest.mark.parametrize("target", sorted(FILES))
def test_targets_say_how_they_were_checked(target: str) -> None:
    found = get_target(target)
    assert found.runs == "meshwright"
    assert found.check
    assert found.limits


def test_arguments_reach_meshwright() -> None:
    container = _container(_documents(PLANS["pipeline"], "kubeflow")[0])
    script, name = container["command"][2:]
    words = shlex.split(script.splitlines()[-1])
    assert words[-4:] == ["meshwright", "run", "$PLAN", "$@"]
    assert name == "meshwright"
    assert container["args"] == ["--steps", "1000"]


def _variables(plan: Plan, target: str) -> dict[str, str]:
    """Values of NCCL_ALGO that the environment of a rank is given."""
    if target in ("jobset", "kubeflow"):
        job = _documents(plan, target)[0]
        container = _container(job) if target == "jobset" else job["spec"]["trainer"]
        found = {entry["name"]: entry["value"] for entry in container["env"]}
    else:
        pattern = r"^export (\w+)=(\S+)$"
        found = dict(re.findall(pattern, _text(plan, target), re.MULTILINE))
    return {name: found[name] for name in found if name.startswith("NCCL_")}


@pytest.mark.parametrize("target", ["torchrun", "slurm", "jobset", "kubeflow"])
def test_nccl_is_told_what_all_sums_of_a_plan_want(target: str) -> None:
    def made(device: str = "h100-80", **fields: Any) -> Plan:
        tree = Communication(replicas=Collective(algorithm="tree"))
        return make_plan(((2, 8),), device, communication=tree, **fields)

    even = made(mesh={"dp_replicate": 2, "dp_shard": 8}, zero_stage=3)
    assert _variables(even, target) == {"NCCL_ALGO": "allreduce:tree"}
    # Sums inside layers are the library's choice.
    layers = made(mesh={"dp_replicate": 2, "dp_shard": 4, "tp": 2}, zero_stage=3)
    assert _variables(layers, target) == {}
    cores = made("cpu", mesh={"dp_replicate": 16})
    assert _variables(cores, target) == {}
