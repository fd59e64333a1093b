"""The partition network trained in ``meshwright/Partition-v0`` by sb3-contrib.

The actor is the network as it is, so that it may begin from any weights and give them
back; the critic is trained anew. Observations are padded and batched: nodes that are
there are taken out of the padding and their embeddings put back, so that the logits of
a problem depend neither on the rest of the batch nor on the room of its arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv
from torch import Tensor, nn

from envs.partition.env import PartitionEnv
from envs.partition.features import MESH_FEATURES, WHOLE_FEATURES
from envs.partition.ordering import STEP_FEATURES
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.errors import StrategyError
from policies.actor import PointingPolicy, PPOSettings, make_ppo
from policies.partition.network import NetworkConfig, PartitionNetwork

__all__ = [
    "Episodes",
    "PartitionPPOConfig",
    "PartitionPolicy",
    "encode_padded",
    "padded_logits",
    "reinforce",
]


def _read_graph(
    encoder: nn.Module, nodes: Tensor, mask: Tensor, edges: Tensor
) -> Tensor:
    """Embed the real nodes; padding is 0. Shape [b, nodes, width].

    Args:
        encoder: Takes nodes [n, features] and edges [2, e].
        nodes: Real nodes first, then padding. Shape [b, nodes, features].
        mask: True for real nodes. Shape [b, nodes].
        edges: Padded by -1. Shape [b, 2, edges].
    """
    counts = mask.sum(dim=1)
    starts = counts.cumsum(0) - counts
    there = edges[:, 0] >= 0
    ends = (edges + starts[:, None, None]).transpose(0, 1)[:, there]
    read: Tensor = encoder(nodes[mask], ends)
    padded = read.new_zeros(*mask.shape, read.shape[1])
    padded[mask] = read
    return padded


def _pooled(nodes: Tensor, mask: Tensor) -> Tensor:
    """Mean and maximum over the real nodes. Shape [b, 2 width]."""
    total = nodes.masked_fill(~mask[..., None], 0.0).sum(dim=1)
    most = nodes.masked_fill(~mask[..., None], -torch.inf).amax(dim=1)
    return torch.cat([total / mask.sum(dim=1, keepdim=True), most], dim=1)


def encode_padded(
    network: PartitionNetwork, obs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Encode the graphs of many problems.

    Args:
        network: The network.
        obs: Observations of :class:`envs.partition.env.PartitionEnv`, batched.
    Returns:
        Embeddings of groups [b, groups, width], and of whole problems [b, width].
    """
    of_units, of_groups = obs["unit_mask"] > 0, obs["group_mask"] > 0
    units = _read_graph(network.units, obs["units"], of_units, obs["unit_edges"].long())
    groups = _read_graph(
        network.devices, obs["groups"], of_groups, obs["group_edges"].long()
    )
    if not network.config.graphs:
        units, groups = units * 0, groups * 0
    asked = network.query(groups) @ network.key(units).transpose(1, 2)
    asked = asked / network.config.width**0.5
    asked = asked.masked_fill(~of_units[:, None], -torch.inf)
    groups = groups + torch.softmax(asked, dim=2) @ network.value(units)
    if not network.config.graphs:
        groups = groups * 0
    parts = [_pooled(units, of_units), _pooled(groups, of_groups), obs["whole"]]
    world: Tensor = network.world(torch.cat(parts, dim=1))
    return groups, world


