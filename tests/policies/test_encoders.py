"""Encoders of jobs and devices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from envs.ramp.graphs import OpGraph, device_edges, op_graph
from envs.ramp.jobs import RampJobs
from envs.ramp.topology import RampTopology
from planner.errors import StrategyError
from policies.pointer import DeviceEncoder, JobEncoder


@pytest.fixture
def graphs(jobs: RampJobs) -> list[OpGraph]:
    return [op_graph(job) for job in jobs.jobs.values()]


def test_each_job_is_encoded_as_it_would_be_alone(graphs: list[OpGraph]) -> None:
    torch.manual_seed(0)
    encoder = JobEncoder(graphs, width=8)
    numbers = torch.tensor([2.0, 0.0, 2.0, 1.0])
    encoded = encoder(numbers)
    assert encoded.shape == (4, 8)
    for row, number in enumerate([2, 0, 2, 1]):
        encoder.set_graphs([graphs[number]])
        alone = encoder(torch.zeros(1))[0]
        torch.testing.assert_close(encoded[row], alone)


def test_the_order_of_ops_does_not_matter(graphs: list[OpGraph]) -> None:
    graph = graphs[0]
    order = np.random.default_rng(0).permutation(len(graph.nodes))
    moved = OpGraph(
        name="moved",
        nodes=graph.nodes[order],
        edge_index=np.argsort(order)[graph.edge_index],
    )
    encoder = JobEncoder([graph, moved], width=8)
    encoded = encoder(torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(encoded[0], encoded[1])


def test_weights_do_not_know_the_graphs(graphs: list[OpGraph]) -> None:
    few, many = JobEncoder(graphs[:1]), JobEncoder(graphs)
    assert {n: p.shape for n, p in few.state_dict().items()} == {
        n: p.shape for n, p in many.state_dict().items()
    }
    with pytest.raises(StrategyError, match="no op graphs"):
        JobEncoder([])


def test_states_side_by_side_are_encoded_as_each_alone() -> None:
    edges = device_edges(RampTopology())
    encoder = DeviceEncoder(edges, features=3, width=8)
    devices = torch.rand(5, 32, 3)
    together = encoder(devices)
    assert together.shape == (5, 32, 8)
    for state in range(5):
        alone = encoder(devices[state])
        torch.testing.assert_close(together[state], alone)


def test_a_device_hears_of_its_neighbours_alone() -> None:
    edges = device_edges(RampTopology())
    encoder = DeviceEncoder(edges, features=2, width=8, layers=1)
    before = torch.rand(1, 32, 2)
    after = before.clone()
    after[0, 7] += 1.0
    changed = (encoder(before) - encoder(after)).abs().sum(dim=2)[0] > 0
    near = set(edges[1][edges[0] == 7].tolist()) | {7}
    assert set(torch.nonzero(changed)[:, 0].tolist()) <= near
    assert changed[7]
