"""A pointer network in numpy, which decides without torch.

One decision is a few small products, less than the overhead of torch around them. The
encodings of jobs, which depend on their graphs alone, are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from planner.simulate.compiled import compiled
from policies.baselines import Flags, Observation
from policies.graph_layers import SAGEConv
from policies.pointer import DeviceEncoder, PointerNetwork
from policies.scorer import batched

__all__ = [
    "CompactPointer",
    "PointerDecider",
]

Floats = NDArray[np.float32]
Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class _Layer:
    """A GraphSAGE layer of means. f features, w units.

    Attributes:
        heard: Weights of the mean over the neighbours. Shape [f, w].
        own: Weights of the device's features. Shape [f, w].
        bias: Shape [w].
    """

    heard: Floats
    own: Floats
    bias: Floats


class CompactPointer:
    """Computes the logits of a :class:`policies.pointer.PointerNetwork`.

    Args:
        network: Its weights are copied; later changes have no effect. On any device.
    """

    def __init__(self, network: PointerNetwork) -> None:
        width, candidates = network.config.width, network.widths.candidates
        seen = _array(network.seen.weight).T
        # In the order of the concatenation in the network's forward pass.
        held, encoded, cluster, around = np.split(
            _array(network.context.weight).T, np.cumsum([width, width, width])
        )
        self._of_candidate = np.ascontiguousarray(seen[:candidates])
        self._of_history = np.ascontiguousarray(seen[candidates:])
        self._of_held, self._of_cluster, self._of_job = held, cluster, around
        self._bias = _array(network.seen.bias)
        self._second = np.ascontiguousarray(_array(network.second.weight).T)
        self._second_bias = _array(network.second.bias)
        temperature = network.log_temperature.detach().cpu().exp().numpy()
        self._last = -_array(network.last.weight)[0] / temperature
        self._of_graph = _job_encodings(network) @ encoded
        self._layers = _layers(network.devices)
        source, target = network.devices.edge_index.cpu().numpy()
        self._source, self._target = source, target
        #: False if device encodings have weight 0, as in a network made from a scorer.
        self._looks = bool(held.any() or cluster.any())

    def logits(self, obs: Mapping[str, Floats]) -> Floats:
        """Compute the logits of b decisions.

        Args:
            obs: Observations of an environment, batched.
        Returns:
            Shape [b, a].
        """
        numbers = obs["job_graph"][:, 0].astype(np.int64)
        shared = self._bias + self._of_graph[numbers]
        shared += obs["job"] @ self._of_job
        shared += obs["history"] @ self._of_history
        hidden = obs["candidates"] @ self._of_candidate
        if self._looks:
            devices = self._encode(obs["devices"])
            shared += devices.mean(axis=1) @ self._of_cluster
            taken = obs["candidate_devices"]
            # Turning the job away takes no devices; their mean is then 0.
            count = np.maximum(taken.sum(axis=2, keepdims=True), np.float32(1.0))
            hidden += (taken @ (devices @ self._of_held)) / count
        hidden += shared[:, None]
        np.maximum(hidden, np.float32(0.0), out=hidden)
        second = hidden @ self._second
        second += self._second_bias
        np.maximum(second, np.float32(0.0), out=second)
        found: Floats = second @ self._last
        return found

    def _encode(self, devices: Floats) -> Floats:
        """Encode devices as the network does. Shape [b, n, width]."""
        hidden = devices
        for layer in self._layers:
            means = _neighbour_means(hidden, self._source, self._target)
            hidden = hidden @ layer.own + means @ layer.heard
            hidden += layer.bias
            np.maximum(hidden, np.float32(0.0), out=hidden)
        return hidden


def _array(part: torch.Tensor) -> Floats:
    found: Floats = part.detach().cpu().numpy().astype(np.float32)
    return found


def _job_encodings(network: PointerNetwork) -> Floats:
    """Encode every job. Shape [jobs, width]."""
    jobs = network.jobs
    count = int(jobs.owner.max()) + 1
    with torch.no_grad():
        return _array(jobs(torch.arange(count, device=jobs.owner.device)))


def _layers(encoder: DeviceEncoder) -> tuple[_Layer, ...]:
    found = []
    for layer in encoder.convolutions:
        assert isinstance(layer, SAGEConv)
        found.append(
            _Layer(
                heard=np.ascontiguousarray(_array(layer.lin_l.weight).T),
                own=np.ascontiguousarray(_array(layer.lin_r.weight).T),
                bias=_array(layer.lin_l.bias),
            )
        )
    return tuple(found)


@compiled
def _neighbour_means(hidden: Floats, source: Index, target: Index) -> Floats:
    """Mean over the neighbours of each device; a repeated edge counts repeatedly.

    Args:
        hidden: Shape [b, n, f].
        source: Source of each edge. Shape [e].
        target: Shape [e].
    Returns:
        Shape [b, n, f]; 0 for devices without neighbours.
    """
    rows, devices, features = hidden.shape
    count = np.zeros(devices, dtype=np.float32)
    for edge in range(len(target)):
        count[target[edge]] += np.float32(1.0)
    found = np.zeros_like(hidden)
    for row in range(rows):
        for edge in range(len(target)):
            here, there = target[edge], source[edge]
            for feature in range(features):
                found[row, here, feature] += hidden[row, there, feature]
        for device in range(devices):
            if count[device] > 0:
                for feature in range(features):
                    found[row, device, feature] /= count[device]
    return found


class PointerDecider:
    """Policy that takes the candidate of the largest logit of a pointer network.

    Args:
        network: Its current weights are copied. On any device.
    """

    def __init__(self, network: PointerNetwork) -> None:
        self._network = CompactPointer(network.eval())

    def predict(self, obs: Observation, action_masks: Flags) -> Index:
        """Decide; see :class:`policies.baselines.Policy`."""
        seen, masks, shape = batched(obs, action_masks)
        values = np.where(masks, self._network.logits(seen), -np.inf)
        return np.asarray(values.argmax(axis=1), dtype=np.int64).reshape(shape)
