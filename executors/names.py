"""Names of modules in plans: patterns, units, and the tensors that tie them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from planner.errors import FingerprintError

__all__ = ["inside", "tied_parameters", "unit_of", "units_of_model"]


def inside(fqn: str, unit: str) -> bool:
    """Return True if a name is a unit or within it; all names are within ``""``."""
    return not unit or fqn == unit or fqn.startswith(unit + ".")


def unit_of(fqn: str, units: Iterable[str]) -> str | None:
    """The innermost of the units that a name lies in; None if in none."""
    found = [unit for unit in units if inside(fqn, unit)]
    return max(found, key=len) if found else None


def units_of_model(model: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
    """The units of a plan that can be kept whole, in the plan's order.

    A unit that holds other units (ops between blocks belong to the module around
    them) is no module that one stage could hold, and is left out.

    Raises:
        FingerprintError: If the model has no module of such a name.
    """
    known = {name for name, _ in model.named_modules()}
    missing = [unit for unit in units if unit not in known]
    if missing:
        shown = ", ".join(missing[:3]) + (" …" if len(missing) > 3 else "")
        raise FingerprintError(
            f"the plan's stages name {len(missing)} modules that the model lacks "
            f"({shown}); the plan is for another model, plan again"
        )
    return tuple(
        unit
        for unit in units
        if unit and not any(other != unit and inside(other, unit) for other in units)
    )


def tied_parameters(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Groups of names under which one parameter is reached, each sorted as found."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)
