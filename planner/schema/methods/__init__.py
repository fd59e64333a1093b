"""Training methods: one file each, in one registry that every room reads.

A method fills a slot of a strategy, its field ``synchronisation`` for one. Its file
holds the document with its settings, if it has any, and its records in ``METHODS``;
every module in this folder is read. Rules of the space, pins, the composition table,
the cost model, executors and descriptions look methods up here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import AfterValidator, Field, ValidationError, WithJsonSchema

from planner.errors import StrategyError, UnknownNameError
from planner.schema.methods.method import (
    Feature,
    Method,
    MethodDocument,
    shown_setting,
)

if TYPE_CHECKING:
    from planner.schema.methods.method import Asynchrony, Learning, Synchronisation
    from planner.schema.strategy import Strategy
    from planner.schema.violations import Case

__all__ = [
    "Asynchrony",
    "Feature",
    "GradientCompression",
    "Learning",
    "Method",
    "MethodDocument",
    "MethodValue",
    "Synchronisation",
    "default_value",
    "limit_violations",
    "method_names",
    "method_of",
    "methods",
    "methods_of",
    "read_method",
    "runs_in",
    "slots",
    "violations",
    "words_of",
]

#: Value of a slot: a document, or a name where that says everything.
MethodValue = MethodDocument | str


def _read() -> tuple[Method, ...]:
    """Records of all modules in this folder, defaults first within a slot."""
    found: list[Method] = []
    for module in iter_modules(__path__):
        if module.name != "method":
            found += import_module(f"{__name__}.{module.name}").METHODS
    taken = [(one.slot, one.kind) for one in found]
    if len(set(taken)) < len(taken):
        raise ValueError(f"two methods of one slot have one name: {sorted(taken)}")
    return tuple(sorted(found, key=lambda one: (one.slot, not one.default)))


_REGISTRY = _read()


@cache
def slots() -> tuple[str, ...]:
    """Fields of a strategy that methods fill."""
    return tuple(dict.fromkeys(one.slot for one in _REGISTRY))


@cache
def methods(slot: str | None = None) -> tuple[Method, ...]:
    """Records of all methods, or of those of one slot, its default first."""
    return tuple(one for one in _REGISTRY if slot in {None, one.slot})


def default_value(slot: str) -> Any:
    """Return the value of a slot that a strategy has by default.

    It is the document of the slot's default method with its default settings, or the
    method's name if it has no document.
    """
    default = methods(slot)[0]
    document = default.document
    return default.kind if document is None else document.model_validate({})


def runs_in(slot: str, value: MethodValue, compute: str) -> bool:
    """Return True if steps of a method are run in a dtype.

    Args:
        slot: Field of a strategy.
        value: What fills it.
        compute: Dtype of products; float16 wants a scaled loss, float8 plain steps.
    """
    if compute not in ("float16", "float8") or value == default_value(slot):
        return True
    return compute == "float16" and method_of(slot, value).scales_loss


def method_names(slot: str) -> tuple[str, ...]:
    """Names by which a slot is filled: of methods and of their presets."""
    return tuple(name for one in methods(slot) for name in (one.kind, *one.presets))


def method_of(slot: str, value: MethodValue) -> Method:
    """Look up the record of what fills a slot.

    Raises:
        UnknownNameError: If there is no such method; suggests the nearest.
    """
    kind = value if isinstance(value, str) else value.kind
    for one in methods(slot):
        if one.kind == kind:
            return one
    raise UnknownNameError(slot.replace("_", " "), kind, _kinds(slot))


def methods_of(strategy: Strategy) -> Iterator[tuple[Method, MethodValue]]:
    """Records and values of a strategy's slots."""
    for slot in slots():
        value = getattr(strategy, slot)
        yield method_of(slot, value), value


def words_of(method: Method, value: MethodValue) -> str:
    """Sentence for people about a slot's value; empty if it goes without saying."""
    if isinstance(value, str):
        return method.words.format(kind=value)
    settings = value.model_dump()
    told = {name for _, name, *_ in Formatter().parse(method.words) if name}
    more = ", ".join(
        f"{name} {shown_setting(settings[name])}"
        for name, info in type(value).model_fields.items()
        if name not in {*told, "kind"} and settings[name] != info.default
    )
    return method.words.format(**settings) + (f" ({more})" if more else "")


