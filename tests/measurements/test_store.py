from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner import Cluster, plan, predict
from planner.calibration.parameters import Vector
from planner.cost import RECIPES
from planner.cost.constants import Calibration
from planner.errors import CalibrationError, PlanFileError, UnknownNameError
from planner.measurements import store
from planner.measurements.catalogues import fitted_constants, frameworks
from planner.measurements.store import (
    Origin,
    calibrated_recipe,
    choose_calibration,
    load_calibration,
    save_calibration,
)
from planner.schema import Plan
from tests.plans import gpt2_graph, tiny_graph

VECTOR = Vector(devices=("a100-80", "h100-80"), recipes=("megatron", "torch"))


def _calibration() -> Calibration:
    shift = np.linspace(-0.8, 0.8, VECTOR.size)
    return VECTOR.calibration(VECTOR.start() + shift, "a test")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "constants.json"
    save_calibration(
        _calibration(), path, Origin(rows={"us": ["1"]}, made="2026-01-02")
    )
    return path


def test_constants_come_back(path: Path) -> None:
    made, again = _calibration(), load_calibration(path)
    assert again.name == "a test"
    assert again.devices.keys() == made.devices.keys()
    assert again.recipes.keys() == made.recipes.keys()
    assert again.default is not None
    for constant in fitted_constants("device"):
        for name, found in again.devices.items():
            expected = getattr(made.devices[name], constant.name)
            assert getattr(found, constant.name) == pytest.approx(expected, rel=1e-5)
        default = getattr(made.default, constant.name)
        assert getattr(again.default, constant.name) == pytest.approx(default, rel=1e-5)
    for constant in fitted_constants("recipe"):
        for name, recipe in again.recipes.items():
            expected = getattr(made.recipes[name], constant.name)
            assert getattr(recipe, constant.name) == pytest.approx(expected, rel=1e-5)


def test_facts_of_a_framework_are_not_in_the_file(path: Path) -> None:
    for name, recipe in load_calibration(path).recipes.items():
        facts = frameworks()[name].recipe
        assert recipe.loss_parallel == facts.loss_parallel
        assert recipe.causal_share == facts.causal_share
    kept = json.loads(path.read_text())["recipes"]["torch"]
    assert kept.keys() == {constant.name for constant in fitted_constants("recipe")}


def test_a_second_round_trip_changes_nothing(path: Path, tmp_path: Path) -> None:
    once = load_calibration(path)
    save_calibration(once, tmp_path / "again.json")
    assert load_calibration(tmp_path / "again.json") == once


def test_the_file_says_which_rows_it_is_from(path: Path) -> None:
    origin = json.loads(path.read_text())["origin"]
    assert origin == {"rows": {"us": ["1"]}, "made": "2026-01-02", "errors": {}}


def test_a_file_is_replaced_whole(path: Path) -> None:
    before = sorted(path.parent.iterdir())
    save_calibration(Calibration(name="empty"), path)
    again = load_calibration(path)
    assert (again.name, again.devices, again.recipes) == ("empty", {}, {})
    assert sorted(path.parent.iterdir()) == before


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(PlanFileError, match="is not a folder"):
        save_calibration(_calibration(), tmp_path / "none" / "constants.json")


