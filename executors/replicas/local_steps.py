"""Copies that train on their own and exchange their weights every few steps.

Exchanges are of local shards, over the ranks that hold the same one: ZeRO, tensor and
pipeline parallelism inside a copy take no further messages. What the optimizer keeps of
a parameter stays the copy's own.

An exchange of a fragment begins ``delay`` steps before it is due: every copy sends how
far its weights have come from those of the last exchange, global - local. When it is
due, the mean of that is the gradient of a step of the outer optimizer on the global
weights, and a copy goes on from (1 - mix) global + mix local. A plain mean needs no
global weights: copies send their weights themselves. Where the largest entries alone
are sent, all copies gather them; a copy adds what it did not send to its next message.

Where a run goes on without copies that die, :mod:`executors.replicas.membership` tells
which there are, and an exchange is of all its weights or of none.

Source: Stich 2019, arXiv 1805.09767; Douillard et al. 2023, 2311.08105, and 2025,
2501.18512.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from executors.communication.chunks import decode_chunks, encode_chunks
from executors.communication.codecs import ALL_GATHER
from executors.replicas.groups import Group
from executors.replicas.membership import Exchange, Membership
from executors.replicas.pieces import local_part, pieces
from planner.errors import ExecutionError
from planner.schema.methods.local_steps import LocalSteps

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["LocalStepsReplicas", "outer_step"]


@dataclass(slots=True)
class _Message:
    """Values of some weights on their way to the other copies."""

    weights: Sequence[nn.Parameter]
    values: torch.Tensor
    work: dist.Work | None = None
    top: int = 0
    kept: torch.Tensor | None = None


class LocalStepsReplicas:
    """Exchanges the trained weights of all copies every ``period`` steps.

    Args:
        synchronisation: Its settings.
    """

    lead_in = 0

    def __init__(self, synchronisation: LocalSteps) -> None:
        self.settings = synchronisation
        self.rests_every = synchronisation.interval
        if synchronisation.fragments == 1:
            self.rests_every = synchronisation.period
        self._names = synchronisation.exchanges
        self._forced: str | None = None
        self._group: dist.ProcessGroup | None = None
        #: Agreement on the copies that there are, where they may die.
        self._membership: Membership | None = None
        self._exchange: Exchange[list[torch.Tensor]] | None = None
        self._fragments: list[list[nn.Parameter]] = []
        self._under_way: list[_Message] = []
        #: Weights of the last exchange, and the outer optimizer's momentum.
        self._global: dict[nn.Parameter, torch.Tensor] = {}
        self._momentum: dict[nn.Parameter, torch.Tensor] = {}
        #: What this copy has not sent.
        self._residual: dict[nn.Parameter, torch.Tensor] = {}

    def attach(self, trainer: Trainer) -> None:
        """Take the weights that are trained, in order, a run of them a fragment."""
        self._group = trainer.place.group("replicate")
        self._membership = trainer.place.membership
        trained = [p for p in trainer.all_parameters() if p.requires_grad]
        self._fragments = _runs(trained, self.settings.fragments)
        if self.settings.takes_mean:
            return
        for weight in trained:
            self._global[weight] = self._kept(local_part(weight).clone())
            if self.settings.outer_momentum:
                self._momentum[weight] = self._kept(
                    torch.zeros_like(local_part(weight))
                )
            if self.settings.top:
                self._residual[weight] = self._kept(
                    torch.zeros_like(local_part(weight))
                )

    def _kept(self, values: torch.Tensor) -> torch.Tensor:
        """Return values where they stay between exchanges."""
        if not self.settings.offload or values.device.type == "cpu":
            return values
        return values.to("cpu").pin_memory()

    def before_forward(self, step: int) -> None:
        """Do nothing."""

    def after_backward(self, step: int) -> None:
        """Average the gradients of all copies during the warm-up."""
        if self._group is None or not self._warms_up(step):
            return
        trained = [p for fragment in self._fragments for p in fragment]
        gradients = [local_part(p.grad) for p in trained if p.grad is not None]
        for piece in pieces(gradients):
            message = _Message((), torch.cat([one.reshape(-1) for one in piece]))
            _send(message, self._group)
            _receive(message, self._group.size())
            parts = torch.split(message.values, [one.numel() for one in piece])
            for gradient, part in zip(piece, parts, strict=True):
                gradient.copy_(part.view_as(gradient))

    def _warms_up(self, step: int) -> bool:
        return self._forced is None and step < self.settings.warm_up_steps

    def after_update(self, step: int) -> None:
        """Begin the exchange that is due soon, and end the one that is due now."""
        alone = self._group is None and self._membership is None
        if alone or self._forced == "plain":
            return
        if self._forced is not None:
            index = self._names.index(self._forced)
            self._begin(self._fragments[index], index + 1)
            self._end()
            return
        settings, done = self.settings, step + 1 - self.settings.warm_up_steps
        if done <= 0:
            if done == 0:
                self.restored(complete=False)
            return
        number, rest = divmod(done + settings.delay, settings.interval)
        if rest == 0:
            self._begin(self._fragments[(number - 1) % settings.fragments], number)
        if done % settings.interval == 0:
            self._end()

    def _begin(self, fragment: Sequence[nn.Parameter], number: int) -> None:
        """Send what the outer optimizer takes for gradients.

        Args:
            fragment: Weights that are exchanged.
            number: Of the exchange, from 1.
        """
        for piece in pieces(fragment):
            values = [local_part(weight) for weight in piece]
            if self._global:
                # In the direction of a gradient: what a copy went down by.
                values = [
                    self._global[weight].to(one.device) - one
                    for weight, one in zip(piece, values, strict=True)
                ]
            if self._membership is not None:
                _require_finite(values, number)
            message = self._message(piece, values)
            if self._group is not None:
                if self._sends_again(message):
                    message.kept = message.values.clone()
                _send(message, self._group)
            self._under_way.append(message)
            at_once = self._group is not None and message.kept is None
            if at_once and self.settings.delay == 0:
                # One piece at a time: no more memory than it takes.
                self._end()
        if self._group is not None and self.settings.delay == 0:
            self._end()
        if self._membership is not None:
            # All pieces or none: a copy may die while they are sent.
            for message in self._under_way:
                message.values = message.values.cpu()
            work = partial(_exchanged, tuple(self._under_way))
            self._exchange = self._membership.begin(number, work)

    def _sends_again(self, message: _Message) -> bool:
        """Return True if a message stays in the device's memory until all have it.

        A group that ends with each of its ranks sends none again, but a step on it is
        to take the memory that the plan's run takes.
        """
        return self.settings.fewest_copies > 0 and message.values.device.type == "cpu"

    def _message(
        self, weights: Sequence[nn.Parameter], values: Sequence[torch.Tensor]
    ) -> _Message:
        """All entries to be sent, or the largest; the others are kept."""
        top = self.settings.top
        if not top:
            return _Message(weights, torch.cat([one.reshape(-1) for one in values]))
        messages = []
        for weight, value in zip(weights, values, strict=True):
            residual = self._residual[weight]
            whole = value + residual.to(value.device)
            part, (sent,) = encode_chunks([whole], top)
            residual.copy_(whole - sent)
            messages.append(part)
        return _Message(weights, torch.cat(messages), top=top)

    def _end(self) -> None:
        """Wait for what was sent, and take over the new weights."""
        copies = self._group.size() if self._group is not None else 1
        if self._exchange is not None:
            *received, members = self._exchange.wait()
            copies, self._exchange = int(members), None
            for message, values in zip(self._under_way, received, strict=True):
                message.values = values
        for message in self._under_way:
            if self._membership is not None:
                device = local_part(message.weights[0]).device
                message.values = message.values.to(device)
            _receive(message, copies)
            sizes = [local_part(weight).numel() for weight in message.weights]
            parts = torch.split(message.values, sizes)
            for weight, part in zip(message.weights, parts, strict=True):
                local = local_part(weight)
                mean = part.view_as(local)
                new = self._stepped(weight, mean) if self._global else mean
                local.copy_(torch.lerp(new, local, self.settings.mix))
        self._under_way = []

    def _stepped(self, weight: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Step of the outer optimizer on a weight."""
        momentum = self._momentum.get(weight)
        return outer_step(self.settings, self._global[weight], momentum, gradient)

    def settle(self) -> None:
        """Do nothing: an exchange ends where it is due."""

    def rests(self, done: int) -> bool:
        """Return True where no exchange is under way and a period may end."""
        if self._forced is not None:
            return self._forced != "plain"
        if done <= self.settings.warm_up_steps:
            return True
        return (done - self.settings.warm_up_steps) % self.rests_every == 0

    def meets(self, done: int) -> bool:
        """Return True where it rests."""
        return self.rests(done)

    def in_sync(self, done: int) -> bool:
        """Return True at the end of a period, if copies are equal there, and before."""
        if done <= self.settings.warm_up_steps and self._forced is None:
            return True
        return self.settings.equal_after_exchange and self.rests(done)

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Weights of the last exchange and the outer momentum, equal on all copies."""
        kept = {"global": self._global, "momentum": self._momentum}
        return {name: tensors for name, tensors in kept.items() if tensors}

    def own_state(self) -> dict[str, torch.Tensor]:
        """Residual of each weight of this copy, by the number of the weight."""
        return {str(index): kept for index, kept in enumerate(self._residual.values())}

    def restored(self, *, complete: bool) -> None:
        """Begin a period with the weights that there are, unless its state was read."""
        if complete:
            return
        for weight, kept in self._global.items():
            kept.copy_(local_part(weight))
        for kept in (*self._momentum.values(), *self._residual.values()):
            kept.zero_()

    def phase(self, step: int) -> str:
        """Return the exchange that is due behind a step, else ``plain``."""
        if self._forced is not None:
            return self._forced
        done = step + 1 - self.settings.warm_up_steps
        number, rest = divmod(done, self.settings.interval)
        if rest or (done <= 0 and self.settings.interval > 1):
            return "plain"
        return self._names[(number - 1) % self.settings.fragments]

    def force(self, phase: str | None) -> None:
        """See :meth:`executors.replicas.Replicas.force`."""
        self._forced = phase


def outer_step(
    settings: LocalSteps,
    weight: torch.Tensor,
    momentum: torch.Tensor | None,
    gradient: torch.Tensor,
) -> torch.Tensor:
    """Step of the outer optimizer, as torch.optim.SGD takes it.

    Args:
        settings: Its learning rate and momentum.
        weight: Of the last exchange; changed in place, wherever it lies.
        momentum: Likewise; None without.
        gradient: Mean of what copies went down by.

    Returns:
        The new weight, on the gradient's device.
    """
    direction = gradient
    if momentum is not None:
        kept = momentum.to(gradient.device) * settings.outer_momentum + gradient
        momentum.copy_(kept)
        direction = kept
        if settings.nesterov:
            direction = gradient + settings.outer_momentum * kept
    new = weight.to(gradient.device) - settings.outer_learning_rate * direction
    weight.copy_(new)
    return new


def _require_finite(values: Sequence[torch.Tensor], number: int) -> None:
    """End this copy before it spoils the others, which go on without it."""
    if not all(torch.isfinite(one).all() for one in values):
        raise ExecutionError(
            f"weights of this copy are not finite at exchange {number}, which it takes "
            f"no part in; lower the learning rate or set grad_clip_norm"
        )


def _send(message: _Message, group: dist.ProcessGroup) -> None:
    """Begin to add up a message over a group, or to gather it if it has the largest."""
    values = message.values
    if message.top:
        every = values.new_empty(group.size() * len(values), values.shape[1])
        message.work = ALL_GATHER(every, values, group=group, async_op=True)
        message.values = every
    else:
        message.work = dist.all_reduce(values, group=group, async_op=True)


def _exchanged(messages: Sequence[_Message], group: Group) -> list[torch.Tensor]:
    """Sums of messages over a group, or all of them; and how many members it has."""
    received = []
    for message in messages:
        if message.top:
            values = group.all_gather(message.values)
        else:
            values = message.values.clone()
            group.all_reduce(values)
        received.append(values)
    return [*received, torch.tensor(group.size)]


def _receive(message: _Message, copies: int) -> None:
    """Wait for the sum, and divide it by the number of copies."""
    if message.work is not None:
        message.work.wait()
    if message.top:
        values = [local_part(weight) for weight in message.weights]
        # In the order of ranks, so that all copies get the same bits.
        parts = message.values.chunk(copies)
        message.values = decode_chunks(parts[0], message.top, values)
        for part in parts[1:]:
            message.values += decode_chunks(part, message.top, values)
    message.values /= copies


def _runs(weights: Sequence[nn.Parameter], number: int) -> list[list[nn.Parameter]]:
    """Cut a list into runs of about equal bytes, some of them empty if it is short."""
    sizes = [local_part(weight).nbytes for weight in weights]
    total, before = sum(sizes), 0
    runs: list[list[nn.Parameter]] = [[] for _ in range(number)]
    for weight, size in zip(weights, sizes, strict=True):
        # By the middle of a weight, so that its larger part decides.
        place = (before + size / 2) * number // max(total, 1)
        runs[min(int(place), number - 1)].append(weight)
        before += size
    return runs
