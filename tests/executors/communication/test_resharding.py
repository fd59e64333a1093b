"""Resharding by ranks that are threads of this process."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executors.communication import resharding as module
from executors.communication.resharding import Resharder
from planner.errors import ExecutionError
from planner.schema.resharding import MeshLayout, Resharding, unit_tasks
from planner.simulate.resharding import naive_resharding, plan_resharding
from tests.simulate.resharding_cases import CASES

_TIMEOUT_S = 60


class _Loopback:
    """Messages between threads, in order for each pair of ranks."""

    def __init__(self) -> None:
        self._queues: dict[Any, queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)
        self._lock = threading.Lock()

    def between(self, source: int, to: int) -> queue.Queue[torch.Tensor]:
        # Two threads that ask first at once would get two queues.
        with self._lock:
            return self._queues[source, to]

    def of(self, rank: int) -> Any:
        outer = self

        class Wire:
            def send(self, tensor: torch.Tensor, to: int) -> None:
                outer.between(rank, to).put(tensor.clone())

            def receive(self, tensor: torch.Tensor, source: int) -> None:
                tensor.copy_(outer.between(source, rank).get(timeout=_TIMEOUT_S))

        return Wire()


def _part(whole: torch.Tensor, layout: MeshLayout, device: int) -> torch.Tensor:
    box = layout.tile(device, whole.shape)
    return whole[tuple(slice(start, stop) for start, stop in box)]


def _run(planned: Resharding, whole: torch.Tensor) -> list[tuple[Any, Resharder]]:
    """Tile and resharder of every rank, those of the source mesh first."""
    sending = planned.source.num_devices
    world = sending + planned.destination.num_devices
    loopback = _Loopback()
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        mine = Resharder(
            planned,
            range(sending),
            range(sending, world),
            rank=rank,
            wire=loopback.of(rank),
        )
        local = _part(whole, planned.source, rank) if rank < sending else None
        found[rank] = mine.run(local, dtype=whole.dtype), mine

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_TIMEOUT_S)
    return [found[rank] for rank in range(world)]


@pytest.mark.parametrize("plan", [plan_resharding, naive_resharding])
@pytest.mark.parametrize("number", CASES)
def test_every_rank_gets_its_part_and_no_byte_crosses_twice(
    number: int, plan: Callable[..., Resharding], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 96)
    case = CASES[number]
    shape = (48 if number == 6 else 16, 16, 10)
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    planned = plan(shape, case.source, case.destination)
    found = _run(planned, whole)
    sending = case.source.num_devices
    assert all(tile is None for tile, _ in found[:sending])
    for device, (tile, _) in enumerate(found[sending:]):
        assert torch.equal(tile, _part(whole, case.destination, device))
    sizes = [
        (4 * task.elements, {case.destination.host_of(d) for d in task.receivers})
        for task in unit_tasks(shape, case.source, case.destination)
    ]
    # What leaves the source is each unit task once; each host gets its parts once.
    left = sum(mine.bytes_across_hosts for _, mine in found[:sending])
    assert left == sum(size for size, _ in sizes)
    across = sum(mine.bytes_across_hosts for _, mine in found)
    assert across == sum(size * len(hosts) for size, hosts in sizes)


def test_ranks_and_tiles_must_fit() -> None:
    layout = MeshLayout(hosts=1, devices_per_host=2, split=("d",))
    planned = plan_resharding((4,), layout, layout)
    wire = _Loopback().of(0)
    with pytest.raises(ExecutionError, match="1 source_ranks for a mesh of 2"):
        Resharder(planned, [0], [2, 3], rank=0, wire=wire)
    with pytest.raises(ExecutionError, match="name a rank twice"):
        Resharder(planned, [0, 1], [1, 2], rank=0, wire=wire)
    mine = Resharder(planned, [0, 1], [2, 3], rank=0, wire=wire)
    for local in (None, torch.zeros(3)):
        with pytest.raises(ExecutionError, match=r"a rank that holds \(2,\)"):
            mine.run(local)
    outside = Resharder(planned, [0, 1], [2, 3], rank=7, wire=wire)
    assert outside.run() is None
