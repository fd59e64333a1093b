"""The partition network trained in ``meshwright/Partition-v0`` by sb3-contrib.

The actor is the network as it is, so that it may begin from any weights and give them
back; the critic is trained anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
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
from policies.partition.batched import padded_logits
from policies.partition.network import NetworkConfig, PartitionNetwork

__all__ = ["Episodes", "PartitionPPOConfig", "PartitionPolicy", "reinforce"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPPOConfig:
    """How the network is trained.

    Attributes:
        num_envs: Episodes side by side.
        n_steps: Decisions of each between updates.
        batch_size: Decisions of a step of the optimizer.
        n_epochs: How often an update goes through its decisions.
        learning_rate: Of the optimizer.
        gamma: By which a later decision's reward counts less; all of it comes at the
            end of an episode.
        gae_lambda: Of the advantage estimates.
        clip_range: Of the ratio of new to old probabilities.
        ent_coef: Weight of the entropy.
    """

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
        for name in ("num_envs", "n_steps", "batch_size", "n_epochs"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of training; it is at least 1"
                )
        if self.num_envs * self.n_steps < 2:
            raise StrategyError(
                f"num_envs={self.num_envs} times n_steps={self.n_steps} is 1; an "
                f"update needs at least 2 decisions"
            )
        if not 0.0 < self.learning_rate < math.inf:
            raise StrategyError(
                f"learning_rate={self.learning_rate}; give a positive number"
            )


@dataclass(frozen=True, slots=True)
class Episodes:
    """What training saw, in the order in which episodes ended.

    Attributes:
        rewards: Log of the baseline's score over the plan's.
        worlds: Their names.
    """

    rewards: list[float] = field(default_factory=list)
    worlds: list[str] = field(default_factory=list)


class _PartitionFeatures(BaseFeaturesExtractor):  # type: ignore[misc]  # of an extra
    """All of the network: stable-baselines3's own layers behind it do nothing.

    Args:
        observation_space: Of the environment.
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
        """Logits, then features of the state. Shape [b, actions + hidden]."""
        meshes, groups, world = padded_logits(self.network, observations)
        phase, left = observations["phase"], observations["left"]
        at = observations["chosen"].long().clamp(min=0)[..., None]
        chosen = observations["meshes"].gather(1, at.expand(-1, 1, MESH_FEATURES))
        near = (left[:, None] @ observations["steps"])[:, 0]
        near = near / left.sum(dim=1, keepdim=True).clamp(min=1.0)
        # The critic reads what the actor makes of a problem, but does not change it.
        parts = [world.detach(), observations["whole"], chosen[:, 0] * phase, near]
        state = self.state(torch.cat([*parts, phase], dim=1))
        return torch.cat([meshes, groups, state], dim=1)


class _Parted(nn.Module):
    """Takes logits and features of the state apart again."""

    def __init__(self, choices: int, hidden: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = choices, hidden

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : self.latent_dim_pi]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, self.latent_dim_pi :]


class PartitionPolicy(MaskableActorCriticPolicy):  # type: ignore[misc]  # of an extra
    """For sb3-contrib's MaskablePPO.

    Takes of ``policy_kwargs`` the ``features_extractor_kwargs`` config, a
    :class:`policies.partition.network.NetworkConfig`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["features_extractor_class"] = _PartitionFeatures
        kwargs.setdefault("features_extractor_kwargs", {"config": NetworkConfig()})
        # Initial weights are the network's own.
        kwargs["ortho_init"] = False
        super().__init__(*args, **kwargs)

    @property
    def network(self) -> PartitionNetwork:
        """The network, whose weights are all that the actor has."""
        found: PartitionNetwork = self.features_extractor.network
        return found

    def _build_mlp_extractor(self) -> None:
        extractor = self.features_extractor
        self.mlp_extractor = _Parted(extractor.choices, extractor.network.config.hidden)

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        # The first optimizer also has the layer that has just been let go.
        self.optimizer = self.optimizer_class(
            self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )


class _Listener(BaseCallback):  # type: ignore[misc]  # of an extra
    """Notes what episodes end with."""

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
    """Train a network from the weights it has, and give it those that come of it.

    Args:
        network: Changed in place.
        worlds: To train on.
        steps: Decisions, rounded up to whole updates.
        seed: Of everything that is drawn.
        config: How; the defaults if None.
        callbacks: More of stable-baselines3's.
        tensorboard: Folder for what TensorBoard shows; None for nothing.
        **options: As for :class:`envs.partition.env.PartitionEnv`.
    Returns:
        What the episodes ended with.
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
    model = MaskablePPO(
        PartitionPolicy,
        DummyVecEnv([make] * config.num_envs),
        n_steps=config.n_steps,
        batch_size=min(config.batch_size, many),
        n_epochs=config.n_epochs,
        learning_rate=config.learning_rate,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        clip_range=config.clip_range,
        ent_coef=config.ent_coef,
        seed=seed,
        device="cpu",
        tensorboard_log=tensorboard,
        policy_kwargs={"features_extractor_kwargs": {"config": network.config}},
    )
    model.policy.network.load_state_dict(network.state_dict())
    episodes = Episodes()
    model.learn(steps, callback=[_Listener(episodes), *callbacks], tb_log_name="ppo")
    network.load_state_dict(model.policy.network.state_dict())
    return episodes
