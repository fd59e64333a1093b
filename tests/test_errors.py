"""The tree of errors, as its docstring draws it."""

from __future__ import annotations

import pickle
import re

import pytest

from planner import errors
from planner.errors import (
    MeshwrightError,
    NoFeasiblePlanError,
    NonFiniteError,
    RankFailedError,
    StoppedError,
    UnknownNameError,
)


def _drawn() -> dict[str, str]:
    """Name to parent, read from the drawing."""
    parents: dict[str, str] = {}
    path: list[str] = []
    # Drawn as a literal block, four columns in.
    for line in (errors.__doc__ or "").splitlines():
        line = line.removeprefix("    ")
        found = re.match(r"^([│├└─ ]*)(\w+Error)\b", line)
        if not found:
            continue
        depth = len(found[1]) // 4
        path[depth:] = [found[2]]
        parents[found[2]] = path[depth - 1] if depth else "Exception"
    return parents


def test_the_drawing_is_the_tree() -> None:
    drawn = _drawn()
    assert sorted(drawn) == sorted(errors.__all__)
    for name, parent in drawn.items():
        kind = getattr(errors, name)
        assert kind.__bases__[0].__name__ == parent
        assert issubclass(kind, MeshwrightError)


def test_exit_codes_of_errors() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        own = {NoFeasiblePlanError: 2, NonFiniteError: 3, StoppedError: 75}
        assert kind.exit_code == own.get(kind, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dgx-h10", "unknown cluster preset 'dgx-h10'; did you mean 'dgx-h100'?"),
        ("DGX-H100", "unknown cluster preset 'DGX-H100'; did you mean 'dgx-h100'?"),
        ("zzz", "unknown cluster preset 'zzz'; known: dgx-a100, dgx-h100"),
    ],
)
def test_unknown_names_suggest_the_nearest(name: str, message: str) -> None:
    error = UnknownNameError("cluster preset", name, ["dgx-h100", "dgx-a100"])
    # A plain KeyError would show the message in quotes.
    assert str(error) == message
    assert isinstance(error, KeyError)


def test_schedules_in_the_wrong_case_are_recognised() -> None:
    error = UnknownNameError("schedule", "1f1b", ["GPipe", "1F1B"])
    assert "did you mean '1F1B'?" in str(error)


def test_an_infeasible_plan_says_why_and_what_would_fit() -> None:
    error = NoFeasiblePlanError(["a lacks 1 byte", "b too"], ["tp=2", "tp=4"])
    assert str(error) == (
        "no feasible plan: a lacks 1 byte; b too; would fit: tp=2 | tp=4"
    )
    assert error.reasons == ("a lacks 1 byte", "b too")
    assert error.remedies == ("tp=2", "tp=4")
    assert "would fit" not in str(NoFeasiblePlanError(["a"]))


def test_a_diagnosis_is_made_once_when_it_is_read() -> None:
    calls: list[int] = []

    def diagnose() -> tuple[tuple[str, ...], tuple[str, ...]]:
        calls.append(1)
        return ("too small",), ("more GPUs",)

    error = NoFeasiblePlanError(diagnose=diagnose)
    assert calls == []
    assert str(error) == "no feasible plan: too small; would fit: more GPUs"
    assert repr(error) == f"NoFeasiblePlanError({str(error)!r})"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert calls == [1]


def test_plain_errors_survive_a_pickle() -> None:
    """They cross process boundaries in pools."""
    error = pickle.loads(pickle.dumps(RankFailedError("rank 1 died")))
    assert type(error) is RankFailedError
    assert str(error) == "rank 1 died"


def test_errors_with_parts_come_through_a_pool_of_processes() -> None:
    unknown = UnknownNameError("law", "Q", ("A", "B"))
    nothing = NoFeasiblePlanError(("too small",), ("more GPUs",))
    for error in (unknown, nothing):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)
