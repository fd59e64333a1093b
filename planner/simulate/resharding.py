"""Order of the unit tasks of a resharding between two meshes, and its time.

Every host has one network interface, and sends or receives one unit task at a time;
receivers that share a host cost nothing more. A task begins when its sender's host and
all of its receivers' hosts are free, and lasts its bytes over the bandwidth. Which of
the hosts that hold it sends a task, and the order of tasks, decide how long all take.

Source: Zhuang et al. 2023, arXiv 2211.05322, sections 3.2 and 3.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from planner.errors import StrategyError
from planner.schema.resharding import (
    MeshLayout,
    Resharding,
    Transfer,
    UnitTask,
    unit_tasks,
)

__all__ = [
    "ReshardingTime",
    "lower_bound_s",
    "makespan_s",
    "naive_resharding",
    "per_device_makespan_s",
    "plan_resharding",
    "size_balanced_resharding",
]

#: Choices of a next task that a search tries unless told otherwise.
_BUDGET = 5_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardingTime:
    """Seconds of a resharding.

    Attributes:
        element_bytes: Bytes of an element.
        bytes_per_s: Bandwidth of a host's network interface, each way.

    Raises:
        StrategyError: If one of them is not positive.
    """

    element_bytes: int
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.element_bytes < 1 or not self.bytes_per_s > 0:
            raise StrategyError(
                f"element_bytes={self.element_bytes}, bytes_per_s={self.bytes_per_s}; "
                f"give numbers above 0"
            )

    def of(self, task: UnitTask) -> float:
        """Seconds of one unit task."""
        return task.elements * self.element_bytes / self.bytes_per_s


class _Clocks:
    """Times from which on hosts are free, those of the source mesh first."""

    def __init__(self, source: MeshLayout, destination: MeshLayout) -> None:
        self.source, self.destination = source, destination
        self.free = [0.0] * (source.hosts + destination.hosts)

    def hosts(self, transfer: Transfer) -> list[int]:
        """Hosts that take part."""
        sender = self.source.host_of(transfer.sender)
        return [sender, *_receiving(transfer.task, self.source, self.destination)]

    def run(self, hosts: Sequence[int], seconds: float) -> None:
        """Occupy hosts from when the last of them is free."""
        end = max(self.free[host] for host in hosts) + seconds
        for host in hosts:
            self.free[host] = end


def _receiving(
    task: UnitTask, source: MeshLayout, destination: MeshLayout
) -> tuple[int, ...]:
    """Hosts of the receivers, counted behind those of the source mesh."""
    hosts = {destination.host_of(device) for device in task.receivers}
    return tuple(source.hosts + host for host in sorted(hosts))


def makespan_s(resharding: Resharding, time: ReshardingTime) -> float:
    """Seconds until the last unit task is done."""
    clocks = _Clocks(resharding.source, resharding.destination)
    for transfer in resharding.transfers:
        clocks.run(clocks.hosts(transfer), time.of(transfer.task))
    return max(clocks.free)


def per_device_makespan_s(resharding: Resharding, time: ReshardingTime) -> float:
    """Seconds if each receiver is sent its part in a message of its own."""
    clocks = _Clocks(resharding.source, resharding.destination)
    for transfer in resharding.transfers:
        sender = resharding.source.host_of(transfer.sender)
        for device in transfer.task.receivers:
            host = resharding.source.hosts + resharding.destination.host_of(device)
            clocks.run([sender, host], time.of(transfer.task))
    return max(clocks.free)


def lower_bound_s(
    shape: Sequence[int],
    source: MeshLayout,
    destination: MeshLayout,
    time: ReshardingTime,
) -> float:
    """Seconds that no order of unit tasks is shorter than.

    What the busiest receiving host gets; what a sending host alone can send; and all
    that is sent over the number of sending hosts.
    """
    tasks = unit_tasks(shape, source, destination)
    load = [0.0] * (source.hosts + destination.hosts)
    total = 0.0
    for task in tasks:
        seconds = time.of(task)
        total += seconds
        for host in _receiving(task, source, destination):
            load[host] += seconds
        holding = {source.host_of(device) for device in task.senders}
        if len(holding) == 1:
            load[holding.pop()] += seconds
    return max(*load, total / source.hosts)


def naive_resharding(
    shape: Sequence[int], source: MeshLayout, destination: MeshLayout
) -> Resharding:
    """Return unit tasks as they come, each sent by the first device that holds it."""
    tasks = unit_tasks(shape, source, destination)
    return Resharding(
        shape=tuple(shape),
        source=source,
        destination=destination,
        transfers=tuple(Transfer(task=one, sender=one.senders[0]) for one in tasks),
    )


def size_balanced_resharding(
    shape: Sequence[int], source: MeshLayout, destination: MeshLayout
) -> Resharding:
    """Return unit tasks as they come, sent by the host that has sent least so far."""
    load = [0] * source.hosts
    transfers = []
    for task in unit_tasks(shape, source, destination):
        sender = min(task.senders, key=lambda one: (load[source.host_of(one)], one))
        load[source.host_of(sender)] += task.elements
        transfers.append(Transfer(task=task, sender=sender))
    return Resharding(
        shape=tuple(shape),
        source=source,
        destination=destination,
        transfers=tuple(transfers),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alike:
    """Unit tasks between the same hosts and of the same size: any may go first."""

    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    seconds: float
    tasks: list[UnitTask] = field(default_factory=list)


def _grouped(
    tasks: Sequence[UnitTask],
    source: MeshLayout,
    destination: MeshLayout,
    time: ReshardingTime,
) -> list[_Alike]:
    found: dict[tuple[object, ...], _Alike] = {}
    for task in tasks:
        senders = tuple(sorted({source.host_of(one) for one in task.senders}))
        receivers = _receiving(task, source, destination)
        key = (senders, receivers, task.elements)
        made = _Alike(senders=senders, receivers=receivers, seconds=time.of(task))
        found.setdefault(key, made).tasks.append(task)
    return list(found.values())


class _Search:
    """Depth-first search over the next task and its sender, with lower bounds.

    Args:
        groups: Tasks that are alike.
        sending: Sending hosts.
        hosts: All hosts.
        bound: Seconds that end the search.
        budget: Choices to try at most.
    """

    def __init__(
        self,
        groups: list[_Alike],
        *,
        sending: int,
        hosts: int,
        bound: float,
        budget: int,
    ) -> None:
        self._groups, self._sending, self._bound = groups, sending, bound
        self._left = [len(group.tasks) for group in groups]
        self._free = [0.0] * hosts
        self._steps: list[tuple[int, int]] = []
        self._budget = budget
        self.best: tuple[tuple[int, int], ...] = ()
        self.seconds = float("inf")

    def run(self) -> None:
        """Search until the bound is met, all is tried, or the budget is spent.

        An order is found even if the budget is smaller than the number of tasks.
        """
        # One choice iterator for each task that has been placed, and the times before.
        stack = [(self._choices(), list(self._free))]
        while stack:
            choices, before = stack[-1]
            self._free = list(before)
            step = next(choices, None)
            over = self._budget <= 0 and self.best
            if step is None or over or self._done():
                stack.pop()
                if self._steps:
                    self._left[self._steps.pop()[0]] += 1
                continue
            self._budget -= 1
            self._place(step)
            if not any(self._left):
                self._note()
            elif self._least() < self.seconds * (1 - 1e-12):
                stack.append((self._choices(), list(self._free)))
                continue
            self._left[self._steps.pop()[0]] += 1

    def _done(self) -> bool:
        return self.seconds <= self._bound * (1 + 1e-12)

    def _place(self, step: tuple[int, int]) -> None:
        index, sender = step
        group = self._groups[index]
        end = self._start(group, sender) + group.seconds
        for host in (sender, *group.receivers):
            self._free[host] = end
        self._left[index] -= 1
        self._steps.append(step)

    def _note(self) -> None:
        if max(self._free) < self.seconds:
            self.seconds, self.best = max(self._free), tuple(self._steps)

    def _start(self, group: _Alike, sender: int) -> float:
        return max(self._free[host] for host in (sender, *group.receivers))

    def _loads(self) -> tuple[list[float], float]:
        """Seconds that hosts surely have before them, and those of all tasks."""
        load, total = [0.0] * len(self._free), 0.0
        for group, left in zip(self._groups, self._left, strict=True):
            seconds = group.seconds * left
            total += seconds
            for host in group.receivers:
                load[host] += seconds
            if len(group.senders) == 1:
                load[group.senders[0]] += seconds
        return load, total

    def _least(self) -> float:
        """Seconds that the tasks placed so far allow at best."""
        load, total = self._loads()
        busy = max(free + own for free, own in zip(self._free, load, strict=True))
        return max(busy, (sum(self._free[: self._sending]) + total) / self._sending)

    def _choices(self) -> Iterator[tuple[int, int]]:
        """Next tasks: what can begin first; of those, what the busiest host waits for.

        Of senders the one that has least to do.
        """
        load, _ = self._loads()
        found = []
        for index, group in enumerate(self._groups):
            if not self._left[index]:
                continue
            waiting = max(self._free[host] + load[host] for host in group.receivers)
            for sender in group.senders:
                ahead = self._free[sender] + load[sender]
                only = len(group.senders) == 1
                urgent = max(waiting, ahead) if only else waiting
                start = self._start(group, sender)
                found.append((start, -urgent, -group.seconds, ahead, index, sender))
        return iter([(index, sender) for *_, index, sender in sorted(found)])


def plan_resharding(
    shape: Sequence[int],
    source: MeshLayout,
    destination: MeshLayout,
    *,
    budget: int = _BUDGET,
) -> Resharding:
    """Choose senders and order of the unit tasks so that all end soon.

    A depth-first search that leaves out what cannot be shorter than the best order
    found; deterministic. Of the devices of a host that hold a part, the one that has
    sent least sends it.

    Args:
        shape: The whole tensor's.
        source: Where it lies.
        destination: Where it is to lie, on other devices.
        budget: Choices of a next task to try; the search ends before if it finds an
            order that takes no longer than :func:`lower_bound_s`.
    Returns:
        No slower than :func:`size_balanced_resharding`.
    Raises:
        StrategyError: If sizes do not divide or the budget is not positive.
    """
    if budget < 1:
        raise StrategyError(f"budget={budget} is not positive; use 1 or more")
    time = ReshardingTime(element_bytes=1, bytes_per_s=1.0)
    tasks = unit_tasks(shape, source, destination)
    groups = _grouped(tasks, source, destination, time)
    plain = size_balanced_resharding(shape, source, destination)
    search = _Search(
        groups,
        sending=source.hosts,
        hosts=source.hosts + destination.hosts,
        bound=lower_bound_s(shape, source, destination, time),
        budget=budget,
    )
    search.run()
    if makespan_s(plain, time) <= search.seconds:
        return plain
    sent = [0] * source.num_devices
    taken = [iter(group.tasks) for group in groups]
    transfers = []
    for index, host in search.best:
        task = next(taken[index])
        own = [one for one in task.senders if source.host_of(one) == host]
        sender = min(own, key=lambda one: (sent[one], one))
        sent[sender] += task.elements
        transfers.append(Transfer(task=task, sender=sender))
    return Resharding(
        shape=tuple(shape),
        source=source,
        destination=destination,
        transfers=tuple(transfers),
    )
