"""Rows that are priced again and again, against settings made anew."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.calibration.parameters import Vector, recipe_constants
from planner.cost import CostModel, PricingContext
from planner.cost.constants import Calibration
from planner.errors import CalibrationError
from planner.measurements import cases
from planner.measurements.cases import prepare, prepare_all, recipe_under
from planner.measurements.catalogues import fitted_constants, frameworks
from planner.schema import Mesh
from tests.measurements.rows import DEVICE, FRAMEWORK, small

VECTOR = Vector(devices=(DEVICE,), recipes=(FRAMEWORK,))


def _calibration(shift: float) -> Calibration:
    return VECTOR.calibration(VECTOR.start() + shift, "test")


def _peak(schedule: str, **changes: object) -> float:
    row = {"pp": 4, "dp": 2, "layers": 8, "microbatch": 1, "global_batch": 48}
    more = {"schedule": schedule, "source": "zero bubble", **changes}
    case = prepare(small(**{**row, **more}))
    # Without the last rank, where the loss of a model this small is most.
    return float(case.cost(_calibration(0.0)).memory.activations[:-1].max())


def test_zero_bubble_holds_as_much_as_1f1b_or_nearly_twice_that() -> None:
    # Qi et al. 2023, section 2: pp microbatches and 2 pp - 1, on every rank.
    usual, one, two = (_peak(name) for name in ("1f1b", "ZB-1p", "ZB-2p"))
    assert one == pytest.approx(usual)
    assert two == pytest.approx(7 / 4 * one)
    assert _peak("zero bubble ZB-H2") == pytest.approx(two)
    # No more than a step has.
    few = {"global_batch": 10}
    assert _peak("ZB-2p", **few) == pytest.approx(5 / 4 * _peak("ZB-1p", **few))


def test_v_half_and_v_min_hold_part_of_what_zero_bubble_v_does() -> None:
    # Qi et al. 2024, 2405.15362: pp, (pp + 2) // 2 and (pp + 4) // 3 microbatches.
    whole, half, least = (_peak(name) for name in ("ZBV", "V-Half", "v-min"))
    assert half == pytest.approx(3 / 4 * whole)
    assert least == pytest.approx(2 / 4 * whole)
    assert _peak("V-ZB") == pytest.approx(whole)


@pytest.mark.parametrize("shift", [-0.4, 0.0, 0.7])
@pytest.mark.parametrize(
    "row",
    [
        {"zero": 1},
        {"tp": 2, "pp": 2, "microbatch": 2, "recompute": "none"},
    ],
    ids=["dp", "tp and pp"],
)
def test_a_case_costs_what_a_new_setting_does(
    row: dict[str, object], shift: float
) -> None:
    case, calibration = prepare(small(**row)), _calibration(shift)
    facts = case.setting
    setting = PricingContext(
        graph=facts.graph,
        cluster=facts.cluster,
        order=facts.order,
        precision=facts.precision,
        recipe=calibration.recipes[FRAMEWORK],
        memory_fraction=1.0,
        calibration=calibration,
    )
    fresh = CostModel(setting).cost(case.strategy, "analytic")
    # Priced under others before, so that nothing of those is kept.
    case.cost(_calibration(1.5))
    kept = case.cost(calibration)
    assert kept.step_time_s == pytest.approx(fresh.step_time_s, rel=1e-12)
    assert kept.memory.total == pytest.approx(fresh.memory.total, rel=1e-12)
    assert case.step_s(calibration) == pytest.approx(fresh.step_time_s, rel=1e-9)


def test_better_devices_take_less_time() -> None:
    case, start = prepare(small()), VECTOR.start()
    for place, (kind, _, constant) in enumerate(VECTOR.columns()):
        if kind == "device" and constant.name == "kernel_speed":
            start[place] += 1.0
    better = VECTOR.calibration(start, "better")
    assert case.step_s(better) < case.step_s(_calibration(0.0))


def test_frozen_weights_have_no_gradients() -> None:
    # Three of four passes over the layers: forward, again, and the inputs' gradients.
    row = {"hidden": 2048, "seq": 2048, "recompute": "full"}
    full, lora = (
        prepare(small(**row, notes=notes)).step_s(_calibration(0.0))
        for notes in ("", "LoRA r=8")
    )
    assert lora == pytest.approx(0.75 * full, rel=0.1)
    assert "adapters are not priced" in prepare(small(**row, notes="LoRA r=8")).why[0]
    with pytest.raises(CalibrationError, match="QLoRA keeps weights in 4 bits"):
        prepare(small(model="GPT QLoRA"))


def test_measured_seconds() -> None:
    assert prepare(small(value=2.5)).measured_step_s == 2.5
    rate = small(metric="samples_per_s", value=32.0)
    assert prepare(rate).measured_step_s == pytest.approx(2.0)
    assert prepare(small(metric="peak_mem_gb")).measured_step_s is None
    assert prepare(small(value=0.0)).measured_step_s is None


def test_a_case_says_what_it_assumed() -> None:
    case = prepare(small(source="a blog", metric="mfu_pct"))
    assert case.framework in frameworks()
    text = "; ".join(case.why)
    assert "framework not named" in text
    assert "FLOPs counted" in text
    assert "vocab" not in text
    assert all(case.why)


def test_recipes_under_a_calibration() -> None:
    facts = frameworks()[FRAMEWORK].recipe
    fitted = _calibration(0.8)
    made = recipe_under(fitted, FRAMEWORK, facts)
    for constant in fitted_constants("recipe"):
        expected = getattr(fitted.recipes[FRAMEWORK], constant.name)
        assert getattr(made, constant.name) == expected
    other = next(name for name in frameworks() if name != FRAMEWORK)
    assert recipe_under(replace(fitted, recipes={}), other, facts) == facts


def test_what_nothing_was_measured_of_follows_what_was() -> None:
    usual, higher = _calibration(0.0), _calibration(0.8)
    other = next(name for name in frameworks() if name != FRAMEWORK)
    was, now = usual.recipes[other], higher.recipes[other]
    assert was.layer_overlap < now.layer_overlap
    assert higher.default is not None
    assert usual.default is not None
    own = higher.devices[DEVICE].kernel_speed
    assert usual.default.kernel_speed < higher.default.kernel_speed < own


def test_hosts_tell_of_hosts_that_run_the_same_kind_of_program() -> None:
    usual, higher = _calibration(0.0), _calibration(0.8)
    host = frameworks()[FRAMEWORK].host
    for name, framework in frameworks().items():
        was, now = usual.recipes[name].launch, higher.recipes[name].launch
        assert (now > was) == (framework.host == host)


def test_what_a_run_fixed_itself_is_not_fitted() -> None:
    first, *others = fitted_constants("recipe")
    facts = frameworks()[FRAMEWORK].recipe
    fixed = replace(facts, **{first.name: first.high})
    fitted = _calibration(0.8)
    made = recipe_under(fitted, FRAMEWORK, fixed)
    assert getattr(made, first.name) == first.high
    for constant in others:
        expected = getattr(fitted.recipes[FRAMEWORK], constant.name)
        assert getattr(made, constant.name) == expected


def test_rows_that_say_too_little_fail_by_themselves() -> None:
    rows = [small(), small(gpu="abacus"), small(tp=3), small(value=2.0)]
    told: list[int] = []
    cases, failed = prepare_all(rows, told.append)
    assert sorted(cases) == [0, 3]
    assert "abacus" in failed[1]
    assert "tp=3" in failed[2]
    assert told == [1, 2, 3, 4]
    with pytest.raises(CalibrationError, match="abacus"):
        prepare(rows[1])


def test_constants_are_few() -> None:
    assert len(fitted_constants("device")) <= 6
    assert all(len(recipe_constants(name)) <= 3 for name in frameworks())


def test_a_plan_that_cannot_be_fails_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "assume_plan", lambda *_: Mesh(pp=0))
    found, failed = prepare_all([small()])
    assert not found
    assert f"point {small().point_id}" in failed[0]
