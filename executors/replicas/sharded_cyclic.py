"""Copies that take turns at a model's stages, and hand weights and gradients on.

Copy N - 1 - j owns stage j of N, from 0: it alone keeps the stage's weights and
optimizer states. Others have the weights while they compute the stage, once in forward
and once more in backward, and each copy gets them from the one before it. With its
backward's weights a copy gets the sum of the gradients of the copies before, adds its
own, and sends both on. The last copy sends the whole sum to the owner, which updates
the weights just before its own forward, the first that uses the new ones.

The last copy hands weights on to the first, for its next step: those, one step old,
that it computes with there. After a rest, as at the beginning and behind a checkpoint,
owners send them in its place; they keep them while the run rests. In each slot a copy
sends one message to the next copy, and the last one another to an owner. The last
stage's weights stay where they are from its forward to its backward, which follows.

Source: Fournier and Oyallon 2024, arXiv 2403.08837, for the cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from executors.mesh import ProcessMesh
from executors.parallelize import ParallelPart
from executors.replicas.cyclic import Turn
from executors.steps import ParallelModel, model_inputs
from planner.schema.methods.cyclic import Cyclic

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["ShardedCyclicReplicas", "ShardedTurn"]

_FORWARD, _BACKWARD, _SUM, _OLDER_FORWARD, _OLDER_BACKWARD = _KINDS = range(5)
#: Bytes at whose multiples kernels like tensors to begin.
_ALIGNMENT = 64


class ShardedTurn(Turn):
    """One stage, whose weights are there while they are needed; at its owner, always.

    They lie in one tensor, which is a message as it is. Its storage stays the same and
    is resized, so that a backward finds what its forward has saved of the weights.

    Args:
        index: Number of the stage.
        part: Its module.
        last: Whether its output makes the loss.
        owned: Whether this copy keeps the weights.
    """

    def __init__(
        self, index: int, part: ParallelPart, *, last: bool, owned: bool
    ) -> None:
        super().__init__(index, part, last=last)
        self.owned = owned
        # Sizes that keep all behind them aligned come first.
        self._weights.sort(key=lambda weight: weight.nbytes % _ALIGNMENT != 0)
        #: Number of weights.
        self.size = sum(weight.numel() for weight in self._weights)
        self._flat = self.empty(1 if owned else 2)
        #: Weights, flat.
        self.values = self._flat[: self.size]
        with torch.no_grad():
            views = self._cut(self.values)
            for weight, view in zip(self._weights, views, strict=True):
                view.copy_(weight)
                weight.data = view
        self.parameters = frozenset(part.inner.parameters())
        #: What is to be sent behind a backward: weights, then gradients, or one alone.
        self.message = self.values
        self.drop()

    @property
    def total(self) -> torch.Tensor:
        """Sum of gradients, flat, in a backward."""
        return self.message[-self.size :] if self.size else self.message

    def empty(self, times: int = 1) -> torch.Tensor:
        """Memory for so many times the trained weights, flat."""
        example = self._weights[0] if self._weights else torch.empty(0)
        size = self.size * times
        return torch.empty(size, dtype=example.dtype, device=example.device)

    def hold(self, times: int) -> torch.Tensor:
        """Take memory for the weights, twice for a sum behind them; all of it, flat."""
        self._flat.untyped_storage().resize_(self.values.nbytes * times)
        return self._flat[: self.size * times]

    def drop(self) -> None:
        """Give the memory of weights back, unless they are owned."""
        self.message = self._flat[:0]
        if not self.owned:
            self._flat.untyped_storage().resize_(0)

    def cut(self, flat: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Parts of a flat tensor by weight."""
        return dict(zip(self._weights, self._cut(flat), strict=True))


@dataclass(slots=True)
class _Sent:
    """Messages under way, and what is done when they have arrived."""

    works: list[tuple[dist.Work, torch.Tensor]]
    then: Callable[[], None] | None


