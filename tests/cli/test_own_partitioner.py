"""The package of ``examples/own-partitioner``, installed as users install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.plans import TINY

PACKAGE = TINY.parent / "own-partitioner"
ROOT = TINY.parents[1]
SMALL = (
    *("plan", "--model", f"hf:{TINY}", "--seq-len", "32", "--cluster", "dgx-a100:1"),
    *("--global-batch", "64", "--evaluation-budget", "8", "--json"),
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a process that has the package."""
    target = tmp_path_factory.mktemp("site")
    # Nothing is downloaded: what the package needs is what these tests run with.
    words = ("--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *words, "--target", target, PACKAGE],
        check=True,
        capture_output=True,
        timeout=120,
    )
    path = os.pathsep.join([str(ROOT), str(target)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _meshwright(installed: dict[str, str], *words: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "planner.cli.main", *words],
        env=installed,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.further
def test_it_plans_by_name(installed: dict[str, str]) -> None:
    made = json.loads(_meshwright(installed, *SMALL, "--partitioner", "halving"))
    assert made["provenance"]["partitioner"] == "halving"
    assert made["provenance"]["evaluations"]["simulated"] <= 8
    memory = made["prediction"]["memory"]
    assert all(one["parameters_bytes"] < one["limit_bytes"] for one in memory)


@pytest.mark.further
def test_it_stands_beside_the_others(installed: dict[str, str]) -> None:
    made = json.loads(
        _meshwright(installed, *SMALL, "--compare", "--time-budget-s", "0.5")
    )
    rows = {row["partitioner"]: row for row in made["contenders"]}
    assert {"halving", "expert", "learned"} <= set(rows)
    # Sixteen strategies picked from all by price: not below the rules of thumb.
    assert rows["halving"]["step_time_s"] <= rows["expert"]["step_time_s"]
