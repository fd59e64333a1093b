"""Copies that train on their own and exchange their weights every few steps."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from planner.schema.methods.method import (
    Feature,
    Method,
    Synchronisation,
    copies_apart,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from planner.schema.violations import Case

__all__ = ["METHODS", "LocalSteps"]


class LocalSteps(Synchronisation):
    """Copies train on their own, and exchange their weights every few steps.

    What an exchange moves is the weights' way since the last one, averaged over the
    copies: an outer optimizer takes it for a gradient of the weights that all copies
    began the period with. Its defaults, a learning rate of 1 without momentum, take
    the mean of the copies' weights.

    Attributes:
        period: Steps from one exchange of a weight to the next.
        outer_learning_rate: Learning rate of the outer optimizer, SGD.
        outer_momentum: Its momentum.
        nesterov: Whether that is Nesterov's.
        fragments: Parts that the weights are exchanged in, one every
            ``period / fragments`` steps.
        delay: Steps of training under which an exchange is on its way.
        mix: Share of its own weights that a copy keeps at an exchange.
        warm_up_steps: First steps, in which copies average their gradients.
        top: Largest entries of every 4,096 of a weight's way that are exchanged; 0 for
            all. Those that are not are added to the way of the next exchange.
        offload: Whether the outer optimizer's weights and momentum lie in the host's
            memory between exchanges.
        on_failure: Whether a run stops when a copy fails, or the others continue
            without it; one that is started again joins them at an exchange.
        min_replicas: Copies that continue at least, where they may: fewer wait at an
            exchange until another is there to join them.
    """

    apart: ClassVar[bool] = True
    between_steps: ClassVar[bool] = True
    #: Entries that ``top`` are chosen of; an index of them has 12 bits.
    CHUNK: ClassVar[int] = 4096

    kind: Literal["local_steps"] = "local_steps"
    period: Annotated[int, Field(ge=1, le=10**6)] = 8
    outer_learning_rate: Annotated[float, Field(gt=0, le=100)] = 1.0
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    fragments: Annotated[int, Field(ge=1, le=1024)] = 1
    delay: Annotated[int, Field(ge=0, le=10**6)] = 0
    mix: Annotated[float, Field(ge=0, le=1)] = 0.0
    warm_up_steps: Annotated[int, Field(ge=0, le=10**9)] = 0
    top: Annotated[int, Field(ge=0, le=4096, multiple_of=2)] = 0
    offload: bool = False
    on_failure: Literal["stop", "continue"] = "stop"
    min_replicas: Annotated[int, Field(ge=1, le=10**6)] = 1

    @model_validator(mode="after")
    def _require_whole_intervals(self) -> Self:
        period, fragments = self.period, self.fragments
        if period % fragments:
            more = period + fragments - period % fragments
            raise ValueError(
                f"period={period} is no multiple of fragments={fragments}, which are "
                f"exchanged at equal distances; use period={more}"
            )
        if self.delay >= self.interval:
            raise ValueError(
                f"delay={self.delay} is not less than the {self.interval} steps from "
                f"one exchange to the next; use delay={self.interval - 1} or a longer "
                f"period"
            )
        if self.warm_up_steps % self.interval:
            raise ValueError(
                f"warm_up_steps={self.warm_up_steps} is no multiple of the "
                f"{self.interval} steps from one exchange to the next; use "
                f"{self.warm_up_steps - self.warm_up_steps % self.interval}"
            )
        if self.nesterov and not self.outer_momentum:
            raise ValueError(
                "nesterov=True without momentum; give outer_momentum=0.9, say"
            )
        if self.fewest_copies and self.warm_up_steps:
            raise ValueError(
                f"on_failure=continue with warm_up_steps={self.warm_up_steps}, in "
                f"which copies wait for each other at every step; use warm_up_steps=0 "
                f"or on_failure=stop"
            )
        if self.offload and self.takes_mean:
            raise ValueError(
                "offload=True, but a plain mean keeps nothing between exchanges; leave "
                "it out"
            )
        return self

    @property
    def fewest_copies(self) -> int:
        """Copies that a run goes on with at least; 0 if it stops when one fails."""
        return self.min_replicas if self.on_failure == "continue" else 0

    @property
    def acts_every(self) -> tuple[int, ...]:
        """Steps between exchanges, and after one until its result is used."""
        if self.warm_up_steps or self.fewest_copies:
            return (1,)
        return (self.interval, self.delay)

    @property
    def interval(self) -> int:
        """Steps from one exchange, of any fragment, to the next."""
        return self.period // self.fragments

    @property
    def takes_mean(self) -> bool:
        """True if the outer optimizer takes the mean of the copies' weights."""
        plain = self.outer_learning_rate == 1 and not self.outer_momentum
        return plain and not self.top

    @property
    def outer_copies(self) -> int:
        """Tensors as large as the weights that are kept between exchanges.

        Global weights, momentum, and what was not sent.
        """
        more = (self.outer_momentum > 0) + (self.top > 0)
        return 0 if self.takes_mean else 1 + more

    @property
    def offloaded_copies(self) -> int:
        """All of these, with ``offload``."""
        return self.outer_copies if self.offload else 0

    @property
    def equal_after_exchange(self) -> bool:
        """True if an exchange leaves copies with equal weights."""
        return self.fragments == 1 and not self.mix

    @property
    def exchanges(self) -> tuple[str, ...]:
        """Names of the exchanges of a period: one a fragment."""
        if self.fragments == 1:
            return ("exchange",)
        return tuple(f"exchange {index}" for index in range(1, self.fragments + 1))

    @property
    def phases(self) -> Mapping[str, float]:
        """Steps without an exchange, and with that of each fragment."""
        plain = {"plain": 1 - self.fragments / self.period}
        exchanges = dict.fromkeys(self.exchanges, 1 / self.period)
        return exchanges if self.interval == 1 else plain | exchanges

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """All trained weights, once a period; in a run's long part after warm-up."""
        return {"all_reduce": 0.0 if self.top else weights / self.period}

    def gathered_bytes(self, shapes: Sequence[tuple[int, ...]], copies: int) -> int:
        """Bytes that every copy gathers in the exchanges of a period, if few are sent.

        Args:
            shapes: Of the trained weights that a device keeps.
            copies: Number of copies.
        """
        chunks = sum(-(-math.prod(shape) // self.CHUNK) for shape in shapes)
        # A value and 12 bits an entry.
        return copies * chunks * (4 * self.top + 3 * self.top // 2)


def _copies_of_one_device(case: Case) -> str | None:
    value, mesh = case.strategy.synchronisation, case.strategy.mesh
    if value.fewest_copies > mesh.dp_replicate:
        return (
            f"synchronisation={value} with dp_replicate={mesh.dp_replicate}; at least "
            f"so many copies are to continue, use min_replicas={mesh.dp_replicate} or "
            f"fewer"
        )
    if value.fewest_copies and mesh.num_devices > mesh.dp_replicate:
        inside = mesh.num_devices // mesh.dp_replicate
        return (
            f"synchronisation={value} with copies of {inside} devices; a run goes on "
            f"without copies of one device each alone, use on_failure=stop or "
            f"dp_replicate={mesh.num_devices} alone"
        )
    return None


def _warm_up_in_float16(case: Case) -> str | None:
    value, compute = case.strategy.synchronisation, case.strategy.precision.compute
    if compute != "float16" or not isinstance(value, LocalSteps):
        return None
    if not value.warm_up_steps:
        return None
    return (
        f"synchronisation={value} with compute=float16; copies that average gradients "
        f"scale the loss each on its own, use warm_up_steps=0 or bfloat16"
    )


METHODS = (
    Method(
        kind="local_steps",
        slot="synchronisation",
        document=LocalSteps,
        words="copies exchange their weights every {period} steps",
        inexact="copies train on their own between exchanges",
        limits=(copies_apart,),
        violations=(_copies_of_one_device, _warm_up_in_float16),
        scales_loss=True,
        feature=Feature(
            name="local steps",
            mesh={"dp_replicate": 2},
            fields={
                "synchronisation": LocalSteps(period=1),
                "semantics": "approximate",
            },
            kind="synchronisation",
            # A copy's gradients are its own; clipped, so is the length of its step.
            tolerance=(2e-2, float("inf"), float("inf")),
        ),
        presets={
            "local-sgd": LocalSteps(period=8),
            # Lin et al. 2020, section 4: gradients first, local steps from the first
            # decay of the learning rate on, half of the way.
            "post-local-sgd": LocalSteps(period=16, warm_up_steps=16 * 1000),
            # Douillard et al. 2023, 2311.08105, table 5: H, outer learning rate and
            # Nesterov momentum.
            "diloco": LocalSteps(
                period=500, outer_learning_rate=0.7, outer_momentum=0.9, nesterov=True
            ),
            # Douillard et al. 2025, 2501.18512: H = 100, fragments one after the
            # other, half of a copy's own weights kept.
            "streaming-diloco": LocalSteps(
                period=100,
                outer_learning_rate=0.4,
                outer_momentum=0.9,
                nesterov=True,
                fragments=4,
                delay=5,
                mix=0.5,
            ),
        },
        prices="planner.cost.replicas.local_steps:LocalStepsPricing",
        runs="executors.replicas.local_steps:LocalStepsReplicas",
        page="methods/local-steps.md",
        test="tests/distributed/test_local_steps.py",
        source=(
            "Stich 2019, arXiv 1805.09767; Lin et al. 2020, 1808.07217; Douillard et "
            "al. 2023, 2311.08105, and 2025, 2501.18512; Sarfi et al. 2025, 2508.15706"
        ),
    ),
)
