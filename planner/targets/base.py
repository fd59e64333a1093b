"""What a launcher can say of a plan, and why it cannot say the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.schema import Strategy
from planner.schema.support import unsupported
from planner.targets.fields import FIELDS, value_of

__all__ = ["Case", "Refusal", "Rule", "Target"]

#: Runs of equal hosts in order: (how many, devices in each).
Hosts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A strategy and what its rules may need to know besides.

    Attributes:
        strategy: What is to be said.
        hosts: Of the cluster; empty if that is not known.
        layers: Whether the names of modules are real, so that rules may count layers.
            A search asks about kinds of strategies before it cuts the model.
        placed: Whether devices are those that will be used; a search asks first.
        tied: Groups of parameter names that are one tensor.
        backend: ``gloo`` or ``nccl``.
        attention: As of :class:`planner.schema.ModelReference`.
        device_types: Names of all that the cluster has; empty if that is not known.
    """

    strategy: Strategy
    hosts: Hosts = ()
    layers: bool = True
    placed: bool = True
    tied: tuple[tuple[str, ...], ...] = ()
    backend: str = "nccl"
    attention: str | None = "causal"
    device_types: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """One thing that a target cannot say.

    Attributes:
        field: Of the strategy, such as ``mesh.pp``.
        value: What the strategy has there.
        why: A clause, without the value.
        remedy: What to change, a clause.
    """

    field: str
    value: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field}={self.value}: {self.why}; {self.remedy}"


#: One limit of a target: None if the case keeps to it.
Rule = Callable[[Case], Refusal | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A launcher and its limits.

    Every field of :data:`planner.targets.fields.FIELDS` that is neither in ``says`` nor
    in ``leaves`` must have its default value: what a target has no word for is refused,
    never dropped.

    Attributes:
        name: As people type it.
        title: As its makers write it.
        version: Which release it was written for.
        runs: Whether Meshwright's executors run the plan there (``meshwright``), or the
            framework trains by its own means (``itself``).
        says: Fields that the written files carry.
        leaves: Fields that the user's training script decides; the files say so.
        reasons: Field to why it has no word for it, a clause, where that can be told.
        rules: Limits beyond single fields.
        even_layers: Whether it cuts pipelines into stages of equally many layers by
            itself.
        sizes: Fields of :data:`planner.targets.fields.FIELDS` whose numbers its rules
            look at, such as ``mesh.tp``. A search asks rules once for all strategies
            that have the same axes, schedule and kinds; where a rule looks at more
            than whether a number is above 1, the field must be named here.
        cannot: What it cannot say, one clause each, for people.
        check: How what is written was checked, for people.
    """

    name: str
    title: str
    version: str
    runs: Literal["meshwright", "itself"]
    says: frozenset[str]
    leaves: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)
    rules: tuple[Rule, ...] = ()
    even_layers: bool = False
    sizes: frozenset[str] = frozenset()
    cannot: tuple[str, ...] = ()
    check: str = ""

    def __post_init__(self) -> None:
        named = self.says | self.leaves | self.sizes | set(self.reasons)
        unknown = named - set(FIELDS)
        if unknown or self.says & self.leaves:
            raise ValueError(
                f"target {self.name} names {sorted(unknown)}, which no strategy has, "
                f"or says and leaves {sorted(self.says & self.leaves)}"
            )

    def refusals(self, case: Case) -> tuple[Refusal, ...]:
        """All that it cannot say of a case; empty if it can say everything."""
        return tuple(self._refusals(case))

    def _refusals(self, case: Case) -> Iterator[Refusal]:
        no_word = f"{self.title} {self.version} has no word for it"
        for name, leaf in FIELDS.items():
            if name in self.says or name in self.leaves or not leaf.matters(case):
                continue
            value = value_of(case.strategy, name)
            if value != leaf.default:
                yield Refusal(
                    field=name,
                    value=str(value),
                    why=self.reasons.get(name, no_word),
                    remedy=f"use {leaf.default}",
                )
        for rule in self.rules:
            refusal = rule(case)
            if refusal is not None:
                yield refusal
        if self.runs == "meshwright":
            yield from _not_run(case)


def _not_run(case: Case) -> Iterator[Refusal]:
    for reason in unsupported(
        case.strategy, tied=case.tied, backend=case.backend, attention=case.attention
    ):
        what, _, remedy = reason.partition("; ")
        yield Refusal(
            field="strategy",
            value=case.strategy.label(),
            why=f"Meshwright's executors do not run it: {what}",
            remedy=remedy or "choose another",
        )
