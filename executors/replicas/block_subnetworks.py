"""Copies that train shallower models, and deal out the residual blocks each round.

A copy holds its own blocks' weights and those of all other units. It computes its own
blocks, and hands the stream on as it is where another block would be. At the end of a
round of ``period`` steps a block's weights become the mean of those copies' that had
it, and go to the copies that have it next, in one ``all_to_all_single`` a piece of the
weights; all other weights become the mean of all. Where blocks are shared, further
holders send theirs to the block's owner before, and get the next owner's behind. Who
has which block follows from a permutation that every copy draws from the same seed.

A checkpoint holds the whole model, whose blocks have learned to be one of few: see
:func:`scaled_blocks` for how to evaluate it.
Source: Dun et al. 2022, arXiv 2107.00961.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from executors.names import tied_parameters
from executors.replicas.pieces import local_part, pieces
from executors.replicas.rounds import Rounds, average
from executors.strategies.skipping import let_pass_by
from planner.errors import ExecutionError
from planner.schema import Strategy
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.schema.methods.method import equal_blocks

if TYPE_CHECKING:
    from executors.mesh import ProcessMesh
    from executors.trainer import Trainer

__all__ = [
    "BlockSubnetworksReplicas",
    "deal_blocks",
    "scaled_blocks",
]


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
    order = _permutation(blocks, seed, turn)
    dealt = []
    for copy in range(copies):
        own = order[copy::copies].tolist()
        others = np.roll(order, -(copy + 1)).tolist()
        own += [block for block in others if block not in own][: depth - len(own)]
        dealt.append(frozenset(own))
    return tuple(dealt)


def _permutation(blocks: int, seed: int, turn: int) -> NDArray[np.int64]:
    """Order in which blocks are dealt out, one to each copy in turn."""
    return np.random.default_rng([seed, turn]).permutation(blocks)


@dataclass(frozen=True, slots=True)
class _Message:
    """A block on its way from one copy to another, or to the same."""

    block: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class _Round:
    """Copies that have each block in a round.

    Attributes:
        owners: Copy that a block is dealt to, by block.
        holders: Copies that train it, of which the owner is one, by block.
    """

    owners: tuple[int, ...]
    holders: tuple[tuple[int, ...], ...]

    def held_by(self, copy: int) -> list[int]:
        """Blocks of a copy, in ascending order."""
        return [block for block, each in enumerate(self.holders) if copy in each]

    def to_owners(self) -> list[_Message]:
        """Messages by which owners get what further holders have trained."""
        return [
            _Message(block, copy, owner)
            for block, owner in enumerate(self.owners)
            for copy in self.holders[block]
            if copy != owner
        ]

    def to_holders(self) -> list[_Message]:
        """Messages by which further holders get what owners have."""
        return [_Message(m.block, m.target, m.source) for m in self.to_owners()]


def _deal(blocks: int, copies: int, settings: BlockSubnetworks, turn: int) -> _Round:
    depth = settings.depth(copies, blocks)
    dealt = deal_blocks(blocks, copies, depth=depth, seed=settings.seed, turn=turn)
    owners = [0] * blocks
    for place, block in enumerate(_permutation(blocks, settings.seed, turn).tolist()):
        owners[block] = place % copies
    holders = (
        tuple(copy for copy, own in enumerate(dealt) if number in own)
        for number in range(blocks)
    )
    return _Round(tuple(owners), tuple(holders))


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
        #: Trained parameters of blocks: of each block one, in one order.
        self._alike: list[tuple[nn.Parameter, ...]] = []
        #: All of them; the others are averaged.
        self.dealt: set[nn.Parameter] = set()
        self._common: list[nn.Parameter] = []
        #: Number of the round, and who has which blocks in it.
        self._turn = 0
        self._round = _Round((), ())

    def elsewhere(
        self, model: nn.Module, strategy: Strategy, place: ProcessMesh
    ) -> tuple[str, ...]:
        """See :meth:`executors.replicas.SkippingReplicas.elsewhere`."""
        copies, index = place.size("replicate"), place.index("replicate")
        if copies == 1:
            return ()
        names = _find_blocks(model, strategy)
        mine = _deal(len(names), copies, self.settings, 0).held_by(index)
        return tuple(name for block, name in enumerate(names) if block not in mine)

    def attach(self, trainer: Trainer) -> None:
        """Find the blocks, let them be skipped, and keep this copy's own."""
        place = trainer.place
        self._group = place.group("replicate")
        self._copies, self._index = place.size("replicate"), place.index("replicate")
        self._optimizer = trainer.optimizer
        self._common = [p for p in trainer.all_parameters() if p.requires_grad]
        if self._copies == 1:
            return
        (part,) = trainer.parts.values()
        self._blocks = _find_blocks(part.inner, trainer.plan.strategy)
        modules = [part.inner.get_submodule(name) for name in self._blocks]
        for number, module in enumerate(modules):
            self._let_skip(number, module)
        every = zip(*(module.parameters() for module in modules), strict=True)
        self._alike = [
            alike for alike in every if any(weight.requires_grad for weight in alike)
        ]
        self.dealt = {weight for alike in self._alike for weight in alike}
        self._common = [weight for weight in self._common if weight not in self.dealt]
        self._round = self._deal(self._turn)
        mine = self._round.held_by(self._index)
        for alike in self._alike:
            for number, weight in enumerate(alike):
                if number not in mine:
                    _release(weight)

    def _let_skip(self, number: int, block: nn.Module) -> None:
        def passes() -> bool:
            return self._index not in self._round.holders[number]

        let_pass_by(block, passes, partial(_require_stream, self._blocks[number]))

    def before_forward(self, step: int) -> None:
        """Take the blocks of the step's round if a run begins in it."""
        if self._forced is None:
            self._begin(step // self.settings.period, trained=False)

    def skipped(self) -> frozenset[nn.Parameter]:
        """Parameters of blocks that this copy does not have in the round."""
        mine = set(self._round.held_by(self._index))
        found = (
            weight
            for alike in self._alike
            for number, weight in enumerate(alike)
            if number not in mine
        )
        return frozenset(found)

    def _deal(self, turn: int) -> _Round:
        return _deal(len(self._blocks), self._copies, self.settings, turn)

    def after_backward(self, step: int) -> None:
        """Do nothing."""

    def after_update(self, step: int) -> None:
        """End the round that is over, and begin the next."""
        if self._copies > 1 and self.phase(step) == "exchange":
            # What it kept is of blocks that are elsewhere from now on.
            self._optimizer.state.clear()
            average(self._common, self._group)
            self._begin(self._turn + 1, trained=True)

    @torch.no_grad()
    def _begin(self, turn: int, *, trained: bool) -> None:
        """Pass blocks on to the copies that have them in another round.

        Args:
            turn: Number of that round.
            trained: Whether holders of a block differ, and the mean is passed on.
        """
        if self._copies == 1 or turn == self._turn:
            return
        before, after = self._round, self._deal(turn)
        mine = before.held_by(self._index)
        # One that this copy has stands for all that are alike.
        found = {alike[mine[0]]: alike for alike in self._alike}
        for piece in pieces(found, times=len(mine)):
            self._pass_on([found[one] for one in piece], before, after, trained)
        self._turn, self._round = turn, after

    def _pass_on(
        self,
        piece: Sequence[Sequence[nn.Parameter]],
        before: _Round,
        after: _Round,
        trained: bool,
    ) -> None:
        """Pass on some parameters of each block.

        Args:
            piece: Those of all blocks that are alike. Shape [parameters, blocks].
            before: Who has them.
            after: Who gets them.
            trained: Whether holders differ.
        """
        old, new = (set(one.held_by(self._index)) for one in (before, after))
        values = {
            block: torch.cat([local_part(alike[block]).reshape(-1) for alike in piece])
            for block in old
        }
        sizes = [alike[0].numel() for alike in piece]
        empty = next(iter(values.values())).new_empty(0)
        exchange = partial(self._exchange, empty=empty, width=sum(sizes))
        if trained:
            for block, more in exchange(before.to_owners(), values):
                values[block] += more
            for block, value in values.items():
                value /= len(before.holders[block])
        owners = zip(before.owners, after.owners, strict=True)
        dealt = [_Message(block, *pair) for block, pair in enumerate(owners)]
        came = dict(exchange(dealt, values))
        del values
        came |= dict(exchange(after.to_holders(), came))
        for alike in piece:
            for block in old - new:
                _release(alike[block])
        for block in new:
            made = torch.split(came[block], sizes)
            for alike, value in zip(piece, made, strict=True):
                if block not in old:
                    _restore(alike[block])
                local = local_part(alike[block])
                local.copy_(value.view(local.shape))

    def _exchange(
        self,
        messages: Sequence[_Message],
        values: Mapping[int, torch.Tensor],
        *,
        empty: torch.Tensor,
        width: int,
    ) -> list[tuple[int, torch.Tensor]]:
        """Send values of blocks; return those that came, by block, in order of senders.

        Args:
            messages: All copies' messages.
            values: What this copy has of each of its blocks. Shapes [width].
            empty: Tensor of their dtype and device. Shape [0].
            width: Scalars of a block.
        """
        if not messages:
            return []
        sent, got = ([0] * self._copies for _ in range(2))
        leaving, coming = [], []
        for one in sorted(messages, key=lambda m: (m.target, m.block)):
            if one.source == self._index:
                leaving.append(values[one.block])
                sent[one.target] += width
        for one in sorted(messages, key=lambda m: (m.source, m.block)):
            if one.target == self._index:
                coming.append(one.block)
                got[one.source] += width
        flat = torch.cat([empty, *leaving])
        came = empty.new_empty(len(coming) * width)
        dist.all_to_all_single(came, flat, got, sent, group=self._group)
        return list(zip(coming, torch.split(came, width), strict=bool(coming)))

    def restored(self, *, complete: bool) -> None:
        """Begin a round, with a new optimizer where there are several copies."""
        if self._copies > 1:
            self._optimizer.state.clear()


def _release(weight: nn.Parameter) -> None:
    """Free the memory of a weight that is another copy's now; its shape stays."""
    local = local_part(weight)
    if local.untyped_storage().nbytes() > local.nbytes:
        # Others' values lie in the same memory.
        weight.data = weight.data.clone()
        local = local_part(weight)
    local.untyped_storage().resize_(0)


def _restore(weight: nn.Parameter) -> None:
    """Take memory for a weight again, without values."""
    local = local_part(weight)
    if not local.untyped_storage().nbytes():
        local.untyped_storage().resize_(local.nbytes)


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
