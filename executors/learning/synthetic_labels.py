"""Stages that learn by themselves, from labels that are drawn for each cut.

Every rank has the batch's classes and draws the same tables, so that it makes its own
targets: a step sends nothing. Where a part is given what the part before it makes, that
is sent forward, and no gradient comes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from executors.learning.classes import IGNORED, require_classes, vector_shapes
from executors.learning.relay import Relay
from executors.parallelize import ParallelPart
from executors.steps import ParallelModel, PlainStep, model_inputs
from planner.errors import ExecutionError
from planner.schema.methods.synthetic_labels import SyntheticLabels

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["SyntheticLabelsStep", "synthetic_table"]

#: Factor of a table's seed, so that cuts of one seed share no table with another's.
_FACTOR = 1_000_003


def synthetic_table(
    settings: SyntheticLabels, cut: int, classes: int, width: int
) -> torch.Tensor:
    """Labels of the classes at a cut.

    Args:
        settings: With the seed.
        cut: Number of the stage before it.
        classes: Rows.
        width: Values that each sample has at the cut.

    Returns:
        Half of each row, rounded down, is ``scale``, drawn at random, the rest 0, in
        float32 on the CPU. Shape [classes, width].
    """
    generator = torch.Generator().manual_seed(settings.seed * _FACTOR + cut)
    order = torch.rand(classes, width, generator=generator).argsort(1)
    return (order < width // 2).float() * settings.scale


class SyntheticLabelsStep:
    """Lets each rank train its own stage; a pipeline again when that is over.

    Args:
        learning: Its settings.
    """

    def __init__(self, learning: SyntheticLabels) -> None:
        self.settings = learning
        self._plain = PlainStep()
        self._forced: str | None = None
        #: Labels of what this rank's stage is given, and of what it makes.
        self._given: torch.Tensor | None = None
        self._wanted: torch.Tensor | None = None

    def attach(self, trainer: Trainer) -> None:
        """Draw the tables of this rank's cuts.

        Raises:
            ExecutionError: If the loss is not of classes, a cut is not one vector a
                sample, or there are fewer rows than classes.
        """
        shapes = vector_shapes(trainer)
        (index,) = trainer.parts
        asked, found = self.settings.classes, shapes[-1][-1]
        if asked is not None and asked < found:
            raise ExecutionError(
                f"learning={self.settings}, but the model scores {found} classes; use "
                f"classes={found}, or leave it out"
            )
        dtype = getattr(torch, trainer.plan.strategy.precision.activation_dtype)

        def table(cut: int) -> torch.Tensor:
            made = synthetic_table(self.settings, cut, asked or found, shapes[cut][-1])
            return made.to(trainer.place.device, dtype)

        self._given = table(index - 1) if index else None
        self._wanted = table(index) if index < len(shapes) - 1 else None

    def meets(self, done: int) -> bool:
        """Return True if the last step was of the whole pipeline."""
        return self.phase(done - 1) == "recovery"

    def phase(self, step: int) -> str:
        """Name of the phase that a step is of."""
        return self._forced or self.settings.phase(step)

    def force(self, phase: str | None) -> None:
        """Make every step one of a phase; None ends that."""
        self._forced = phase

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`; the loss is the stage's own."""
        loss = self.backward(trainer, local)
        trainer.optimizer.step()
        return loss, None

    def backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        """See :meth:`executors.steps.Step.backward`; of the stage's own loss."""
        if self.phase(trainer.done) == "recovery":
            return self._plain.backward(trainer, local)
        trainer.optimizer.zero_grad()
        classes = require_classes(trainer, local)
        inputs = model_inputs(trainer, local)
        count = trainer.plan.strategy.num_microbatches
        ((index, part),) = trainer.parts.items()
        relay = Relay(trainer, index) if self.settings.inputs == "outputs" else None
        total = torch.zeros((), device=trainer.place.device)
        for number in range(count):
            micro = {name: v.chunk(count)[number] for name, v in inputs.items()}
            wanted = classes.chunk(count)[number]
            given = self._inputs_of(wanted)
            if relay is not None:
                given = relay.receive(len(wanted))
            total += self._train(trainer, part, (given, wanted), micro, relay)
        if relay is not None:
            relay.finish()
        return total

    def _inputs_of(self, classes: torch.Tensor) -> list[torch.Tensor]:
        """Return what a stage is given of the stage before it."""
        if self._given is None:
            return []
        return [self._given[classes.clamp(min=0)]]

    def _train(
        self,
        trainer: ParallelModel,
        part: ParallelPart,
        sample: tuple[Sequence[torch.Tensor], torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        relay: Relay | None,
    ) -> torch.Tensor:
        """Run forward and backward of a microbatch; its share of the loss."""
        given, classes = sample
        part.sync_gradients(True)
        output = part.module(*given, **inputs)
        if self._wanted is None:
            loss = trainer.loss(output, classes)
            loss.backward()  # type: ignore[no-untyped-call]
            part.end_backward()
            return loss.detach()
        (made,) = output
        if relay is not None:
            relay.send(made.detach())
        loss, gradient = self._distance(made.detach(), classes, trainer.loss.count)
        made.backward(gradient)
        part.end_backward()
        return loss

    def _distance(
        self, made: torch.Tensor, classes: torch.Tensor, count: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Half of the squared distance from the labels of a cut, and its gradient.

        Args:
            made: By the stage. Shape [samples, width].
            classes: Of the samples.
            count: Samples that count in the global batch, over which it is a mean.
        """
        assert self._wanted is not None
        apart = self._wanted[classes.clamp(min=0)].neg_().add_(made)
        apart *= (classes != IGNORED)[:, None]
        norms = torch.linalg.vector_norm(apart, dim=1, dtype=torch.float32)
        return norms.square().sum() / (2 * count), apart.div_(count)
