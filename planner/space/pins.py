"""Pins: knobs that a request fixes, as values and as codes of a table."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from planner.errors import StrategyError, UnknownNameError
from planner.schema import PINNABLE, Offload
from planner.schema.methods import read_method, slots
from planner.schema.schedules import schedule_name, schedule_names, schedule_spec
from planner.schema.strategy_parts import Boundary, BucketOrder, SumAlgorithm
from planner.space.table import RECOMPUTE_NAMES

__all__ = ["Pin", "normalize_pins", "pin_text", "read_pins"]

#: Value of a pin: a degree or count, a name, or on and off.
Pin = bool | int | str

#: Knobs that are on or off.
_SWITCHES = frozenset({"sequence_parallel", "compile"})
#: Knobs that all strategies of a request have in common: no column of a table.
_COMMON = frozenset(
    {
        *slots(),
        *("boundary", "buckets", "compile", "loss_chunks", "offload", "replicas"),
        "semantics",
    }
)
_SEMANTICS = ("exact", "approximate")


def _names(knob: str) -> Sequence[str]:
    """Return the names of a knob's values; empty if they have none."""
    if knob == "schedule":
        return schedule_names()
    named = {
        "recompute": RECOMPUTE_NAMES,
        "semantics": _SEMANTICS,
        "boundary": get_args(Boundary),
        "buckets": get_args(BucketOrder),
        # A hierarchy needs domains, which a pin does not tell.
        "offload": Offload.names(),
        "replicas": [n for n in get_args(SumAlgorithm) if n != "hierarchy"],
    }
    return named.get(knob, ())


def _code(knob: str, value: Pin) -> int:
    """Return the code of a pin's value in the column of a table."""
    if not isinstance(value, str):
        return int(value)
    if knob == "schedule":
        return schedule_spec(value).code
    return RECOMPUTE_NAMES.index(value)


#: Greatest degree or count, so that products of columns stay within 64 bits.
_MOST = 10**6
_MOST_DIGITS = 18

_ON_AND_OFF: dict[str, bool] = {"true": True, "1": True, "false": False, "0": False}


def read_pins(pins: Mapping[str, Any]) -> dict[str, Pin]:
    """Read pins: one type of value for each knob.

    Degrees, counts and the ZeRO stage become integers (text of digits is taken, as a
    shell or a YAML file gives it), schedules, recompute kinds and methods stay names
    (``local_steps:period=8``), switches become bools.

    Args:
        pins: Knob to value.
    Raises:
        UnknownNameError: If a knob, schedule, recompute kind or method does not exist.
        StrategyError: If a value has the wrong type or is out of range, or a schedule
            has another name with the number of virtual stages.
    """
    read = {knob: _read(knob, value) for knob, value in pins.items()}
    name, virtual = read.get("schedule"), read.get("virtual_stages")
    other = schedule_spec(name).one_stage if isinstance(name, str) else None
    if virtual == 1 and other is not None:
        raise StrategyError(
            f"pin schedule={name} with virtual_stages=1; with one stage a rank it is "
            f"{other}, use schedule={other}, or virtual_stages=2 or more"
        )
    return read


def _read(knob: str, value: Any) -> Pin:
    if knob not in PINNABLE:
        raise UnknownNameError("knob to pin", str(knob), PINNABLE)
    if knob in slots():
        return str(read_method(knob, value))
    if _names(knob):
        return _name(knob, value)
    if knob in _SWITCHES:
        return _switch(knob, value)
    number = _whole_number(knob, value)
    low, high = (0, 3) if knob == "zero_stage" else (1, _MOST)
    if number < low:
        raise StrategyError(f"pin {knob}={number} is below {low}; give at least {low}")
    if number > high:
        raise StrategyError(f"pin {knob}={number} is above {high}; give at most {high}")
    return number


def _name(knob: str, value: Any) -> str:
    names = _names(knob)
    if not isinstance(value, str):
        raise StrategyError(
            f"pin {knob}={value!r} is not a name; give one of {', '.join(names)}"
        )
    if value not in names:
        raise UnknownNameError(knob, value, names)
    return value


def _switch(knob: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    found = (
        _ON_AND_OFF.get(str(value).lower()) if isinstance(value, str | int) else None
    )
    if found is None:
        raise StrategyError(
            f"pin {knob}={value!r} is neither on nor off; give True or False"
        )
    return found


def _whole_number(knob: str, value: Any) -> int:
    if isinstance(value, str):
        digits = value.strip().removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS:
            return int(value)
    elif not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            # Integers of numpy pass, too; a float is no index, not even 8.0.
            return operator.index(value)
    raise StrategyError(
        f"pin {knob}={value!r} is not a whole number; give one such as {knob}=2"
    )


def normalize_pins(pins: Mapping[str, Any]) -> dict[str, int]:
    """Return pins as the integers of a :class:`StrategyTable`.

    Pins of a :class:`planner.space.Regime` are in no table and left out.

    Args:
        pins: Pins before or after :func:`read_pins`.
    Raises:
        UnknownNameError: As :func:`read_pins`.
        StrategyError: As :func:`read_pins`.
    """
    return {
        knob: _code(knob, value)
        for knob, value in read_pins(pins).items()
        if knob not in _COMMON
    }


def pin_text(knob: str, code: int) -> str:
    """Return a column of a table as a pin is written: ``schedule=1F1B``, ``tp=8``."""
    if knob == "schedule":
        return f"{knob}={schedule_name(code)}"
    return f"{knob}={RECOMPUTE_NAMES[code] if knob == 'recompute' else code}"
