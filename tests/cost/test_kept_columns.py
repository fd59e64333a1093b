"""Tests of prices that are kept by combination."""

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.cost import kept_columns
from planner.cost.kept_columns import KeptColumns

Index = NDArray[np.int64]


def columns(*pairs: tuple[int, int]) -> tuple[Index, Index]:
    tp, cp = np.array(pairs, dtype=np.int64).T
    return tp, cp


class Pricer:
    """Prices combinations, and counts how often."""

    def __init__(self, tp: Index, cp: Index) -> None:
        self.given, self.priced = (tp, cp), 0

    def __call__(self, rows: Index) -> dict[str, NDArray[np.float64]]:
        self.priced += len(rows)
        tp, cp = (column[rows].astype(float) for column in self.given)
        return {"sum": tp + cp, "both": np.stack([tp, cp])}


@pytest.fixture
def kept() -> KeptColumns:
    return KeptColumns({"sum": 0, "both": 1})


def test_each_combination_is_priced_once(kept: KeptColumns) -> None:
    asked = columns((1, 2), (4, 1), (1, 2))
    price = Pricer(*asked)
    found = kept.look_up(asked, price)
    assert found["sum"].tolist() == [3, 5, 3]
    assert found["both"].tolist() == [[1, 4, 1], [2, 1, 2]]
    assert price.priced == 2

    again = columns((8, 8), (4, 1))
    price = Pricer(*again)
    assert kept.look_up(again, price)["both"].tolist() == [[8, 4], [8, 1]]
    assert price.priced == 1


def test_what_is_known_in_another_order_is_put_in_the_order_asked(
    kept: KeptColumns,
) -> None:
    asked = columns((1, 1), (2, 1), (3, 1))
    kept.look_up(asked, Pricer(*asked))
    turned = columns((3, 1), (1, 1), (2, 1))
    price = Pricer(*turned)
    assert kept.look_up(turned, price)["sum"].tolist() == [4, 2, 3]
    assert price.priced == 0


def test_too_much_is_forgotten_and_priced_again(
    kept: KeptColumns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_columns, "_MOST_BYTES", 16)
    first = columns((1, 1), (2, 1))
    kept.look_up(first, Pricer(*first))
    mixed = columns((2, 1), (5, 1))
    price = Pricer(*mixed)
    assert kept.look_up(mixed, price)["sum"].tolist() == [3, 6]
    assert price.priced == 2
    price = Pricer(*first)
    assert kept.look_up(first, price)["sum"].tolist() == [2, 3]
    assert price.priced == 2
