"""Independent subnetwork training of quadratics: its limit, by all permutations."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from benchmarks.subnetwork_theory import (
    Quadratics,
    drawn,
    limit,
    main,
    optimum,
    rate_bound,
    run,
    step,
)

CASES = [(2, 1, True), (4, 1, True), (2, 2, True), (3, 2, True), (3, 1, False)]


def _literal(
    problem: Quadratics, x: NDArray[np.float64], rate: float, own: NDArray[np.int64]
) -> NDArray[np.float64]:
    """1/n sum [C_i x - rate S_i grad f_i(S_i x)], with matrices."""
    n, size = problem.vectors.shape
    total = np.zeros(size)
    for index in range(n):
        block = np.zeros((size, size))
        block[own[index], own[index]] = 1.0
        sketch = problem.scale * block
        gradient = problem.matrices[index] @ (sketch @ x) - problem.vectors[index]
        total += n * block @ x - rate * sketch @ gradient
    return total / n


@pytest.mark.parametrize(("n", "q", "precondition"), CASES)
def test_the_limit_is_where_the_expected_step_stays(
    n: int, q: int, precondition: bool
) -> None:
    """The mean of a step over all permutations, from the limit: no way at all."""
    problem = drawn(n, q, 1, precondition=precondition)
    there = limit(problem)
    after = []
    for order in permutations(range(n * q)):
        own = np.array(order).reshape(n, q)
        after.append(step(problem, there, 0.3, own))
        assert after[-1] == pytest.approx(_literal(problem, there, 0.3, own))
    assert np.mean(after, axis=0) == pytest.approx(there, rel=1e-10)
    # Nor is that the optimum.
    assert np.linalg.norm(there - optimum(problem)) > 0.1 * np.linalg.norm(there)


@pytest.mark.parametrize("n", [2, 8, 32])
def test_with_one_coordinate_each_it_is_that_of_the_paper(n: int) -> None:
    plain = drawn(n, 1, 2, precondition=False)
    diagonals = np.diagonal(plain.matrices, axis1=1, axis2=2)
    expected = (plain.vectors / np.sqrt(diagonals)).mean(0) / np.sqrt(n)
    assert limit(drawn(n, 1, 2)) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "q"), [(4, 1), (4, 2)])
def test_decayed_learning_rates_arrive_there(n: int, q: int) -> None:
    problem = drawn(n, q, 3)
    last = run(problem, lambda index: 1 / (2 + index / 2), 20_000, 4)[-1]
    assert last == pytest.approx(limit(problem), abs=0.02 * np.linalg.norm(last))


def test_without_vectors_no_step_shrinks_less_than_the_bound() -> None:
    for q in (1, 3):
        problem = drawn(4, q, 5, zero=True)
        lengths = np.linalg.norm(run(problem, lambda _: 0.4, 30, 6, 1.0), axis=1)
        bound = rate_bound(problem, 0.4)
        assert (lengths[1:] <= bound * lengths[:-1] * (1 + 1e-12)).all()
        assert bound < 1
        if q == 1:
            assert lengths[1:] == pytest.approx(0.6 * lengths[:-1])


def test_the_table_has_a_line_a_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "1", "--steps", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 9
