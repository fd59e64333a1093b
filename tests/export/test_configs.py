"""Configs of accelerate, DeepSpeed and nanotron."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.errors import ExportError
from planner.export import export, export_files
from planner.schema import (
    Overlap,
    Plan,
    Precision,
    TensorSharding,
)
from planner.targets import FIELDS, Case, get_target
from tests.export.config_plans import EXPRESSIBLE, SCRIPTS
from tests.export.golden_files import check_golden
from tests.export.plans import HOSTILE, PLANS, make_plan, named

EVERY = [(target, name) for target, plans in EXPRESSIBLE.items() for name in plans]
CONFIG = {
    "accelerate": "accelerate.yaml",
    "deepspeed": "ds_config.json",
    "nanotron": "plan.nanotron.yaml",
}


def _config(plan: Plan, target: str) -> dict[str, Any]:
    text = export_files(plan, target)[CONFIG[target]]
    found: dict[str, Any] = (
        json.loads(text) if target == "deepspeed" else yaml.safe_load(text)
    )
    return found


@pytest.mark.parametrize(("target", "name"), EVERY)
def test_what_is_written_is_what_was_read_once(target: str, name: str) -> None:
    check_golden(EXPRESSIBLE[target][name], target, name, SCRIPTS)


@pytest.mark.parametrize(("target", "name"), EVERY)
def test_scripts_are_scripts(target: str, name: str, tmp_path: Path) -> None:
    export(EXPRESSIBLE[target][name], target, tmp_path)
    subprocess.run(["sh", "-n", str(tmp_path / "run.sh")], check=True)
    assert os.access(tmp_path / "run.sh", os.X_OK)
    for path in tmp_path.glob("*.py"):
        ast.parse(path.read_text())
        assert "meshwright" not in _imported(path)


def _imported(path: Path) -> set[str]:
    """First names of all that a script imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    assert not names & {"planner", "executors"}
    return names


@pytest.mark.parametrize("target", EXPRESSIBLE)
def test_hostile_names_stay_in_the_plan(target: str, tmp_path: Path) -> None:
    plan = named(PLANS["replicas"], HOSTILE)
    files = export_files(plan, target)
    plain = export_files(PLANS["replicas"], target)
    assert {k: v for k, v in files.items() if k != "plan.json"} == {
        k: v for k, v in plain.items() if k != "plan.json"
    }
    assert Plan.from_json(files["plan.json"]).model.name == HOSTILE


def test_hostile_patterns_are_quoted() -> None:
    odd = 'a"b$(touch pwned)\n- {x: 1}.(.*)'
    sharding = TensorSharding(patterns={odd: "colwise"})
    plan = make_plan(mesh={"tp": 8}, sharding=sharding)
    specs = _config(plan, "deepspeed")["tensor_parallel"]["partition_config"]
    (pattern,) = specs["layer_specs"][0]["patterns"]
    assert re.match(pattern, f"model.{odd}.weight")
    assert not re.match(pattern, "model.anything.weight")
    for text in export_files(plan, "deepspeed").values():
        assert "touch pwned)\n" not in text


@pytest.mark.parametrize("target", EXPRESSIBLE)
def test_every_field_is_said_left_or_refused(target: str) -> None:
    """Other values than a launcher has words for never pass."""
    declared = get_target(target)
    case = Case(strategy=PLANS["replicas"].strategy, hosts=((1, 8),))
    assert not declared.violations(case)
    other: dict[str, Any] = {
        "gradient_compression": "powersgd",
        "overlap": Overlap(
            forward_prefetch=2, backward_prefetch=2, bucket_bytes=1 << 20
        ),
        "compile": True,
        "precision": Precision(compute="float8"),
        "device_ranges": ((4, 8), (0, 4)),
        "mesh": case.strategy.mesh.model_copy(update={"ep": 2}),
    }
    for name, value in other.items():
        changed = case.strategy.model_copy(update={name: value})
        found = declared.violations(Case(strategy=changed, hosts=((1, 8),)))
        leaves = {f for f in FIELDS if f.split(".")[0] == name}
        if leaves <= declared.leaves or (name == "compile" and name in declared.says):
            assert not found
        else:
            fields = {violation.field for violation in found}
            assert fields & (leaves | {name}), f"{target} drops {name}"


