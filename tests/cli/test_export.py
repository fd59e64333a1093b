"""The command ``export``: targets listed, plans refused or planned again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner import plan
from planner.errors import FingerprintError, NoFeasiblePlanError, PlanFileError
from planner.export import exporter_names
from planner.export.registry import require_expressible
from planner.replan import replan_within
from planner.schema import Plan
from planner.targets import get_target
from tests.cli.shell import ask
from tests.plans import TINY, tiny_graph

Capsys = pytest.CaptureFixture[str]
OPTIONS = {"global_batch": 32, "partitioner": "expert"}


def _pipeline(folder: Path) -> Path:
    """A plan with a schedule that Megatron does not have."""
    path = folder / "plan.json"
    made = plan(
        f"hf:{TINY}",
        "dgx-a100:1",
        seq_len=32,
        pin={"pp": 2, "schedule": "ZBVZeroBubble"},
        **OPTIONS,  # type: ignore[arg-type]
    )
    made.save(path)
    return path


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _pipeline(tmp_path_factory.mktemp("plans"))


def test_every_target_is_listed_with_what_it_cannot_say(capsys: Capsys) -> None:
    listed = ask(capsys, "export", "--list", "--json").json
    assert [entry["name"] for entry in listed] == list(exporter_names())
    torchrun = next(entry for entry in listed if entry["name"] == "torchrun")
    assert "different devices on different hosts" in torchrun["cannot"]
    assert torchrun["fields"] == len(torchrun["says"])
    table = ask(capsys, "export", "--list").out
    assert all(name in table for name in exporter_names())


def test_who_it_was_planned_for_is_told(
    capsys: Capsys, pipeline: Path, tmp_path: Path
) -> None:
    path = tmp_path / "within.json"
    made = plan(tiny_graph(), "dgx-a100:1", target="torchrun", **OPTIONS)  # type: ignore[arg-type]
    assert made.provenance.target == "torchrun"
    assert Plan.load(pipeline).provenance.target == "meshwright"
    made.save(path)
    said = "was planned within the limits of torchrun"
    for to, told in (("torchrun", True), ("slurm", False)):
        words = ("export", path, "--to", to, "-o", tmp_path / to)
        assert (said in ask(capsys, *words).err) == told
    # As a plan that was made before this was kept.
    data = json.loads(path.read_text())
    del data["provenance"]["target"]
    path.write_text(json.dumps(data))
    assert Plan.load(path).provenance.target is None


def test_without_nearest_nothing_is_written(
    capsys: Capsys, pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    answer = ask(capsys, "export", str(pipeline), "--to", "megatron", "-o", str(out))
    assert answer.code == 1
    assert "schedule=ZBVZeroBubble: it has 1F1B" in answer.error
    assert not out.exists()


def test_nearest_exports_what_the_target_can_say(
    capsys: Capsys, pipeline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("export", str(pipeline), "--to", "megatron", "--nearest", "-o", str(out))
    answer = ask(capsys, *words, "--json")
    told = answer.json
    before, after = Plan.load(pipeline), Plan.load(out / "plan.json")
    require_expressible(get_target("megatron"), after)
    assert told["replanned"]
    assert told["dropped_pins"] == ["schedule=ZBVZeroBubble"]
    assert told["step_time_s"] == {
        "before": before.prediction.step_time_s,
        "after": after.prediction.step_time_s,
    }
    assert after.strategy.mesh.pp == 2, "the pin that it allows is kept"
    assert after.workload == before.workload
    assert any(c.startswith("strategy.schedule: ZBV") for c in told["changes"])
    text = ask(capsys, *words, "--force").out
    assert "pin left out: schedule=ZBVZeroBubble" in text
    assert f"{out / 'run.sh'}" in text


def test_a_plan_that_can_be_said_is_left_as_it_is(
    capsys: Capsys, pipeline: Path, tmp_path: Path
) -> None:
    words = ("export", str(pipeline), "--to", "json", "--nearest", "--json")
    answer = ask(capsys, *words, "-o", str(tmp_path))
    assert not answer.json["replanned"]
    assert (tmp_path / "plan.json").read_bytes() == pipeline.read_bytes()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "megatorn"], "unknown export target 'megatorn'; did you mean"),
        ([], "no target is named; give --to TARGET, see --list"),
    ],
)
def test_what_is_missing_is_said(
    capsys: Capsys, pipeline: Path, words: list[str], message: str
) -> None:
    assert message in ask(capsys, "export", str(pipeline), *words).error


def test_no_plan_is_no_export(capsys: Capsys) -> None:
    assert "no plan is named" in ask(capsys, "export", "--to", "json").error


def test_a_newer_plan_is_refused(
    capsys: Capsys, pipeline: Path, tmp_path: Path
) -> None:
    data = json.loads(pipeline.read_text()) | {"schema_version": 99}
    newer = tmp_path / "newer.json"
    newer.write_text(json.dumps(data))
    error = ask(capsys, "export", str(newer), "--to", "json", "-o", str(tmp_path)).error
    assert "schema_version" in error
    assert "99" in error


def test_a_model_of_ones_own_is_named(tmp_path: Path) -> None:
    made = plan(tiny_graph(), "dgx-a100:1", **OPTIONS)  # type: ignore[arg-type]
    nameless = made.model_copy(
        update={"model": made.model.model_copy(update={"ref": None})}
    )
    with pytest.raises(PlanFileError, match="does not say where its model"):
        replan_within(nameless, "megatron")
    again = replan_within(nameless, "megatron", model=tiny_graph())
    assert again.plan.model.fingerprint == made.model.fingerprint


def test_another_model_of_the_same_name_is_refused() -> None:
    made = plan(tiny_graph(), "dgx-a100:1", **OPTIONS)  # type: ignore[arg-type]
    other = made.model.model_copy(update={"fingerprint": "sha256:0"})
    with pytest.raises(FingerprintError, match="is not the model"):
        replan_within(made.model_copy(update={"model": other}), "megatron")
    machines = made.cluster.model_copy(update={"fingerprint": "sha256:0"})
    with pytest.raises(FingerprintError, match="is not the cluster"):
        replan_within(made.model_copy(update={"cluster": machines}), "megatron")


def test_what_no_pin_is_to_blame_for_is_the_targets_limit() -> None:
    made = plan(tiny_graph(), "dgx-a100:1", **OPTIONS)  # type: ignore[arg-type]
    bare = made.strategy.precision.model_copy(
        update={"parameter": "bfloat16", "compute": "bfloat16"}
    )
    asked = made.strategy.model_copy(update={"precision": bare})
    with pytest.raises(NoFeasiblePlanError, match=r"its optimizer updates weights in"):
        replan_within(made.model_copy(update={"strategy": asked}), "megatron")