def read_method(slot: str, value: Any) -> MethodValue:
    """Read what a person writes for a slot: ``local_steps:period=100``, or a document.

    Raises:
        UnknownNameError: If there is no such method; suggests the nearest.
        StrategyError: If a setting does not exist or is out of range.
    """
    if isinstance(value, MethodDocument):
        method_of(slot, value)
        return value
    if not isinstance(value, str):
        raise StrategyError(
            f"{slot}={value!r} is not a name; give one of "
            f"{', '.join(method_names(slot))}"
        )
    name, _, text = value.partition(":")
    for one in methods(slot):
        if name == one.kind or name in one.presets:
            break
    else:
        raise UnknownNameError(slot.replace("_", " "), name, method_names(slot))
    if text and not one.settings:
        raise StrategyError(f"{slot}={value}, but {name} has no settings")
    if one.document is None:
        return one.kind
    settings = one.presets[name].model_dump() if name in one.presets else {}
    settings |= dict(_setting(slot, part) for part in text.split(",") if part)
    try:
        return one.document.model_validate(settings)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise StrategyError(
            f"{slot}={value}: {where}: {first['msg']}; settings are "
            f"{', '.join(one.settings)}"
        ) from error


def _setting(slot: str, text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign:
        raise StrategyError(f"{slot}: {text!r} is not SETTING=VALUE, such as period=8")
    try:
        return name.strip(), json.loads(value)
    except ValueError:
        return name.strip(), value.strip()


def limit_violations(case: Case) -> tuple[str, ...]:
    """Violations of a strategy's methods, whoever runs it."""
    found = (
        limit(case) for one, _ in methods_of(case.strategy) for limit in one.limits
    )
    return tuple(reason for reason in found if reason)


def violations(case: Case) -> tuple[str, ...]:
    """Violations of a strategy's methods that Meshwright's executors would see."""
    found = []
    for one, value in methods_of(case.strategy):
        asked = (rule(case) for rule in (*one.limits, *one.violations))
        reason = next((reason for reason in asked if reason), None)
        found.append(reason or _not_run(case, one, value))
    return tuple(reason for reason in found if reason)


def _not_run(case: Case, method: Method, value: MethodValue) -> str | None:
    """Refuse what has no executor, and what changes training without consent."""
    if method.runs is None:
        return (
            f"{method.slot}={value}, which no executor runs yet; leave it to its "
            f"default"
        )
    if method.inexact and case.strategy.semantics == "exact":
        return (
            f"{method.slot}={value} with semantics=exact; {method.inexact}, say "
            f"semantics=approximate"
        )
    return None


def _kinds(slot: str) -> tuple[str, ...]:
    return tuple(one.kind for one in methods(slot))


def _named(kind: str) -> MethodValue:
    """Read a name: that of a method with settings stands for its defaults."""
    try:
        return read_method("gradient_compression", kind)
    except (StrategyError, UnknownNameError) as error:
        raise ValueError(str(error)) from None


def _documents(slot: str) -> tuple[type[MethodDocument], ...]:
    every = (one.document for one in methods(slot))
    return tuple(document for document in every if document is not None)


if TYPE_CHECKING:
    GradientCompression = MethodValue
else:
    #: Document of when the stages of a pipeline update their weights.
    Asynchrony = Annotated[
        Union[_documents("asynchrony")],  # noqa: UP007 -- of a tuple
        Field(discriminator="kind"),
    ]
    #: Document of what keeps the copies along dp_replicate together.
    Synchronisation = Annotated[
        Union[_documents("synchronisation")],  # noqa: UP007 -- of a tuple
        Field(discriminator="kind"),
    ]
    #: Document of the rule by which a batch becomes new weights.
    Learning = Annotated[
        Union[_documents("learning")],  # noqa: UP007 -- of a tuple
        Field(discriminator="kind"),
    ]
    #: Name or document of what is done to gradients on their way between copies.
    GradientCompression = (
        Annotated[
            str,
            AfterValidator(_named),
            WithJsonSchema(
                {"enum": list(_kinds("gradient_compression")), "type": "string"}
            ),
        ]
        | Annotated[
            Union[_documents("gradient_compression")],  # noqa: UP007 -- of a tuple
            Field(discriminator="kind"),
        ]
    )
