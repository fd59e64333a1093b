"""The table of tasks, on tasks made by chance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.partitioner_tasks import run_tasks, table_of_tasks
from benchmarks.partitioners import main
from planner.split import breaches, max_load_ms, read_task
from tests.split.cases import document
from tests.split.conftest import registered, solvers  # noqa: F401 fixtures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    below = tmp_path / "Graphs"
    below.mkdir()
    for seed in range(2):
        made = document(np.random.default_rng(seed))
        text = json.dumps(made)
        (below / f"net{seed}.json").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.further
@pytest.mark.usefixtures("solvers")
def test_every_solver_of_every_task(folder: Path) -> None:
    result = run_tasks(folder)
    assert [entry["instance"] for entry in result["tasks"]] == [
        "net0_Graphs",
        "net1_Graphs",
    ]
    for entry in result["tasks"]:
        task = read_task(folder / "Graphs" / f"{entry['instance'][:4]}.json")
        number = {name: d for d, name in enumerate(task.device_names)}
        for method in ("auto", "exact", "linearised", "refined"):
            device = np.array([number[entry["split"][method][v]] for v in task.nodes])
            assert breaches(task, device) == ()
            load = entry["loads_ms"][method]
            assert load == pytest.approx(max_load_ms(task, device))
            assert entry["seconds"][method] > 0
        assert entry["loads_ms"]["auto"] == entry["loads_ms"]["exact"]
    assert "net1_Graphs" in table_of_tasks(result)


def hopeless(task: object, *, time_limit_s: float, seed: int) -> None:
    """Never ends in time."""


def test_one_that_does_not_finish_is_null(
    folder: Path,
    solvers: dict[str, str],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    solvers["slow"] = f"{__name__}:hopeless"
    arguments = ["--tasks", str(folder), "--methods", "slow", "linearised"]
    assert main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["tasks"][0]
    assert first["loads_ms"]["slow"] is None
    assert first["seconds"]["slow"] is None
    assert first["split"]["slow"] is None
    assert main(arguments) == 0
    assert "linearised ms" in capsys.readouterr().out


def test_a_folder_without_tasks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--tasks", str(tmp_path)]) == 1
    assert "holds no throughput task" in capsys.readouterr().err
