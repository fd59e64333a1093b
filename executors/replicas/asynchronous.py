"""Stages that update their weights behind each backward; the pipeline is not flushed.

A stage runs its part of 1F1B's order over the microbatches between two drains, of
whatever steps: stage s of S, from 0, runs forward of microbatch m, and then backward of
microbatch m - (S - 1 - s), behind which it updates its weights. That order is known
beforehand. A rank waits for its neighbours' messages alone, which go in the order of
microbatches, in one group for each pair and direction.

A microbatch runs backward with the weights that it ran forward with. Weights that are
to be updated while microbatches under way began with them are left to those, and a copy
is updated. Recomputation takes place with the older weights and the random numbers of
the forward, too. Where a plan computes in another dtype than its weights have, a
version is a copy in that dtype, and gradients of it are summed in the weights' own.

Replicas of a stage run the same order, and average their gradients before each update:
one all-reduce in the stage's group, in which no rank of another stage waits.

Losses are known to all ranks when the pipeline is drained.

Source: Narayanan et al. 2019, PipeDream, section 3.3 (weight stashing).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from executors.mesh import ProcessMesh
from executors.replicas import KeepsOwn, Replicas
from executors.replicas.gradient_means import GradientMeans
from executors.steps import ParallelModel, PlainStep, model_inputs
from executors.strategies.casts import uncast_weights
from planner.schema.methods.asynchronous import Asynchronous

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["AsynchronousReplicas", "StashedWeights", "Version"]


@dataclass(slots=True, eq=False)
class Version:
    """Weights between two updates.

    Attributes:
        number: Updates before it.
        values: Leaves by name; they share memory with the parameters until these are
            updated, or are copies in the dtype that is computed in.
        users: Microbatches that have run forward with it, and not backward.
    """

    number: int
    values: dict[str, torch.Tensor]
    users: int = 0


class _Host(nn.Module):
    """A stage, and any work that is to see other weights in it."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class StashedWeights:
    """Trained weights of a stage, in all versions that microbatches under way use.

    Args:
        module: The stage.
        optimizer: Of its weights.
        every: Backwards whose gradients, summed up, make an update.
        compute: Dtype in which the stage computes; None for that of its weights.
        means: Of the gradients of an update over replicas; None if there are none.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        compute: torch.dtype | None = None,
        means: GradientMeans | None = None,
    ) -> None:
        self._host, self._optimizer, self._every = _Host(module), optimizer, every
        self._means = means
        self._trained = {
            name: weight
            for name, weight in self._host.named_parameters()
            if weight.requires_grad
        }
        full = uncast_weights(module)
        self._cast = {
            name: compute
            for name, weight in self._host.named_parameters()
            if compute is not None and weight not in full and weight.is_floating_point()
        }
        self._sums: dict[str, torch.Tensor] = {}
        self._added = self._number = self._oldest = 0
        self._newest: Version | None = None
        #: Updates by how many others came since the oldest weights of their gradients.
        self.staleness: Counter[int] = Counter()
        #: Versions that are kept beside the newest, and most of them so far.
        self.older = self.most_older = 0

    def begin(self) -> Version:
        """Newest weights, for the forward of one more microbatch."""
        if self._newest is None:
            values = {
                # The data of a parameter does not know of changes to it.
                name: self._computed(name, weight.data).requires_grad_()
                for name, weight in self._trained.items()
            }
            self._newest = Version(self._number, values)
        self._newest.users += 1
        return self._newest

    def _computed(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Return a weight in the dtype that is computed in."""
        dtype = self._cast.get(name)
        return value if dtype is None else value.to(dtype)

    def _frozen(self) -> dict[str, torch.Tensor]:
        """Weights that are not trained, where they are cast."""
        return {
            name: self._computed(name, weight)
            for name, weight in self._host.named_parameters()
            if name in self._cast and name not in self._trained
        }

    def run_newest(self, work: Callable[[], Any]) -> Any:
        """Do some work at the newest weights, whose gradients it may make."""
        values = {
            name: self._computed(name, weight) for name, weight in self._trained.items()
        }
        return functional_call(self._host, {**values, **self._frozen()}, (work,))

    def average(self) -> None:
        """Average the weights' own gradients over replicas; collective."""
        if self._means is None or not self._trained:
            return
        grads = {n: w.grad for n, w in self._trained.items() if w.grad is not None}
        for name, mean in self._means.of(grads, self._trained).items():
            self._trained[name].grad = mean

    def run(self, version: Version, work: Callable[[], Any]) -> Any:
        """Do some work for which the stage has the weights of a version."""
        values = {**version.values, **self._frozen()}
        return functional_call(self._host, values, (work,))

    def end(self, version: Version) -> None:
        """Take the gradients of a backward, and update the weights when that is due."""
        for name, value in version.values.items():
            grad, value.grad = value.grad, None
            if grad is not None:
                grad = grad.to(self._trained[name].dtype)
                before = self._sums.get(name)
                self._sums[name] = grad if before is None else before + grad
        version.users -= 1
        if version is not self._newest and not version.users:
            self.older -= 1
            # Whoever asks for this still holds it.
            version.values = {}
        if not self._added:
            # Backwards come in the order of forwards.
            self._oldest = version.number
        self._added += 1
        if self._added == self._every:
            self.staleness[self._number - self._oldest] += 1
            self._update()

    @torch.no_grad()
    def _update(self) -> None:
        """Update the newest weights; leave them as they are to those that use them."""
        if self._newest is not None and not self._newest.users:
            self._newest.values = {}
        elif self._newest is not None:
            self.older += 1
            self.most_older = max(self.most_older, self.older)
            for name, weight in self._trained.items():
                if name not in self._cast:
                    weight.data = weight.data.clone()
        self._newest = None
        for name, weight in self._trained.items():
            weight.grad = self._sums.pop(name, None)
        self.average()
        self._optimizer.step()
        for weight in self._trained.values():
            weight.grad = None
        self._added = 0
        self._number += 1


