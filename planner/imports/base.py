"""The result of every source: a strategy, and the keys that it passes over."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from planner.errors import StrategyError
from planner.schema import Mesh, Offload, Recompute, Stage, Strategy
from planner.targets import layers_of_stages

__all__ = [
    "DTYPES",
    "Ignored",
    "Imported",
    "Keys",
    "OffloadedPart",
    "Wanted",
    "assembled",
    "checked_recompute",
    "computed_in",
    "divided",
    "ignored_keys",
    "name_stages",
    "sort_unknown",
    "unknown_error",
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


#: What is part of the name of most options that change a strategy.
_STRATEGIC = re.compile(
    r"parallel|shard|zero|offload|pipeline|expert|recompute|fp8|fp16|bf16|precision|"
    r"batch|accumul|quantiz|compress|replica|fsdp|ulysses|autocast|"
    r"(?<![a-z])(?:tp|pp|dp|cp|sp|ep|etp|ddp)(?![a-z])"
)
_COMMENT = re.compile(r"^(_+|//|#)|^_?comment|^description$")


def sort_unknown(
    names: Sequence[str], known: Iterable[str], harmless: Iterable[str] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Part names that are not known by what they may mean.

    Args:
        names: Names that are not known, without their place.
        known: Names that mean something to a strategy.
        harmless: Names that mean nothing to one.

    Returns:
        Those that may change a strategy, each with the nearest known name or nothing,
        and the others, each with the reason to pass it over.
    """
    refused, passed = {}, {}
    known, harmless = list(known), list(harmless)
    for name in names:
        bare = name.lstrip("-")
        near = difflib.get_close_matches(name, [*known, *harmless], n=1, cutoff=0.8)
        if _COMMENT.search(bare.lower()):
            passed[name] = "a comment"
        elif near and near[0] in known:
            refused[name] = near[0]
        elif near or not _STRATEGIC.search(bare.lower().replace("-", "_")):
            passed[name] = (
                "not known to Meshwright; its name is about nothing that a strategy has"
            )
        else:
            refused[name] = ""
    return refused, passed


