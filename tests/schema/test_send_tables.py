"""Send tables of every algorithm are right, and wrong ones are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from planner.errors import StrategyError
from planner.schema.send_tables import (
    ALGORITHMS,
    Send,
    SendTable,
    direct,
    halving,
    hierarchy,
    ring,
    tree,
)


def _every(ranks: int) -> dict[str, SendTable]:
    order = np.random.default_rng(ranks).permutation(ranks).tolist()
    hosts = [rank // 3 for rank in range(ranks)]
    sites = [host // 2 for host in hosts]
    return {
        "ring": ring(order),
        "halving": halving(order),
        "tree": tree(order, pieces=5),
        "direct": direct([1 / ranks] * ranks),
        "hosts": hierarchy(order, [hosts]),
        "sites": hierarchy(order, [hosts, sites]),
        "shares": hierarchy(order, [hosts], [1 / len(set(hosts))] * len(set(hosts))),
    }


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 13])
def test_algorithms_bring_every_sum_to_every_rank(ranks: int) -> None:
    for table in _every(ranks).values():
        table.check()


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_ring_and_halving_send_no_more_than_must_be_sent(ranks: int) -> None:
    least = 2 * (ranks - 1) / ranks * 1e6
    for table in (ring(range(ranks)), halving(range(ranks))):
        np.testing.assert_allclose(table.bytes_sent(1e6), least)


def test_numbers_of_steps_are_those_of_the_formulas() -> None:
    assert ring(range(8)).steps == 14
    assert halving(range(8)).steps == 6
    assert halving(range(9)).steps == 8
    assert direct([1 / 8] * 8).steps == 2
    assert tree(range(7), pieces=4).steps == 2 * 2 + 4 - 1
    assert hierarchy(range(8), [[0, 0, 0, 0, 1, 1, 1, 1]]).steps == 2 + 2


def test_a_rank_sends_by_the_part_that_it_sums() -> None:
    """A rank that sums a part w sends 1 - w of it, and w to each of the others."""
    parts = [0.5, 0.3, 0.2, 0.0]
    sent = direct(parts).bytes_sent(1.0)
    np.testing.assert_allclose(sent, [1 + 2 * part for part in parts])


def test_between_hosts_goes_what_is_left_of_a_tensor() -> None:
    """On 2 hosts of 4, each rank sends half of its quarter, twice."""
    table = hierarchy(range(8), [[0, 0, 0, 0, 1, 1, 1, 1]])
    far = [s for s in table.sends if s.source // 4 != s.destination // 4]
    sent = math.fsum(table.shares[s.chunk] for s in far)
    assert sent == pytest.approx(8 * 2 * (1 / 4) * (1 / 2))


def test_a_table_survives_json() -> None:
    for table in _every(7).values():
        assert SendTable.from_json(table.to_json()) == table


def _dropped(table: SendTable, index: int) -> SendTable:
    sends = [*table.sends[:index], *table.sends[index + 1 :]]
    return replace(table, sends=tuple(sends))


def test_no_message_of_a_ring_may_be_missing() -> None:
    table = ring(range(4))
    for index in range(len(table.sends)):
        with pytest.raises(StrategyError, match=r"lacks|holds nothing"):
            _dropped(table, index).check()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            SendTable(
                collective="all_gather",
                ranks=3,
                shares=(1.0,),
                owners=(0,),
                sends=(Send(0, 1, 2, 0, add=False),),
            ),
            "rank 1 sends chunk 0, of which it holds nothing",
        ),
        (
            SendTable(
                collective="all_reduce",
                ranks=2,
                shares=(1.0,),
                sends=(Send(0, 0, 1, 0, add=True), Send(1, 0, 1, 0, add=True)),
            ),
            r"rank 1 would count ranks \[0\] twice",
        ),
        (
            SendTable(
                collective="all_gather",
                ranks=3,
                shares=(1.0,),
                owners=(0,),
                sends=(
                    Send(0, 0, 1, 0, add=False),
                    Send(1, 0, 2, 0, add=False),
                    Send(1, 1, 2, 0, add=False),
                ),
            ),
            "rank 2 gets chunk 0 twice",
        ),
        (
            SendTable(
                collective="reduce_scatter",
                ranks=2,
                shares=(0.5, 0.5),
                owners=(0, 1),
                sends=(Send(0, 0, 1, 1, add=True),),
            ),
            r"rank 0 lacks what ranks \[1\] gave of chunk 0",
        ),
    ],
)
def test_wrong_tables_are_refused(table: SendTable, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        table.check()


def test_what_arrives_in_a_step_is_sent_in_the_next_at_the_earliest() -> None:
    sends = (Send(0, 0, 1, 0, add=False), Send(0, 1, 2, 0, add=False))
    table = SendTable(
        collective="all_gather", ranks=3, shares=(1.0,), owners=(0,), sends=sends
    )
    with pytest.raises(StrategyError, match="step 0: rank 1 sends chunk 0"):
        table.check()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"collective": "broadcast"}, "collective='broadcast'"),
        ({"ranks": 0}, "ranks=0"),
        ({"shares": (0.5, 0.4)}, "add up to 0.9"),
        ({"shares": (1.5, -0.5)}, "0 or more"),
        ({"owners": (0,)}, "1 owners of 1 chunks under all_reduce"),
        ({"sends": (Send(0, 0, 2, 0, add=True),)}, "destination 2 is not one of 2"),
        ({"sends": (Send(0, 0, 0, 0, add=True),)}, "sends to another"),
    ],
)
def test_numbers_out_of_range_are_refused(
    asked: dict[str, object], message: str
) -> None:
    plain = {"collective": "all_reduce", "ranks": 2, "shares": (1.0,)}
    with pytest.raises(StrategyError, match=message):
        SendTable(**{**plain, **asked})  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[]", "{}", '{"collective": 1}', "nonsense"])
def test_text_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(StrategyError, match="not a send table"):
        SendTable.from_json(text)


def test_orders_name_each_rank_once() -> None:
    for make in (ring, halving, tree):
        with pytest.raises(StrategyError, match=r"order=\(0, 0, 2\)"):
            make([0, 0, 2])
    with pytest.raises(StrategyError, match="2 domains for 3 ranks"):
        hierarchy(range(3), [[0, 1]])
    with pytest.raises(StrategyError, match="3 fractions for 2 domains"):
        hierarchy(range(4), [[0, 0, 1, 1]], [0.2, 0.3, 0.5])
    with pytest.raises(StrategyError, match="pieces=0"):
        tree(range(3), pieces=0)
    assert set(ALGORITHMS) == {"ring", "halving", "direct", "tree", "hierarchy"}


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_pieces_are_sums_of_as_many_bytes_each_a_step_later(pieces: int) -> None:
    parts = [0.5, 0.25, 0.25, 0.0]
    for one, whole in (
        (direct(parts, pieces), direct(parts)),
        (
            hierarchy(range(4), [[0, 0, 1, 1]], [0.75, 0.25], pieces),
            hierarchy(range(4), [[0, 0, 1, 1]], [0.75, 0.25]),
        ),
    ):
        one.check()
        assert one.steps == whole.steps + pieces - 1
        assert one.bytes_sent(1.0) == pytest.approx(whole.bytes_sent(1.0))


def test_no_pieces_are_refused() -> None:
    with pytest.raises(StrategyError, match="pieces=0; use 1 or more"):
        direct([0.5, 0.5], 0)
