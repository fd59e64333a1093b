"""Pins as people write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.schema import PINNABLE, Communication, Strategy
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.schedules import schedule_spec
from planner.space import (
    RECOMPUTE_NAMES,
    Regime,
    StrategyTable,
    normalize_pins,
    pin_text,
    read_pins,
)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tpp": 2}, "did you mean 'tp'"),
        ({"schedule": "1f1b"}, "unknown schedule '1f1b'"),
        ({"schedule": "Interleaved1F1"}, "did you mean"),
        ({"recompute": "ful"}, "did you mean 'full'"),
        ({"synchronisation": "local_step"}, "did you mean 'local_steps'"),
        ({3: 2}, "unknown knob to pin '3'"),
    ],
)
def test_typing_errors_name_the_nearest(pins: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownNameError, match=words):
        read_pins(pins)


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ({"tp": 0}, "pin tp=0 is below 1; give at least 1"),
        ({"tp": "-2"}, "pin tp=-2 is below 1"),
        ({"tp": 10**7}, "pin tp=10000000 is above 1000000; give at most 1000000"),
        ({"tp": "9" * 5000}, "is not a whole number"),
        ({"zero_stage": -1}, "pin zero_stage=-1 is below 0"),
        ({"zero_stage": 4}, "pin zero_stage=4 is above 3"),
        ({"pp": "two"}, "pin pp='two' is not a whole number; give one such as pp=2"),
        ({"pp": 2.0}, "pin pp=2.0 is not a whole number"),
        ({"pp": None}, "pin pp=None is not a whole number"),
        ({"pp": True}, "pin pp=True is not a whole number"),
        ({"pp": [2]}, r"pin pp=\[2\] is not a whole number"),
        ({"schedule": 1}, "pin schedule=1 is not a name; give one of GPipe, 1F1B"),
        ({"recompute": True}, "pin recompute=True is not a name; give one of none, "),
        ({"sequence_parallel": 2}, "pin sequence_parallel=2 is neither on nor off"),
        ({"sequence_parallel": "on?"}, "give True or False"),
        ({"sequence_parallel": 1.0}, "neither on nor off"),
        ({"compile": "yes"}, "pin compile='yes' is neither on nor off"),
        ({"synchronisation": 8}, "synchronisation=8 is not a name; give one of "),
        ({"synchronisation": "local_steps:period=0"}, "greater than or equal to 1"),
        ({"synchronisation": "local_steps:peroid=2"}, "settings are period"),
        ({"synchronisation": "local_steps:2"}, "'2' is not SETTING=VALUE"),
        ({"synchronisation": "all_reduce:x=1"}, "has no settings"),
        ({"gradient_compression": "float16:x=1"}, "has no settings"),
        (
            {"schedule": "Interleaved1F1B", "virtual_stages": 1},
            "virtual_stages=1; with one stage a rank it is Eager1F1B, use schedule="
            "Eager1F1B, or virtual_stages=2 or more",
        ),
    ],
)
def test_values_of_the_wrong_type_or_size_are_refused(
    pins: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words) as caught:
        read_pins(pins)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"tp": "8"}, {"tp": 8}),
        ({"tp": " 8 "}, {"tp": 8}),
        ({"tp": np.int64(8)}, {"tp": 8}),
        ({"zero_stage": "0"}, {"zero_stage": 0}),
        ({"schedule": "1F1B"}, {"schedule": "1F1B"}),
        ({"recompute": "full"}, {"recompute": "full"}),
        ({"sequence_parallel": "true"}, {"sequence_parallel": True}),
        ({"sequence_parallel": 0}, {"sequence_parallel": False}),
        ({"compile": "true"}, {"compile": True}),
        ({"synchronisation": "local-sgd"}, {"synchronisation": "local_steps"}),
        (
            {"synchronisation": "local_steps: period=4"},
            {"synchronisation": "local_steps:period=4"},
        ),
        ({"gradient_compression": "powersgd"}, {"gradient_compression": "powersgd"}),
    ],
)
def test_each_knob_has_one_type(written: dict[str, Any], read: dict[str, Any]) -> None:
    found = read_pins(written)
    assert found == read
    assert {k: type(v) for k, v in found.items()} == {
        k: type(v) for k, v in read.items()
    }
    assert read_pins(found) == found


def test_pins_become_columns_of_a_table() -> None:
    pins = normalize_pins(
        {"tp": "8", "schedule": "1F1B", "recompute": "full", "sequence_parallel": True}
    )
    assert pins == {
        "tp": 8,
        "schedule": schedule_spec("1F1B").code,
        "recompute": RECOMPUTE_NAMES.index("full"),
        "sequence_parallel": 1,
    }
    assert [pin_text(knob, code) for knob, code in pins.items()] == [
        "tp=8",
        "schedule=1F1B",
        "recompute=full",
        "sequence_parallel=1",
    ]
    of_regime = {f for f in Regime.__dataclass_fields__ if f in Strategy.model_fields}
    # A document of one leaf, pinned by that.
    of_regime = of_regime - {"communication"} | {*Communication.model_fields}
    # DeepSpeed's, read from its configs and never searched for.
    of_regime = of_regime - {"shards"}
    columns = {*StrategyTable.__dataclass_fields__}
    assert set(PINNABLE) == columns | of_regime


def test_what_all_strategies_have_in_common_is_no_column() -> None:
    pins = {"tp": 2, "compile": True, "synchronisation": "local_steps"}
    assert normalize_pins(pins) == {"tp": 2}


def test_pins_of_methods_are_read_as_people_write_them_and_consent() -> None:
    regime = Regime.from_pins(read_pins({"synchronisation": LocalSteps(period=4)}))
    assert regime.synchronisation == LocalSteps(period=4)
    assert regime.semantics == "approximate"
    assert Regime.from_pins({"tp": 2}) == Regime()
    assert Regime.from_pins({"synchronisation": "all_reduce"}).semantics == "exact"
    strategy = Strategy(compile=True, gradient_compression="powersgd")
    regime = Regime.of(strategy)
    assert {k: getattr(strategy, k) for k in regime.strategy_fields} == (
        regime.strategy_fields
    )
