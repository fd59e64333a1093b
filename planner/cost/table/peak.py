"""Peak memory of one device: bytes at the worst moment of its step.

The moments are those that :mod:`planner.cost.strategy.memory` describes; what devices
hold for their microbatches is counted before, from action tables or by closed forms.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.cost.context import ScalarBytes
from planner.simulate.compiled import compiled, inner

__all__ = [
    "IN_FLIGHT",
    "Degrees",
    "Devices",
    "Held",
    "Scalars",
    "is_alone",
    "peak_bytes",
    "peak_of_device",
    "units_in_flight",
]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class Scalars(NamedTuple):
    """Scalars on one device: all, ZeRO's shard; trained ones, those of the first unit.

    The first unit is reduced last.
    """

    whole: float
    shard: float
    trained: float
    trained_shard: float
    first_trained: float


class Held(NamedTuple):
    """Bytes that one device holds for its microbatches, at three moments of a step.

    Attributes:
        first: When the first backward begins.
        later: When one begins that a forward was run before; gradients are there.
        again: When one follows upon another.
    """

    first: float
    later: float
    again: float


#: Working sets by what of a unit's weights is in flight: nothing; gradients that are
#: reduced unit by unit; weights that are gathered so, too; gradients of units whose
#: weights are let go of before.
IN_FLIGHT = ("nothing", "gradients", "weights", "released")

_NOTHING, _GRADIENTS, _WEIGHTS, _RELEASED = range(len(IN_FLIGHT))


class Degrees(NamedTuple):
    """Degrees of a strategy that decide what one device holds.

    Attributes:
        zero: ZeRO stage.
        pp: Pipeline degree.
        many: Microbatches in a step.
        replicas: Degree of dp_replicate; 0 if it does not matter that a device may have
            the whole model.
        shards: Degree of dp_shard times that of cp.
    """

    zero: int
    pp: int
    many: int
    replicas: int
    shards: int


@inner
def units_in_flight(degrees: Degrees, of: ScalarBytes) -> int:
    """Return which of :data:`IN_FLIGHT` a strategy has."""
    zero, many = degrees.zero, degrees.many
    if degrees.pp > 1 or of.gathers_whole:
        return _NOTHING
    if zero == 3:
        return _WEIGHTS
    unitwise = zero == 1 or of.compute != of.stored
    kept = not (of.gradients_ahead or of.computed_gradients or of.both_gradients)
    if zero >= 1 and many == 1 and kept:
        return _RELEASED
    if zero == 2 or (unitwise and many == 1 and not of.gradients_ahead):
        return _GRADIENTS
    return _NOTHING


@inner
def is_alone(degrees: Degrees, of: ScalarBytes) -> bool:
    """Return True if a device holds what the only one of a model does.

    See :func:`planner.cost.unit_memory.alone_bytes_of`.
    """
    zero, pp, many, replicas, shards = degrees
    copies = min(replicas, 1) * shards if of.replicas_alike else replicas * shards
    plain = not (of.gradients_ahead or of.computed_gradients or of.both_gradients)
    plain = plain and not of.gathers_whole
    return plain and copies == 1 and zero == 0 and pp == 1 and many == 1


@inner
def _of_gradients(has: Scalars, degrees: Degrees, of: ScalarBytes) -> float:
    """Bytes of gradients on one device, once they are there."""
    zero, pp, many = degrees.zero, degrees.pp, degrees.many
    gradients = has.trained * of.stored
    shard = has.trained_shard * of.stored * of.shard_share
    if zero >= 1:
        wide = max(of.reduce, of.compute) if many > 1 else of.compute
        gradients = has.trained * wide
    if pp == 1 and (zero >= 2 or (zero == 1 and many == 1 and not of.gradients_ahead)):
        # The input of the last reduction stays until the next.
        last = many > 1 and zero >= 2 and not of.gradients_ahead
        gradients = shard + (has.first_trained * of.reduce if last else 0.0)
    sums = of.stored if zero == 0 else of.reduce
    if of.both_gradients and sums > of.compute and (pp > 1 or zero <= 1):
        gradients += has.trained * of.compute
    if of.computed_gradients:
        early = zero == 3 or (zero == 2 and pp == 1 and not of.gathers_whole)
        shard = has.trained_shard * of.shard_share
        gradients = (shard if early else has.trained) * of.compute
    return gradients


@inner
def peak_of_device(
    has: Scalars,
    degrees: Degrees,
    of: ScalarBytes,
    held: Held,
    working: float,
    ending: float,
) -> tuple[float, float, float, float]:
    """Bytes of parameters, gradients, states and activations at the worst moment.

    ``working`` is the working set of one unit, ``ending`` of one that is the last to be
    done.
    """
    zero, pp, gathered = degrees.zero, degrees.pp, 0.0
    in_units = zero == 3 and pp == 1 and not of.gathers_whole
    if not in_units and (zero >= 1 or of.compute != of.stored):
        gathered = has.whole * of.compute
    # Behind a forward nothing is gathered under ZeRO 3.
    early = gathered if zero < 3 or of.gathers_whole else 0.0
    gradients = _of_gradients(has, degrees, of)
    ahead = pp == 1 and zero == 0 and of.compute == of.stored == of.reduce
    first = gradients if ahead or of.gradients_ahead or of.computed_gradients else 0.0
    owned, trained = has.whole, has.trained
    if zero >= 1:
        owned, trained = has.shard * of.shard_share, has.trained_shard
    found = (early, first, held.first + working)
    later = held.later + (working if held.later > held.again else ending)
    if early + gradients + later > found[0] + found[1] + found[2]:
        found = (early, gradients, later)
    if gathered + gradients + held.again + ending > found[0] + found[1] + found[2]:
        found = (gathered, gradients, held.again + ending)
    states = trained * of.states
    return owned * of.stored + found[0], found[1], states, found[2]


class Devices(NamedTuple):
    """Many devices, each with its parameters and what it holds for microbatches.

    Attributes:
        scalars: All; what ZeRO leaves of them; the trained ones of both; those of the
            first unit. Shape [n, 5].
        held: When the first backward begins, when one begins behind a forward, and
            behind another. Shape [n, 3].
        working: Working sets by :data:`IN_FLIGHT`, then those of a unit that is the
            last to be done. Shape [n, 8].
        alone: Cast weights, gradients and working set of the only device of a model.
            Shape [n, 3].
        zero: ZeRO stage. Shape [n].
        pp: Pipeline degree. Shape [n].
        many: Microbatches in a step. Shape [n].
        replicas: Degree of dp_replicate; 0 where ``alone`` is not told. Shape [n].
        shards: Of dp_shard times that of cp. Shape [n].
    """

    scalars: Array
    held: Array
    working: Array
    alone: Array
    zero: Index
    pp: Index
    many: Index
    replicas: Index
    shards: Index


@compiled
def _of_all_devices(each: Devices, of: ScalarBytes, parts: Array) -> None:
    for i in range(len(each.scalars)):
        has, held = each.scalars[i], each.held[i]
        degrees = Degrees(
            each.zero[i], each.pp[i], each.many[i], each.replicas[i], each.shards[i]
        )
        if is_alone(degrees, of):
            parts[0, i] = has[0] * of.stored + each.alone[i, 0]
            parts[1, i], parts[2, i] = each.alone[i, 1], has[2] * of.states
            parts[3, i] = held[0] + each.alone[i, 2]
            continue
        kind = units_in_flight(degrees, of)
        parts[0, i], parts[1, i], parts[2, i], parts[3, i] = peak_of_device(
            Scalars(has[0], has[1], has[2], has[3], has[4]),
            degrees,
            of,
            Held(held[0], held[1], held[2]),
            each.working[i, kind],
            each.working[i, kind + len(IN_FLIGHT)],
        )


def peak_bytes(each: Devices, of: ScalarBytes) -> Array:
    """Bytes of parameters, gradients, states and activations at the peak. [4, n]."""
    parts = np.empty((4, len(each.scalars)))
    _of_all_devices(each, of, parts)
    return parts
