"""Worlds of given clusters and models."""

from __future__ import annotations

import pytest

from envs.partition.sampler import OwnWorlds
from planner.errors import StrategyError, UnknownNameError
from tests.plans import TINY

LAB = str(TINY.parent / "cluster.yaml")


def test_worlds_are_of_what_was_given() -> None:
    given = OwnWorlds(clusters=(LAB, "dgx-a100:1"), models=(f"hf:{TINY}",), seq_len=32)
    worlds = [given.world(index) for index in range(12)]
    assert worlds == [given.world(index) for index in range(12)]
    assert {world.machines().num_devices for world in worlds} == {16, 8}
    assert {world.model for world in worlds} == {f"hf:{TINY}"}
    # The lab's last two of the first eight devices are taken in all of its worlds.
    labs = [world.machines() for world in worlds if world.machines().num_devices == 16]
    assert all(not {6, 7} & set(lab.free.tolist()) for lab in labs)
    assert len({tuple(lab.free.tolist()) for lab in labs}) > 1
    other = OwnWorlds(
        clusters=given.clusters, models=given.models, seq_len=32, split="validation"
    )
    assert [other.world(index).global_batch for index in range(12)] != [
        world.global_batch for world in worlds
    ]


def test_something_is_given_and_known() -> None:
    with pytest.raises(StrategyError, match="no clusters and no models"):
        OwnWorlds()
    with pytest.raises(UnknownNameError, match="did you mean"):
        OwnWorlds(clusters=("dgx-a10:1",))