class _Channel:
    """Messages of one direction between this stage and a neighbour, by microbatch.

    Args:
        group: This rank and the neighbour's.
        like: Empty tensors like those of a message.
        device: Where they are.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        like: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._group, self._like, self._device = group, like, device
        self._peer = 1 - dist.get_rank(group)
        # What is sent or received must live until it has arrived.
        self._pending: dict[int, list[tuple[dist.Work, torch.Tensor]]] = {}

    def send(self, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Begin to send a microbatch's message."""
        self._pending[number] = [
            (self._begin(dist.isend, tensor, number, index), tensor)
            for index, tensor in enumerate(tensors)
        ]

    def expect(self, number: int) -> None:
        """Begin to receive a microbatch's message, unless that has begun."""
        if number not in self._pending:
            empty = [torch.empty_like(one, device=self._device) for one in self._like]
            self._pending[number] = [
                (self._begin(dist.irecv, tensor, number, index), tensor)
                for index, tensor in enumerate(empty)
            ]

    def _begin(
        self, how: Callable[..., Any], tensor: torch.Tensor, number: int, index: int
    ) -> dist.Work:
        peer = {"group_dst" if how is dist.isend else "group_src": self._peer}
        tag = number * len(self._like) + index
        work: dist.Work = how(tensor, group=self._group, tag=tag, **peer)
        return work

    def take(self, number: int) -> list[torch.Tensor]:
        """Wait for a microbatch's message."""
        self.expect(number)
        tensors = []
        for work, tensor in self._pending.pop(number):
            work.wait()
            tensors.append(tensor)
        return tensors

    def finish(self, before: int | None = None) -> None:
        """Let go of what has been sent.

        Args:
            before: First microbatch whose message may still be under way; None to wait
                for all.
        """
        for number in [*self._pending]:
            if before is None or number < before:
                for work, _ in self._pending.pop(number):
                    work.wait()


@dataclass(slots=True)
class _Flight:
    """A microbatch between its forward and its backward on this stage."""

    version: Version
    given: list[torch.Tensor]
    made: list[torch.Tensor]


@dataclass(slots=True)
class _Links:
    """Channels to the neighbours; None at the ends of the pipeline."""

    received: _Channel | None = None
    returned: _Channel | None = None
    sent: _Channel | None = None
    answered: _Channel | None = None

    @property
    def outgoing(self) -> list[_Channel]:
        """Channels by which this rank sends."""
        return [one for one in (self.sent, self.returned) if one is not None]


@dataclass(slots=True)
class _Count:
    """Microbatches since the pipeline was drained."""

    forward: int = 0
    backward: int = 0
    flying: dict[int, _Flight] = field(default_factory=dict)


