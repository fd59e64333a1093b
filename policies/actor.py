"""The pointer network as an actor and critic of stable-baselines3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn

from envs.ramp.graphs import OpGraph
from planner.errors import StrategyError
from policies.pointer import PointerConfig, PointerNetwork, Widths

__all__ = ["PointerPolicy", "widths_of"]

_PARTS = ("job_graph", "job", "devices", "candidates", "candidate_devices", "history")


def widths_of(space: spaces.Space[Any]) -> Widths:
    """Of an environment's observations.

    Raises:
        StrategyError: If they are not those of a job stream.
    """
    if not isinstance(space, spaces.Dict) or not set(_PARTS) <= set(space.spaces):
        raise StrategyError(
            f"observations of a job stream have {', '.join(_PARTS)}; these are {space} "
            f"(an environment made with observe=False leaves most of them out)"
        )
    sizes = {name: (space[name].shape or (0,))[-1] for name in _PARTS}
    return Widths(
        job=sizes["job"],
        devices=sizes["devices"],
        candidates=sizes["candidates"],
        history=sizes["history"],
    )


class _PointerFeatures(BaseFeaturesExtractor):  # type: ignore[misc]  # of an extra
    """All of the network: stable-baselines3's own layers behind it do nothing.

    Args:
        observation_space: Of the environment.
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
        """Logits, then features of the state. Shape [b, actions + hidden]."""
        return torch.cat(self.network(observations), dim=1)


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


class PointerPolicy(MaskableActorCriticPolicy):  # type: ignore[misc]  # of an extra
    """For sb3-contrib's MaskablePPO.

    Takes of ``policy_kwargs`` the ``features_extractor_kwargs`` graphs, device_edges
    and config; see :class:`policies.pointer.PointerNetwork`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["features_extractor_class"] = _PointerFeatures
        # Initial weights are the network's own, or a scorer's.
        kwargs["ortho_init"] = False
        super().__init__(*args, **kwargs)

    @property
    def network(self) -> PointerNetwork:
        """The network, whose weights are all that the actor has."""
        found: PointerNetwork = self.features_extractor.network
        return found

    def _build_mlp_extractor(self) -> None:
        extractor = self.features_extractor
        hidden = extractor.network.config.hidden
        self.mlp_extractor = _Parted(extractor.choices, hidden)

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        # The first optimizer also has the layer that has just been let go.
        self.optimizer = self.optimizer_class(
            self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs
        )
