"""Record of a method, and the bases of the documents that choose one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from planner.schema.base import Document

if TYPE_CHECKING:
    from planner.schema.violations import Case

__all__ = [
    "Asynchrony",
    "Feature",
    "Learning",
    "Method",
    "MethodDocument",
    "Recompute",
    "Synchronisation",
    "Violation",
    "copies_apart",
    "copies_of_one_device",
    "equal_blocks",
    "parts_alone",
    "shown_setting",
]

#: Violation of a strategy: value, rule, remedy; None if there is none.
Violation = Callable[["Case"], str | None]


class MethodDocument(Document):
    """A method and its settings, the value of a slot of a strategy."""

    #: Knobs of a strategy that have this one value with it, as a pin writes them.
    fixes: ClassVar[Mapping[str, str | int]] = {}

    kind: str

    def __str__(self) -> str:
        """Text of a pin: ``local_steps``, ``local_steps:period=100``."""
        shown = ",".join(
            f"{name}={shown_setting(getattr(self, name))}"
            for name, info in type(self).model_fields.items()
            if name != "kind" and getattr(self, name) != info.default
        )
        return f"{self.kind}:{shown}" if shown else self.kind


def shown_setting(value: Any) -> Any:
    """Value of a setting in a pin, where commas separate settings."""
    return "+".join(map(str, value)) if isinstance(value, tuple) else value


#: What a stage's backward computes again: nothing, what is cheap for its size, all.
Recompute = Literal["none", "selective", "full"]


class Asynchrony(MethodDocument):
    """Base of when the stages of a pipeline update their weights."""

    #: True if microbatches may be under way at the end of a step.
    unflushed: ClassVar[bool] = False

    @property
    def wanted_recompute(self) -> Recompute | None:
        """Recomputation that every stage must have; None for any."""
        return None

    @property
    def update_interval(self) -> int:
        """Microbatches behind which a stage updates weights while others are under way.

        0 if none are.
        """
        return 0

    def steps_to_drain(self, num_microbatches: int) -> int:
        """Steps from one time that no microbatch is under way to the next.

        Args:
            num_microbatches: Of a step.
        """
        return 1

    def updates(self, num_microbatches: Any) -> Any:
        """Updates of each weight in a step, on average.

        Args:
            num_microbatches: Of a step, or a column of it.
        """
        return 1.0

    def older_versions(self, stage: int, stages: int) -> int:
        """Most versions of a stage's weights that are kept beside the newest.

        Args:
            stage: Its number, from 0.
            stages: How many there are.
        """
        return 0


class Synchronisation(MethodDocument):
    """Base of what keeps the copies along dp_replicate together."""

    #: True if it acts on weights between steps alone, see ``acts_every``.
    between_steps: ClassVar[bool] = False

    #: True if weights of copies may differ between exchanges.
    apart: ClassVar[bool] = False
    #: True if each copy holds parts of the layers that tp would split.
    splits: ClassVar[bool] = False
    #: True if copies train some of the neurons, which tp would divide between layers.
    of_neurons: ClassVar[bool] = False
    #: True if copies skip some of the model's equal residual blocks.
    of_blocks: ClassVar[bool] = False
    #: Weights are averaged in pieces of about this size: few messages, little memory.
    PIECE_BYTES: ClassVar[int] = 25 * 2**20

    @property
    def chains(self) -> bool:
        """True if features are divided between all layers that follow each other."""
        return False

    @property
    def acts_every(self) -> tuple[int, ...]:
        """Numbers of steps of which it acts on weights after multiples alone."""
        return (1,)

    @property
    def offloaded_copies(self) -> int:
        """Copies of the weights that lie in the host's memory."""
        return 0

    @property
    def fewest_copies(self) -> int:
        """Copies that a run goes on with at least; 0 if it stops when one fails."""
        return 0

    def ways(self, tp: Any, copies: Any) -> Any:
        """Devices over which the features between layers are divided.

        Args:
            tp: Tensor parallel degree, or a column of it.
            copies: Number of copies; likewise.
        """
        return tp * copies if self.splits else tp

    def cuts(self, copies: Any) -> Any:
        """True where copies compute some of the neurons alone.

        Args:
            copies: Number of copies, or a column of it.
        """
        return self.ways(1, copies) > 1

    def depth(self, copies: Any, blocks: int) -> Any:
        """Equal residual blocks that each copy computes.

        Args:
            copies: Number of copies, or a column of it.
            blocks: Of the model, see :func:`equal_blocks`.
        """
        return blocks + 0 * copies

    @property
    def widths(self) -> tuple[tuple[float, float], ...]:
        """Shares of steps, and of the neurons of a copy that these steps compute."""
        return ((1.0, 1.0),)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Copies that compute nothing in steps of all neurons."""
        return ()

    @property
    def phases(self) -> Mapping[str, float]:
        """Kinds of step, and the share of steps that are of each."""
        return {"step": 1.0}

    def parts(self, copies: Any) -> Any:
        """Stages that a device cuts its part of the model into, to run in turn.

        Args:
            copies: Number of copies, or a column of it.
        """
        return 1

    def expected_traffic(
        self, *, gradients: float, weights: float, divided: float = 0.0
    ) -> dict[str, float]:
        """Bytes that a device exchanges with the other copies in a mean step.

        Args:
            gradients: Bytes of the gradients that it holds.
            weights: Bytes of the trained weights that it holds.
            divided: Those of them that go from copy to copy, or that not all steps
                exchange.

        Returns:
            Payload by kind of collective, such as ``all_reduce``.
        """
        raise NotImplementedError(f"synchronisation {self.kind} tells no traffic")


class Learning(MethodDocument):
    """Base of the rule by which a batch becomes new weights."""

    #: True if it is for class scores alone, with one vector a sample between units.
    of_classes: ClassVar[bool] = False
    #: True if it is for chains of linear layers alone.
    of_layers: ClassVar[bool] = False

    @property
    def phases(self) -> Mapping[str, float]:
        """Kinds of step, and the share of steps that are of each."""
        return {"step": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """One thing that a strategy can do, a row of the composition table.

    Attributes:
        name: As the table shows it.
        mesh: Degrees that it needs.
        fields: Other fields of the strategy that it sets.
        sharding: Fields of the strategy's sharding that it sets.
        recompute: Of every stage.
        zero_stage: Least ZeRO stage that it needs.
        kind: Features of one kind exclude each other.
        tolerance: Largest relative differences from one process's loss, gradients of
            the first step, and gradients of all; None where sums alone are reordered.
    """

    name: str
    mesh: dict[str, int] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    sharding: dict[str, Any] = field(default_factory=dict)
    recompute: Literal["none", "selective", "full"] = "none"
    zero_stage: Literal[0, 1, 2, 3] = 0
    kind: str = ""
    tolerance: tuple[float, float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Record of one method.

    Attributes:
        kind: Its name, and the ``kind`` of its document.
        slot: Field of a strategy that it fills.
        document: Class of its settings; None if its name is all there is to say.
        default: True for the value of a strategy that says nothing.
        words: Sentence for people; names of settings in braces stand for values. Empty
            for what goes without saying.
        inexact: Why a step does not compute what plain training would; None if it does.
        limits: Violations whoever runs the plan.
        violations: Violations of Meshwright's executors alone.
        feature: Row of the composition table; None if another stands for it.
        presets: Names of settings that are in use, beside those of the defaults.
        prices: ``module:name`` of its pricing.
        runs: ``module:name`` of its executor; None if there is none.
        scales_loss: True if its steps can scale the loss, as float16 wants it; those
            of default methods do.
        unverified: Why a dry run cannot follow it; None if it can.
        page: Its page, in ``docs/``.
        test: File of its acceptance test.
        source: Where it is from.
    """

    kind: str
    slot: str
    document: type[MethodDocument] | None = None
    default: bool = False
    words: str = ""
    inexact: str | None = None
    limits: tuple[Violation, ...] = ()
    violations: tuple[Violation, ...] = ()
    feature: Feature | None = None
    presets: Mapping[str, MethodDocument] = field(default_factory=dict)
    prices: str
    runs: str | None = None
    scales_loss: bool = False
    unverified: str | None = None
    page: str
    test: str
    source: str

    @property
    def settings(self) -> tuple[str, ...]:
        """Names of its settings."""
        fields = self.document.model_fields if self.document else ()
        return tuple(name for name in fields if name != "kind")