class AsynchronousReplicas:
    """Runs stages that do not wait for each other; the rule of a step is its own, too.

    Args:
        asynchrony: Its settings.
        replicas: What keeps copies of each stage together, when none of their
            microbatches is under way.

    Attributes:
        drained: Whether no microbatch is under way, on all ranks alike.
    """

    def __init__(self, asynchrony: Asynchronous, replicas: Replicas) -> None:
        self.settings, self._inner = asynchrony, replicas
        self.drained = True
        self._index = self._stages = self._steps = self._step = 0
        self._measured = False
        self._links, self._count = _Links(), _Count()
        self._weights: StashedWeights | None = None
        self._module: nn.Module = nn.Identity()

    def attach(self, trainer: Trainer) -> None:
        """Take the stage, and become the rule by which a batch is trained on."""
        self._inner.attach(trainer)
        strategy, place = trainer.plan.strategy, trainer.place
        self._stages = strategy.mesh.pp
        ((self._index, part),) = trainer.parts.items()
        self._module = part.module
        self._steps = self.settings.steps_to_drain(strategy.num_microbatches)
        for group in trainer.optimizer.param_groups:
            group["lr"] *= self.settings.rate_scale(self._stages)
        every = self.settings.update_every
        precision = strategy.precision
        compute = None
        if precision.compute != precision.parameter:
            compute = getattr(torch, precision.compute)
        self._weights = StashedWeights(
            self._module, trainer.optimizer, every, compute, _means(trainer)
        )
        if trainer.pipeline is not None:
            (lowered,) = trainer.pipeline.lowered
            self._links = _links(place, lowered.receives, lowered.sends)
        trainer.step_rule = self

    @property
    def weights(self) -> StashedWeights:
        """Weights of this rank's stage."""
        assert self._weights is not None, "it has been attached"
        return self._weights

    @property
    def _lag(self) -> int:
        """Microbatches under way when a backward begins, beside its own."""
        return self._stages - 1 - self._index

    # -- A step ----------------------------------------------------------------------

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`; the loss is of its forwards."""
        many, count = trainer.plan.strategy.num_microbatches, self._count
        target = trainer.loss.target(local)
        targets = [None] * many if target is None else [*target.chunk(many)]
        inputs = model_inputs(trainer, local)
        cut = {name: value.chunk(many) for name, value in inputs.items()}
        self.drained = False
        losses = []
        first = count.forward
        for index in range(many):
            micro = {name: parts[index] for name, parts in cut.items()}
            output = self._forward(micro, last=first + many - 1)
            if self._links.sent is None:
                losses.append(self._lose(trainer, output, targets[index], many))
            del output
            if count.forward - count.backward > self._lag:
                self._backward()
        if not (self._step + 1) % self._steps and not self._measured:
            self._drain()
        if not losses:
            return None, None
        return torch.stack(losses).sum(), None

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`; at the newest weights."""
        self._drain()
        loss: torch.Tensor | None = self.weights.run_newest(
            lambda: PlainStep().backward(trainer, local)
        )
        self.weights.average()
        return loss

    def _forward(self, inputs: Mapping[str, torch.Tensor], last: int) -> Any:
        """Run forward of the next microbatch; the stage's output.

        Args:
            inputs: Of the model, for this microbatch.
            last: Last microbatch that the neighbours are about to run.
        """
        links, number = self._links, self._count.forward
        given = []
        if links.received is not None and links.returned is not None:
            given = links.received.take(number)
            if number < last:
                links.received.expect(number + 1)
            # The stage before has run a backward behind each forward but the first.
            links.returned.finish(before=number - self._lag - 1)
        given = [one.requires_grad_(one.is_floating_point()) for one in given]
        version = self.weights.begin()
        output = self.weights.run(version, lambda: self._module(*given, **inputs))
        made = [] if links.sent is None else list(output)
        if links.sent is not None:
            links.sent.send(number, [one.detach() for one in made])
        self._count.flying[number] = _Flight(version, given, made)
        self._count.forward += 1
        return output

    def _lose(
        self,
        trainer: ParallelModel,
        output: Any,
        target: torch.Tensor | None,
        many: int,
    ) -> torch.Tensor:
        """Loss of the last stage's microbatch as its share of the step's."""
        flight = self._count.flying[self._count.forward - 1]
        loss = trainer.loss(output, target)
        # An update is by the mean over its microbatches, not over those of the step.
        flight.made = [loss * (many / self.settings.update_every)]
        return loss.detach()

    def _backward(self) -> None:
        """Run backward of the next microbatch, and update the weights."""
        links, number = self._links, self._count.backward
        flight = self._count.flying.pop(number)
        version = flight.version
        grads: list[torch.Tensor | None] = [None]
        if links.sent is not None and links.answered is not None:
            answers = iter(links.answered.take(number))
            grads = [
                next(answers) if made.is_floating_point() else None
                for made in flight.made
            ]
            links.sent.finish(before=number + 1)
            if number + 1 < self._count.forward:
                links.answered.expect(number + 1)
        kept = [at for at, made in enumerate(flight.made) if made.requires_grad]
        if kept:
            ends = [flight.made[at] for at in kept]
            work = partial(torch.autograd.backward, ends, [grads[at] for at in kept])
            self.weights.run(version, work)
            del ends, work
        if links.returned is not None:
            floats = [one for one in flight.given if one.is_floating_point()]
            links.returned.send(number, [_gradient(one) for one in floats])
            del floats
        # An update is no time to hold what a microbatch has left.
        del flight, grads
        self.weights.end(version)
        self._count.backward += 1

    def _drain(self) -> None:
        """Run all backwards that are left; collective."""
        while self._count.backward < self._count.forward:
            self._backward()
        for channel in self._links.outgoing:
            channel.finish()
        self._count = _Count()
        self.drained = True

    # -- Between steps ---------------------------------------------------------------

    @property
    def rests_every(self) -> int:
        """Steps from one time that pipeline and copies rest to the next."""
        return math.lcm(self._steps, self._inner.rests_every)

    @property
    def lead_in(self) -> int:
        """Steps until as many backwards are run in one as forwards."""
        return max(1, self._inner.lead_in)

    def before_forward(self, step: int) -> None:
        """Note the number of the step."""
        self._step = step
        self._inner.before_forward(step)

    def after_backward(self, step: int) -> None:
        """Let copies act on the gradients."""
        self._inner.after_backward(step)

    def after_update(self, step: int) -> None:
        """Let copies act, where the pipeline is drained."""
        if self.drained:
            self._inner.after_update(step)

    def settle(self) -> None:
        """Drain the pipeline."""
        self._drain()
        self._inner.settle()

    def rests(self, done: int) -> bool:
        """Return True if the pipeline is drained after so many steps."""
        return not done % self._steps and self._inner.rests(done)

    def meets(self, done: int) -> bool:
        """Return True if the pipeline is drained now, and all copies come together."""
        return self.drained and self._inner.meets(done)

    def in_sync(self, done: int) -> bool:
        """Return True if all copies are equal after so many steps."""
        return self._inner.in_sync(done)

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Tensors that are kept for the copies of each parameter."""
        return self._inner.state()

    def own_state(self) -> dict[str, torch.Tensor]:
        """Tensors that are kept for this copy alone."""
        return self._inner.own_state() if isinstance(self._inner, KeepsOwn) else {}

    def restored(self, *, complete: bool) -> None:
        """Go on from weights that were read."""
        self._inner.restored(complete=complete)

    def phase(self, step: int) -> str:
        """Name of the phase that a step is of."""
        return self._inner.phase(step)

    def force(self, phase: str | None) -> None:
        """Leave out drains while a phase is measured."""
        self._drain()
        self._measured = phase is not None
        self._inner.force(phase)


