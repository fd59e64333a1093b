"""Small tasks made by chance, and every split of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import networkx as nx
import numpy as np

from planner.split import SplitTask, breaches, parse_task

Document = dict[str, Any]


def document(rng: np.random.Generator, *, nodes: int = 6, **limits: float) -> Document:
    """A forward graph. Every node takes time, so that none goes with a neighbour."""
    made = [
        {
            "id": f"n{i}",
            "supportedOnFpga": 1,
            "cpuLatency": float(rng.uniform(2, 30)),
            "fpgaLatency": float(rng.uniform(0.5, 5)),
            "isBackwardNode": 0,
            "size": float(rng.integers(1, 10)),
        }
        for i in range(nodes)
    ]
    cost = rng.uniform(0, 3, nodes)
    edges = [
        {"sourceId": f"n{i}", "destId": f"n{j}", "cost": float(cost[i])}
        for i, j in itertools.combinations(range(nodes), 2)
        if rng.random() < 0.4
    ]
    return {
        "maxSizePerFPGA": limits.get("memory", 1e9),
        "maxFPGAs": int(limits.get("accelerators", 2)),
        "maxCPUs": int(limits.get("cpus", 1)),
        "nodes": made,
        "edges": edges,
    }


def training(rng: np.random.Generator, forward: Document, drop: float = 0) -> Document:
    """With a backward node for each forward one, edges turned round.

    Args:
        drop: Share of forward nodes that are left out again, so that backward nodes
            remain which have none.
    """
    nodes, edges = list(forward["nodes"]), list(forward["edges"])
    for node in forward["nodes"]:
        colour = {"colorClass": int(node["id"][1:])}
        node.update(colour)
        back = {**node, "id": "b" + node["id"], "isBackwardNode": 1}
        nodes.append({**back, "fpgaLatency": float(rng.uniform(0.5, 8))})
    prices = {node["id"]: float(rng.uniform(0, 3)) for node in nodes}
    for edge in forward["edges"]:
        back = "b" + edge["destId"]
        edges.append(
            {"sourceId": back, "destId": "b" + edge["sourceId"], "cost": prices[back]}
        )
    gone = {node["id"] for node in forward["nodes"] if rng.random() < drop}
    nodes = [node for node in nodes if node["id"] not in gone]
    edges = [e for e in edges if not {e["sourceId"], e["destId"]} & gone]
    return {**forward, "nodes": nodes, "edges": edges}


def naive_loads(task: SplitTask, device: np.ndarray) -> list[float]:
    """The definition, read aloud."""
    loads = []
    edges = list(zip(task.edge_source.tolist(), task.edge_target.tolist(), strict=True))
    for d in range(task.devices):
        mine = [v for v in range(len(task)) if device[v] == d]
        if d >= task.accelerators:
            loads.append(sum(task.cpu_ms[v] for v in mine))
            continue
        moved = {u for u, v in edges if (device[u] == d) != (device[v] == d)}
        loads.append(
            sum(task.accelerator_ms[v] for v in mine)
            + sum(task.transfer_ms[u] for u in moved)
        )
    return loads


def ordered(task: SplitTask, device: np.ndarray) -> bool:
    """Whether forward nodes run through the devices in one order of these."""
    graph = nx.DiGraph()
    for u, v in zip(task.edge_source, task.edge_target, strict=True):
        if not task.backward[v] and device[u] != device[v]:
            graph.add_edge(int(device[u]), int(device[v]))
    return bool(nx.is_directed_acyclic_graph(graph))


def legal_splits(task: SplitTask) -> Iterator[np.ndarray]:
    """Every legal assignment whose devices have an order."""
    classes = int(task.colour.max()) + 1
    for choice in itertools.product(range(task.devices), repeat=classes):
        device = np.array(choice)[task.colour]
        if ordered(task, device) and not breaches(task, device):
            yield device


def task_of(made: Document) -> SplitTask:
    """Parsed."""
    return parse_task(made, "made")
