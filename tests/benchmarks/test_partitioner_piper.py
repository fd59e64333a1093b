"""The table of Piper tasks, on tasks made by chance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.partitioner_piper import PiperGrid, piper_table, run_piper, tasks_of
from benchmarks.partitioners import main
from planner.split import GIB, PiperPlan, PiperTask, read_piper, solve_piper
from planner.split.piper.plan import NO_PLAN
from tests.split.conftest import piper_solvers, registered
from tests.split.test_piper import layers

__all__ = ["piper_solvers", "registered"]

GRID = PiperGrid(devices=(2, 4), memory_gib=(1e-9, 3e-8), bandwidth_gib=5 / GIB)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed in range(2):
        made = layers(np.random.default_rng(seed), 5)
        text = json.dumps(made)
        (tmp_path / f"net{seed}.json").write_text(text, encoding="utf-8")
    (tmp_path / "optima.json").write_text("[]", encoding="utf-8")
    return tmp_path


@pytest.mark.usefixtures("piper_solvers")
def test_every_solver_of_every_task(folder: Path) -> None:
    result = run_piper(tasks_of(folder, GRID))
    entries = result["tasks"]
    assert [e["instance"] for e in entries] == ["net0"] * 4 + ["net1"] * 4
    for entry in entries:
        task = read_piper(folder / f"{entry['instance']}.json").on(
            devices=entry["devices"],
            memory_bytes=entry["memory_gib"] * GIB,
            bandwidth=5.0,
        )
        best = solve_piper(task, "exact")
        fits = entry["memory_gib"] > 1e-8
        assert bool(best.stages) == fits
        for method in ("exact", "auto", "learned"):
            time = entry["time_per_sample"][method]
            assert entry["seconds"][method] > 0
            if fits:
                assert time >= best.time_per_sample * (1 - 1e-9)
                nodes = [n for s in entry["stages"][method] for n in s["nodes"]]
                assert sorted(nodes) == list(range(5))
            elif method != "learned":
                assert time == -1
    table = piper_table(result)
    assert "none fits" in table
    lines = [line.split() for line in table.splitlines()]
    assert next(line[:5] for line in lines if line[:2] == ["auto", "all"]) == [
        "auto",
        "all",
        "8",
        "0.00",
        "%",
    ]


def hopeless(task: PiperTask, *, time_limit_s: float, seed: int) -> PiperPlan:
    """Finds nothing."""
    return NO_PLAN


def test_one_that_does_not_find_out_is_null(
    folder: Path, piper_solvers: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    piper_solvers["slow"] = f"{__name__}:hopeless"
    arguments = ["--piper", str(folder), "--methods", "slow", "exact"]
    arguments += ["--devices", "2", "--memory-gib", "3e-8"]
    assert main([*arguments, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["tasks"][0]
    assert first["time_per_sample"]["slow"] is None
    assert first["time_per_sample"]["exact"] > 0
    assert first["stages"]["slow"] == []
    assert main(arguments) == 0
    assert "inf %" in capsys.readouterr().out


def test_a_folder_without_tasks_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--piper", str(tmp_path)]) == 1
    assert "holds no Piper task" in capsys.readouterr().err
    assert main(["--piper-drawn", "0"]) == 1
    assert "0 drawn tasks" in capsys.readouterr().err


@pytest.mark.usefixtures("piper_solvers")
def test_parts_of_the_learned_one_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--piper-drawn", "2", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["tasks"]
    assert len({entry["instance"] for entry in entries}) == 2
    for entry in entries:
        times = entry["time_per_sample"]
        assert {"learned", "untrained", "no_moves", "untrained_no_moves"} < set(times)
        assert times["learned"] <= times["no_moves"]
        assert min(times.values()) >= times["exact"] * (1 - 1e-9)
