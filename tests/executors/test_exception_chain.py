"""One line says what was raised, why, and in which module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executors.exception_chain import chain, explain, own_error
from planner.errors import ExecutionError


def _caught(function: Callable[[], object]) -> BaseException:
    try:
        function()
    except BaseException as error:  # any is good enough to be explained
        return error
    pytest.fail("nothing was raised")


def _wrapped(suppress: bool = False) -> None:
    try:
        try:
            raise IndexError("list index out of range")
        except IndexError as error:
            raise ValueError("\n  one:\ntwo") from (None if suppress else error)
    except ValueError:
        raise RuntimeError("outer\nmore")  # noqa: B904 - a context, no cause


def test_the_root_is_found_through_causes_and_contexts() -> None:
    error = _caught(_wrapped)
    kinds = [type(one) for one in chain(error)]
    assert kinds == [RuntimeError, ValueError, IndexError]
    assert explain(error) == "outer: IndexError: list index out of range"
    assert explain(error.__context__) == "one: IndexError: list index out of range"


def test_what_was_hidden_stays_hidden() -> None:
    error = _caught(lambda: _wrapped(suppress=True))
    assert [type(one) for one in chain(error)] == [RuntimeError, ValueError]
    assert explain(error) == "outer: ValueError: one:"


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), TypeError("second")
    first.__cause__, second.__cause__ = second, first
    assert chain(first) == [first, second]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("plain"), "plain"),
        (ValueError(), ""),
        (ValueError("  two\nlines"), "two"),
        (KeyError("name"), "'name'"),
    ],
)
def test_an_error_without_a_cause_says_what_it_says(
    error: Exception, said: str
) -> None:
    assert explain(error) == said


@pytest.mark.parametrize(
    ("outer", "inner", "said"),
    [
        ("failed:", "why", "failed: ValueError: why"),
        ("", "why", "ValueError: why"),
        ("failed", "", "failed: ValueError"),
        ("failed: why", "why", "failed: why"),
    ],
)
def test_nothing_is_said_twice(outer: str, inner: str, said: str) -> None:
    error = RuntimeError(outer)
    error.__cause__ = ValueError(inner)
    assert explain(error) == said


class _Fails(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.no_such_thing


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(2, 2), nn.Sequential(_Fails()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            out: torch.Tensor = self.blocks(x)
        except AttributeError as error:
            raise RuntimeError("[Stage 0] failed to run forward:") from error
        return out


def test_the_innermost_module_is_named() -> None:
    model = _Model()
    error = _caught(lambda: model(torch.ones(1, 2)))
    said = explain(error)
    assert said.startswith("[Stage 0] failed to run forward: AttributeError: ")
    assert said.endswith("no attribute 'no_such_thing' (in blocks.1.0)")
    assert explain(error, model.blocks).endswith("(in 1.0)")


def test_a_wrapper_is_no_part_of_the_name() -> None:
    class Bare(DistributedDataParallel):
        """Without a process group."""

        def __init__(self, module: nn.Module) -> None:
            nn.Module.__init__(self)
            self.module = module

        def forward(self, *args: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.module(*args)
            return out

    Bare.__name__ = DistributedDataParallel.__name__
    wrapped = Bare(_Model())
    assert explain(_caught(lambda: wrapped(torch.ones(1, 2)))).endswith(
        "(in blocks.1.0)"
    )


def test_no_module_is_named_outside_of_all() -> None:
    error = _caught(lambda: nn.Linear(2, 2)(torch.ones(3)))
    assert "(in" not in explain(error)


def test_an_error_of_our_own_is_found_within_another() -> None:
    own = ExecutionError("no tokens")
    error = RuntimeError("[Stage 1] failed to run forward:")
    error.__cause__ = own
    assert own_error(error) is own
    assert own_error(own) is own
    assert own_error(ValueError()) is None
