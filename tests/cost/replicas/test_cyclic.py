"""Gradients handed from copy to copy, against a simulation of the messages."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from planner.cluster import Cluster
from planner.cost import Cost, CostModel
from planner.cost.replicas.cyclic import cycle_seconds
from planner.cost.result import PARTS
from planner.schema import Precision
from planner.schema.methods.cyclic import Cyclic
from planner.space import Regime, build_strategy
from tests.cost.made import device, hosts, row, setting_for, table_of, uniform_graph

FULL = Precision(compute="float32")
GRAPH = uniform_graph(8)
WEIGHTS = 4.0 * 16 * 512**2
#: 0.1 GB/s between hosts.
SLOW = {n: hosts((n, 1, device()), between=1e8) for n in (2, 4, 8)}
VERSIONS = [Cyclic(version="v1"), Cyclic(version="v2")]
Key = tuple[str, int, int, int]


class Cycle:
    """Copies as the executor runs them; a send begins when its receive was posted.

    Args:
        settings: Version.
        copies: How many.
        forward_s: Of one stage; likewise backward_s.
        hop_s: One message.
        steps: Of each copy.

    Attributes:
        ends: Time at which each copy ended each step.
    """

    def __init__(
        self,
        settings: Cyclic,
        copies: int,
        forward_s: float,
        backward_s: float,
        hop_s: float,
        steps: int,
    ) -> None:
        self.settings, self.copies, self.hop_s = settings, copies, hop_s
        self.seconds, self.steps = (forward_s, backward_s), steps
        self.now = [0.0] * copies
        self.ends: list[list[float]] = [[] for _ in range(copies)]
        self._issued: dict[Key, float] = {}
        self._posted: dict[Key, float] = {}
        self._last: list[Key | None] = [None] * copies
        waiting = {copy: self._run(copy) for copy in range(copies)}
        blocked: dict[int, Key | None] = dict.fromkeys(waiting, None)
        while waiting:
            before = len(self._issued) + len(self._posted), len(waiting)
            for copy in list(waiting):
                while (key := blocked[copy]) is None or self._arrival(key) is not None:
                    if key is not None:
                        self.now[copy] = max(self.now[copy], self._arrival(key) or 0.0)
                    try:
                        blocked[copy] = next(waiting[copy])
                    except StopIteration:
                        del waiting[copy]
                        break
            after = len(self._issued) + len(self._posted), len(waiting)
            assert after != before, f"all wait: {blocked}"

    @property
    def period_s(self) -> float:
        """Seconds of a step when all are under way; the slowest copy's."""
        half = self.steps // 2
        return max((e[-1] - e[half - 1]) / (self.steps - half) for e in self.ends)

    def _arrival(self, key: Key) -> float | None:
        if key in self._issued and key in self._posted:
            return max(self._issued[key], self._posted[key]) + self.hop_s
        return None

    def _send(self, copy: int, key: Key) -> Iterator[Key]:
        if (last := self._last[copy]) is not None:
            yield last
        self._issued[key] = self.now[copy]
        self._last[copy] = key

    def _post(self, copy: int, kind: str, stage: int, step: int) -> None:
        self._posted[kind, stage, step, copy] = self.now[copy]

    def _send_sum(self, copy: int, stage: int, step: int) -> Iterator[Key]:
        route = [self.copies - 1, *self.settings.route(stage, self.copies)]
        place = route.index(copy) + 1
        if place < self.copies:
            yield from self._send(copy, ("sum", stage, step, route[place]))

    def _run(self, copy: int) -> Iterator[Key]:
        for step in range(self.steps):
            if copy > 0:
                self._post(copy, "partial", self.copies - 1, step)
            for stage in range(self.copies):
                if copy < self.copies - 1:
                    yield from self._forward(copy, stage, step)
                else:
                    yield from self._forward_of_last(copy, stage, step)
            for stage in reversed(range(self.copies)):
                yield from self._backward(copy, stage, step)
            self.ends[copy].append(self.now[copy])

    def _forward(self, copy: int, stage: int, step: int) -> Iterator[Key]:
        late = not self.settings.is_fresh(copy, stage, self.copies)
        took = step - 1 - late
        if took >= 0:
            yield ("sum", stage, took, copy)
        if late and took >= -1:
            self._post(copy, "sum", stage, took + 1)
        self.now[copy] += self.seconds[0]
        if took >= 0:
            yield from self._send_sum(copy, stage, took)

    def _forward_of_last(self, copy: int, stage: int, step: int) -> Iterator[Key]:
        self.now[copy] += self.seconds[0]
        if step and not self.settings.hurries(stage, self.copies):
            yield from self._send_sum(copy, stage, step - 1)

    def _backward(self, copy: int, stage: int, step: int) -> Iterator[Key]:
        self.now[copy] += self.seconds[1]
        if copy > 0:
            yield ("partial", stage, step, copy)
        if copy < self.copies - 1:
            if self.settings.is_fresh(copy, stage, self.copies):
                self._post(copy, "sum", stage, step)
            yield from self._send(copy, ("partial", stage, step, copy + 1))
        elif self.settings.hurries(stage, self.copies):
            yield from self._send_sum(copy, stage, step)
        if stage and copy > 0:
            self._post(copy, "partial", stage - 1, step)


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("settings", VERSIONS, ids=str)
def test_no_copy_waits_for_ever(settings: Cyclic, copies: int) -> None:
    """Each sends one message at a time, which begins when its receiver asks for it."""
    for hop_s in (0.0, 0.5, 3.0):
        found = Cycle(settings, copies, 1.0, 2.0, hop_s, steps=6)
        assert all(len(ends) == 6 for ends in found.ends)


