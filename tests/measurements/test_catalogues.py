"""Catalogues state the source of each entry, and hold what the code looks up."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from planner.cluster.presets import device_type_names
from planner.measurements.catalogues import (
    DATA,
    fitted_constants,
    frameworks,
    read_rows,
    read_tree,
)
from planner.measurements.device_names import accelerators, chips
from planner.measurements.hosts import known_systems, usual_hosts
from planner.measurements.known_models import known_models

TABLES = sorted(DATA.glob("*.csv"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_every_row_states_its_source(path: Path) -> None:
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows
    for row in rows:
        # No field too many or too few.
        assert None not in row
        assert None not in row.values()
        stated = [row[name] for name in row if name.split("_")[-1] == "source"]
        assert stated
        assert all(text.strip() for text in stated), row


def test_every_model_plan_and_framework_states_its_source() -> None:
    assert all(known.source for known in known_models())
    assert all(entry["source"] for entry in read_tree("known_plans.yaml").values())
    for framework in frameworks().values():
        assert framework.source
        assert all(variant.source for variant in framework.variants)
    facts = read_tree("frameworks.yaml")["facts"]
    assert all(fact["source"] for fact in facts.values())


def test_devices_of_the_catalogues_are_known() -> None:
    known = {*accelerators(), *device_type_names()}
    named = {
        name for chip in chips() for name in (*chip.variants, *chip.pcie, *chip.nvl)
    }
    assert named <= known
    assert set(usual_hosts()) == known
    assert all(set(system.devices) <= known for system in known_systems())
    sold = [pair.split(":") for chip in chips() for pair in chip.also_sold_as]
    assert sold
    assert all(name in named and int(size) > 0 for name, size in sold)


def test_frameworks_are_fitted_in_three_constants_of_recipes() -> None:
    names = [constant.name for constant in fitted_constants("recipe")]
    for framework in frameworks().values():
        assert len(framework.fitted) <= 3
        assert set(framework.fitted) <= set(names)
        assert "launch" in framework.fitted


def test_names_lead_to_frameworks() -> None:
    assert {row["framework"] for row in read_rows("framework_names.csv")} <= set(
        frameworks()
    )
