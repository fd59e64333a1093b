"""Copies that take turns at the stages of a model, and hand its gradients on.

Each copy runs all stages of the model, forward and then backward, one microbatch a
step. Behind its backward of a stage it adds its gradient to the sum that has come from
the copy before, and sends that to the next. The last copy's sum goes around once more,
and each copy steps its own weights by it: before its next forward of the stage where
it computes with the newest weights, else before the one after.

Behind each of its N forwards a copy sends a sum, behind each of its N backwards a
partial sum: one message at a time. Nothing is kept twice: weights are stepped in place,
when nothing needs the old ones any more. Where one copy alone keeps each stage's
weights, :mod:`executors.replicas.sharded_cyclic` runs the same cycle.

Source: Fournier and Oyallon 2024, arXiv 2403.08837.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors.parallelize import ParallelPart
from executors.steps import ParallelModel, model_inputs
from planner.plugins import load_object
from planner.schema.methods.cyclic import Cyclic

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["CyclicReplicas", "Turn"]

_PARTIAL, _SUM = range(2)
_SHARDED = "executors.replicas.sharded_cyclic:ShardedCyclicReplicas"


@dataclass(slots=True)
class _Gradient:
    """A stage's gradient, flat, and the request that brings it, if one does."""

    values: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> torch.Tensor:
        """Values, once they are there."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.values


class _Messages:
    """Messages of one copy, of which it sends one at a time.

    Args:
        group: All copies; None for one copy alone, which has none.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        # What is sent must live until it has arrived.
        self._sent: _Gradient | None = None

    def send(self, values: torch.Tensor, to: int, stage: int, kind: int) -> None:
        """Begin to send a stage's gradient, when what was sent before has arrived."""
        self.finish()
        work = dist.isend(values, group=self._group, group_dst=to, tag=2 * stage + kind)
        self._sent = _Gradient(values, work)

    def receive(
        self, values: torch.Tensor, source: int, stage: int, kind: int
    ) -> _Gradient:
        """Begin to receive a stage's gradient."""
        work = dist.irecv(
            values, group=self._group, group_src=source, tag=2 * stage + kind
        )
        return _Gradient(values, work)

    def finish(self) -> None:
        """Wait until what was sent has arrived."""
        if self._sent is not None:
            self._sent.wait()
            self._sent = None


class Turn:
    """One stage: its forward and backward, its weights and their gradient.

    Args:
        index: Number of the stage.
        part: Its module.
        last: Whether its output makes the loss.
    """

    def __init__(self, index: int, part: ParallelPart, *, last: bool) -> None:
        self.index, self.last, self._part = index, last, part
        self._weights = [p for p in part.inner.parameters() if p.requires_grad]
        self._given: list[torch.Tensor] = []
        self._made: list[torch.Tensor] = []
        #: Summed gradient that is to be used next; None if it is not expected yet.
        self.due: _Gradient | None = None
        #: Number of steps whose gradients the weights have not been updated by.
        self.behind = 0
        self._newer: list[torch.Tensor] = []

    @property
    def weights(self) -> Sequence[nn.Parameter]:
        """Trained weights."""
        return self._weights

    def forward(
        self, relayed: Sequence[torch.Tensor], inputs: Mapping[str, torch.Tensor]
    ) -> Any:
        """Output, as tensors for the next stage; of the last stage, the model's."""
        self._given = [
            one.detach().requires_grad_(one.is_floating_point()) for one in relayed
        ]
        self._part.sync_gradients(True)
        output = self._part.module(*self._given, **inputs)
        self._made = [] if self.last else list(output)
        return output

    def backward(
        self, grads: Sequence[torch.Tensor | None], loss: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Gradients of what the forward was given, from those of what it made.

        Args:
            grads: Of what it made; of the last stage none.
            loss: Of the last stage, else None.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor | None]]
        pairs = [
            (made, grad)
            for made, grad in zip(self._made, grads, strict=True)
            if made.requires_grad and grad is not None
        ]
        if loss is not None:
            pairs = [(loss, None)]
        if pairs:
            made, given = zip(*pairs, strict=True)
            torch.autograd.backward(made, given)
        found = [one.grad for one in self._given]
        self._given, self._made = [], []
        return found

    def empty(self) -> torch.Tensor:
        """Memory for a gradient of all trained weights, flat."""
        size = sum(_local(weight).numel() for weight in self._weights)
        example = _local(self._weights[0]) if self._weights else torch.empty(0)
        return torch.empty(size, dtype=example.dtype, device=example.device)

    def add_own(self, total: torch.Tensor, *, first: bool) -> None:
        """Move this copy's gradient to a sum.

        Args:
            total: Gradients of the copies before it.
            first: True if there are none.
        """
        for weight, part in zip(self._weights, self._cut(total), strict=True):
            own, weight.grad = weight.grad, None
            if first:
                part.zero_() if own is None else part.copy_(_local(own))
            elif own is not None:
                part.add_(_local(own))

    def give_gradients(self, total: torch.Tensor, copies: int) -> None:
        """Give weights the mean of all copies' gradients."""
        mean = total / copies
        for weight, part in zip(self._weights, self._cut(mean), strict=True):
            weight.grad = _like(weight, part)

    def drop_gradients(self) -> None:
        """Take the gradients from the weights."""
        for weight in self._weights:
            weight.grad = None

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        shapes = [_local(weight).shape for weight in self._weights]
        parts = torch.split(flat, [shape.numel() for shape in shapes])
        pairs = zip(parts, shapes, strict=True)
        return [part.view(shape) for part, shape in pairs]

    @torch.no_grad()
    def go_back(self, older: Mapping[nn.Parameter, torch.Tensor]) -> None:
        """Compute with older weights until :meth:`return_to_newer`."""
        self._newer = [_local(weight).clone() for weight in self._weights]
        for weight in self._weights:
            _local(weight).copy_(older[weight])

    @torch.no_grad()
    def return_to_newer(self) -> None:
        """End what :meth:`go_back` began, if it did."""
        for weight, newer in zip(self._weights, self._newer, strict=False):
            _local(weight).copy_(newer)
        self._newer = []


