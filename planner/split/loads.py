"""The judge: how long each device works for a sample, and whether a split is legal."""

from __future__ import annotations

import numpy as np

from planner.errors import StrategyError
from planner.split.task import Array, Index, Mask, SplitTask, summed

__all__ = ["breaches", "loads_ms", "max_load_ms", "one_device"]


def _checked(task: SplitTask, assignment: Index) -> Index:
    device = np.asarray(assignment)
    if device.shape != (len(task),) or device.dtype.kind not in "iu":
        raise StrategyError(
            f"an assignment of shape {device.shape}, {device.dtype}; {task.name} needs "
            f"one integer for each of its {len(task)} nodes"
        )
    wrong = (device < 0) | (device >= task.devices)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise StrategyError(
            f"node {task.nodes[at]!r} is on device {device[at]}; {task.name} has "
            f"devices 0 to {task.devices - 1}"
        )
    return device.astype(np.int64)


def loads_ms(task: SplitTask, assignment: Index) -> Array:
    """Load of each device.

    An accelerator's load is what it computes, plus the transfer time of each output
    that comes in and of each own output that goes out, each once however many use it.
    A CPU's load is what it computes.

    Args:
        task: What is split.
        assignment: Device of each node. Shape [n].

    Returns:
        Milliseconds. Shape [devices].

    Raises:
        StrategyError: If the assignment has another length or unknown devices.
    """
    device = _checked(task, assignment)
    accelerated = device < task.accelerators
    work = np.where(accelerated, task.accelerator_ms, task.cpu_ms)
    load = summed(device, work, task.devices)
    source, target = task.edge_source, task.edge_target
    crosses = device[source] != device[target]
    source, target = source[crosses], target[crosses]
    arrivals = np.unique(source * task.devices + device[target])
    paid_by = np.concatenate([arrivals % task.devices, device[np.unique(source)]])
    output = np.concatenate([arrivals // task.devices, np.unique(source)])
    moved = summed(paid_by, task.transfer_ms[output], task.devices)
    moved[task.accelerators :] = 0.0
    return load + moved


def max_load_ms(task: SplitTask, assignment: Index) -> float:
    """Load of the busiest device: time per sample of the pipeline, in ms."""
    return float(loads_ms(task, assignment).max())


def one_device(task: SplitTask) -> Index:
    """All nodes on the first device; what it takes of memory is not looked at."""
    return np.zeros(len(task), dtype=np.int64)


def _returns(task: SplitTask, device: Index, part: Mask) -> list[int]:
    """Nodes of a part whose device a path of this part had left before."""
    start, flat = task.predecessors
    # Bit d: a path from a node of device d has led here and left d on the way.
    left = [0] * len(task)
    found = []
    for node in task.topological.tolist():
        if not part[node]:
            continue
        been = 0
        for before in flat[start[node] : start[node + 1]].tolist():
            if part[before]:
                been |= left[before]
                if device[before] != device[node]:
                    been |= 1 << int(device[before])
        left[node] = been
        if been >> int(device[node]) & 1:
            found.append(node)
    return found


def breaches(task: SplitTask, assignment: Index) -> tuple[str, ...]:
    """What makes a split illegal; empty if it is legal.

    A device's forward nodes must be contiguous (no path leaves the device and comes
    back), and so must its backward nodes; a class lies on one device; accelerators
    have the memory and support what they run.

    Raises:
        StrategyError: If the assignment has another length or unknown devices.
    """
    device = _checked(task, assignment)
    names = task.device_names
    low = np.full(task.colour.max() + 1, task.devices)
    np.minimum.at(low, task.colour, device)
    reasons = [
        f"node {task.nodes[at]!r} is on {names[device[at]]}, a node of its class "
        f"on {names[low[task.colour[at]]]}; a class lies on one device"
        for at in np.flatnonzero(low[task.colour] != device)[:1]
    ]
    held = summed(device, task.size_bytes, task.devices)
    reasons += [
        f"{names[at]} holds {held[at]:.0f} bytes; it has {task.memory_bytes:.0f}"
        for at in np.flatnonzero(held[: task.accelerators] > task.memory_bytes)
    ]
    unsupported = (device < task.accelerators) & ~task.supported
    reasons += [
        f"node {task.nodes[at]!r} is on {names[device[at]]}; accelerators do not "
        f"support it"
        for at in np.flatnonzero(unsupported)[:1]
    ]
    reasons += [
        f"a path of {what} nodes leaves {names[device[at]]} and returns to it "
        f"at node {task.nodes[at]!r}; a device's {what} nodes are contiguous"
        for what, part in (("forward", ~task.backward), ("backward", task.backward))
        for at in _returns(task, device, part)[:1]
    ]
    return tuple(reasons)
