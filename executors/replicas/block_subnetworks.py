"""Copies that train shallower models, and deal out the residual blocks each round.

Every copy has all weights. In a round it computes its own blocks, and hands the stream
on as it is where another block would be: nothing of that block is computed, kept for
backward or updated. At the end of a round of ``period`` steps a block's weights become
the mean of those copies' that had it, and all others the mean of all. Who has which
block follows from a permutation that every copy draws from the same seed.

A checkpoint holds the whole model, whose blocks have learned to be one of few: see
:func:`scaled_blocks` for how to evaluate it.
Source: Dun et al. 2022, arXiv 2107.00961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from executors.names import tied_parameters
from executors.replicas.pieces import local_part, pieces
from executors.replicas.rounds import Rounds
from planner.errors import ExecutionError
from planner.schema import Strategy
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.schema.methods.method import equal_blocks

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["BlockSubnetworksReplicas", "deal_blocks", "scaled_blocks"]


def deal_blocks(
    blocks: int, copies: int, *, depth: int, seed: int, turn: int
) -> tuple[frozenset[int], ...]:
    """Blocks of each copy in a round.

    A permutation of the blocks is dealt round-robin, so that each has an owner. Copies
    that lack blocks then have the next ones of the permutation, too.

    Args:
        blocks: How many there are.
        copies: Number of copies.
        depth: Blocks of each copy, from ``blocks / copies`` to ``blocks``.
        seed: Shared by all.
        turn: Number of the round.

    Returns:
        ``depth`` blocks for each copy.
    """
    order = np.random.default_rng([seed, turn]).permutation(blocks)
    dealt = []
    for copy in range(copies):
        own = order[copy::copies].tolist()
        others = np.roll(order, -(copy + 1)).tolist()
        own += [block for block in others if block not in own][: depth - len(own)]
        dealt.append(frozenset(own))
    return tuple(dealt)


class BlockSubnetworksReplicas(Rounds):
    """Trains some of the residual blocks on each copy, others in each round.

    Args:
        synchronisation: Its settings.
    """

    def __init__(self, synchronisation: BlockSubnetworks) -> None:
        super().__init__(synchronisation.period)
        self.settings = synchronisation
        self._group: dist.ProcessGroup | None = None
        self._copies, self._index = 1, 0
        self._blocks: tuple[str, ...] = ()
        self._trained: list[nn.Parameter] = []
        #: Number of the block that a parameter is of.
        self._block_of: dict[nn.Parameter, int] = {}
        #: Blocks of each copy in a step; between steps no copy skips any.
        self._dealt: tuple[frozenset[int], ...] = ()
        #: Number of the round.
        self._turn = 0

    def attach(self, trainer: Trainer) -> None:
        """Find the blocks, and let them be skipped."""
        place = trainer.place
        self._group = place.group("replicate")
        self._copies, self._index = place.size("replicate"), place.index("replicate")
        self._optimizer = trainer.optimizer
        self._trained = [p for p in trainer.all_parameters() if p.requires_grad]
        if self._copies == 1:
            return
        (part,) = trainer.parts.values()
        self._blocks = _find_blocks(part.inner, trainer.plan.strategy)
        for number, name in enumerate(self._blocks):
            block = part.inner.get_submodule(name)
            self._let_skip(number, block)
            self._block_of |= dict.fromkeys(block.parameters(), number)

    def _let_skip(self, number: int, block: nn.Module) -> None:
        # Around what compiles a block or computes it again.
        whole, name = block.forward, self._blocks[number]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._dealt and number not in self._dealt[self._index]:
                return (*args, *kwargs.values())[0]
            found = whole(*args, **kwargs)
            _require_stream(name, (*args, *kwargs.values())[0], found)
            return found

        block.forward = forward

    def before_forward(self, step: int) -> None:
        """Take the blocks of the step's round."""
        if self._forced is None:
            self._turn = step // self.settings.period
        if self._copies > 1:
            self._dealt = self._deal()

    def skipped(self) -> frozenset[nn.Parameter]:
        """Parameters of blocks that this copy does not have in the round."""
        if self._copies == 1:
            return frozenset()
        mine = self._deal()[self._index]
        found = (p for p, block in self._block_of.items() if block not in mine)
        return frozenset(found)

    def _deal(self) -> tuple[frozenset[int], ...]:
        count = len(self._blocks)
        depth = self.settings.depth(self._copies, count)
        return deal_blocks(
            count, self._copies, depth=depth, seed=self.settings.seed, turn=self._turn
        )

    def after_backward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """End the round that is over."""
        if self._copies > 1 and self.phase(step) == "exchange":
            self._average()
            # What it kept is of blocks that are elsewhere now.
            self._optimizer.state.clear()
            self._turn += 1
        # Between steps the model is whole.
        self._dealt = ()

    @torch.no_grad()
    def _average(self) -> None:
        """Take the mean of each weight over the copies that trained it."""
        holders = [
            [copy for copy, blocks in enumerate(self._dealt) if number in blocks]
            for number in range(len(self._blocks))
        ]
        every = list(range(self._copies))
        for piece in pieces(self._trained):
            who = [
                holders[self._block_of[p]] if p in self._block_of else every
                for p in piece
            ]
            sizes = [local_part(weight).numel() for weight in piece]
            # Added to anything, -0.0 leaves its bits as they are.
            flat = local_part(piece[0]).new_full((sum(sizes),), -0.0)
            parts = torch.split(flat, sizes)
            for weight, part, owners in zip(piece, parts, who, strict=True):
                if self._index in owners:
                    part.copy_(local_part(weight).reshape(-1))
            dist.all_reduce(flat, group=self._group)
            for weight, part, owners in zip(piece, parts, who, strict=True):
                local = local_part(weight)
                local.copy_(part.div_(len(owners)).view_as(local))

    def restored(self, *, complete: bool) -> None:
        """Begin a round, with a new optimizer where there are several copies."""
        if self._copies > 1:
            self._optimizer.state.clear()


