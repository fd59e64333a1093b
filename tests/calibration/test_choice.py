"""The calibration that prices a plan is chosen and named in the plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from planner import Cluster, plan, predict
from planner.calibration import choice
from planner.calibration.choice import calibrated_recipe, choose_calibration
from planner.calibration.frameworks import FRAMEWORKS
from planner.calibration.parameters import Vector
from planner.calibration.store import save_calibration
from planner.cost import RECIPES
from planner.cost.constants import Calibration
from planner.errors import CalibrationError, UnknownNameError
from planner.schema import Plan
from tests.plans import gpt2_graph, tiny_graph

VECTOR = Vector(devices=("a100-80",), recipes=("torch",))
STRATEGY = {"mesh": {"dp_shard": 8}, "zero_stage": 3, "microbatch_size": 4}


def _calibration(shift: float = 0.0) -> Calibration:
    """Efficiencies above where fits begin, or below; recipes as they are there."""
    efficiency = [
        kind == "device" and "efficiency" in constant.name
        for kind, _, constant in VECTOR.columns()
    ]
    places = VECTOR.start() + shift * np.array(efficiency)
    return VECTOR.calibration(places, f"shift {shift:g}")


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """Constants in the place of those that come with Meshwright."""
    made = _calibration(0.25)
    monkeypatch.setattr(choice, "has_shipped", lambda: True)
    monkeypatch.setattr(choice, "shipped", lambda: made)
    return made


@cache
def _gpus() -> Cluster:
    return Cluster.parse("dgx-a100")


@cache
def _cpus() -> Cluster:
    return Cluster.detect(processes=2)


def _predict(cluster: Cluster, calibration: Calibration | Path | str | None) -> Plan:
    return predict(gpt2_graph(), cluster, STRATEGY, calibration=calibration)


def test_none_means_the_cluster_s_document() -> None:
    assert choose_calibration(None, _gpus()) is None
    assert choose_calibration("none", _gpus()) is None
    assert calibrated_recipe("torch", None) == RECIPES["torch"]


def test_shipped_constants_are_of_gpus(as_shipped: Calibration) -> None:
    assert choose_calibration("shipped", _gpus()) is as_shipped
    assert choose_calibration("shipped", _cpus()) is None


def test_a_copy_without_constants_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "has_shipped", lambda: False)
    assert choose_calibration("shipped", _gpus()) is None


def test_constants_of_gpus_for_cpus_are_refused() -> None:
    with pytest.raises(CalibrationError, match="has CPU devices"):
        choose_calibration(_calibration(), _cpus())


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"missing\.json cannot be read"):
        choose_calibration(str(tmp_path / "missing.json"), _gpus())


def test_recipes_of_a_calibration_go_first() -> None:
    fitted = _calibration(0.5)
    assert calibrated_recipe("torch", fitted) is fitted.recipes["torch"]
    bare = replace(fitted, recipes={})
    assert calibrated_recipe("torch", bare) == FRAMEWORKS["torch"].recipe
    assert calibrated_recipe("alpa", bare) == FRAMEWORKS["alpa"].recipe
    with pytest.raises(UnknownNameError):
        calibrated_recipe("magic", fitted)
    with pytest.raises(UnknownNameError):
        calibrated_recipe("magic", None)


def test_constants_change_prices_and_plans_name_them(tmp_path: Path) -> None:
    plain = _predict(_gpus(), None)
    assert plain.provenance.calibration is None
    assert "constants:" not in plain.explain()
    fast, slow = (_predict(_gpus(), _calibration(shift)) for shift in (1.0, -1.0))
    assert fast.prediction.step_time_s < slow.prediction.step_time_s
    assert fast.provenance.calibration == "shift 1"
    assert "constants: shift 1" in fast.explain().splitlines()
    path = tmp_path / "constants.json"
    save_calibration(_calibration(1.0), path)
    whole, read = _predict(_gpus(), _calibration(1.0)), _predict(_gpus(), path)
    assert read.prediction.step_time_s == pytest.approx(
        whole.prediction.step_time_s, rel=1e-4
    )
    assert read.provenance.calibration == "shift 1"


def test_what_is_shipped_is_the_default(as_shipped: Calibration) -> None:
    made = predict(gpt2_graph(), _gpus(), STRATEGY)
    assert made == _predict(_gpus(), as_shipped)
    planned = plan(gpt2_graph(), _gpus(), global_batch=64, pin={"dp_shard": 8})
    assert planned.provenance.calibration == as_shipped.name


def test_cpus_are_priced_as_ever(as_shipped: Calibration) -> None:
    strategy = {
        "mesh": {"dp_shard": 2},
        "zero_stage": 3,
        "precision": {"compute": "float32"},
    }
    made, without = (
        predict(tiny_graph(), _cpus(), strategy, calibration=chosen)
        for chosen in ("shipped", None)
    )
    assert made == without
    assert made.provenance.calibration is None


def test_measured_devices_keep_what_was_measured() -> None:
    """The same document, measured: device constants of a calibration leave it alone."""
    document = _gpus().document
    device = document.device_types[0].model_copy(
        update={"measured": True, "matmul_efficiency": 0.61}
    )
    cluster = Cluster.from_document(
        document.model_copy(update={"device_types": (device,)})
    )
    worse, better = (_predict(cluster, _calibration(shift)) for shift in (-1.0, 1.0))
    assert worse.prediction == better.prediction
    assert worse.provenance.calibration == "shift -1"
