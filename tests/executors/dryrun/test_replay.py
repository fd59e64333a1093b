"""Actions that are counted leave the books as if they had been run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from executors.dryrun.replay import Action, Replay, UnsettledError
from executors.dryrun.trace import StepTrace

FORCED = {0: frozenset({0, 1, 2})}


def _no_state(_: int, __: bool) -> Hashable:
    return ()


def _replay(trace: StepTrace) -> Replay:
    return Replay(trace, FORCED, state=_no_state, settle=lambda *_: None)


class _Books:
    """A part whose forward keeps memory that its backward frees."""

    def __init__(
        self,
        trace: StepTrace,
        kept: Callable[[int], int],
        rows: Callable[[int], int],
    ) -> None:
        self._replay = _replay(trace)
        self._sizes, self._rows = kept, rows
        self._kept: dict[int, Any] = {}
        self.out: dict[int, Any] = {}
        self.lasting = torch.zeros(100)

    def _run_forward(self, index: int) -> torch.Tensor:
        self._kept[index] = torch.zeros(self._sizes(index))
        scratch = torch.zeros(1000)
        out = torch.zeros(4, 6)
        del scratch
        return out.t()

    def _run_backward(self, index: int) -> torch.Tensor:
        del self._kept[index]
        product = torch.ones(self._rows(index), 30) @ torch.ones(30, 40)
        return product[1:3]

    def _act(
        self, kind: str, index: int, call: Callable[[], Any], given: list[Any]
    ) -> torch.Tensor:
        action = Action(kind=kind, part=0, microbatch=index)
        replay = self._replay
        if replay.is_run(action):
            numbers = replay.numbers(given)
            made: torch.Tensor = replay.run(
                action, call, given=numbers, products=lambda out: (out,)
            )
            return made
        (counted,) = replay.count(action, given)
        assert counted is not None
        return counted

    def forward(self, index: int) -> None:
        call = partial(self._run_forward, index)
        self.out[index] = self._act("forward", index, call, [])

    def backward(self, index: int) -> torch.Tensor:
        call = partial(self._run_backward, index)
        given = [self.out.pop(index)]
        return self._act("backward", index, call, given)


def _books(
    count: int,
    *,
    kept: Callable[[int], int] = lambda _: 64,
    rows: Callable[[int], int] = lambda _: 20,
) -> tuple[Any, ...]:
    """Two in flight, as in a pipeline; peak, FLOPs and the last product."""
    with FakeTensorMode() as _, StepTrace() as trace:
        part = _Books(trace, kept, rows)
        part.forward(0)
        for index in range(1, count):
            part.forward(index)
            found = part.backward(index - 1)
        ledger = trace.ledger
        found = part.backward(count - 1)
        return (
            ledger.peak_bytes,
            ledger.current_bytes,
            trace.flops,
            (found.shape, found.stride(), found.storage_offset()),
        )


def test_counting_leaves_what_running_would() -> None:
    peak, current, flops, product = _books(50)
    # What lasts, outputs of two, what the other keeps, the product before, and three
    # matrices.
    assert peak == 4 * (100 + 2 * 24 + 64 + 20 * 40 + 20 * 30 + 30 * 40 + 20 * 40)
    assert flops == 50 * 2 * 20 * 30 * 40
    assert product == ((2, 40), (40, 1), 40)
    # What lasts, and the last product, of which a view is left.
    assert current == 4 * (100 + 20 * 40)


def test_what_never_repeats_is_run() -> None:
    peak, *_ = _books(50, kept=lambda index: 64 + index)
    assert peak == _books(50)[0] + 4 * 49


def test_microbatches_must_not_differ_after_some_were_counted() -> None:
    with pytest.raises(UnsettledError, match="has not been run twice"):
        _books(6, rows=lambda index: 20 + index)
    # No more of them than are run anyway: nothing was counted.
    flops = _books(3, rows=lambda index: 20 + index)[2]
    assert flops == (20 + 21 + 22) * 2 * 30 * 40


def test_a_product_may_be_what_was_given() -> None:
    with FakeTensorMode() as _, StepTrace() as trace:
        replay = _replay(trace)
        for index in range(5):
            before = trace.ledger.current_bytes
            given = torch.zeros(8, 2)
            action = Action(kind="forward", part=0, microbatch=index)
            if replay.is_run(action):
                numbers = replay.numbers([given])
                out = replay.run(
                    action,
                    partial(operator.getitem, given, slice(3, None)),
                    given=numbers,
                    products=lambda out: (out,),
                )
            else:
                (out,) = replay.count(action, [given])
            assert out.untyped_storage()._cdata == given.untyped_storage()._cdata
            assert out.storage_offset() == 6
            assert trace.ledger.current_bytes == before + 8 * 2 * 4
            del given, out
        assert replay.ran == {0, 1, 2}


def test_other_states_are_other_actions() -> None:
    state = ["whole"]
    entered: list[Hashable] = []
    with FakeTensorMode() as _, StepTrace() as trace:

        def settle(_: int, wanted: Hashable) -> None:
            entered.append(wanted)
            state[0] = str(wanted)

        replay = Replay(trace, FORCED, state=lambda *_: state[0], settle=settle)

        def flip() -> None:
            state[0] = "sharded" if state[0] == "whole" else "whole"

        run = []
        for index in range(8):
            action = Action(kind="forward", part=0, microbatch=index)
            run.append(replay.is_run(action))
            if run[-1]:
                replay.run(action, flip, given=(), products=lambda _: ())
            else:
                replay.count(action, ())
    # Each of two states is seen twice before anything is counted.
    assert run == [True] * 4 + [False] * 4
    assert entered == ["sharded", "whole"] * 2