def _first(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = data["devices"]["a100-80"]
    return found


def _set(constant: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: _first(data).update({constant: value})


DEVICE, RECIPE = fitted_constants("device")[0], fitted_constants("recipe")[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(format_version=99), "format_version=99"),
        (lambda d: d.pop("format_version"), "format_version=None"),
        (lambda d: d["recipes"].update(magic={}), "recipe 'magic' is not known"),
        (_set(DEVICE.name, DEVICE.high + 1), f"{DEVICE.name}="),
        (_set(DEVICE.name, DEVICE.low - 1), f"from {DEVICE.low:g} to"),
        (_set(DEVICE.name, "fast"), "'fast' is not a number"),
        (_set(DEVICE.name, True), "True is not a number"),
        (_set(DEVICE.name, None), "None is not a number"),
        (_set("host_overhead", "many"), "'many' is not a number"),
        (_set("host_overhead", -1.0), "-1.0 is not a number"),
        (_set("luck", 1.0), "'luck'"),
        (lambda d: _first(d).clear(), "device 'a100-80' lacks"),
        (lambda d: d["devices"].update(x=3), "device 'x' is int"),
        (lambda d: d.pop("devices"), "devices is NoneType"),
        (lambda d: d.update(recipes=[]), "recipes is list"),
        (lambda d: d.update(default=3), "default is int"),
        (
            lambda d: d["recipes"]["torch"].update({RECIPE.name: RECIPE.high + 1}),
            "recipe 'torch': " + RECIPE.name,
        ),
        (lambda d: d["recipes"]["torch"].update(name=1), "recipe 'torch' has 'name'"),
    ],
)
def test_files_that_are_refused(
    path: Path, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    with pytest.raises(CalibrationError) as caught:
        load_calibration(path)
    assert words in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "constants.json"
    path.write_text(text)
    with pytest.raises(CalibrationError, match=r"constants\.json"):
        load_calibration(path)
    with pytest.raises(CalibrationError, match="cannot read constants"):
        load_calibration(tmp_path / "missing.json")


def test_the_shipped_constants_are_a_file_like_any(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "SHIPPED", path)
    store.shipped.cache_clear()
    try:
        assert store.has_shipped()
        assert store.shipped() == load_calibration(path)
        path.unlink()
        store.shipped.cache_clear()
        assert not store.has_shipped()
        with pytest.raises(CalibrationError, match="install it again"):
            store.shipped()
    finally:
        store.shipped.cache_clear()


def test_what_is_shipped_can_be_read() -> None:
    """Where this copy came with constants; without, plans go by datasheets."""
    if store.has_shipped():
        assert store.shipped().devices


def _with_imbalance(path: Path, value: float) -> Path:
    document = json.loads(path.read_text())
    document["recipes"]["torch"]["imbalance"] = value
    path.write_text(json.dumps(document))
    return path


def test_how_uneven_routers_are_can_be_written_in(path: Path) -> None:
    assert load_calibration(path).recipes["torch"].imbalance == 1.0
    again = load_calibration(_with_imbalance(path, 1.3))
    assert again.recipes["torch"].imbalance == 1.3
    save_calibration(again, path)
    assert load_calibration(path) == again


@pytest.mark.parametrize("value", [0.5, 1000.0])
def test_routers_have_a_mean(path: Path, value: float) -> None:
    with pytest.raises(CalibrationError, match=r"imbalance=.* from 1 to 64"):
        load_calibration(_with_imbalance(path, value))


A100 = Vector(devices=("a100-80",), recipes=("torch",))
STRATEGY = {"mesh": {"dp_shard": 8}, "zero_stage": 3, "microbatch_size": 32}


def _shifted(shift: float = 0.0) -> Calibration:
    """Efficiencies above where fits begin, or below; recipes as they are there."""
    efficiency = [
        constant.name in {"kernel_speed", "network_efficiency"}
        for _, _, constant in A100.columns()
    ]
    places = A100.start() + shift * np.array(efficiency)
    return A100.calibration(places, f"shift {shift:g}")


@pytest.fixture
def as_shipped(monkeypatch: pytest.MonkeyPatch) -> Calibration:
    """Constants in the place of those that come with Meshwright."""
    made = _shifted(0.25)
    monkeypatch.setattr(store, "has_shipped", lambda: True)
    monkeypatch.setattr(store, "shipped", lambda: made)
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
    monkeypatch.setattr(store, "has_shipped", lambda: False)
    assert choose_calibration("shipped", _gpus()) is None


def test_constants_of_gpus_for_cpus_are_refused() -> None:
    with pytest.raises(CalibrationError, match="has CPU devices"):
        choose_calibration(_shifted(), _cpus())


def test_a_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"cannot read .*missing\.json"):
        choose_calibration(str(tmp_path / "missing.json"), _gpus())


def test_recipes_of_a_calibration_go_first() -> None:
    fitted = _shifted(0.5)
    assert calibrated_recipe("torch", fitted) is fitted.recipes["torch"]
    bare = replace(fitted, recipes={})
    assert calibrated_recipe("torch", bare) == frameworks()["torch"].recipe
    assert calibrated_recipe("alpa", bare) == frameworks()["alpa"].recipe
    with pytest.raises(UnknownNameError):
        calibrated_recipe("magic", fitted)
    with pytest.raises(UnknownNameError):
        calibrated_recipe("magic", None)


def test_constants_change_prices_and_plans_name_them(tmp_path: Path) -> None:
    plain = _predict(_gpus(), None)
    assert plain.provenance.calibration is None
    assert "constants:" not in plain.explain()
    fast, slow = (_predict(_gpus(), _shifted(shift)) for shift in (1.0, -1.0))
    assert fast.prediction.step_time_s < slow.prediction.step_time_s
    assert fast.provenance.calibration == "shift 1"
    assert "constants: shift 1" in fast.explain().splitlines()
    path = tmp_path / "constants.json"
    save_calibration(_shifted(1.0), path)
    whole, read = _predict(_gpus(), _shifted(1.0)), _predict(_gpus(), path)
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
    worse, better = (_predict(cluster, _shifted(shift)) for shift in (-1.0, 1.0))
    assert worse.prediction == better.prediction
    assert worse.provenance.calibration == "shift -1"