@pytest.mark.parametrize(("target", "name"), EVERY)
def test_batches_and_degrees_multiply_to_the_plan(target: str, name: str) -> None:
    plan = EXPRESSIBLE[target][name]
    config, mesh = _config(plan, target), plan.strategy.mesh
    if target == "accelerate":
        sizes = config.get("parallelism_config", {})
        degrees = [v for k, v in sizes.items() if k.endswith("_size")] or [8]
        product = 1
        for degree in degrees:
            product *= degree
        assert config["num_processes"] == mesh.num_devices
        assert product == mesh.num_devices or not sizes
    elif target == "deepspeed":
        micro = config["train_micro_batch_size_per_gpu"]
        steps = config["gradient_accumulation_steps"]
        assert config["train_batch_size"] == micro * steps * mesh.data_parallel
        assert config["train_batch_size"] == plan.workload.global_batch
    else:
        axes, tokens = config["parallelism"], config["tokens"]
        assert axes["dp"] * axes["pp"] * axes["tp"] == mesh.num_devices
        count = tokens["batch_accumulation_per_replica"]
        assert (
            tokens["micro_batch_size"] * count * axes["dp"]
            == plan.workload.global_batch
        )


def test_nanotron_wants_sequences() -> None:
    plan = PLANS["replicas"]
    workload = plan.workload.model_copy(update={"seq_len": None})
    with pytest.raises(ExportError, match="seq_len=None: nanotron trains on sequences"):
        export_files(plan.model_copy(update={"workload": workload}), "nanotron")


def test_a_config_of_ones_own_gets_the_plan_laid_over(tmp_path: Path) -> None:
    export(PLANS["pipeline"], "nanotron", tmp_path)
    base = tmp_path / "base.yaml"
    base.write_text(
        yaml.safe_dump(
            {
                "general": {"project": HOSTILE},
                "model": {"dtype": "float32", "model_config": {"hidden_size": 8}},
                "parallelism": {"dp": 1, "pp": 1, "tp": 1},
            }
        )
    )
    ran = subprocess.run(
        [sys.executable, "merge.py", "base.yaml", "plan.nanotron.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    merged = yaml.safe_load(ran.stdout)
    assert merged["general"]["project"] == HOSTILE
    assert merged["model"] == {"dtype": "bfloat16", "model_config": {"hidden_size": 8}}
    assert merged["parallelism"]["pp"] == 4
    (tmp_path / "base.yaml").write_text("- no\n- sections\n")
    ran = subprocess.run(
        [sys.executable, "merge.py", "base.yaml", "plan.nanotron.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 1
    assert "base.yaml is no config" in ran.stderr


@pytest.mark.parametrize("target", EXPRESSIBLE)
def test_scripts_ask_for_what_they_need(target: str, tmp_path: Path) -> None:
    export(
        EXPRESSIBLE[target]["some-devices" if target != "accelerate" else "zero3"],
        target,
        tmp_path,
    )
    bare = {k: v for k, v in os.environ.items() if k not in {"NODE_RANK", "TRAIN"}}
    bare |= {"BASE": "x", "TRAIN": "y"}
    ran = subprocess.run(
        ["sh", str(tmp_path / "run.sh")],
        env=bare,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "set NODE_RANK, 0 to 1" in ran.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not there")
@pytest.mark.parametrize(("target", "name"), EVERY)
def test_shellcheck_finds_nothing(target: str, name: str, tmp_path: Path) -> None:
    export(EXPRESSIBLE[target][name], target, tmp_path)
    subprocess.run(["shellcheck", str(tmp_path / "run.sh")], check=True)