@contextmanager
def scaled_blocks(model: nn.Module, strategy: Strategy) -> Iterator[None]:
    """A context in which a whole model's dealt blocks count as much as in training.

    In training a block is in d/B of the copies, where each has d of B blocks: 1/n for n
    copies without shared blocks. Here each hands on x + d/B (block(x) - x), so that the
    stream grows as it did in training. Weights stay as they are.

    Args:
        model: Whole, such as one that was loaded from a checkpoint.
        strategy: By which it was trained.

    Raises:
        ExecutionError: If blocks are not dealt out by the strategy, or the model has no
            equal blocks.
    """
    value, copies = strategy.synchronisation, strategy.mesh.dp_replicate
    if not isinstance(value, BlockSubnetworks):
        raise ExecutionError(
            f"synchronisation={value} deals out no blocks; evaluate the model as it is"
        )
    blocks = _find_blocks(model, strategy)
    share = value.depth(copies, len(blocks)) / len(blocks)

    modules = [model.get_submodule(name) for name in blocks]
    own = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = partial(_scaled, module.forward, share)
    try:
        yield
    finally:
        for module, forward in zip(modules, own, strict=True):
            del module.__dict__["forward"]
            if forward is not None:
                module.forward = forward


def _scaled(
    whole: Callable[..., torch.Tensor], share: float, *args: Any, **kwargs: Any
) -> torch.Tensor:
    # A block may write to the stream in place.
    stream = (*args, *kwargs.values())[0].clone()
    return torch.lerp(stream, whole(*args, **kwargs), share)


def _find_blocks(model: nn.Module, strategy: Strategy) -> tuple[str, ...]:
    """FQNs of the blocks that are dealt out.

    Raises:
        ExecutionError: If there are none.
    """
    units: Sequence[str] = [name for one in strategy.stages for name in one.modules]
    tied = {name for names in tied_parameters(model) for name in names}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = equal_blocks(units, shapes, tied)
    if not found:
        raise ExecutionError(
            f"none of the {len(units)} units of the plan's stages are equal and follow "
            f"each other, but copies train shares of such; plan again, or use "
            f"synchronisation=local_steps"
        )
    return found


def _require_stream(name: str, given: Any, found: Any) -> None:
    tensors = isinstance(given, torch.Tensor) and isinstance(found, torch.Tensor)
    if not tensors or given.shape != found.shape:
        raise ExecutionError(
            f"block {name} takes {_shown(given)} first and returns {_shown(found)}; a "
            f"block that copies skip takes the residual stream first and returns one "
            f"tensor of its shape, use synchronisation=local_steps"
        )


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__
