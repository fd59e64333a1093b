"""Draw orders of device groups from the network, many side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from envs.partition.features import Observed
from envs.partition.ordering import Ordering
from planner.search.device_order.groups import DeviceGroups
from planner.search.device_order.subsets import Choices
from planner.search.steps import Steps, completed
from policies.partition.network import Encoded, PartitionNetwork

__all__ = ["Drawn", "draw_in_steps", "draw_orders", "log_likelihood"]

Index = NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Drawn:
    """Orders, with the network's inputs and choices if they were kept.

    Attributes:
        choice: Mesh of each order. Shape [n].
        sequence: Groups in order, -1 after the last. Shape [n, groups].
        steps: Inputs of the network. Shape [steps, n, groups, STEP_FEATURES]; None
            unless asked for, as the next two are.
        left: Groups that could be taken. Shape [steps, n, groups].
        taken: Group that was taken; -1 once an order is done. Shape [steps, n].
    """

    choice: Index
    sequence: Index
    steps: NDArray[np.float32] | None = None
    left: NDArray[np.bool_] | None = None
    taken: Index | None = None


def draw_orders(
    network: PartitionNetwork,
    seen: Observed,
    encoded: Encoded,
    groups: DeviceGroups,
    choices: Choices,
    choice: Index,
    rng: np.random.Generator,
    *,
    greedy: int = 0,
    temperature: float = 1.0,
    keep: bool = False,
    forced: Index | None = None,
) -> Drawn:
    """Draw an order of groups for each of some meshes.

    Args:
        network: Scores groups.
        seen: The problem.
        encoded: Its encoding by the network.
        groups: Groups of its devices.
        choices: Its meshes.
        choice: Mesh of each order. Shape [n].
        rng: Draws the groups.
        greedy: Number of first orders that take the likeliest group each time.
        temperature: Divides the logits of the others.
        keep: Whether to keep inputs and choices, for training.
        forced: Orders to follow instead of drawing any. Shape [n, groups].
    """
    return completed(
        draw_in_steps(
            network,
            seen,
            encoded,
            groups,
            choices,
            choice,
            rng,
            greedy=greedy,
            temperature=temperature,
            keep=keep,
            forced=forced,
        )
    )


@torch.no_grad()
def draw_in_steps(
    network: PartitionNetwork,
    seen: Observed,
    encoded: Encoded,
    groups: DeviceGroups,
    choices: Choices,
    choice: Index,
    rng: np.random.Generator,
    *,
    greedy: int = 0,
    temperature: float = 1.0,
    keep: bool = False,
    forced: Index | None = None,
) -> Steps[Drawn]:
    """Do the same in steps; see :func:`draw_orders`. Pauses before each next group."""
    subsets = choices.subset[choice]
    ordering = Ordering.start(
        sizes=groups.sizes,
        kinds=groups.kinds,
        groups=seen.groups,
        pairs=seen.pairs,
        mesh=choices.mesh[choice],
        count=np.array([subset.count for subset in choices.subsets])[subsets],
        usable=np.stack([subset.usable for subset in choices.subsets])[subsets],
    )
    bases = network.bases(seen, encoded, torch.from_numpy(choice))
    cool = np.full((len(choice), 1), temperature, dtype=np.float32)
    steps: list[NDArray[np.float32]] = []
    left: list[NDArray[np.bool_]] = []
    taken: list[Index] = []
    while (going := ordering.going).any():
        yield
        numbers = ordering.describe()
        if forced is not None:
            chosen = forced[:, len(taken)]
            steps.append(numbers)
            left.append(ordering.left.copy())
            taken.append(np.where(going, chosen, -1))
            ordering.take(chosen)
            continue
        logits = network.step_logits(bases, torch.from_numpy(numbers)).numpy()
        logits = np.where(ordering.left, logits / cool, -np.inf)
        noise = rng.gumbel(size=logits.shape)
        noise[:greedy] = 0.0
        chosen = (logits + noise).argmax(axis=1)
        if keep:
            steps.append(numbers)
            left.append(ordering.left.copy())
            taken.append(np.where(going, chosen, -1))
        ordering.take(chosen)
    sequence = ordering.sequences()
    if not (keep or forced is not None):
        return Drawn(choice=choice, sequence=sequence)
    return Drawn(
        choice=choice,
        sequence=sequence,
        steps=np.stack(steps),
        left=np.stack(left),
        taken=np.stack(taken),
    )


def log_likelihood(
    network: PartitionNetwork, seen: Observed, encoded: Encoded, drawn: Drawn
) -> tuple[Tensor, Tensor]:
    """Log likelihood of orders under the network, and the entropy of its choices.

    Args:
        network: In training.
        seen: The problem.
        encoded: Its encoding, with gradients.
        drawn: Orders drawn with ``keep=True``.
    Returns:
        Log probability of each order, shape [n], and the mean entropy of a step.
    """
    if drawn.steps is None or drawn.left is None or drawn.taken is None:
        raise ValueError("orders were drawn without keep=True")
    bases = network.bases(seen, encoded, torch.from_numpy(drawn.choice))
    logits = network.step_logits(bases[None], torch.from_numpy(drawn.steps))
    left, taken = torch.from_numpy(drawn.left), torch.from_numpy(drawn.taken)
    going = (taken >= 0) & left.any(dim=2)
    logits = logits.masked_fill(~left, -1e9)
    logs = torch.log_softmax(logits, dim=2)
    of_taken = logs.gather(2, taken.clamp(min=0)[..., None])[..., 0]
    entropy = -(logs.exp() * logs).sum(dim=2)[going].mean()
    return (of_taken * going).sum(dim=0), entropy
