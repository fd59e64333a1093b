"""One line on an error: what was raised, its root cause, the module it came from.

Imports nothing heavy: a launched process loads it before it knows its work.
"""

from __future__ import annotations

import re
import sys
import traceback
from typing import Any

from planner.errors import MeshwrightError

__all__ = ["chain", "explain", "is_consequence", "own_error"]

#: What a rank says whose peer died: a consequence, not a cause.
_CONSEQUENCE = re.compile(
    r"closed by peer|Connection reset|Broken pipe|Connection refused|DistNetworkError"
    r"|NCCL .*remote|timed out",
    re.IGNORECASE,
)


def chain(error: BaseException) -> list[BaseException]:
    """An error, its cause, the cause's cause, and so on to the root."""
    found: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in found:
        found.append(current)
        hidden = current.__suppress_context__
        current = current.__cause__ or (None if hidden else current.__context__)
    return found


def own_error(error: BaseException) -> MeshwrightError | None:
    """The first of the chain that Meshwright raised on purpose, if one is.

    torch wraps whatever a pipeline stage raises.
    """
    return next((e for e in chain(error) if isinstance(e, MeshwrightError)), None)


def is_consequence(error: BaseException | str) -> bool:
    """Return True if another rank's failure may have caused an error.

    Args:
        error: What was raised, or what a rank has printed.
    """
    if isinstance(error, BaseException):
        found = [f"{type(one).__name__}: {one}" for one in chain(error)]
        return _CONSEQUENCE.search("\n".join(found)) is not None
    return _CONSEQUENCE.search(error) is not None


def explain(error: BaseException, model: Any = None) -> str:
    """One line on an error, without the name of its type.

    ``[Stage 0] failed to run forward: AttributeError: 'NoneType' object has no
    attribute 'shape' (in blocks.3)``: what was raised, its root cause if it has one,
    and the innermost module whose forward was running.

    Args:
        error: What was raised.
        model: Module whose names of submodules are given; None for the outermost one
            that the traceback shows.
    Returns:
        The line; empty if the error says nothing.
    """
    said, root = _first_line(error), chain(error)[-1]
    why = _first_line(root)
    if root is not error and not (why and why in said):
        parts = (said.rstrip(":"), type(root).__name__, why)
        said = ": ".join(filter(None, parts))
    place = _running_module(error, model)
    return " ".join(filter(None, (said, f"(in {place})" if place else "")))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "").strip()


def _running_module(error: BaseException, model: Any) -> str:
    """FQN of the innermost module with a frame in the tracebacks; empty if none."""
    kind = getattr(sys.modules.get("torch.nn"), "Module", None)
    if kind is None:
        return ""
    owners = [
        frame.f_locals.get("self")
        for one in chain(error)
        for frame, _ in traceback.walk_tb(one.__traceback__)
    ]
    modules = [owner for owner in owners if isinstance(owner, kind)]
    if not modules:
        return ""
    outermost = modules[0] if model is None else model
    if type(outermost).__name__ == "DistributedDataParallel":
        outermost = outermost.module
    names = {id(module): name for name, module in outermost.named_modules()}
    named = (names.get(id(module), "") for module in reversed(modules))
    return next(filter(None, named), "")