class _Ring:
    """Messages of one copy.

    Args:
        group: All copies; None for one copy alone, which has none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # What is sent must live until it has arrived.
        self._sent: list[_Sent] = []

    def send(
        self,
        messages: list[tuple[torch.Tensor, int, int]],
        stage: int,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Begin to send messages about a stage: values, receiver and kind of each."""
        works = []
        for values, to, kind in messages:
            tag = len(_KINDS) * stage + kind
            if values.numel():
                work = dist.isend(values, group=self._group, group_dst=to, tag=tag)
                assert work is not None
                works.append((work, values))
        self._sent.append(_Sent(works, then))

    def receive(
        self, values: torch.Tensor, source: int, stage: int, kind: int
    ) -> dist.Work | None:
        """Begin to receive a message; None if it is empty."""
        if not values.numel():
            return None
        tag = len(_KINDS) * stage + kind
        return dist.irecv(values, group=self._group, group_src=source, tag=tag)

    def finish(self) -> None:
        """Wait until what was sent has arrived."""
        sent, self._sent = self._sent, []
        for one in sent:
            for work, _ in one.works:
                work.wait()
            if one.then is not None:
                one.then()


class ShardedCyclicReplicas:
    """Lets copies take turns at weights that each stage's owner keeps.

    Args:
        synchronisation: Its settings.
    """

    rests_every = 1
    #: Owners send old weights in it that come from the last copy from then on.
    lead_in = 1

    def __init__(self, synchronisation: Cyclic) -> None:
        self.settings = synchronisation
        (self._phase,) = synchronisation.phases
        self._copy, self._copies = 0, 1
        self._turns: dict[int, ShardedTurn] = {}
        self._ring, self._early = _Ring(None), _Ring(None)
        self._optimizer: torch.optim.Optimizer | None = None
        #: Own weights before the last update, while the run rests; None if those that
        #: there are stand for them.
        self._older: torch.Tensor | None = None
        #: Sum of the last step's gradients of the own stage, in the last copy.
        self._due: torch.Tensor | None = None
        self._rests = True

    def take(self, index: int, part: ParallelPart, place: ProcessMesh) -> None:
        """See :meth:`executors.replicas.HoldingReplicas.take`."""
        self._copy, self._copies = place.index("replicate"), place.size("replicate")
        self._turns[index] = ShardedTurn(
            index,
            part,
            last=index == self._copies - 1,
            owned=self.settings.owner(index, self._copies) == self._copy,
        )

    def attach(self, trainer: Trainer) -> None:
        """Take the stages, and become the rule by which a batch is trained on."""
        for index, part in trainer.parts.items():
            if index not in self._turns:
                self.take(index, part, trainer.place)
        group = trainer.place.group("replicate")
        self._ring, self._early = _Ring(group), _Ring(group)
        self._optimizer = trainer.optimizer
        trainer.step_rule = self

    # -- A step ----------------------------------------------------------------------

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`."""
        return self._cycle(trainer, local), None

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`; at the newest weights."""
        self.settle()
        older, self._older = self._older, None
        loss = self._cycle(trainer, local)
        total = self._drain()
        self._own.give_gradients(total, self._copies)
        self._older = older
        return loss

    def _cycle(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Run all slots of a step; the copy's loss."""
        target = trainer.loss.target(local)
        inputs = model_inputs(trainer, local)
        self._send_older(_OLDER_FORWARD)
        coming = self._expect_forward(self._turns[0])
        output: Any = ()
        for turn in self._turns.values():
            came, coming = coming, self._expect_following(turn)
            self._bring(turn, came)
            output = turn.forward(output, inputs)
            self._end_forward(turn)
        loss: torch.Tensor = trainer.loss(output, target)
        del output
        grads: list[torch.Tensor | None] = []
        for turn in reversed(self._turns.values()):
            came, coming = coming, None
            if turn.index > 0:
                coming = self._expect_backward(self._turns[turn.index - 1])
            if came is not None and not self._keeps(turn):
                came.wait()
            grads = turn.backward(grads, loss if turn.last else None)
            if came is not None and self._keeps(turn):
                came.wait()
            turn.add_own(turn.total, first=self._copy == 0)
            self._end_backward(turn)
        self._rests = False
        return loss.detach()

    @property
    def _is_last(self) -> bool:
        return self._copy == self._copies - 1

    @property
    def _next(self) -> int:
        return (self._copy + 1) % self._copies

    @property
    def _own(self) -> ShardedTurn:
        """Stage whose weights this copy keeps."""
        return next(turn for turn in self._turns.values() if turn.owned)

    def _owner(self, turn: ShardedTurn) -> int:
        return self.settings.owner(turn.index, self._copies)

    def _keeps(self, turn: ShardedTurn) -> bool:
        """Return True if backward has the weights that forward has left."""
        return turn.owned or turn.last

    def _bring(self, turn: ShardedTurn, came: dist.Work | None) -> None:
        """Wait for what a forward needs: weights, or the gradients for new ones."""
        if came is not None:
            came.wait()
        if turn.owned and self._due is not None:
            due, self._due = self._due, None
            self._step(turn, due)

    def _step(self, turn: ShardedTurn, total: torch.Tensor) -> None:
        """Update the own stage's weights by the sum of all copies' gradients."""
        assert self._optimizer is not None
        turn.give_gradients(total, self._copies)
        self._optimizer.step()
        turn.drop_gradients()

    # -- Messages --------------------------------------------------------------------

    def _expect_following(self, turn: ShardedTurn) -> dist.Work | None:
        """Begin to receive what is needed in the slot behind a forward."""
        if turn.last:
            return self._expect_backward(turn)
        return self._expect_forward(self._turns[turn.index + 1])

    def _source(self) -> int:
        """Copy from which weights come, or the whole sum."""
        return (self._copy or self._copies) - 1

    def _expect_forward(self, turn: ShardedTurn) -> dist.Work | None:
        """Begin to receive weights; the owner, the sum by which it updates them."""
        if turn.owned:
            if self._rests or self._is_last:
                return None
            self._due = turn.empty()
            last = self._copies - 1
            return self._ring.receive(self._due, last, turn.index, _SUM)
        values, source, kind = turn.hold(1), self._source(), _FORWARD
        if self._rests and self._copy == 0:
            source, kind = self._owner(turn), _OLDER_FORWARD
        return self._ring.receive(values, source, turn.index, kind)

    def _expect_backward(self, turn: ShardedTurn) -> dist.Work | None:
        """Begin to receive weights, and the sum of the copies before; what there is."""
        first, source, kind = self._copy == 0, self._source(), _BACKWARD
        if self._keeps(turn):
            both = self._goes_on(turn) and not self._is_last
            turn.message = turn.empty(2 if both else 1)
            if first:
                return None
            return self._ring.receive(turn.total, source, turn.index, kind)
        turn.message = turn.hold(2)
        if not first:
            return self._ring.receive(turn.message, source, turn.index, kind)
        if self._rests:
            source, kind = self._owner(turn), _OLDER_BACKWARD
        return self._ring.receive(turn.values, source, turn.index, kind)

    def _goes_on(self, turn: ShardedTurn) -> bool:
        """Return True if the next copy gets a backward's weights from this one."""
        return not turn.last and self._owner(turn) != self._next

    def _end_forward(self, turn: ShardedTurn) -> None:
        """Send weights to the next copy, unless it has them."""
        self._ring.finish()
        messages = []
        if self._owner(turn) != self._next:
            messages = [(turn.values, self._next, _FORWARD)]
        self._ring.send(messages, turn.index, None if turn.last else turn.drop)
        if not messages and not turn.last:
            turn.drop()
        if turn.owned:
            self._early.finish()
            self._send_older(_OLDER_BACKWARD)

    def _end_backward(self, turn: ShardedTurn) -> None:
        """Send weights and the sum up to this copy on; from the last it is the whole.

        To its owner, where weights go to the first copy.
        """
        self._ring.finish()
        self._early.finish()
        messages, goes_on = [], self._goes_on(turn)
        if not self._is_last:
            values = turn.message if goes_on else turn.total
            messages = [(values, self._next, _BACKWARD)]
            if goes_on and turn.owned:
                turn.message[: turn.size].copy_(turn.values)
        else:
            if turn.owned:
                self._due = turn.total
            else:
                messages.append((turn.total, self._owner(turn), _SUM))
            if goes_on:
                messages.append((turn.values, self._next, _BACKWARD))
        if turn.index:
            self._ring.send(messages, turn.index, turn.drop)
            return
        # The next step's forward takes its memory at once.
        messages = [(values.clone(), to, kind) for values, to, kind in messages]
        turn.drop()
        self._ring.send(messages, turn.index)

    def _send_older(self, kind: int) -> None:
        """After a rest, send the first copy old weights of the own stage."""
        if not self._rests or self._copy == 0:
            return
        own = self._own
        values = own.values if self._older is None else self._older
        self._early.send([(values, 0, kind)], own.index)
        if kind == _OLDER_BACKWARD:
            self._older = None

    # -- Between steps ---------------------------------------------------------------

    def _drain(self) -> torch.Tensor:
        """Receive all that is under way; the sum of gradients of the own stage."""
        last, own = self._copies - 1, self._own
        if self._copy == 0 and last > 0:
            for turn in self._turns.values():
                self._throw_away(turn, _FORWARD)
        if not self._is_last:
            self._due = own.empty()
            work = self._ring.receive(self._due, last, own.index, _SUM)
            if work is not None:
                work.wait()
        if self._copy == 0 and last > 0:
            for turn in reversed(self._turns.values()):
                self._throw_away(turn, _BACKWARD)
        self._ring.finish()
        self._early.finish()
        assert self._due is not None
        total, self._due, self._rests = self._due, None, True
        return total

    def _throw_away(self, turn: ShardedTurn, kind: int) -> None:
        """Receive weights for a step that is not made."""
        if not turn.owned:
            last = self._copies - 1
            work = self._ring.receive(turn.hold(1), last, turn.index, kind)
            if work is not None:
                work.wait()
            turn.drop()

    def before_forward(self, step: int) -> None:
        """Do nothing: messages belong to slots of the step."""

    def after_backward(self, step: int) -> None:
        """Do nothing: gradients are handed on stage by stage."""

    def after_update(self, step: int) -> None:
        """Do nothing: the step's gradients are on their way."""

    def settle(self) -> None:
        """Use all gradients of the steps done; keep the weights before the last one."""
        if not self._rests:
            total = self._drain()
            self._older = self._own.values.clone()
            self._step(self._own, total)

    def rests(self, done: int) -> bool:
        """Return True if all gradients have been used."""
        return self._rests

    def meets(self, done: int) -> bool:
        """Return True if all gradients have been used: no copy waits for all others."""
        return self._rests

    def in_sync(self, done: int) -> bool:
        """Return True: of each weight there is one value between steps."""
        return True

    def held(self) -> Set[nn.Parameter]:
        """See :meth:`executors.replicas.HoldingReplicas.held`."""
        every = (turn.parameters for turn in self._turns.values())
        return frozenset().union(*every) - self.skipped()

    def skipped(self) -> frozenset[nn.Parameter]:
        """Weights that another copy updates."""
        return frozenset(
            weight
            for turn in self._turns.values()
            if not turn.owned
            for weight in turn.weights
        )

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Own weights before the last update; before the first those that there are."""
        if self._older is None:
            self._older = self._own.values.clone()
        return {"older": self._own.cut(self._older)}

    def restored(self, *, complete: bool) -> None:
        """Begin with equal weights, unless the older ones were read."""
        if not complete:
            self._older = None

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase

    def force(self, phase: str | None) -> None:
        """Settle when a measurement ends: steps are all of the one phase."""
        if phase is None:
            self.settle()