def unknown_error(what: str, refused: Mapping[str, str]) -> StrategyError:
    """Error for options that are not known and may change the strategy, all at once.

    Args:
        what: ``key of a DeepSpeed config``.
        refused: Their names, each with the nearest known one or nothing.
    """
    shown = ", ".join(
        repr(name) + (f" (did you mean {near!r}?)" if near else "")
        for name, near in refused.items()
    )
    return StrategyError(
        f"unknown {what} {shown}: may change the strategy; correct what is misspelt, "
        f"and leave the rest out to price what remains"
    )


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
        dtype: Data type of matrix products, where the file leaves it to the trainer.
        recompute: Activations that the training script recomputes; None for what the
            file says.
        recipe: Function of a Python file that makes the config.
        script_words: Words that a shell script is started with, after assignments.
        without_offload: True to price a config without what it moves to the host.
    """

    world_size: int | None = None
    global_batch: int | None = None
    microbatch_size: int | None = None
    dtype: str | None = None
    recompute: Recompute | None = None
    recipe: str = ""
    script_words: str = ""
    without_offload: bool = False


#: What a launcher can move to the host's memory.
OffloadedPart = Literal["optimizer", "parameters", "activations"]


@dataclass(slots=True, kw_only=True)
class Keys:
    """Keys of a mapping that are taken one by one, so that none is left unread.

    Attributes:
        data: The mapping.
        where: Place in the file, with a dot: ``fsdp_config.``; empty for the whole.
        ignored: Gets the keys that are passed over.
        problems: Gets what :meth:`finish` refuses.
        unknown: Gets keys that are not known and may change the strategy.
        without_offload: True to pass over what moves states to the host.
        offloaded: Gets what is moved there.
    """

    data: dict[str, Any]
    where: str = ""
    ignored: list[Ignored] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)
    without_offload: bool = False
    offloaded: list[OffloadedPart] = field(default_factory=list)

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
        return self.of(key, self.take(key, dict, {}))

    def of(self, key: str, data: Mapping[str, Any]) -> Keys:
        """A mapping that belongs to a key, with the lists of this one."""
        return Keys(
            data=dict(data),
            where=f"{self.where}{key}.",
            ignored=self.ignored,
            problems=self.problems,
            unknown=self.unknown,
            without_offload=self.without_offload,
            offloaded=self.offloaded,
        )

    def skip(self, key: str, why: str) -> None:
        """Note a key that is passed over."""
        self.ignored.append(Ignored(key=f"{self.where}{key}", why=why))

    def pass_over(self, reasons: Mapping[str, str]) -> None:
        """Take keys that mean nothing to a strategy, with the reason of each."""
        for key in [key for key in self.data if key in reasons]:
            del self.data[key]
            self.skip(key, reasons[key])

    def refuse(self, text: str) -> None:
        """Note what :meth:`finish` refuses."""
        self.problems.append(text)

    def take_offload(self, key: str, value: object, part: OffloadedPart) -> None:
        """Note what a config moves to the host, or pass it over if that was asked.

        Args:
            key: That says so.
            value: Its value; files on a disk are not priced.
            part: That is moved.
        """
        if self.without_offload:
            self.skip(key, f"{value}: priced without offloading, as asked")
        elif str(value).lower() in ("nvme", "disk", "offload_disk"):
            self.refuse(
                f"{self.where}{key}={value}: Meshwright prices what is offloaded to "
                f"the host's memory, not to disks; use cpu, or give --without-offload, "
                f"to price the rest"
            )
        else:
            self.offloaded.append(part)

    @property
    def offload(self) -> Offload:
        """All that was noted; the optimizer goes along with weights."""
        states = next(
            (part for part in ("parameters", "optimizer") if part in self.offloaded),
            "none",
        )
        return Offload.model_validate(
            {"states": states, "activations": "activations" in self.offloaded}
        )

    def close(self, known: Iterable[str], harmless: Iterable[str] = ()) -> None:
        """Note keys that are left: those that may change a strategy, and the others.

        Args:
            known: Keys that mean something to a strategy.
            harmless: Keys that mean nothing to one.
        """
        refused, passed = sort_unknown(list(self.data), known, harmless)
        self.unknown |= {f"{self.where}{key}": near for key, near in refused.items()}
        self.pass_over(passed)

    def finish(self, what: str) -> None:
        """Refuse everything that was noted for it, in one message.

        Args:
            what: Kind of the file: ``a DeepSpeed config``.

        Raises:
            StrategyError: Naming every key and the remedy.
        """
        texts = list(self.problems)
        if self.unknown:
            texts.append(str(unknown_error(f"key of {what}", self.unknown)))
        if texts:
            raise StrategyError("; ".join(texts))


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


def checked_recompute(wanted: Wanted, said: str | None, where: str) -> Recompute:
    """Return what the file and the user say is recomputed.

    Args:
        wanted: May say it.
        said: What the file says; None if it leaves it to the training script.
        where: The file's word, for messages.

    Raises:
        StrategyError: If both say it, and differ.
    """
    if wanted.recompute is None or said is None:
        return wanted.recompute or said or "none"  # type: ignore[return-value]
    if wanted.recompute != said:
        raise StrategyError(
            f"--recompute {wanted.recompute}, but the file says {said} ({where}); "
            f"change the file, or leave --recompute out"
        )
    return wanted.recompute


#: Words of other launchers for a data type of products.
DTYPES = {
    "no": "float32",
    "fp32": "float32",
    "float32": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "fp8": "float8",
    "float8": "float8",
}


def computed_in(keys: Keys, key: str, wanted: Wanted, natural: str) -> str:
    """Data type of products that a trainer fills in, noted.

    Args:
        keys: Gets the note.
        key: Key that is ``auto``.
        wanted: May say it.
        natural: Data type if the user does not.
    """
    dtype = wanted.dtype or natural
    keys.skip(key, f"auto: the trainer's; {dtype} is priced, --dtype says another")
    return dtype


def assembled(
    source: str,
    fields: Mapping[str, Any],
    *,
    mesh: Mesh,
    recompute: Recompute,
    ignored: Sequence[Ignored],
    cut: tuple[int, ...] = (),
) -> Imported:
    """Make the result of what was read; every stage recomputes the same.

    1F1B of fewer microbatches than stages is GPipe: all forwards are in flight before
    the last stage's first backward ends. Weights that nothing shards are priced on the
    device, as no gather brings them from the host.
    """
    noted = list(ignored)
    offload = fields.get("offload", Offload())
    unsharded = not fields.get("zero_stage") or mesh.shards == 1
    if offload.states == "parameters" and unsharded:
        why = (
            "optimizer states are priced on the host, and weights on the device, where "
            "nothing shards them: memory will be less"
        )
        noted.append(Ignored(key="offloaded weights", why=why))
        offload = offload.model_copy(update={"states": "optimizer"})
        fields = {**fields, "offload": offload}
    if fields.get("schedule") == "1F1B" and fields["num_microbatches"] < mesh.pp:
        why = (
            f"1F1B is GPipe where microbatches ({fields['num_microbatches']}) are "
            f"fewer than stages ({mesh.pp})"
        )
        noted.append(Ignored(key="schedule", why=why))
        fields = {**fields, "schedule": "GPipe"}
    bare = Strategy(mesh=mesh, **fields)
    stages = tuple(
        Stage(rank=bare.rank_of_stage(index), modules=(), recompute=recompute)
        for index in range(mesh.pp * bare.virtual_stages)
    )
    return Imported(
        source=source,
        strategy=Strategy(mesh=mesh, **fields, stages=stages),
        ignored=tuple(noted),
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
