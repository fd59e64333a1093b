"""Patterns of module names."""

from __future__ import annotations

from planner.schema.patterns import matches_pattern


def test_patterns_match_from_the_end() -> None:
    assert matches_pattern("layers.*.up", "model.layers.3.up")
    assert matches_pattern("lm_head", "lm_head")
    assert not matches_pattern("layers.*.up", "model.layers.3.mlp.up")
    assert not matches_pattern("a.b.c", "b.c")


def test_a_pattern_is_matched_by_those_that_mean_all_of_it() -> None:
    assert matches_pattern("layers.*.up", "model.layers.*.up")
    assert not matches_pattern("layers.0.up", "model.layers.*.up")
