"""The result of every source: a strategy, and the keys that it passes over."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from planner.errors import StrategyError, UnknownNameError
from planner.schema import Mesh, Recompute, Stage, Strategy
from planner.targets import layers_of_stages

__all__ = [
    "Ignored",
    "Imported",
    "Keys",
    "Wanted",
    "assembled",
    "divided",
    "ignored_keys",
    "name_stages",
]


@cache
def ignored_keys(section: str) -> Mapping[str, str]:
    """Keys without a meaning for a strategy, and the reason of each.

    Args:
        section: Section of ``planner/imports/ignored.yaml``: a launcher, or a part of
            its config.
    """
    text = files("planner.imports").joinpath("ignored.yaml").read_text("utf-8")
    reasons: dict[str, str] = yaml.safe_load(text)[section]["keys"]
    return {key: why for why, keys in reasons.items() for key in keys.split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ignored:
    """A key that means nothing to a strategy.

    Attributes:
        key: Key as in the file.
        why: A clause.
    """

    key: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A config as a strategy.

    Attributes:
        source: Name of the launcher.
        strategy: Its stages have no modules: these are the model's, see
            :func:`name_stages`.
        ignored: Keys without a meaning for a strategy.
        cut: Layers of every virtual stage, if the config says; else empty.
    """

    source: str
    strategy: Strategy
    ignored: tuple[Ignored, ...] = ()
    cut: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Values that the user gives where the file has none; checked where it has.

    Attributes:
        world_size: Processes.
        global_batch: Samples per step over all of them.
        microbatch_size: Samples per microbatch on each.
    """

    world_size: int | None = None
    global_batch: int | None = None
    microbatch_size: int | None = None


@dataclass(slots=True, kw_only=True)
class Keys:
    """Keys of a mapping that are taken one by one, so that none is left unread.

    Attributes:
        data: The mapping.
        where: Place in the file, with a dot: ``fsdp_config.``; empty for the whole.
        ignored: Gets the keys that are passed over.
    """

    data: dict[str, Any]
    where: str = ""
    ignored: list[Ignored] = field(default_factory=list)

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """A key's value; the default if it is missing, null or ``auto``.

        Raises:
            StrategyError: If it has another type.
        """
        value = self.data.pop(key, None)
        if value is None:
            return default
        if value == "auto":
            self.skip(key, "auto: the trainer fills it in when it starts")
            return default
        if (
            kind is float
            and isinstance(value, int | str)
            and not isinstance(value, bool)
        ):
            value = _number(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise StrategyError(
                f"{self.where}{key}={reprlib.repr(value)} is not of type "
                f"{kind.__name__}; correct it, or leave it out"
            )
        return value

    def count(self, key: str, default: int | None = None) -> Any:
        """A key's whole number, 1 or more.

        Raises:
            StrategyError: If it is another value.
        """
        value = self.take(key, int, default)
        if value is not None and value < 1:
            raise StrategyError(f"{self.where}{key}={value} is below 1; give 1 or more")
        return value

    def inner(self, key: str) -> Keys:
        """A mapping inside, empty if it is missing."""
        found = self.take(key, dict, {})
        return Keys(data=dict(found), where=f"{self.where}{key}.", ignored=self.ignored)

    def skip(self, key: str, why: str) -> None:
        """Note a key that is passed over."""
        self.ignored.append(Ignored(key=f"{self.where}{key}", why=why))

    def pass_over(self, reasons: Mapping[str, str]) -> None:
        """Take keys that mean nothing to a strategy, with the reason of each."""
        for key in [key for key in self.data if key in reasons]:
            del self.data[key]
            self.skip(key, reasons[key])

    def close(self, what: str, known: Sequence[str]) -> None:
        """Refuse keys that are left.

        Raises:
            UnknownNameError: Naming the first key that is not known.
        """
        if self.data:
            key = f"{self.where}{next(iter(self.data))}"
            raise UnknownNameError(f"key of {what}", key, known)


def _number(value: int | str) -> Any:
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return value
    return number if math.isfinite(number) else value


def divided(what: str, whole: int, *, by: int, rule: str) -> int:
    """A number divided without rest.

    Raises:
        StrategyError: If there is one: value, rule.
    """
    if by < 1:
        raise StrategyError(
            f"{what}={whole} is divided by {by} ({rule}); give 1 or more"
        )
    each, rest = divmod(whole, by)
    if rest or not each:
        raise StrategyError(f"{what}={whole} is not a multiple of {by} ({rule})")
    return each


def assembled(
    source: str,
    fields: Mapping[str, Any],
    *,
    mesh: Mesh,
    recompute: Recompute,
    ignored: Sequence[Ignored],
    cut: tuple[int, ...] = (),
) -> Imported:
    """Make the result of what was read; every stage recomputes the same."""
    bare = Strategy(mesh=mesh, **fields)
    stages = tuple(
        Stage(rank=bare.rank_of_stage(index), modules=(), recompute=recompute)
        for index in range(mesh.pp * bare.virtual_stages)
    )
    return Imported(
        source=source,
        strategy=Strategy(mesh=mesh, **fields, stages=stages),
        ignored=tuple(ignored),
        cut=cut,
    )


def name_stages(imported: Imported, unit_names: Sequence[str]) -> Strategy:
    """The strategy with the model's modules, where the config says how it is cut.

    Args:
        imported: A config that was read.
        unit_names: Names of the model's pipeline units, in order.

    Raises:
        StrategyError: If the config cuts more or fewer layers than the model has.
    """
    if not imported.cut or imported.strategy.mesh.pp == 1:
        return imported.strategy
    whole = Strategy(stages=(Stage(rank=0, modules=tuple(unit_names)),))
    found = layers_of_stages(whole)
    count = len(found[0].layers) if found else 0
    if found is None or count != sum(imported.cut):
        raise StrategyError(
            f"the config cuts {sum(imported.cut)} layers, the model has {count}; name "
            f"the model that it is for"
        )
    before, last = len(found[0].before), len(imported.cut) - 1
    ends = [before + sum(imported.cut[: stage + 1]) for stage in range(last)]
    bounds = [0, *ends, len(unit_names)]
    stages = tuple(
        stage.model_copy(
            update={"modules": tuple(unit_names[bounds[at] : bounds[at + 1]])}
        )
        for at, stage in enumerate(imported.strategy.stages)
    )
    return imported.strategy.model_copy(update={"stages": stages})