def equal_blocks(
    units: Sequence[str], shapes: Mapping[str, Sequence[int]], tied: Collection[str]
) -> tuple[str, ...]:
    """Longest run of units with parameters of the same names and shapes.

    The first and the last unit are never in it, nor are units that hold others or have
    a parameter that other modules have, too. Between runs of one length the one with
    more weights is chosen, then the first.

    Args:
        units: FQNs of a model's pipeline units, in order.
        shapes: FQN of each parameter to its shape.
        tied: Those of them that are found under several names.

    Returns:
        FQNs of two units or more, or nothing.
    """
    holders = {holder for unit in units for holder in _holders(unit)}
    plain = [unit for unit in units if unit and unit not in holders]
    inner = set(units[1:-1])
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {u: [] for u in plain}
    barred = set()
    for name, shape in shapes.items():
        unit = next((holder for holder in _holders(name) if holder in found), None)
        if unit is not None:
            found[unit].append((name[len(unit) :], tuple(shape)))
            barred |= {unit} if name in tied else set()
    runs: list[list[str]] = [[]]
    for unit in plain:
        if runs[-1] and found[unit] != found[runs[-1][0]]:
            runs.append([])
        if unit in inner and unit not in barred and found[unit]:
            runs[-1].append(unit)
        elif runs[-1]:
            runs.append([])

    def size(run: list[str]) -> tuple[int, int]:
        return len(run), sum(prod(shape) for _, shape in found[run[0]]) if run else 0

    longest = max(runs, key=size)
    return tuple(longest) if len(longest) > 1 else ()


