"""Layers that follow errors of their own, made from the error of the output.

All microbatches go forward through the pipeline, and nothing is kept for a backward but
what each layer was given and made. The last stage then broadcasts the errors of all of
them at once, and every stage makes its gradients by itself.

Where a plan computes in another dtype than its weights have, all weights are cast once
a step; what microbatches add to gradients is summed in the weights' own.

Source: Ororbia et al. 2023, arXiv 2002.03911.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from executors.communication.buckets import local_values
from executors.learning.chains import Layer, read_chain
from executors.learning.classes import IGNORED, require_classes, vector_shapes
from executors.learning.relay import Relay
from executors.steps import ParallelModel, model_inputs
from planner.errors import ExecutionError
from planner.schema.methods.local_alignment import LocalAlignment

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["LocalAlignmentStep", "error_weight"]


def error_weight(layer: int, width: int, source: int, *, direct: bool) -> torch.Tensor:
    """Error weights of a layer before the first step, the same wherever cuts are.

    Args:
        layer: Number of the layer, from 1.
        width: Features of the layer.
        source: Features of the layer whose error it is given.
        direct: True if that is the last layer of all.

    Returns:
        Normal values over the root of ``source``, in float32 on the CPU. Shape [width,
        source].
    """
    generator = torch.Generator().manual_seed(2 * layer + direct)
    return torch.randn(width, source, generator=generator) / math.sqrt(source)


@dataclass(slots=True)
class _Errors:
    """Error weights of one layer, and their gradient in this step."""

    direct: bool
    weight: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Cast:
    """Weights of a layer in the dtype that is computed in, in this step.

    Attributes:
        weight: W.
        bias: b; None if the layer has none.
        errors: Error weights; None in the last layer of all.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    errors: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Pass:
    """One microbatch: what each layer was given, what it made, and what was handed on.

    Attributes:
        given: z of the layer before, by layer.
        made: h, by layer.
        output: z of the last layer.
    """

    given: list[torch.Tensor]
    made: list[torch.Tensor]
    output: torch.Tensor


