"""The partition network on padded observations, many at once.

The same modules and weights as :class:`policies.partition.network.PartitionNetwork` has
for one problem: nodes that are there are taken out of the padding, and what is read of
them is put back, so that the logits of a problem do not depend on what else is in a
batch, nor on how much room its arrays have.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from policies.partition.network import PartitionNetwork

__all__ = ["encode_padded", "padded_logits"]


def _read_graph(
    encoder: nn.Module, nodes: Tensor, mask: Tensor, edges: Tensor
) -> Tensor:
    """Embeddings of the nodes that are there, 0 for the others. [b, nodes, width].

    Args:
        encoder: Takes nodes [n, features] and edges [2, e].
        nodes: Those that are there come first. Shape [b, nodes, features].
        mask: Which are. Shape [b, nodes].
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
    """Mean and largest of the nodes that are there. Shape [b, 2 width]."""
    total = nodes.masked_fill(~mask[..., None], 0.0).sum(dim=1)
    most = nodes.masked_fill(~mask[..., None], -torch.inf).amax(dim=1)
    return torch.cat([total / mask.sum(dim=1, keepdim=True), most], dim=1)


def encode_padded(
    network: PartitionNetwork, obs: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Read the graphs of many problems.

    Args:
        network: Whose weights.
        obs: As :class:`envs.partition.env.PartitionEnv` says, with a leading axis.
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
    """Logits of meshes and of groups, whichever is decided.

    Args:
        network: Whose weights.
        obs: As for :func:`encode_padded`.
    Returns:
        Shapes [b, meshes] and [b, groups]; those of padding mean nothing, nor do those
        of groups before there is a mesh. Then embeddings of problems, [b, width].
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
