"""Stages that hand microbatches on, against times worked out by hand."""

from __future__ import annotations

import numpy as np

from planner.simulate import relay_starts


def test_equal_stages_begin_one_forward_and_one_message_apart() -> None:
    ahead, send = np.full(3, 2.0), np.full(2, 0.5)
    start = relay_starts(ahead, ahead, send, 3)
    assert start.tolist() == [[0, 2, 4], [2.5, 4.5, 6.5], [5, 7, 9]]


def test_a_slow_stage_makes_those_behind_it_wait() -> None:
    ahead = np.array([1.0, 3.0, 1.0])
    start = relay_starts(ahead, ahead, np.zeros(2), 3)
    assert start.tolist() == [[0, 1, 2], [1, 4, 7], [4, 7, 10]]


def test_a_microbatch_goes_on_before_its_stage_is_through_with_it() -> None:
    start = relay_starts(np.ones(2), np.array([3.0, 2.0]), np.zeros(1), 2)
    assert start.tolist() == [[0, 3], [1, 4]]


def test_messages_over_one_boundary_wait_for_each_other() -> None:
    start = relay_starts(np.ones(2), np.ones(2), np.array([4.0]), 3)
    assert start.tolist() == [[0, 1, 2], [5, 9, 13]]
