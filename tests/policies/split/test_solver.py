"""The ``learned`` solver, and the weights that it reads."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.split import Groups, SplitTask, best_along, breaches, max_load_ms, solve
from policies.split.network import SplitNetwork
from policies.split.saved import (
    SavedSplitPolicy,
    load_policy,
    save_policy,
    shipped_folder,
)
from policies.split.solver import SearchConfig, best_by_network, learned
from tests.split.cases import document, legal_splits, task_of, training
from tests.split.conftest import golden, published, registered, solvers

__all__ = ["golden", "published", "registered", "solvers"]


def random_task(seed: int) -> SplitTask:
    rng = np.random.default_rng(seed)
    made = document(rng, nodes=6, accelerators=2 + seed % 2, cpus=seed % 2)
    return task_of(training(rng, made) if seed % 3 == 0 else made)


@pytest.mark.parametrize("seed", range(8))
def test_small_tasks_are_split_as_well_as_can_be(
    seed: int, solvers: dict[str, str]
) -> None:
    task = random_task(seed)
    found = solve(task, "learned")
    assert found is not None
    assert found.found_by == "learned"
    assert breaches(task, found.assignment) == ()
    least = min(max_load_ms(task, device) for device in legal_splits(task))
    assert least * (1 - 1e-9) <= found.load_ms <= 1.25 * least


def test_a_seed_gives_the_same_split(pool: list[Groups]) -> None:
    for groups in pool[:4]:
        one, other = (learned(groups.task, seed=5) for _ in range(2))
        assert one is not None
        assert other is not None
        np.testing.assert_array_equal(one.assignment, other.assignment)


def test_more_orders_are_no_worse(pool: list[Groups], network: SplitNetwork) -> None:
    better = 0
    for groups in pool:
        few = best_by_network(network, groups, search=SearchConfig(rounds=0))
        many = best_by_network(
            network, groups, search=SearchConfig(rounds=20, patience=20)
        )
        if few is not None:
            assert many is not None
            assert many.load_ms <= few.load_ms
            better += many.load_ms < few.load_ms
    assert better > 2


def test_out_of_time_it_gives_what_it_has(
    pool: list[Groups], network: SplitNetwork
) -> None:
    groups = next(g for g in pool if g.task.cpus)
    found = best_by_network(network, groups, ends=time.monotonic() - 1)
    assert found is not None
    assert breaches(groups.task, found.assignment) == ()


def test_memory_that_suffices_along_few_orders() -> None:
    """Two pairs that fit on a device each, though most runs do not."""
    made = document(np.random.default_rng(0), nodes=4, accelerators=2, cpus=0)
    for node, size in zip(made["nodes"], (6.0, 6.0, 4.0, 4.0), strict=True):
        node["size"] = size
    task = task_of({**made, "edges": [], "maxSizePerFPGA": 10.0})
    found = learned(task)
    assert found is not None
    assert breaches(task, found.assignment) == ()


def test_what_does_not_fit_along_any_order_is_left() -> None:
    made = document(np.random.default_rng(0), nodes=4, accelerators=2, cpus=0)
    for node in made["nodes"]:
        node["size"] = 6.0
    assert learned(task_of({**made, "maxSizePerFPGA": 10.0})) is None


def test_published_tasks_are_near_their_optima(
    published: dict[str, SplitTask],
    golden: dict[tuple[str, str], float],
    solvers: dict[str, str],
) -> None:
    ratios = []
    for name, task in published.items():
        best = golden.get((name, "exact_optimum"))
        if best is not None:
            found = solve(task, "learned")
            assert found is not None
            assert breaches(task, found.assignment) == ()
            ratios.append(found.load_ms / best)
    assert len(ratios) == 9
    # Published figures have six digits.
    assert min(ratios) > 1 - 1e-5
    assert np.mean(ratios) < 1.002


def test_shipped_weights_are_small_and_described() -> None:
    folder = shipped_folder()
    assert (folder / "README.md").stat().st_size > 500
    assert (folder / "policy.safetensors").stat().st_size < 500_000
    notes = load_policy().notes
    assert notes["validated_on"]["gain_over_standard_orders"] > 0


def test_what_was_saved_splits_the_same(
    network: SplitNetwork, pool: list[Groups], tmp_path: Path
) -> None:
    save_policy(SavedSplitPolicy(network=network, notes={"seed": 1}), tmp_path)
    saved = load_policy(tmp_path)
    assert saved.notes == {"seed": 1}
    one = best_by_network(network, pool[0])
    other = best_by_network(saved.network, pool[0])
    assert one is not None
    assert other is not None
    np.testing.assert_array_equal(one.assignment, other.assignment)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 99}, "format_version=99, this Meshwright reads"),
        ({"features": ["work"]}, "other features than this Meshwright's"),
        ({"standing": ["place"]}, "other standing than this Meshwright's"),
        ({"network": {"width": 9}}, "does not go with its config.json"),
        ({"colour": 1}, "colour: Extra inputs"),
    ],
)
def test_weights_of_another_version_are_refused(
    network: SplitNetwork, tmp_path: Path, change: dict[str, object], match: str
) -> None:
    save_policy(SavedSplitPolicy(network=network), tmp_path)
    path = tmp_path / "config.json"
    held = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**held, **change}), encoding="utf-8")
    with pytest.raises(StrategyError, match=match):
        load_policy(tmp_path)


def test_files_that_are_missing_or_damaged(
    network: SplitNetwork, tmp_path: Path
) -> None:
    with pytest.raises(StrategyError, match=r"config\.json cannot be read"):
        load_policy(tmp_path)
    save_policy(SavedSplitPolicy(network=network), tmp_path)
    (tmp_path / "policy.safetensors").write_bytes(b"no weights")
    with pytest.raises(StrategyError, match="holds no weights"):
        load_policy(tmp_path)
    (tmp_path / "policy.safetensors").unlink()
    with pytest.raises(StrategyError, match="it belongs to"):
        load_policy(tmp_path)


def test_a_search_that_makes_no_sense(pool: list[Groups]) -> None:
    with pytest.raises(StrategyError, match="gain=-1"):
        SearchConfig(gain=-1.0)
    assert best_along(pool[0], np.arange(len(pool[0])), 0.0, check=False) is None
