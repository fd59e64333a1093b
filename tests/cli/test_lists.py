"""``meshwright methods``, ``models``, ``clusters``, ``explain`` and ``export``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from planner.capture import model_names
from planner.cluster import Cluster, cluster_names
from planner.schema import Plan
from planner.schema.cluster import ClusterDocument
from planner.schema.methods import methods
from tests.cli.shell import ask
from tests.plans import gpt2_plan


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    gpt2_plan().save(path)
    return path


def test_methods(capsys: pytest.CaptureFixture[str]) -> None:
    table = ask(capsys, "methods")
    rows = [line.split()[:2] for line in table.out.splitlines()]
    assert rows[0] == ["pin", "method"]
    assert rows[1:] == [
        [one.slot, name] for one in methods() for name in (one.kind, *one.presets)
    ]
    listed = {one["method"]: one for one in ask(capsys, "methods", "--json").json}
    assert listed["local_steps"]["settings"][0] == "period"
    assert [name for name, one in listed.items() if one["default"]] == [
        *("flushed", "none", "backpropagation", "all_reduce")
    ]


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    table = ask(capsys, "models")
    rows = [line.split() for line in table.out.splitlines()]
    assert rows[0][:2] == ["model", "class"]
    assert tuple(row[0] for row in rows[1:]) == model_names()
    listed = ask(capsys, "models", "--json").json
    assert tuple(listed) == model_names()
    assert listed["gpt2"]["class"] == "GPT2LMHeadModel"


def test_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    table = ask(capsys, "clusters")
    names = tuple(line.split()[0] for line in table.out.splitlines()[1:])
    assert names == cluster_names()
    assert "8 x h100-80" in next(
        line for line in table.out.splitlines() if line.startswith("dgx-h100 ")
    )
    assert ask(capsys, "clusters", "--json").json == list(cluster_names())


def test_one_cluster(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = ask(capsys, "clusters", "dgx-h100:4").out
    assert "32 on 4 hosts" in table
    document = ask(capsys, "clusters", "dgx-h100:4", "--json").out
    path = tmp_path / "mine.json"
    path.write_text(document)
    assert ClusterDocument.load(path) == Cluster.parse("dgx-h100:4").document
    assert ask(capsys, "clusters", path).out == table


def test_explain(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    plan = gpt2_plan()
    assert ask(capsys, "explain", plan_file).out == plan.explain() + "\n"
    data = ask(capsys, "explain", plan_file, "--json").json
    assert list(data) == ["prediction", "provenance"]
    assert data["prediction"]["step_time_s"] == plan.prediction.step_time_s


def test_explain_against(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.json"
    gpt2_plan(pp=2, schedule="1F1B").save(other)
    lines = ask(capsys, "explain", plan_file, "--against", other).out.splitlines()
    assert "strategy.mesh.pp: 1 -> 2" in lines
    assert ask(capsys, "explain", plan_file, "--against", other, "--json").json == lines
    same = ask(capsys, "explain", plan_file, "--against", plan_file)
    assert same.out == "the plans are equal\n"


def test_export(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "folder"
    answer = ask(capsys, "export", plan_file, "--to", "torchrun", "-o", out)
    assert answer.out.splitlines() == [f"{out}/plan.json", f"{out}/run.sh"]
    assert Plan.load(out / "plan.json") == gpt2_plan()
    paths = ask(capsys, "export", plan_file, "--to", "json", "-o", out, "--json").json
    assert paths == [f"{out}/plan.json"]


def test_bad_plan_files(
    capsys: pytest.CaptureFixture[str], plan_file: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.json"
    cut.write_text(plan_file.read_text()[:500])
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps({**gpt2_plan().to_data(), "schema_version": 9}))
    for command in (("explain",), ("run",), ("export", "--to", "json")):
        for path, said in (
            (tmp_path / "no.json", "cannot read plan .*: No such file"),
            (tmp_path, "cannot read plan .*: it is a folder"),
            (cut, "not a whole JSON document .*was it cut off"),
            (newer, "schema_version 9 is newer than 1"),
        ):
            answer = ask(capsys, *command, path)
            assert answer.code == 1
            assert re.search(said, answer.error)


def test_bad_names(capsys: pytest.CaptureFixture[str], plan_file: Path) -> None:
    error = ask(capsys, "export", plan_file, "--to", "torchrum").error
    assert error == "unknown export target 'torchrum'; did you mean 'torchrun'?"
    error = ask(capsys, "clusters", "dgx-h100:many").error
    assert "'many' is not a number of at least 1" in error
