"""Modules that a plan's names stand for."""

from __future__ import annotations

import pytest
from torch import nn

from executors.names import inside, tied_parameters, unit_of, units_of_model
from planner.errors import FingerprintError
from tests.distributed.cases import UNITS, build


def test_inside_respects_components() -> None:
    assert inside("layers.1.mlp", "layers.1")
    assert inside("layers.1", "layers.1")
    assert not inside("layers.10", "layers.1")
    assert inside("anything", "")


def test_the_innermost_unit_wins() -> None:
    assert unit_of("a.b.c", ["a", "a.b"]) == "a.b"
    assert unit_of("x", ["a"]) is None


def test_units_that_hold_units_are_left_out() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    assert units_of_model(model, ["", "0", "0.0", "1"]) == ("0.0", "1")


def test_missing_units_are_named() -> None:
    with pytest.raises(FingerprintError, match=r"2 modules .*\(7, 8\)"):
        units_of_model(nn.Sequential(nn.Linear(1, 1)), ["0", "7", "8"])


def test_tied_parameters_are_found_under_all_their_names() -> None:
    assert tied_parameters(build("gpt2")) == (
        ("transformer.wte.weight", "lm_head.weight"),
    )
    assert tied_parameters(build("llama")) == ()
    assert units_of_model(build("llama"), UNITS["llama"]) == UNITS["llama"]
