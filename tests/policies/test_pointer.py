"""The pointer network, its encoders, and it as an actor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sb3_contrib import MaskablePPO

from envs.ramp.features import NUM_FEATURES
from envs.ramp.graphs import OpGraph, device_edges, op_graph
from envs.ramp.history import NUM_HISTORY
from envs.ramp.jobs import RampJobs
from envs.ramp.topology import RampTopology
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError
from policies.actor import PointerPolicy
from policies.pointer import (
    DeviceEncoder,
    JobEncoder,
    PointerConfig,
    PointerNetwork,
    widths_of,
)
from policies.scorer import Scorer, score


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


def _scorer(hidden: int) -> Scorer:
    generator = np.random.default_rng(0)
    inputs = NUM_FEATURES + NUM_HISTORY
    shapes = ((inputs, hidden), (hidden,), (hidden, hidden), (hidden,), (hidden,))
    parts = (generator.normal(size=shape) / 3 for shape in shapes)
    return Scorer(*(part.astype(np.float32) for part in parts))


def _env(jobs: RampJobs, steps: int = 20) -> RampVecEnv:
    """Four streams, some decisions after their begin."""
    env = RampVecEnv(4, jobs=jobs, law=["A", "B"], horizon_s=1e5, seed=0)
    env.reset()
    generator = np.random.default_rng(0)
    for _ in range(steps):
        masks = env.action_masks()
        drawn = np.where(masks, generator.random(masks.shape), -1)
        env.step(drawn.argmax(axis=1))
    return env


def _network(env: RampVecEnv, **config: Any) -> PointerNetwork:
    return PointerNetwork(
        env.graphs,
        env.device_graph,
        widths_of(env.observation_space),
        PointerConfig(**config),
    )


def _seen(env: RampVecEnv) -> dict[str, torch.Tensor]:
    obs, _ = env.session.see()
    return {name: torch.from_numpy(part) for name, part in obs.items()}


def test_it_begins_as_the_scorer_does(jobs: RampJobs) -> None:
    env, scorer = _env(jobs), _scorer(16)
    network = _network(env, hidden=16, temperature=0.5)
    network.start_from(scorer)
    obs = _seen(env)
    with torch.no_grad():
        logits, state = network(obs)
    assert logits.shape == (4, env.action_space.n)
    assert state.shape == (4, 16)
    room = np.zeros(16, dtype=np.float32), np.zeros(16, dtype=np.float32)
    for row in range(4):
        for choice in range(env.action_space.n):
            features = obs["candidates"][row, choice].numpy()
            expected = score(scorer, features, obs["history"][row].numpy(), *room)
            assert float(logits[row, choice]) == pytest.approx(
                -expected / 0.5, rel=1e-3, abs=1e-4
            )
    with pytest.raises(StrategyError, match="a scorer of the shapes"):
        _network(env, hidden=8).start_from(scorer)


def test_candidates_are_scored_apart(jobs: RampJobs) -> None:
    """Permuted candidates have permuted logits."""
    env = _env(jobs)
    network, obs = _network(env), _seen(env)
    order = torch.randperm(env.action_space.n)
    moved = dict(obs)
    for name in ("candidates", "candidate_devices"):
        moved[name] = obs[name][:, order]
    with torch.no_grad():
        logits, state = network(obs)
        again, same = network(moved)
    torch.testing.assert_close(again, logits[:, order])
    torch.testing.assert_close(same, state)


def test_its_weights_serve_another_cluster_and_other_jobs(jobs: RampJobs) -> None:
    small = RampTopology(groups=2, racks=2, servers=2, most_splits=8)
    other = RampJobs(dict(list(jobs.jobs.items())[:2]), small)
    first, second = _env(jobs), _env(other, steps=3)
    network, copy = _network(first), _network(second)
    copy.load_state_dict(network.state_dict())
    with torch.no_grad():
        logits, _ = copy(_seen(second))
    assert logits.shape == (4, second.action_space.n)
    assert logits.isfinite().all()
    assert len(second.graphs) == 2
    assert op_graph(other.jobs["vgg16"]).name == "vgg16"


def test_maskable_ppo_trains_it_and_comes_back_from_a_file(
    jobs: RampJobs, tmp_path: Any
) -> None:
    env = _env(jobs)
    model = MaskablePPO(
        PointerPolicy,
        env,
        n_steps=16,
        batch_size=32,
        n_epochs=1,
        device="cpu",
        seed=0,
        policy_kwargs={
            "features_extractor_kwargs": {
                "graphs": env.graphs,
                "device_edges": env.device_graph,
                "config": PointerConfig(hidden=16),
            }
        },
    )
    network = model.policy.network
    before = {name: part.clone() for name, part in network.named_parameters()}
    # All of the network learns, and nothing is in the optimizer that does not.
    held = {
        id(p) for group in model.policy.optimizer.param_groups for p in group["params"]
    }
    assert held == {id(p) for p in model.policy.parameters()}
    model.learn(64)
    changed = [n for n, p in network.named_parameters() if not p.equal(before[n])]
    assert changed == list(before)
    obs, masks = env.session.see()
    actions, _ = model.predict(obs, deterministic=True, action_masks=masks)
    assert masks[np.arange(4), actions].all()
    model.save(tmp_path / "model.zip")
    again = MaskablePPO.load(tmp_path / "model.zip", device="cpu")
    same, _ = again.predict(obs, deterministic=True, action_masks=masks)
    assert same.tolist() == actions.tolist()


def test_observations_of_nothing_are_refused(jobs: RampJobs) -> None:
    env = RampVecEnv(1, jobs=jobs, observe=False)
    with pytest.raises(StrategyError, match="observe=False"):
        widths_of(env.observation_space)
    with pytest.raises(StrategyError, match="temperature=0"):
        PointerConfig(temperature=0.0)