def _gradient(given: torch.Tensor) -> torch.Tensor:
    """Gradient of what a stage was given; zeros if nothing depends on it."""
    grad, given.grad = given.grad, None
    return torch.zeros_like(given) if grad is None else grad.contiguous()


def _means(trainer: Trainer) -> GradientMeans | None:
    """Averages of this rank's stage; None where it is the only one of its stage."""
    place, precision = trainer.place, trainer.plan.strategy.precision
    group = place.group("replicate") if place.reduces else None
    if group is None:
        return None
    return GradientMeans(group=group, dtype=getattr(torch, precision.reduce))


def _links(
    place: ProcessMesh,
    receives: Sequence[torch.Tensor],
    sends: Sequence[torch.Tensor],
) -> _Links:
    """Make the channels of this rank; collective over all.

    Args:
        place: Where this process stands.
        receives: Empty tensors like those that the stage receives.
        sends: The same of those that it sends.
    """
    stages, index = place.size("pp"), place.index("pp")
    floats = [one for one in receives if one.is_floating_point()]
    answers = [one for one in sends if one.is_floating_point()]
    copies = dist.get_world_size() // stages
    links = _Links()
    for stage in range(stages - 1):
        for first in range(stage * copies, (stage + 1) * copies):
            pair = [first, first + copies]
            # Of every rank alike; one a direction, so that neither waits for the other.
            there, back = (dist.new_group(pair) for _ in range(2))
            if place.rank not in pair:
                continue
            assert there is not None
            assert back is not None
            if stage == index:
                links.sent = _Channel(there, sends, place.device)
                links.answered = _Channel(back, answers, place.device)
            else:
                links.received = _Channel(there, receives, place.device)
                links.returned = _Channel(back, floats, place.device)
    return links