def padded_logits(
    network: PartitionNetwork, obs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of meshes and of groups.

    Args:
        network: The network.
        obs: As for :func:`encode_padded`.
    Returns:
        Shapes [b, meshes] and [b, groups]; meaningless for padding, and for groups
        before a mesh is chosen. Then embeddings of problems, shape [b, width].
    """
    groups, world = encode_padded(network, obs)
    meshes = obs["meshes"]
    around = world[:, None].expand(-1, meshes.shape[1], -1)
    of_meshes = network.mesh(torch.cat([meshes, around], dim=2))[..., 0]
    at = obs["chosen"].long().clamp(min=0)[..., None].expand(-1, 1, meshes.shape[2])
    chosen = meshes.gather(1, at)[:, 0]
    context = network.context(torch.cat([chosen, world], dim=1))
    bases = network.group(groups) + context[:, None]
    return of_meshes, network.step_logits(bases, obs["steps"]), world


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPPOConfig(PPOSettings):
    """Settings of PPO. ``gamma`` is 1: all reward comes at the end of an episode."""

    num_envs: int = 8
    n_steps: int = 128
    batch_size: int = 128
    n_epochs: int = 4
    learning_rate: float = 3e-4
    gamma: float = 1.0
    gae_lambda: float = 0.95
    clip_range: float = 0.2
    ent_coef: float = 0.005

    def __post_init__(self) -> None:
        PPOSettings.__post_init__(self)
        if self.num_envs * self.n_steps < 2:
            raise StrategyError(
                f"num_envs={self.num_envs} times n_steps={self.n_steps} is 1; an "
                f"update needs at least 2 decisions"
            )


@dataclass(frozen=True, slots=True)
class Episodes:
    """Episodes of a training, in the order in which they ended.

    Attributes:
        rewards: Log of the baseline's score over the plan's.
        worlds: Names of their worlds.
    """

    rewards: list[float] = field(default_factory=list)
    worlds: list[str] = field(default_factory=list)


class _PartitionFeatures(BaseFeaturesExtractor):  # type: ignore[misc]  # of an extra
    """The whole network: stable-baselines3's own layers behind it do nothing.

    Args:
        observation_space: Observations of the environment.
        config: Sizes of the network.
    """

    def __init__(self, observation_space: spaces.Dict, config: NetworkConfig) -> None:
        rooms = (observation_space[name].shape or (0,) for name in ("meshes", "groups"))
        self.choices = sum(room[0] for room in rooms)
        super().__init__(observation_space, self.choices + config.hidden)
        self.network = PartitionNetwork(config)
        inputs = config.width + WHOLE_FEATURES + MESH_FEATURES + STEP_FEATURES + 1
        self.state = nn.Sequential(
            nn.Linear(inputs, config.hidden),
            nn.ReLU(),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(),
        )

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return logits, then features of the state. Shape [b, actions + hidden]."""
        meshes, groups, world = padded_logits(self.network, observations)
        phase, left = observations["phase"], observations["left"]
        at = observations["chosen"].long().clamp(min=0)[..., None]
        chosen = observations["meshes"].gather(1, at.expand(-1, 1, MESH_FEATURES))
        near = (left[:, None] @ observations["steps"])[:, 0]
        near = near / left.sum(dim=1, keepdim=True).clamp(min=1.0)
        # The critic reads the actor's encoding, but does not train it.
        parts = [world.detach(), observations["whole"], chosen[:, 0] * phase, near]
        state = self.state(torch.cat([*parts, phase], dim=1))
        return torch.cat([meshes, groups, state], dim=1)


class PartitionPolicy(PointingPolicy):
    """The partition network.

    Takes of ``policy_kwargs`` the ``features_extractor_kwargs`` config, a
    :class:`policies.partition.network.NetworkConfig`.
    """

    extractor = _PartitionFeatures

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("features_extractor_kwargs", {"config": NetworkConfig()})
        super().__init__(*args, **kwargs)


class _Listener(BaseCallback):  # type: ignore[misc]  # of an extra
    """Records rewards and worlds of the episodes that end."""

    def __init__(self, episodes: Episodes) -> None:
        super().__init__()
        self.episodes = episodes

    def _on_step(self) -> bool:
        ended = zip(
            self.locals["dones"],
            self.locals["rewards"],
            self.locals["infos"],
            strict=True,
        )
        for done, reward, info in ended:
            if done:
                self.episodes.rewards.append(float(reward))
                self.episodes.worlds.append(str(info["world"]))
        return True


def reinforce(
    network: PartitionNetwork,
    worlds: WorldSampler | Sequence[World],
    *,
    steps: int,
    seed: int,
    config: PartitionPPOConfig | None = None,
    callbacks: Iterable[Any] = (),
    tensorboard: str | None = None,
    **options: Any,
) -> Episodes:
    """Train a network in place, from the weights it has.

    Args:
        network: Changed in place.
        worlds: Worlds to train on.
        steps: Decisions, rounded up to whole updates.
        seed: Seed of everything that is drawn.
        config: Settings; the defaults if None.
        callbacks: Further callbacks of stable-baselines3.
        tensorboard: Folder for TensorBoard's files; None for none.
        **options: Arguments of :class:`envs.partition.env.PartitionEnv`.
    Returns:
        Rewards and worlds of the episodes.
    Raises:
        StrategyError: If ``steps`` is below 1; as the environment.
        NoFeasiblePlanError: If nothing fits on one of the worlds given.
    """
    if steps < 1:
        raise StrategyError(f"steps={steps} of training; it is at least 1")
    config = config or PartitionPPOConfig()

    first = PartitionEnv(worlds, **options)

    def make() -> Monitor:
        return Monitor(first.alike())

    many = config.num_envs * config.n_steps
    model = make_ppo(
        PartitionPolicy,
        DummyVecEnv([make] * config.num_envs),
        config,
        {"config": network.config},
        batch_size=min(config.batch_size, many),
        seed=seed,
        tensorboard_log=tensorboard,
    )
    model.policy.network.load_state_dict(network.state_dict())
    episodes = Episodes()
    model.learn(steps, callback=[_Listener(episodes), *callbacks], tb_log_name="ppo")
    network.load_state_dict(model.policy.network.state_dict())
    return episodes