class CyclicReplicas:
    """Lets copies take turns; the rule of a step is its own, too.

    Args:
        synchronisation: Its settings.
    """

    rests_every = 1
    #: Weights that are one step old use the gradients of the step before the last.
    lead_in = 2

    def __new__(cls, synchronisation: Cyclic) -> Any:
        """Make copies that hand weights on, too, if those are sharded."""
        if synchronisation.sharded:
            return load_object(_SHARDED)(synchronisation)
        return super().__new__(cls)

    def __init__(self, synchronisation: Cyclic) -> None:
        self.settings = synchronisation
        (self._phase,) = synchronisation.phases
        self._copy, self._copies = 0, 1
        self._turns: list[Turn] = []
        self._messages = _Messages(None)
        self._optimizer: torch.optim.Optimizer | None = None
        #: Weights before the last update, which some stages have yet to use, where
        #: that update was made for others to read the weights.
        self._older: dict[nn.Parameter, torch.Tensor] = {}

    def attach(self, trainer: Trainer) -> None:
        """Take the stages, and become the rule by which a batch is trained on."""
        place = trainer.place
        self._copy, self._copies = place.index("replicate"), place.size("replicate")
        self._messages = _Messages(place.group("replicate"))
        count = len(trainer.parts)
        self._turns = [
            Turn(index, trainer.parts[index], last=index == count - 1)
            for index in range(count)
        ]
        self._optimizer = trainer.optimizer
        trainer.step_rule = self

    # -- A step ----------------------------------------------------------------------

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`."""
        loss = self._cycle(trainer, local)
        self._older = {}
        return loss, None

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`; at the newest weights."""
        self.settle()
        older, self._older = self._older, {}
        loss = self._cycle(trainer, local)
        for turn in reversed(self._turns):
            turn.give_gradients(self._fetch(turn), self._copies)
            turn.due, turn.behind = None, 0
        self._messages.finish()
        self._older = older
        return loss

    def _cycle(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Run all slots of a step; the copy's loss."""
        target = trainer.loss.target(local)
        inputs = model_inputs(trainer, local)
        partial = self._expect_partial(self._turns[-1])
        output: Any = ()
        for turn in self._turns:
            taken = self._use_sum(turn)
            if self._older and not self._is_fresh(turn):
                turn.go_back(self._older)
            output = turn.forward(output, inputs)
            if taken is not None:
                self._send_sum(turn, taken)
            del taken
        loss: torch.Tensor = trainer.loss(output, target)
        del output
        grads: list[torch.Tensor | None] = []
        for turn in reversed(self._turns):
            grads = turn.backward(grads, loss if turn is self._turns[-1] else None)
            total = turn.empty() if partial is None else partial.wait()
            turn.add_own(total, first=partial is None)
            self._hand_on(turn, total)
            if turn.index > 0:
                partial = self._expect_partial(self._turns[turn.index - 1])
        return loss.detach()

    @property
    def _is_last(self) -> bool:
        return self._copy == self._copies - 1

    def _is_fresh(self, turn: Turn) -> bool:
        return self.settings.is_fresh(self._copy, turn.index, self._copies)

    def _hurries(self, turn: Turn) -> bool:
        """Return True if the last copy sends a sum as soon as it is made."""
        return self._copies > 1 and self.settings.hurries(turn.index, self._copies)

    def _use_sum(self, turn: Turn) -> torch.Tensor | None:
        """Bring a stage's weights to what its next forward computes with.

        Returns:
            The sum to send on behind the forward, one slot later: there a copy sends
            nothing else. None if there is none.
        """
        fresh, taken = self._is_fresh(turn), None
        if self._is_last:
            if turn.due is not None and not self._hurries(turn):
                taken = turn.due.values
            if fresh:
                self._step(turn)
            return taken
        if turn.behind > (0 if fresh else 1):
            assert turn.due is not None
            taken = turn.due.wait()
            self._step(turn)
        if turn.behind:
            self._expect_sum(turn)
        return taken

    def _hand_on(self, turn: Turn, total: torch.Tensor) -> None:
        """Send the sum up to this copy to the next; from the last it is the whole."""
        if self._is_last:
            self._step(turn)
            turn.return_to_newer()
            turn.due = _Gradient(total)
            if self._hurries(turn):
                self._send_sum(turn, total)
        else:
            turn.return_to_newer()
            if self._is_fresh(turn):
                self._expect_sum(turn)
            self._messages.send(total, self._copy + 1, turn.index, _PARTIAL)
        turn.behind += 1

    def _step(self, turn: Turn) -> None:
        """Update a stage's weights by the summed gradient, if one is due."""
        if turn.due is None:
            return
        assert self._optimizer is not None
        turn.give_gradients(turn.due.wait(), self._copies)
        self._optimizer.step()
        turn.drop_gradients()
        turn.due = None
        turn.behind -= 1

    # -- Messages --------------------------------------------------------------------

    def _expect_partial(self, turn: Turn) -> _Gradient | None:
        """Begin to receive the sum of the copies before; None if there are none."""
        if self._copy == 0:
            return None
        before = self._copy - 1
        return self._messages.receive(turn.empty(), before, turn.index, _PARTIAL)

    def _route(self, turn: Turn) -> list[int]:
        """Copies by which a stage's sum goes, from the one that makes it."""
        last = self._copies - 1
        return [last, *self.settings.route(turn.index, self._copies)]

    def _expect_sum(self, turn: Turn) -> None:
        """Begin to receive a stage's sum."""
        route = self._route(turn)
        source = route[route.index(self._copy) - 1]
        turn.due = self._messages.receive(turn.empty(), source, turn.index, _SUM)

    def _send_sum(self, turn: Turn, values: torch.Tensor) -> None:
        """Send a stage's sum to the next copy, if there is one."""
        route = self._route(turn)
        place = route.index(self._copy) + 1
        if place < len(route):
            self._messages.send(values, route[place], turn.index, _SUM)

    def _fetch(self, turn: Turn) -> torch.Tensor:
        """Wait for a stage's sum between two steps, and send it on."""
        if turn.due is None:
            self._expect_sum(turn)
        assert turn.due is not None
        values = turn.due.wait()
        if not (self._is_last and self._hurries(turn)):
            self._send_sum(turn, values)
        return values

    # -- Between steps ---------------------------------------------------------------

    def before_forward(self, step: int) -> None:
        """Do nothing: messages belong to slots of the step."""

    def after_backward(self, step: int) -> None:
        """Do nothing: gradients are handed on stage by stage."""

    def after_update(self, step: int) -> None:
        """Do nothing: the step's gradients are on their way."""

    def settle(self) -> None:
        """Use all gradients of the steps done; keep the weights before the last one."""
        # What was to be used a step later comes first, from all copies.
        for behind in (2, 1):
            for turn in reversed(self._turns):
                if turn.behind == behind:
                    self._fetch(turn)
                    if behind == 1:
                        for weight in turn.weights:
                            self._older[weight] = _local(weight).clone()
                    self._step(turn)
        self._messages.finish()

    def rests(self, done: int) -> bool:
        """Return True if all gradients have been used."""
        return not any(turn.behind for turn in self._turns)

    def meets(self, done: int) -> bool:
        """Return True if all gradients have been used: no copy waits for all others."""
        return self.rests(done)

    def in_sync(self, done: int) -> bool:
        """Return True: copies are equal between steps."""
        return True

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Weights before the last update; before the first those that there are."""
        if not self._older:
            weights = [weight for turn in self._turns for weight in turn.weights]
            self._older = {weight: _local(weight).clone() for weight in weights}
        return {"older": self._older}

    def restored(self, *, complete: bool) -> None:
        """Begin with equal weights everywhere, unless the older ones were read."""
        if not complete:
            self._older = {}

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase

    def force(self, phase: str | None) -> None:
        """Settle when a measurement ends: steps are all of the one phase."""
        if phase is None:
            self.settle()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _like(weight: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """Local values, divided over ranks as a weight is."""
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(
        local,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
