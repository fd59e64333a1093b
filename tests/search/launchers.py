"""Launchers that exist in tests alone: each with limits of another kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from planner.targets import (
    EVERYTHING,
    Case,
    Target,
    Violation,
    base,
    get_target,
    layers_of_stages,
    may_be_even,
    same_on_every_host,
)

__all__ = ["LAUNCHERS", "installed"]


def _even(case: Case) -> Violation | None:
    if not case.layers or case.strategy.mesh.pp == 1 or may_be_even(case.strategy):
        return None
    return _violation("stages.modules", "it cuts evenly")


def _whole(case: Case) -> Violation | None:
    if not case.layers or case.strategy.mesh.pp == 1:
        return None
    if layers_of_stages(case.strategy) is not None:
        return None
    return _violation("stages.modules", "it counts whole layers")


def _one_recompute(case: Case) -> Violation | None:
    if len({stage.recompute for stage in case.strategy.stages}) < 2:
        return None
    return _violation("stages.recompute", "it has one for all stages")


def _narrow(case: Case) -> Violation | None:
    degree = case.strategy.mesh.dp_shard
    return None if degree in {1, 4} else _violation("mesh.dp_shard", "1 or 4 alone")


def _no_tp_with_zero_3(case: Case) -> Violation | None:
    if case.strategy.mesh.tp == 1 or case.strategy.zero_stage < 3:
        return None
    return _violation("zero_stage", "not beside tp")


def _violation(field: str, why: str) -> Violation:
    return Violation(field=field, value="?", why=why, remedy="use another")


def _target(name: str, **changes: Any) -> Target:
    plain: dict[str, Any] = {"title": name.title(), "version": "9.1", "runs": "itself"}
    return Target(name=name, **{"says": EVERYTHING, **plain, **changes})


_NO_PIPELINE = {"mesh.pp", "schedule", "virtual_stages", "stages.modules"}

LAUNCHERS = {
    target.name: target
    for target in (
        _target("even", even_layers=True, rules=(_even, _one_recompute)),
        _target("whole", rules=(_whole, _one_recompute, same_on_every_host)),
        _target(
            "flat",
            says=EVERYTHING
            - _NO_PIPELINE
            - {"mesh.cp", "sharding.sequence_parallel", "device_ranges"}
            - {"sharding.patterns"},
            leaves=frozenset({"sharding.patterns"}),
            rules=(_no_tp_with_zero_3, _one_recompute),
        ),
        _target(
            "narrow",
            rules=(_narrow,),
            sizes=frozenset({"mesh.dp_shard"}),
            runs="meshwright",
        ),
        _target("gpipe", says=EVERYTHING - {"schedule", "virtual_stages"}),
        _target("mute", says=EVERYTHING - {"grad_clip_norm"}),
        _target("bare", says=EVERYTHING - {"precision.reduce", "optimizer"}),
    )
}


@dataclass(frozen=True, kw_only=True)
class _Point:
    """An entry point of a package that is not there."""

    target: Target
    value: str = "tests:launcher"

    def load(self) -> Target:
        return self.target


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register launchers as an installed package would."""
    points = {name: _Point(target=target) for name, target in LAUNCHERS.items()}
    monkeypatch.setattr(base, "_registered", lambda: points)
    get_target.cache_clear()
    yield
    get_target.cache_clear()