@pytest.mark.parametrize("copies", [2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("settings", VERSIONS, ids=str)
def test_a_step_takes_what_messages_let_it(settings: Cyclic, copies: int) -> None:
    """To the digit while messages are hidden, and within a fifth up to C/N each."""
    forward_s, backward_s = 1.0, 2.0
    for hop_s in (0.0, 0.1, 0.5, 0.9, 1.2, 1.5, 2.0, 3.0):
        found = Cycle(settings, copies, forward_s, backward_s, hop_s, steps=60)
        (priced,) = cycle_seconds(
            settings,
            np.array([copies]),
            np.array([forward_s * copies]),
            np.array([backward_s * copies]),
            np.array([hop_s]),
        )
        exact = hop_s <= forward_s or copies == 2
        assert found.period_s == pytest.approx(priced, rel=1e-6 if exact else 0.2)
        if hop_s <= forward_s:
            assert priced == pytest.approx(3.0 * copies)


@pytest.mark.parametrize("settings", VERSIONS, ids=str)
def test_no_copy_sends_its_gradients_more_than_twice(settings: Cyclic) -> None:
    """A partial sum of each stage, and its sum at most once; all copies get it."""
    for copies in range(2, 17):
        for stage in range(copies):
            route = settings.route(stage, copies)
            assert sorted(route) == list(range(copies - 1))
            # Who needs fresh weights first has them straight from the last copy.
            fresh = [settings.is_fresh(one, stage, copies) for one in route]
            assert fresh == sorted(fresh, reverse=True)
            assert sum(fresh) == (stage if settings.version == "v2" else 0)


def _priced(
    synchronisation: str, cluster: Cluster, **degrees: int
) -> tuple[Cost, dict[str, float], float]:
    """One strategy by simulation, then its row of a table by parts and memory."""
    regime, graph = Regime.from_pins({"synchronisation": synchronisation}), GRAPH
    context = setting_for(graph, cluster, regime=regime, precision=FULL)
    values = row(**degrees)
    strategy = build_strategy(
        values,
        unit_names=graph.unit_names,
        bounds=[0, len(graph.unit_names)],
        sharding={},
        precision=FULL,
        regime=regime,
    )
    model = CostModel(context)
    table = model.table(table_of(values))
    parts = dict(zip(PARTS, table.parts_s[0].tolist(), strict=True))
    return model.cost(strategy), parts, float(table.memory_bytes[0])


@pytest.mark.parametrize("copies", [2, 4, 8])
@pytest.mark.parametrize("preset", ["cyclic-v1", "cyclic-v2"])
def test_a_copy_sends_its_gradients_twice(preset: str, copies: int) -> None:
    cost, parts, memory = _priced(preset, SLOW[copies], dp_replicate=copies)
    plain, _, plain_memory = _priced("all_reduce", SLOW[copies], dp_replicate=copies)
    skipped = 1 / copies if preset == "cyclic-v2" else 0.0
    share = 1.0 if copies == 2 else 2.0 - skipped
    assert cost.collective_bytes == {"send": pytest.approx(share * WEIGHTS)}
    assert cost.link_bytes["dp"] == pytest.approx(share * WEIGHTS)
    assert parts["data_parallel"] == pytest.approx(cost.breakdown_s["data_parallel"])
    kept = WEIGHTS / copies * (2 if preset == "cyclic-v1" else 1)
    grown = cost.memory.gradients - plain.memory.gradients
    assert grown == pytest.approx(kept)
    assert memory - plain_memory == pytest.approx(kept, abs=1.0)
    assert cost.memory.activations >= 3 * WEIGHTS / copies


@pytest.mark.parametrize("preset", ["cyclic-v1", "cyclic-v2"])
def test_messages_hide_under_stages(preset: str) -> None:
    """All of them on a fast network, as much as there is compute on a slow one."""
    fast = hosts((4, 1, device()), between=1e12)
    cost, *_ = _priced(preset, fast, dp_replicate=4)
    assert cost.breakdown_s["data_parallel"] == 0
    cost, *_ = _priced(preset, SLOW[4], dp_replicate=4)
    waits = cost.breakdown_s["data_parallel"] + cost.breakdown_s["compute"]
    assert waits == pytest.approx(8 * (WEIGHTS / 4) / 1e8, rel=0.05)


def test_accumulation_saves_more_memory_than_a_cycle() -> None:
    """One device runs the batch in parts; its activations are one part's."""
    whole, *_ = _priced("all_reduce", SLOW[2], dp_replicate=2, microbatch_size=8)
    cycle, *_ = _priced("cyclic-v2", SLOW[2], dp_replicate=2, microbatch_size=8)
    parts, *_ = _priced(
        "all_reduce", SLOW[2], dp_replicate=2, microbatch_size=2, num_microbatches=4
    )
    assert cycle.memory.activations == pytest.approx(whole.memory.activations, rel=0.2)
    assert parts.memory.activations < 0.5 * cycle.memory.activations


ZERO = Cyclic(sharded=True)


class ShardedCycle(Cycle):
    """Copies that hand weights on, too, as the executor runs them.

    Arguments as for :class:`Cycle`; ``hop_s`` is for a stage's weights or gradient.
    """

    _both: set[Key]
    _sent: list[list[Key]]

    def _arrival(self, key: Key) -> float | None:
        if key in self._issued and key in self._posted:
            begin = max(self._issued[key], self._posted[key])
            return begin + self.hop_s * (1 + (key in self._both))
        return None

    def _run(self, copy: int) -> Iterator[Key]:
        if copy == 0:
            self._both, self._sent = set(), [[] for _ in range(self.copies)]
        last = self.copies - 1
        for step in range(self.steps):
            comes = self._ask(copy, "forward", 0, step)
            for stage in range(self.copies):
                came, comes = comes, self._ask_next(copy, stage, step)
                if came is not None:
                    yield came
                self.now[copy] += self.seconds[0]
                yield from self._finish(copy)
                if self._owner(stage) != (copy + 1) % self.copies:
                    self._begin(copy, "forward", stage, step)
            for stage in reversed(range(self.copies)):
                came, comes = comes, None
                if stage:
                    comes = self._ask(copy, "backward", stage - 1, step)
                kept = stage == last or self._owner(stage) == copy
                if came is not None and not kept:
                    yield came
                self.now[copy] += self.seconds[1]
                if came is not None and kept:
                    yield came
                yield from self._finish(copy)
                self._end_backward(copy, stage, step)
            self.ends[copy].append(self.now[copy])
        # At a rest what was for a next step is received.
        if copy == 0:
            for stage in range(last):
                self._post(0, "forward", stage, self.steps)
                self._post(0, "backward", stage, self.steps)
        self._post(copy, "sum", self._owner(copy), self.steps - 1)

    def _owner(self, stage: int) -> int:
        return ZERO.owner(stage, self.copies)

    def _ask(self, copy: int, kind: str, stage: int, step: int) -> Key | None:
        """Message that a copy begins to receive; old weights are there at first."""
        kept = stage == self.copies - 1 or self._owner(stage) == copy
        if kind == "forward" and self._owner(stage) == copy:
            kind, step = "sum", step - 1
            if step < 0 or copy == self.copies - 1:
                return None
        elif copy == 0 and (step == 0 or (kind == "backward" and kept)):
            return None
        self._post(copy, kind, stage, step)
        return kind, stage, step, copy

    def _ask_next(self, copy: int, stage: int, step: int) -> Key | None:
        if stage == self.copies - 1:
            return self._ask(copy, "backward", stage, step)
        return self._ask(copy, "forward", stage + 1, step)

    def _end_backward(self, copy: int, stage: int, step: int) -> None:
        last, following = self.copies - 1, (copy + 1) % self.copies
        weights = stage < last and self._owner(stage) != following
        if copy < last:
            self._begin(copy, "backward", stage, step, both=weights)
            return
        if self._owner(stage) != copy:
            self._issue(copy, ("sum", stage, step, self._owner(stage)))
        if weights:
            self._begin(copy, "backward", stage, step)

    def _begin(
        self, copy: int, kind: str, stage: int, step: int, *, both: bool = False
    ) -> None:
        following = (copy + 1) % self.copies
        key = kind, stage, step + (following == 0), following
        self._both |= {key} if both else set()
        self._issue(copy, key)

    def _issue(self, copy: int, key: Key) -> None:
        self._issued[key] = self.now[copy]
        self._sent[copy].append(key)

    def _finish(self, copy: int) -> Iterator[Key]:
        """Wait until what was sent a slot ago has arrived."""
        yield from self._sent[copy]
        self._sent[copy] = []


@pytest.mark.parametrize("backward_s", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("copies", [2, 3, 4, 5, 8, 16])
def test_a_sharded_step_takes_what_messages_let_it(
    copies: int, backward_s: float
) -> None:
    """Within a fifth, however long a message is; no copy waits for ever."""
    for hop_s in (0.0, 0.1, 0.3, 0.5, 1.0, 1.5, 2.0, 3.0, 10.0):
        found = ShardedCycle(ZERO, copies, 1.0, backward_s, hop_s, steps=40)
        (priced,) = cycle_seconds(
            ZERO,
            np.array([copies]),
            np.array([1.0 * copies]),
            np.array([backward_s * copies]),
            np.array([hop_s]),
        )
        assert found.period_s == pytest.approx(priced, rel=0.2), hop_s


@pytest.mark.parametrize("copies", [2, 4, 8])
def test_sharded_copies_hold_a_stage_each(copies: int) -> None:
    """Weights, states and traffic are those of ZeRO 3, but for few stages at work."""
    degrees = {"dp_replicate": copies, "microbatch_size": 64}
    cost, parts, memory = _priced("cyclic-zero", SLOW[copies], **degrees)
    plain, _, plain_memory = _priced("all_reduce", SLOW[copies], **degrees)
    shards = {"dp_shard": copies, "zero_stage": 3, "microbatch_size": 64}
    zero, *_ = _priced("all_reduce", SLOW[copies], **shards)
    states = WEIGHTS * 2
    assert plain.memory.optimizer == pytest.approx(states)
    assert cost.memory.optimizer == pytest.approx(states / copies)
    assert cost.memory.optimizer == pytest.approx(zero.memory.optimizer)
    held = plain.memory.parameters - WEIGHTS * (1 - min(copies, 3) / copies)
    assert cost.memory.parameters == pytest.approx(held)
    assert cost.memory.gradients == pytest.approx(WEIGHTS * 2 / copies)
    saved = states * (1 - 1 / copies) + plain.memory.parameters - held
    saved += WEIGHTS * (1 - 2 / copies)
    assert plain_memory - memory == pytest.approx(saved, abs=1.0)
    sent = 3 * (1 - 1 / copies) * WEIGHTS
    assert cost.collective_bytes == {"send": pytest.approx(sent)}
    assert cost.link_bytes["dp"] == pytest.approx(sent)
    assert zero.link_bytes["dp"] == pytest.approx(sent, rel=0.01)
    assert parts["data_parallel"] == pytest.approx(cost.breakdown_s["data_parallel"])
