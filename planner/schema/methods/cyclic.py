"""Copies that take turns at the stages of a model, and hand its gradients on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from planner.schema.methods.method import Feature, Method, Synchronisation

if TYPE_CHECKING:
    from planner.schema.violations import Case

__all__ = ["METHODS", "Cyclic"]


class Cyclic(Synchronisation):
    """Copies take turns at the stages of a model, and hand its gradients on.

    N copies cut the model into N stages. Forward and backward of a microbatch take 2N
    slots, one a stage; each copy begins two slots after the one before it, so that in
    every slot each stage is at one copy. Behind its backward of a stage a copy adds
    its gradient to the sum of those before it, and sends that on; the last copy's sum
    goes around once more, and every copy steps for itself. No copy waits for all.

    Step t of copy i computes gradients with weights of which some are one step old:

    theta[t+1] = theta[t] - optimizer(1/N sum over i of grad f_i(used by i in t))

    Source: Fournier and Oyallon 2024, arXiv 2403.08837.

    Attributes:
        version: ``v1`` computes with theta[t-1] throughout; ``v2`` takes theta[t] where
            the cycle has it in time: copy i, from 0, at stage j with i + j >= N - 1.
        sharded: Keep each stage's weights and optimizer states at one copy alone, its
            owner. Its weights go from copy to copy, each of which has them while it
            computes the stage.
    """

    apart: ClassVar[bool] = True

    kind: Literal["cyclic"] = "cyclic"
    version: Literal["v1", "v2"] = "v2"
    sharded: bool = False

    def parts(self, copies: Any) -> Any:
        """Return as many stages as there are copies."""
        return copies

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """Gradients once, as partial sums; of more than two copies at most twice.

        Sharded weights go around for forward and for backward, but for those, divided,
        that the next copy has.
        """
        return {"send": gradients + (2 * weights - divided if self.sharded else 0)}

    def owner(self, stage: int, copies: int) -> int:
        """Copy that updates a stage's weights, and is the first to use them.

        Args:
            stage: As for :meth:`route`; likewise copies.
        """
        return copies - 1 - stage

    def shares_sent(self, copy: int, copies: int) -> list[int]:
        """Number of times that a copy sends each stage of sharded weights in a step.

        Its weights for forward and, but for the last stage, for backward, unless the
        next copy owns them; its summed gradient, unless this copy owns the whole sum.

        Args:
            copy: Number of the copy, from 0.
            copies: How many there are.

        Returns:
            By stage, from 0 to 3: a gradient is as large as its weights.
        """
        following = (copy + 1) % copies
        found = []
        for stage in range(copies):
            owner = self.owner(stage, copies)
            weights = 0 if owner == following else 1 + (stage < copies - 1)
            summed = copy < copies - 1 or owner != copy
            found.append(weights + summed)
        return found

    def is_fresh(self, copy: int, stage: int, copies: int) -> bool:
        """True if a copy computes a stage with the newest weights.

        Args:
            copy: Number of the copy, from 0.
            stage: Number of the stage, from 0.
            copies: How many there are.
        """
        return self.version == "v2" and copy + stage >= copies - 1

    def route(self, stage: int, copies: int) -> list[int]:
        """Copies in the order in which they get a stage's summed gradient.

        The last copy makes it, and sends it to the first that needs it.

        Args:
            stage: Number of the stage, from 0.
            copies: How many copies there are.
        """
        first = copies - 1 - stage if self.version == "v2" else 0
        return [*range(first, copies - 1), *range(first)]

    def hurries(self, stage: int, copies: int) -> bool:
        """True if the first copy on the route computes with fresh weights.

        Args:
            stage: As for :meth:`route`; likewise copies.
        """
        return self.is_fresh(self.route(stage, copies)[0], stage, copies)


def _copies_alone(case: Case) -> str | None:
    mesh, shown = case.strategy.mesh, case.strategy.synchronisation
    if mesh.dp_replicate == 1:
        return (
            f"synchronisation={shown} with dp_replicate=1; copies along dp_replicate "
            f"are what takes turns, use dp_replicate > 1 or synchronisation=all_reduce"
        )
    for axis, degree in mesh.model_dump().items():
        if degree > 1 and axis != "dp_replicate":
            return (
                f"synchronisation={shown} with {axis}={degree}; a copy is one device, "
                f"which has all stages, use {axis}=1 or synchronisation=all_reduce"
            )
    if case.strategy.num_microbatches > 1:
        return (
            f"synchronisation={shown} with num_microbatches="
            f"{case.strategy.num_microbatches}; a copy has one microbatch a cycle, use "
            f"num_microbatches=1 with a larger microbatch_size"
        )
    return None


def _stages_never_meet(case: Case) -> str | None:
    strategy, shown = case.strategy, case.strategy.synchronisation
    if strategy.grad_clip_norm is not None:
        return (
            f"grad_clip_norm={strategy.grad_clip_norm} with synchronisation={shown}; "
            f"its norm is over all stages, which are never updated together, leave it "
            f"out or use synchronisation=all_reduce"
        )
    if case.tied:
        return (
            f"tied weights ({', '.join(case.tied[0])}) with synchronisation={shown}; "
            f"stages that share them are never updated together, untie them or use "
            f"synchronisation=all_reduce"
        )
    return None


def _owners_compute_first(case: Case) -> str | None:
    settings = case.strategy.synchronisation
    if not isinstance(settings, Cyclic) or not settings.sharded:
        return None
    if settings.version == "v2":
        return None
    return (
        f"synchronisation={settings}; in v1 an owner computes with older weights than "
        f"those that it has just updated, use version=v2 or sharded=false"
    )


def _one_precision(case: Case) -> str | None:
    settings, precision = case.strategy.synchronisation, case.strategy.precision
    single = precision.parameter == precision.compute == precision.reduce
    if single or not isinstance(settings, Cyclic) or not settings.sharded:
        return None
    return (
        f"synchronisation={settings} with precision.parameter={precision.parameter}, "
        f"compute={precision.compute} and reduce={precision.reduce}; weights are "
        f"computed with as they are stored and sent, use one precision or sharded=false"
    )


def _on_gloo(case: Case) -> str | None:
    if case.backend == "gloo":
        return None
    return (
        f"synchronisation={case.strategy.synchronisation} on {case.backend}; its "
        f"messages overtake each other by their tags, which gloo alone heeds, plan for "
        f"CPUs or use synchronisation=all_reduce"
    )


METHODS = (
    Method(
        kind="cyclic",
        slot="synchronisation",
        document=Cyclic,
        words="copies take turns at the stages and hand gradients on ({version})",
        inexact="gradients are of weights that are one step old in part",
        limits=(_copies_alone, _stages_never_meet, _owners_compute_first),
        violations=(_on_gloo, _one_precision),
        feature=Feature(
            name="cyclic",
            mesh={"dp_replicate": 2},
            fields={"synchronisation": Cyclic(), "semantics": "approximate"},
            kind="synchronisation",
            # Losses of a copy, and weights one step old.
            tolerance=(2e-2, float("inf"), float("inf")),
        ),
        presets={
            "cyclic-v1": Cyclic(version="v1"),
            "cyclic-v2": Cyclic(version="v2"),
            "cyclic-zero": Cyclic(version="v2", sharded=True),
        },
        prices="planner.cost.replicas.cyclic:CyclicPricing",
        runs="executors.replicas.cyclic:CyclicReplicas",
        page="methods/cyclic.md",
        test="tests/distributed/test_cyclic.py",
        source="Fournier and Oyallon 2024, arXiv 2403.08837",
    ),
)
