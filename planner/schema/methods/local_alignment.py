"""Layers that follow errors of their own, made from the error of the output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from planner.schema.methods.method import Learning, Method, parts_alone

if TYPE_CHECKING:
    from collections.abc import Mapping

    from planner.schema.violations import Case

__all__ = ["METHODS", "LocalAlignment"]

Share = Annotated[float, Field(ge=0, le=1e3)]


class LocalAlignment(Learning):
    """Layers that follow errors of their own, made from the error of the output.

    Of L linear layers h_l = W_l z_(l-1) with z_l = f(h_l), the last makes scores of
    classes, and e_L = softmax(h_L) - y. Error weights E give each layer a direction,

    d_l = E_(L,l) e_L if ``skip`` divides l, or l is the last layer of its stage; else
    d_l = E_(l+1,l) e_(l+1)

    and a target, f(h_l - beta d_l), from which it is e_l = z_l - f(h_l - beta d_l)
    away. The gradient of W_l is e_l z_(l-1)^T, that of E is gamma d_l e_j^T. All stages
    begin as soon as e_L is known: no error goes from one to another.

    Source: Ororbia et al. 2023, arXiv 2002.03911.

    Attributes:
        skip: Layers from one that the output's error reaches directly to the next.
        beta: How far a target lies along the direction.
        gamma: Weight of the gradient of E.
        noise: Standard deviation of what is added to the model's input.
        error_learning_rate: Step size of plain gradient descent of E.
    """

    of_classes: ClassVar[bool] = True
    of_layers: ClassVar[bool] = True
    fixes: ClassVar[Mapping[str, str | int]] = {"schedule": "GPipe"}

    kind: Literal["local_alignment"] = "local_alignment"
    skip: Annotated[int, Field(ge=1, le=10**4)] = 2
    beta: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    gamma: Share = 0.1
    noise: Share = 0.1
    error_learning_rate: Share = 0.01

    def is_direct(self, layer: int) -> bool:
        """True if the output's error reaches a layer directly, wherever cuts are.

        Args:
            layer: Its number l, from 1.
        """
        return layer % self.skip == 0


def _forward_only(case: Case) -> str | None:
    strategy = case.strategy
    if strategy.schedule != "GPipe":
        return (
            f"schedule {strategy.schedule} with learning={strategy.learning}; all "
            f"forwards come first, and no backward follows, use GPipe"
        )
    return None


def _nothing_again(case: Case) -> str | None:
    strategy, precision = case.strategy, case.strategy.precision
    kinds = {stage.recompute for stage in strategy.stages} - {"none"}
    if kinds:
        return (
            f"recompute={kinds.pop()} with learning={strategy.learning}; there is no "
            f"backward that would compute anything again, use recompute=none"
        )
    if strategy.compile:
        return (
            f"compile=True with learning={strategy.learning}; layers are called one "
            f"by one, leave it out"
        )
    if precision.compute not in (precision.parameter, "bfloat16"):
        return (
            f"parameter={precision.parameter} and compute={precision.compute} with "
            f"learning={strategy.learning}; errors have no scale that would keep them "
            f"in the range of other dtypes than bfloat16, use compute=bfloat16, or "
            f"compute={precision.parameter}"
        )
    return None


METHODS = (
    Method(
        kind="local_alignment",
        slot="learning",
        document=LocalAlignment,
        words="layers follow local errors, every {skip} directly the output's",
        inexact="layers follow errors of their own in place of gradients",
        limits=(parts_alone, _forward_only),
        violations=(_nothing_again,),
        presets={"rec-lra": LocalAlignment()},
        prices="planner.cost.learning.local_alignment:LocalAlignmentPricing",
        runs="executors.learning.local_alignment:LocalAlignmentStep",
        page="methods/local-alignment.md",
        test="tests/distributed/test_local_alignment.py",
        source="Ororbia et al. 2023, arXiv 2002.03911",
    ),
)
