from __future__ import annotations

import itertools

import pytest

from planner.errors import StrategyError, UnknownNameError
from planner.schema import Mesh, Strategy
from planner.schema.schedules import schedule_names, schedule_spec
from planner.simulate import actions, rank_of_stages
from tests.simulate.cases import legal, violation
from tests.simulate.torch_orders import executed_order, torch_order

PPS = (1, 2, 3, 4, 5, 8)
VIRTUALS = (1, 2, 3, 4)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 10, 12, 16, 20)
SINGLE = ("GPipe", "1F1B")
MULTI = tuple(name for name in schedule_names() if name not in SINGLE)


def _ours(case: tuple[str, int, int, int]) -> list[list[str]]:
    table = actions(*case)
    return [[str(action) for action in table.rank(r)] for r in range(table.pp)]


@pytest.mark.parametrize("schedule", MULTI)
def test_order_is_exactly_torchs(schedule: str) -> None:
    cases = [case for case in legal(PPS, VIRTUALS, MICROBATCHES) if case[0] == schedule]
    assert len(cases) >= 20
    for case in cases:
        theirs = torch_order(*case)
        assert _ours(case) == [theirs[rank] for rank in range(case[1])], case


@pytest.mark.parametrize("schedule", SINGLE)
def test_order_is_exactly_what_torch_runs(schedule: str) -> None:
    cases = [case for case in legal(PPS, (1,), MICROBATCHES) if case[0] == schedule]
    assert len(cases) >= 20
    for case in cases:
        _, pp, _, num_microbatches = case
        assert _ours(case) == executed_order(schedule, pp, num_microbatches), case


@pytest.mark.parametrize("schedule", schedule_names())
def test_legality_agrees_with_torch(schedule: str) -> None:
    verdicts = set()
    for pp, virtual, microbatches in itertools.product(PPS, VIRTUALS, MICROBATCHES):
        if schedule_spec(schedule).single_stage and virtual > 1:
            continue
        try:
            if schedule in SINGLE:
                executed_order(schedule, pp, microbatches)
            else:
                torch_order(schedule, pp, virtual, microbatches)
            refused = False
        except ValueError:
            refused = True
        reason = violation(schedule, pp, virtual, microbatches)
        assert (reason is not None) is refused, (pp, virtual, microbatches, reason)
        verdicts.add(refused)
    assert False in verdicts


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("1F1B", 8, 1, 4), ["num_microbatches=4", "8 stages", "use 8 or more"]),
        (("GPipe", 4, 2, 8), ["virtual_stages=2", "use 1"]),
        (("ZBVZeroBubble", 4, 1, 8), ["virtual_stages=1", "use 2"]),
        (("DualPipeV", 4, 2, 7), ["num_microbatches=7", "use 8 or more"]),
        (("Interleaved1F1B", 4, 2, 11), ["num_microbatches=11", "use 8"]),
        (("Eager1F1B", 4, 2, 8), ["virtual_stages=2", "use 1 or Interleaved1F1B"]),
        (("Eager1F1B", 4, 1, 9), ["num_microbatches=9", "use 8"]),
        (("GPipe", 0, 1, 8), ["pp=0", "1 or more"]),
        (("GPipe", 1, 1, 0), ["num_microbatches=0", "1 or more"]),
    ],
)
def test_reason_names_value_rule_and_remedy(
    case: tuple[str, int, int, int], words: list[str]
) -> None:
    reason = violation(*case)
    assert reason is not None
    assert "\n" not in reason
    for word in words:
        assert word in reason
    with pytest.raises(StrategyError, match=words[0]):
        actions(*case)


def test_remedies_are_legal() -> None:
    assert violation("Interleaved1F1B", 4, 2, 8) is None
    assert violation("DualPipeV", 4, 2, 8) is None
    assert violation("1F1B", 8, 1, 8) is None


def test_unknown_schedule_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'GPipe'"):
        violation("gpipe", 2, 1, 4)


@pytest.mark.parametrize("case", legal((1, 2, 4), (1, 2, 3), (8, 12)))
def test_every_microbatch_runs_once_on_the_rank_of_its_stage(
    case: tuple[str, int, int, int],
) -> None:
    table = actions(*case)
    schedule, pp, virtual, microbatches = case
    strategy = Strategy(mesh=Mesh(pp=pp), schedule=schedule, virtual_stages=virtual)
    seen: dict[str, list[tuple[int, int]]] = {"F": [], "grad": [], "weight": []}
    for rank in range(pp):
        for action in table.rank(rank):
            assert strategy.rank_of_stage(action.stage) == rank
            place = (action.stage, action.microbatch)
            letter = action.kind.letter
            if letter == "OVERLAP_F_B":
                seen["F"].append(place)
                place = (action.paired_stage, action.paired_microbatch)
                assert strategy.rank_of_stage(action.paired_stage) == rank
                letter = "B"
            if letter == "F":
                seen["F"].append(place)
            if letter in "BI":
                seen["grad"].append(place)
            if letter in "BW":
                seen["weight"].append(place)
    everything = sorted(itertools.product(range(pp * virtual), range(microbatches)))
    for places in seen.values():
        assert sorted(places) == everything


def test_stage_map_loops_or_folds() -> None:
    assert rank_of_stages("Interleaved1F1B", 3, 2).tolist() == [0, 1, 2, 0, 1, 2]
    assert rank_of_stages("ZBVZeroBubble", 3, 2).tolist() == [0, 1, 2, 2, 1, 0]


def test_tables_are_kept_and_cannot_be_changed() -> None:
    table = actions("DualPipeV", 4, 2, 8)
    assert actions("DualPipeV", 4, 2, 8) is table
    with pytest.raises(ValueError, match="read-only"):
        table.microbatch[0] = 3


def test_no_such_rank() -> None:
    with pytest.raises(StrategyError, match="rank=4"):
        list(actions("GPipe", 4, 1, 8).rank(4))