def _holders(name: str) -> Iterator[str]:
    """FQNs of the modules that hold something, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def copies_apart(case: Case) -> str | None:
    """Violation of a method whose copies, along dp_replicate, take the mean of weights.

    Args:
        case: Strategy that the method is part of.
    """
    mesh = case.strategy.mesh
    if mesh.dp_replicate == 1:
        return (
            f"synchronisation={case.strategy.synchronisation} with dp_replicate=1; "
            f"copies along dp_replicate are what it averages, use dp_replicate > 1 or "
            f"synchronisation=all_reduce"
        )
    if mesh.cp > 1 and case.strategy.zero_stage == 0:
        return (
            f"synchronisation={case.strategy.synchronisation} with cp={mesh.cp} and "
            f"zero_stage=0; ranks of one sequence would be copies that train on their "
            f"own, use zero_stage=1, 2 or 3, or cp=1"
        )
    return None


def copies_of_one_device(case: Case, why: str) -> str | None:
    """Violation of a method whose copies are one device each.

    Args:
        case: Strategy that the method is part of.
        why: Reason for it.
    """
    strategy = case.strategy
    value, mesh = strategy.synchronisation, strategy.mesh
    others = {
        axis: degree
        for axis in ("pp", "dp_shard", "cp", "tp", "ep")
        if (degree := getattr(mesh, axis)) > 1
    }
    if strategy.zero_stage:
        others["zero_stage"] = strategy.zero_stage
    if not others:
        return None
    given = " and ".join(f"{name}={number}" for name, number in others.items())
    return f"synchronisation={value} with {given}; {why}, use dp_replicate alone"


def parts_alone(case: Case) -> str | None:
    """Violation of a rule by which the stages of a pipeline learn by themselves.

    Args:
        case: Strategy that the rule is part of.
    """
    strategy = case.strategy
    value, mesh = strategy.learning, strategy.mesh
    if mesh.pp == 1:
        return (
            f"learning={value} with pp=1; stages of a pipeline are the parts that "
            f"learn by themselves, use pp > 1 or learning=backpropagation"
        )
    others = {
        axis: degree
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "ep")
        if (degree := getattr(mesh, axis)) > 1
    }
    if strategy.zero_stage:
        others["zero_stage"] = strategy.zero_stage
    if strategy.virtual_stages > 1:
        others["virtual_stages"] = strategy.virtual_stages
    if others:
        given = " and ".join(f"{name}={number}" for name, number in others.items())
        return (
            f"learning={value} with {given}; each part is one device with one stage, "
            f"use pp alone"
        )
    if strategy.asynchrony.unflushed:
        return (
            f"asynchrony={strategy.asynchrony} with learning={value}; it is a rule of "
            f"its own, use asynchrony=flushed or learning=backpropagation"
        )
    if strategy.grad_clip_norm is not None:
        return (
            f"grad_clip_norm={strategy.grad_clip_norm} with learning={value}; its norm "
            f"is over all parts, which never meet, leave it out or use "
            f"learning=backpropagation"
        )
    if case.tied:
        return (
            f"tied weights ({', '.join(case.tied[0])}) with learning={value}; parts "
            f"that share them never meet, untie them or use learning=backpropagation"
        )
    return None
