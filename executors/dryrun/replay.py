"""Actions of a dry run that repeat: run a few times, then counted instead of run.

The forward of a stage on one microbatch takes and frees the same memory, sends the same
bytes and does the same products as on the next. Each is run until two runs have had
exactly the same effect; from then on the effect is added to the books, event by event,
and only the tensors that others will hold are made. Nothing is extrapolated: were two
runs to differ, :class:`UnsettledError` tells that everything must be run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor

from executors.dryrun.effects import (
    Effect,
    Event,
    Origin,
    Tape,
    product_of,
    rebuild,
    traffic_between,
)
from executors.dryrun.trace import StepTrace

__all__ = ["Action", "Replay", "UnsettledError"]

#: Number of what takes no memory of the device.
_NOWHERE = -1


class UnsettledError(Exception):
    """Runs of one action differ: every one must be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One operation of one part of the model on one microbatch.

    Attributes:
        kind: ``forward``, ``loss``, ``backward`` …
        part: Index of the stage.
        microbatch: Index in the step.
    """

    kind: str
    part: int
    microbatch: int


@dataclass(slots=True, kw_only=True)
class _Chain:
    """Actions that were run of one microbatch on one part.

    Attributes:
        real: Whether it is run, or counted.
        variants: Key of each action so far.
    """

    real: bool
    variants: tuple[Hashable, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Made:
    """Ledger numbers of the storages that an action has made."""

    first: int
    end: int
    key: Hashable
    microbatch: int


class Replay:
    """Decides which actions run, notes what they do, and counts the others.

    Args:
        trace: Where effects are seen and counted.
        forced: Microbatches of each part that are run whatever is known.
        state: Of a part: what decides what an action on it will do. Told whether
            gradients matter.
        settle: Brings a part into a state, uncounted.
        patient: Whether a microbatch is only counted once all that was last run of its
            part is known. Without it the first actions of a microbatch may be, while
            backwards that come a pipeline's length later still differ.
    """

    def __init__(
        self,
        trace: StepTrace,
        forced: Mapping[int, frozenset[int]],
        *,
        state: Callable[[int, bool], Hashable],
        settle: Callable[[int, Hashable], None],
        patient: bool = False,
    ) -> None:
        self._trace, self._ledger = trace, trace.ledger
        self._forced, self._state, self._settle = forced, state, settle
        self._patient = patient
        # Of each part and kind of action, what was run last.
        self._latest: dict[tuple[int, str], Hashable] = {}
        self._chains: dict[tuple[int, int], _Chain] = {}
        self._last: dict[Hashable, Effect] = {}
        self._tapes: dict[Hashable, Tape] = {}
        self._ghosts: dict[tuple[Hashable, int], int] = {}
        self._made: list[_Made] = []
        # Storages that are handed from action to action, real ones in both cases.
        self._handed: set[int] = set()
        #: Microbatches that were run, of any part.
        self.ran: set[int] = set()

    def is_run(self, action: Action) -> bool:
        """Return True if an action is to be run and not counted."""
        place = action.part, action.microbatch
        if place not in self._chains:
            key = self._key(action, ())
            known = key in self._tapes
            if self._patient:
                known &= all(
                    latest in self._tapes
                    for (part, _), latest in self._latest.items()
                    if part == action.part
                )
            forced = action.microbatch in self._forced.get(action.part, frozenset())
            self._chains[place] = _Chain(real=forced or not known)
        if self._chains[place].real:
            self.ran.add(action.microbatch)
            return True
        return False

    def numbers(self, tensors: Sequence[Any]) -> tuple[int, ...]:
        """Storages of what an action is given, to be passed to :meth:`run`.

        Numbers, not tensors: whoever watches must not keep them alive.
        """
        found = (
            self._ledger.add(tensor) if isinstance(tensor, torch.Tensor) else None
            for tensor in tensors
        )
        return tuple(_NOWHERE if number is None else number for number in found)

    def run(
        self,
        action: Action,
        call: Callable[[], Any],
        *,
        given: Sequence[int],
        products: Callable[[Any], Sequence[Any]],
    ) -> Any:
        """Run an action and note its effect.

        Args:
            action: One that is to be run.
            call: Does it.
            given: Storages of what it is given, see :meth:`numbers`.
            products: The tensors that it leaves for others, given what it returns.

        Returns:
            What it returns.
        """
        trace, ledger = self._trace, self._ledger
        chain = self._chains[action.part, action.microbatch]
        key = self._key(action, chain.variants)
        start, first, flops = ledger.position, ledger.count, trace.flops
        before = trace.tally.by_group()
        result = call()
        made = _Made(
            first=first, end=ledger.count, key=key, microbatch=action.microbatch
        )
        self._made.append(made)
        effect = Effect(
            traffic=traffic_between(trace.tally.by_group(), before),
            flops=trace.flops - flops,
            after=self._state(action.part, False),
            **self._outcome(action, start, given, products(result)),
        )
        chain.variants = (*chain.variants, key)
        last = self._last.get(key)
        if last is not None and effect.like(last) and key not in self._tapes:
            self._tapes[key] = self._tape(effect, last)
        self._last[key] = effect
        self._latest[action.part, action.kind] = key
        return result

    def count(
        self, action: Action, given: Sequence[Any]
    ) -> tuple[torch.Tensor | None, ...]:
        """Count the effect of an action that is not run.

        Args:
            action: One that is not to be run.
            given: What it would be given, in the same order as always.

        Returns:
            Its products.

        Raises:
            UnsettledError: If no two runs of it have been alike.
        """
        chain = self._chains[action.part, action.microbatch]
        key = self._key(action, chain.variants)
        tape = self._tapes.get(key)
        if tape is None:
            raise UnsettledError(f"{action} has not been run twice with one effect")
        chain.variants = (*chain.variants, key)
        effect, made = tape.effect, []
        self._ledger.hold(tape.lasting)
        for piece in range(len(tape.whose)):
            if piece:
                size = effect.made[piece - 1][1]
                made.append(torch.empty(size, dtype=torch.uint8))
            self._ledger.repeat(tape.whose[piece], tape.change[piece])
        self._trace.tally.add(effect.traffic)
        self._trace.flops += effect.flops
        if effect.after != self._state(action.part, False):
            self._settle(action.part, effect.after)
        values = tuple(
            None if p is None else rebuild(p, given if p.given else made)
            for p in effect.products
        )
        self._handed |= {*self.numbers(values)}
        return values

    def _key(self, action: Action, before: tuple[Hashable, ...]) -> Hashable:
        """Key of an action's effect: the actions before it, and the state."""
        updates = action.kind not in ("forward", "loss", "input gradients")
        state = self._state(action.part, updates)
        return action.kind, action.part, state, before

    def _outcome(
        self, action: Action, start: int, given: Sequence[int], products: Sequence[Any]
    ) -> dict[str, Any]:
        """Collect events and products of an action that has just been run."""
        numbers = [self._product_number(tensor) for tensor in products]
        fresh = [n for n in dict.fromkeys(numbers) if n is not None and n not in given]
        self._handed |= {*given, *fresh}
        events: list[Event] = []
        made: dict[int, tuple[int, int]] = {}
        for number, change in self._ledger.events(start):
            if number in fresh and number not in made:
                made[number] = (len(events), change)
            elif number not in self._handed:
                origin = self._origin(number, action.microbatch)
                events.append(Event(number=number, origin=origin, change=change))
        if set(fresh) != set(made):
            raise UnsettledError("a tensor is returned that was there before")
        places = list(made)
        return {
            "events": tuple(events),
            "made": tuple(made.values()),
            "products": tuple(
                None if number is None else product_of(tensor, number, given, places)
                for tensor, number in zip(products, numbers, strict=True)
            ),
        }

    def _product_number(self, tensor: Any) -> int | None:
        if tensor is None:
            return None
        if isinstance(tensor, DTensor) or not isinstance(tensor, FakeTensor):
            raise UnsettledError(f"{type(tensor).__name__} cannot be made again")
        return self._ledger.add(tensor)

    def _origin(self, number: int, microbatch: int) -> Origin:
        place = bisect_right(self._made, number, key=lambda made: made.first) - 1
        if place >= 0 and number < self._made[place].end:
            made = self._made[place]
            return made.key, microbatch - made.microbatch, number - made.first
        return None, 0, number

    def _tape(self, effect: Effect, last: Effect) -> Tape:
        whose: list[int] = []
        lasting: dict[int, int] = {}
        for event, before in zip(effect.events, last.events, strict=True):
            number = event.number
            if number == before.number:
                # One that lives from microbatch to microbatch.
                lasting[number] = lasting.get(number, 0) + event.change
            else:
                maker, _, index = event.origin
                if (maker, index) not in self._ghosts:
                    self._ghosts[maker, index] = self._ledger.ghost(number)
                number = self._ghosts[maker, index]
            whose.append(number)
        cuts = [position for position, _ in effect.made]
        change = [event.change for event in effect.events]
        return Tape(
            effect=effect,
            whose=tuple(np.split(np.array(whose, dtype=np.int64), cuts)),
            change=tuple(np.split(np.array(change, dtype=np.int64), cuts)),
            lasting=tuple(lasting.items()),
        )
