"""Worlds that are drawn: the same everywhere, apart by split, always solvable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.partition import World, WorldSampler, load_worlds, sample_world
from envs.partition.clusters import (
    CLUSTER_KINDS,
    Scale,
    cluster_split,
    composition,
    draw_cluster,
)
from envs.partition.machines import KNOWN, UNSEEN
from envs.partition.models import COUNTS, SPLITS, Split, catalogue, profiled
from envs.partition.sampler import KINDS, OwnWorlds, is_feasible, main
from planner.cluster import Cluster, device_type
from planner.errors import CaptureError, StrategyError, UnknownNameError
from planner.schema.cluster import ClusterDocument
from tests.plans import TINY

#: Clusters are cheap to draw, models are not read for these tests.
DRAWS = 15


def _draws(kind: str, split: Split = "train") -> list[ClusterDocument]:
    return [
        draw_cluster(kind, split, np.random.default_rng(seed), KNOWN, Scale())
        for seed in range(DRAWS)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_a_world_that_can_be_solved(kind: str) -> None:
    world = sample_world(kind, "test", 0)
    assert (world.kind, world.name) == (kind, f"{kind}-test-0")
    request = world.request()
    assert is_feasible(request)
    machines = request.context.cluster
    assert 2 <= machines.num_free <= machines.num_devices
    assert bool(machines.document.occupied) or kind != "occupied"
    assert World.from_json(world.to_json()) == world


def test_a_world_that_nothing_fits_is_not_feasible() -> None:
    big = World(name="x", model="llama2-70b", cluster="l40s-pcie", global_batch=8)
    assert not is_feasible(big.request())
    roomy = big.model_copy(update={"cluster": "l40s-pcie:16"})
    assert is_feasible(roomy.request())


@pytest.mark.further
def test_the_same_seed_gives_the_same_file_in_another_process(tmp_path: Path) -> None:
    options = ["--kind", "mixed", "sites", "--split", "validation", "--count", "1"]
    options += ["--seed", "3", "--cache", str(tmp_path / "graphs")]
    here, there = tmp_path / "here.json", tmp_path / "there.json"
    main([*options, "--out", str(here)])
    command = [sys.executable, "-m", "envs.partition.sampler", *options]
    subprocess.run([*command, "--out", str(there)], check=True)
    assert here.read_bytes() == there.read_bytes()
    worlds = load_worlds(here)
    assert [world.kind for world in worlds] == ["mixed", "sites"]
    assert worlds[1] == sample_world("sites", "validation", 3_000_000)


def test_splits_share_no_model() -> None:
    shapes = {
        split: {json.dumps([s.model, s.seq_len]) for s in catalogue(split)}
        for split in SPLITS
    }
    assert [len(shapes[split]) for split in SPLITS] == [60, 15, 30]
    assert {split: sum(COUNTS[split].values()) for split in SPLITS} == {
        split: len(shapes[split]) for split in SPLITS
    }
    assert len(set.union(*shapes.values())) == 105


@pytest.mark.parametrize("kind", CLUSTER_KINDS)
def test_splits_share_no_composition(kind: str) -> None:
    found = {split: {composition(d) for d in _draws(kind, split)} for split in SPLITS}
    assert not found["train"] & found["test"]
    assert not found["train"] & found["validation"]
    assert not found["validation"] & found["test"]
    for split in SPLITS:
        assert {cluster_split(d) for d in _draws(kind, split)} == {split}


def test_a_composition_is_the_same_in_any_order() -> None:
    (document,) = _draws("uneven")[:1]
    turned = document.model_copy(update={"hosts": document.hosts[::-1]})
    assert composition(turned) == composition(document)


def test_kinds_are_what_they_are_called() -> None:
    for document in _draws("uniform"):
        assert Cluster.from_document(document).is_uniform
    for document in _draws("mixed"):
        assert len(document.device_types) in {2, 3}
    for document in _draws("uneven"):
        assert len({group.devices_per_host for group in document.hosts}) > 1
    for document in _draws("occupied"):
        cluster = Cluster.from_document(document)
        assert 2 <= cluster.num_free < cluster.num_devices
        assert cluster.num_free >= cluster.num_devices // 4
    for document in _draws("sites"):
        assert document.topology == "matrix"


@pytest.mark.parametrize("kind", ["mixed", "uneven"])
def test_hosts_are_in_no_order(kind: str) -> None:
    shuffled = 0
    for document in _draws(kind):
        hosts = [
            (g.device, g.devices_per_host)
            for g in document.hosts
            for _ in range(g.count)
        ]
        shuffled += hosts != sorted(hosts) and hosts != sorted(hosts, reverse=True)
    assert shuffled > DRAWS / 2


def test_links_between_sites_are_as_measured() -> None:
    """Yuan et al. 2022: 11 to 238 ms and 0.335 to 1.16 Gbit/s across sites."""
    for document in _draws("sites"):
        cluster = Cluster.from_document(document)
        host = np.asarray(cluster.host_of_device)
        each = int(np.bincount(host)[0])
        ids = np.arange(cluster.num_devices)
        rate, delay = cluster.topology.links(ids[:, None], ids[None, :])
        across = delay > 10.5e-3
        assert across.any()
        assert not across[host[:, None] == host[None, :]].any()
        assert delay.max() <= 238e-3
        gbits = rate[across] * each * 8e-9
        # The spread of one standard deviation is 15 %; four of them are the limit.
        assert gbits.min() > 0.335 * np.exp(-0.6)
        assert gbits.max() < 1.16 * np.exp(0.6)
        assert np.array_equal(delay, delay.T)
        assert np.array_equal(rate, rate.T)


def test_scale_is_kept() -> None:
    for kind in CLUSTER_KINDS:
        for document in _draws(kind):
            hosts = sum(group.count for group in document.hosts)
            assert document.num_devices <= 512
            assert hosts <= (128 if kind == "sites" else 64)


def test_transfer_is_new_in_types_or_in_size() -> None:
    known = {machine.device for machine in KNOWN.values()}
    unseen = {machine.device for machine in UNSEEN.values()}
    assert not known & unseen
    for name in known | unseen:
        assert device_type(name).name == name
    with pytest.raises(StrategyError, match="never trained on"):
        sample_world("transfer", "train", 0)


def test_what_a_sampler_refuses() -> None:
    with pytest.raises(UnknownNameError, match="mixd"):
        sample_world("mixd", "test", 0)
    with pytest.raises(UnknownNameError, match="split"):
        sample_world("mixed", "tset", 0)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="seed=-1"):
        sample_world("mixed", "test", -1)
    with pytest.raises(StrategyError, match="kinds is empty"):
        WorldSampler(kinds=(), split="test")


def test_profiles_are_split_by_name(tmp_path: Path) -> None:
    node = "forward_compute_time=1.0, backward_compute_time=2.0, activation_size=4e6"
    lines = [f"node{i} -- Linear(8) -- {node}, parameter_size=4e6" for i in range(3)]
    edges = ["\tnode0 -- node1", "\tnode1 -- node2"]
    for number in range(12):
        (tmp_path / f"net{number}.txt").write_text("\n".join([*lines, *edges]))
    names = {split: {s.name for s in profiled(tmp_path, split)} for split in SPLITS}
    assert sum(len(found) for found in names.values()) == 12
    assert len(set.union(*names.values())) == 12
    shape = profiled(tmp_path, "train")[0]
    assert shape.parameters == 3e6
    world = World(name="p", model=str(shape.model), cluster="dgx-h100", global_batch=8)
    assert is_feasible(world.request())
    (tmp_path / "net0.txt").write_text("node0 -- nothing")
    profiled.cache_clear()
    with pytest.raises(CaptureError, match="net0"):
        [profiled(tmp_path, split) for split in SPLITS]


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
