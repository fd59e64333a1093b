"""Pods with shares of GPUs on hosts of many types: the world of openb's traces."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.errors import StrategyError, UnknownNameError
from planner.reading import read_table

__all__ = ["NodeTable", "PodRoom", "PodTable", "at_demand", "read_nodes", "read_pods"]

Index = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Parts of a GPU that a pod may ask for.
MILLI = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable:
    """Hosts.

    Attributes:
        cpu: Thousandths of processors. Shape [nodes].
        memory: MiB. Shape [nodes].
        gpus: Number of GPUs. Shape [nodes].
        kind: Their type, an index into ``kinds``. Shape [nodes].
        kinds: GPU types.
    """

    cpu: Index
    memory: Index
    gpus: Index
    kind: Index
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTable:
    """Pods in the order in which they come.

    Attributes:
        cpu: Thousandths of processors. Shape [pods].
        memory: MiB. Shape [pods].
        gpus: Number of GPUs. Shape [pods].
        milli: Thousandths of each. Shape [pods].
        allowed: GPU types that will do. Shape [pods, kinds].
    """

    cpu: Index
    memory: Index
    gpus: Index
    milli: Index
    allowed: Mask

    def __len__(self) -> int:
        return len(self.cpu)

    def take(self, pods: Index) -> PodTable:
        """Return pods in a new order, any number of times each."""
        return replace(
            self,
            cpu=self.cpu[pods],
            memory=self.memory[pods],
            gpus=self.gpus[pods],
            milli=self.milli[pods],
            allowed=self.allowed[pods],
        )


def read_nodes(path: str | os.PathLike[str]) -> NodeTable:
    """Read hosts in openb's format.

    Raises:
        StrategyError: If the file is not of this form.
    """
    needed = ("cpu_milli", "memory_mib", "gpu", "model")
    _, rows = read_table(path, "nodes", needed, error=StrategyError)
    if not rows:
        raise StrategyError(f"{path} has no host; give at least one")
    kinds = tuple(sorted({row["model"] for _, row in rows}))
    return NodeTable(
        cpu=_column(rows, "cpu_milli"),
        memory=_column(rows, "memory_mib"),
        gpus=_column(rows, "gpu"),
        kind=np.array([kinds.index(row["model"]) for _, row in rows]),
        kinds=kinds,
    )


def read_pods(path: str | os.PathLike[str], kinds: tuple[str, ...]) -> PodTable:
    """Read pods in openb's format.

    Args:
        path: CSV file, gzipped if it ends with ``.gz``.
        kinds: GPU types of the hosts.

    Raises:
        StrategyError: If the file is not of this form.
        UnknownNameError: If a pod asks for a type that no host has.
    """
    needed = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    _, rows = read_table(path, "pods", needed, error=StrategyError)
    allowed = np.ones((len(rows), len(kinds)), dtype=np.bool_)
    for pod, (where, row) in enumerate(rows):
        if spec := (row.get("gpu_spec") or "").strip():
            for kind in spec.split("|"):
                if kind not in kinds:
                    raise UnknownNameError(f"GPU type in {where}:", kind, kinds)
            allowed[pod] = [kind in spec.split("|") for kind in kinds]
    gpus, milli = _column(rows, "num_gpu"), _column(rows, "gpu_milli")
    wrong = (milli > MILLI) | ((gpus > 1) & (milli != MILLI))
    for pod in np.flatnonzero(wrong).tolist():
        raise StrategyError(
            f"{rows[pod][0]}: gpu_milli={milli[pod]} of num_gpu={gpus[pod]}; give up "
            f"to {MILLI} of one GPU, or {MILLI} of each of several"
        )
    return PodTable(
        cpu=_column(rows, "cpu_milli"),
        memory=_column(rows, "memory_mib"),
        gpus=gpus,
        milli=np.where(gpus > 0, milli, 0),
        allowed=allowed,
    )


def at_demand(
    pods: PodTable, nodes: NodeTable, demand: float, seed: int | np.random.Generator = 0
) -> PodTable:
    """Return pods that ask for a share of all GPUs, in random order.

    Pods are drawn again, or dropped, until the share is reached, as Weng et al. 2023
    inflate openb's trace.

    Args:
        pods: The pods.
        nodes: The hosts.
        demand: Share of the hosts' GPUs that the pods ask for together.
        seed: Seed or generator.

    Raises:
        StrategyError: If the demand is not positive, or no pod asks for a GPU.
    """
    wanted = pods.gpus * pods.milli
    if not 0.0 < demand < np.inf or not wanted.any():
        raise StrategyError(
            f"demand={demand} of {int(wanted.sum())} thousandths of GPUs; give a "
            "positive share, and pods that ask for GPUs"
        )
    random = np.random.default_rng(seed)
    target = demand * MILLI * int(nodes.gpus.sum())
    order = random.permutation(len(pods))
    total = np.cumsum(wanted[order])
    if total[-1] > target:
        order = order[: int(np.searchsorted(total, target, side="right"))]
    else:
        more: list[int] = []
        sum_now = int(total[-1])
        while True:
            pod = int(random.integers(len(pods)))
            if sum_now + wanted[pod] > target:
                break
            sum_now += int(wanted[pod])
            more.append(pod)
        order = random.permutation(np.append(order, np.array(more, dtype=np.int64)))
    return pods.take(order)


class PodRoom:
    """Free processors, memory and GPUs of each host.

    Attributes:
        nodes: The hosts.
        cpu: Thousandths of processors left. Shape [nodes].
        memory: MiB left. Shape [nodes].
        gpu: Thousandths left of each GPU; 0 where there is none.
            Shape [nodes, most GPUs].
        allocated: Thousandths of GPUs that pods hold.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self.nodes = nodes
        self.cpu = nodes.cpu.copy()
        self.memory = nodes.memory.copy()
        most = int(nodes.gpus.max())
        self.gpu: Index = np.where(
            np.arange(most) < nodes.gpus[:, None], MILLI, 0
        ).astype(np.int64)
        self.allocated = 0

    @property
    def share(self) -> float:
        """Share of all GPUs that pods hold."""
        return self.allocated / (MILLI * int(self.nodes.gpus.sum()))

    def able(self, pods: PodTable, pod: int) -> Index:
        """Return the hosts that have room for a pod."""
        fits = (self.cpu >= pods.cpu[pod]) & (self.memory >= pods.memory[pod])
        if pods.gpus[pod]:
            fits &= pods.allowed[pod][self.nodes.kind]
            fits &= (self.gpu >= pods.milli[pod]).sum(axis=1) >= pods.gpus[pod]
        return np.flatnonzero(fits)

    def place(self, pods: PodTable, pod: int, node: int, gpu: int) -> None:
        """Put a pod on a host.

        Args:
            pods: The pods.
            pod: The pod.
            node: The host.
            gpu: GPU of a pod that asks for a part of one; others take whole free ones.

        Raises:
            StrategyError: If the host has no room for it.
        """
        milli, count = int(pods.milli[pod]), int(pods.gpus[pod])
        chosen: list[int] = []
        if count == 1 and milli < MILLI:
            chosen = [gpu]
        elif count:
            chosen = np.flatnonzero(self.gpu[node] >= milli)[:count].tolist()
        short = len(chosen) < count or any(
            self.gpu[node, one] < milli for one in chosen
        )
        if (
            short
            or self.cpu[node] < pods.cpu[pod]
            or self.memory[node] < pods.memory[pod]
        ):
            raise StrategyError(
                f"host {node} has no room for {count} x {milli} GPU, {pods.cpu[pod]} "
                "CPU; choose among the hosts that are able"
            )
        self.cpu[node] -= pods.cpu[pod]
        self.memory[node] -= pods.memory[pod]
        self.gpu[node, chosen] -= milli
        self.allocated += milli * count


def _column(rows: list[tuple[str, dict[str, str]]], name: str) -> Index:
    found = []
    for where, row in rows:
        text = row[name].strip()
        if not text.isdigit():
            raise StrategyError(
                f"{where}: {name}={text!r}; give a whole number of at least 0"
            )
        found.append(int(text))
    return np.array(found, dtype=np.int64)
