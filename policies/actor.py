"""Networks that point at candidates, as actors and critics of stable-baselines3."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from envs.ramp.graphs import OpGraph
from planner.errors import StrategyError
from policies.pointer import PointerConfig, PointerNetwork, widths_of

__all__ = ["PPOSettings", "PointerPolicy", "PointingPolicy", "make_ppo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOSettings:
    """Settings of PPO that all worlds have; each world has its own defaults.

    Attributes:
        num_envs: Episodes side by side.
        n_steps: Decisions of each between updates.
        batch_size: Decisions of one step of the optimizer.
        n_epochs: Passes of an update over its decisions.
        learning_rate: Learning rate of the optimizer.
        gamma: Discount of later rewards.
        gae_lambda: Decay of the advantage estimates.
        clip_range: Limit of the ratio of new to old probabilities.
        ent_coef: Weight of the entropy.
    """

    num_envs: int
    n_steps: int
    batch_size: int
    n_epochs: int
    learning_rate: float
    gamma: float
    gae_lambda: float
    clip_range: float
    ent_coef: float

    def __post_init__(self) -> None:
        for name in ("num_envs", "n_steps", "batch_size", "n_epochs"):
            if getattr(self, name) < 1:
                raise StrategyError(
                    f"{name}={getattr(self, name)} of training; it is at least 1"
                )
        if not 0.0 < self.learning_rate < math.inf:
            raise StrategyError(
                f"learning_rate={self.learning_rate}; give a positive number"
            )


def make_ppo(
    policy: type[PointingPolicy],
    env: Any,
    settings: PPOSettings,
    network: Mapping[str, Any],
    **more: Any,
) -> MaskablePPO:
    """Make a trainer.

    Args:
        policy: Actor and critic.
        env: Episodes side by side.
        settings: Settings of PPO.
        network: Arguments of the policy's network.
        **more: Further arguments of MaskablePPO; they override the settings.
    """
    given = {
        one.name: getattr(settings, one.name)
        for one in fields(PPOSettings)
        if one.name != "num_envs"
    }
    kwargs = {"features_extractor_kwargs": dict(network)}
    return MaskablePPO(policy, env, device="cpu", policy_kwargs=kwargs, **given | more)


class _PointerFeatures(BaseFeaturesExtractor):  # type: ignore[misc]  # of an extra
    """The whole network: stable-baselines3's own layers behind it do nothing.

    Args:
        observation_space: Observations of the environment.
        graphs: Op graph of every job.
        device_edges: Neighbours among the devices. Shape [2, edges].
        config: Sizes of the network.
    """

    def __init__(
        self,
        observation_space: spaces.Dict,
        graphs: Sequence[OpGraph],
        device_edges: NDArray[np.int64],
        config: PointerConfig,
    ) -> None:
        self.choices = int((observation_space["candidates"].shape or (0,))[0])
        super().__init__(observation_space, self.choices + config.hidden)
        self.network = PointerNetwork(
            graphs, device_edges, widths_of(observation_space), config
        )

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """Return logits, then features of the state. Shape [b, actions + hidden]."""
        return torch.cat(self.network(observations), dim=1)


class _Parted(nn.Module):
    """Separates logits from features of the state."""

    def __init__(self, choices: int, hidden: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = choices, hidden

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: Tensor) -> Tensor:
        return features[:, : self.latent_dim_pi]

    def forward_critic(self, features: Tensor) -> Tensor:
        return features[:, self.latent_dim_pi :]


class PointingPolicy(MaskableActorCriticPolicy):  # type: ignore[misc]  # of an extra
    """Actor and critic of sb3-contrib's MaskablePPO around a network that points.

    ``extractor`` has the attributes ``network`` and ``choices``, the number of actions,
    and returns logits followed by features of the state.
    """

    extractor: ClassVar[type[BaseFeaturesExtractor]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["features_extractor_class"] = self.extractor
        # Initial weights are the network's own.
        kwargs["ortho_init"] = False
        super().__init__(*args, **kwargs)

    @property
    def network(self) -> Any:
        """The network, whose weights are all that the actor has."""
        return self.features_extractor.network

    def _build_mlp_extractor(self) -> None:
        extractor = self.features_extractor
        self.mlp_extractor = _Parted(extractor.choices, extractor.network.config.hidden)

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        # The first optimizer also has the layer that was just replaced.
        self.optimizer = self.optimizer_class(
            self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )


class PointerPolicy(PointingPolicy):
    """The pointer network of the job stream.

    Takes of ``policy_kwargs`` the ``features_extractor_kwargs`` graphs, device_edges
    and config; see :class:`policies.pointer.PointerNetwork`.
    """

    extractor = _PointerFeatures