class LocalAlignmentStep:
    """Trains the layers of this rank's stage by their own errors.

    Args:
        learning: Its settings.
    """

    def __init__(self, learning: LocalAlignment) -> None:
        self.settings = learning
        (self._phase,) = learning.phases
        self._layers: list[Layer] = []
        #: Of each layer of this rank but the last of all.
        self._errors: list[_Errors] = []
        self._index, self._stages, self._classes = 0, 1, 1
        self._dtype = torch.float32

    def attach(self, trainer: Trainer) -> None:
        """Read the layers of this rank's stage, and make their error weights.

        Raises:
            ExecutionError: If it is no chain of linear layers that ends in scores of
                classes.
        """
        shapes = vector_shapes(trainer)
        ((index, part),) = trainer.parts.items()
        self._index, self._stages = index, len(shapes)
        self._classes = shapes[-1][-1]
        self._dtype = getattr(torch, trainer.plan.strategy.precision.compute)
        stages = trainer.plan.strategy.stages
        self._layers = read_chain(part.inner, first=index == 0)
        if len(self._layers) != len(stages[index].modules):
            raise ExecutionError(
                f"learning={self.settings}, but stage {index} has "
                f"{len(stages[index].modules)} modules and {len(self._layers)} linear "
                f"layers; each module must be one, or use learning=backpropagation"
            )
        before = sum(len(stage.modules) for stage in stages[:index])
        widths = [layer.module.out_features for layer in self._layers]
        for place, layer in enumerate(self._layers):
            last = place == len(widths) - 1
            if last and self._is_last:
                break
            number = before + place + 1
            direct = last or self.settings.is_direct(number)
            source = self._classes if direct else widths[place + 1]
            weight = error_weight(number, widths[place], source, direct=direct)
            weight = weight.to(local_values(layer.module.weight))
            self._errors.append(_Errors(direct, weight, torch.zeros_like(weight)))

    @property
    def _is_last(self) -> bool:
        return self._index == self._stages - 1

    def own_state(self) -> dict[str, torch.Tensor]:
        """Error weights by layer, live: a checkpoint is read into them."""
        pairs = zip(self._layers, self._errors, strict=False)
        return {f"errors.{layer.name}": errors.weight for layer, errors in pairs}

    def meets(self, done: int) -> bool:
        """Return True: every step ends with one loss."""
        return True

    def phase(self, step: int) -> str:
        """Name of the one phase that there is."""
        return self._phase

    def force(self, phase: str | None) -> None:
        """Do nothing: every step is of the one phase."""

    @torch.no_grad()
    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`."""
        loss = self.backward(trainer, local)
        trainer.optimizer.step()
        rate = self.settings.error_learning_rate
        for errors in self._errors:
            errors.weight.sub_(errors.grad, alpha=rate)
        return loss, None

    @torch.no_grad()
    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`; gradients are the rule's own."""
        trainer.optimizer.zero_grad()
        for errors in self._errors:
            errors.grad.zero_()
        classes = require_classes(trainer, local)
        inputs = model_inputs(trainer, local)
        count = trainer.plan.strategy.num_microbatches
        relay, weights = Relay(trainer, self._index), self._cast()
        passes = []
        for number in range(count):
            micro = {name: v.chunk(count)[number] for name, v in inputs.items()}
            samples = len(classes) // count
            passes.append(self._forward(relay, micro, samples, weights))
        relay.finish()
        error, loss = self._output_error(trainer, passes, classes)
        for one, its_error in zip(passes, error.chunk(count), strict=True):
            self._learn(one, its_error, weights)
        for layer in self._layers:
            for parameter in layer.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(trainer.loss.count)
        for errors in self._errors:
            errors.grad.mul_(self.settings.gamma / trainer.loss.count)
        return loss

    def _cast(self) -> list[_Cast]:
        """Weights of this rank's layers in the dtype that is computed in."""

        def cast(value: torch.Tensor | None) -> torch.Tensor | None:
            return None if value is None else local_values(value).to(self._dtype)

        found = []
        for place, layer in enumerate(self._layers):
            weight, bias = (
                cast(one) for one in (layer.module.weight, layer.module.bias)
            )
            has_errors = place < len(self._errors)
            errors = cast(self._errors[place].weight) if has_errors else None
            assert weight is not None
            found.append(_Cast(weight, bias, errors))
        return found

    def _forward(
        self,
        relay: Relay,
        inputs: Mapping[str, torch.Tensor],
        samples: int,
        weights: Sequence[_Cast],
    ) -> _Pass:
        """Run a microbatch through this rank's layers."""
        first = self._layers[0]
        if self._index == 0:
            assert first.input is not None
            value = inputs[first.input]
            if self.settings.noise:
                value = value + self.settings.noise * torch.randn_like(value)
        else:
            (value,) = relay.receive(samples)
        value = first.before(value.to(self._dtype))
        given, made = [], []
        for layer, cast in zip(self._layers, weights, strict=True):
            given.append(value)
            made.append(nn.functional.linear(value, cast.weight, cast.bias))
            value = layer.activation(made[-1])
        if not self._is_last:
            relay.send(value)
        return _Pass(given, made, value)

    def _output_error(
        self,
        trainer: ParallelModel,
        passes: Sequence[_Pass],
        classes: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Error of the scores of all microbatches, broadcast; the last stage's loss."""
        group, loss = trainer.place.group("pp"), None
        if self._is_last:
            scores = torch.cat([one.output for one in passes])
            loss = trainer.loss(scores, classes)
            every = torch.arange(self._classes, device=scores.device)
            error = scores.float().softmax(1) - (classes[:, None] == every).float()
            error *= (classes != IGNORED)[:, None]
        else:
            shape = (len(classes), self._classes)
            error = torch.empty(shape, device=trainer.place.device)
        dist.broadcast(error, group=group, group_src=self._stages - 1)
        return error, loss

    def _learn(
        self, one: _Pass, output_error: torch.Tensor, weights: Sequence[_Cast]
    ) -> None:
        """Add the sums of a microbatch to the gradients of this rank's layers.

        Args:
            one: The microbatch.
            output_error: Its e_L.
            weights: Of the layers, cast.
        """
        output_error = output_error.to(self._dtype)
        error, outputs = output_error, [*one.given[1:], one.output]
        for place in reversed(range(len(self._layers))):
            layer, cast = self._layers[place], weights[place].errors
            if cast is not None:
                errors = self._errors[place]
                above = output_error if errors.direct else error
                direction = above @ cast.T
                _add_product(errors.grad, direction.T, above)
                point = direction.mul_(-self.settings.beta).add_(one.made[place])
                error = layer.activation(point).neg_().add_(outputs[place])
            _add_gradients(layer.module, error, one.given[place])


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a product of matrices, which may be of another dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _add_gradients(layer: nn.Linear, error: torch.Tensor, given: torch.Tensor) -> None:
    """Add a microbatch's sums of what is trained of a layer."""
    for parameter in (layer.weight, layer.bias):
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = local_values(parameter.grad)
        if parameter is layer.weight:
            _add_product(total, error.T, given)
        else:
            total.add_(error.sum(0, dtype=total.dtype))
