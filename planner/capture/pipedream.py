"""Reading PipeDream profiles: a ModelGraph with measured layer times.

A profile has one node a line, then one edge a line::

    node4 -- Embedding(32320, 1024) -- forward_compute_time=0.073, \
backward_compute_time=6.949, activation_size=6291456.0, parameter_size=132382720.000
        node4 -- node5

Times are milliseconds, sizes bytes; an op with several outputs lists them in brackets,
``[6291456.0; 131072.0]``. Nothing is known of FLOPs or shapes, so blocks carry the
measured times instead.

Source: Narayanan et al. 2019 (SOSP), profiler output of msr-fiddle/pipedream.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from planner.errors import CaptureError
from planner.graph.model import Block, BlockKind, Edge, ModelGraph, Parameter
from planner.reading import MOST_NAME, read_text

__all__ = ["ProfileNode", "parse_profile", "read_profile"]

_ELEMENT_BYTES = 4
#: Largest time or size: an exabyte.
_LARGEST = 1e18
_GETITEM = re.compile(r"__getitem__\((\d+)\)")
_KINDS: tuple[tuple[str, BlockKind], ...] = (
    (r"attention", "attention"),
    (r"lstm|gru|rnn", "recurrent"),
    (r"embedding", "embedding"),
    (r"conv", "conv"),
    (r"norm", "norm"),
    (r"linear|classifier", "mlp"),
)
_FIELDS = (
    "forward_compute_time",
    "backward_compute_time",
    "activation_size",
    "parameter_size",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileNode:
    """One line of a profile.

    Attributes:
        name: ``node12``.
        op: The module as torch prints it.
        forward_ms: Milliseconds as written; likewise ``backward_ms``.
        activations: Bytes of each output.
        parameter_bytes: Bytes of its weights.
    """

    name: str
    op: str
    forward_ms: float
    backward_ms: float
    activations: tuple[float, ...]
    parameter_bytes: float


def _numbers(text: str, field: str, where: str) -> tuple[float, ...]:
    """Parse a number, or numbers in brackets; finite and not negative."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        values = tuple(float(part) for part in inner.split(";"))
    except ValueError as error:
        raise CaptureError(
            f"{where}: {field}={text!r} is not a number or a list such as "
            f"[6291456.0; 131072.0]"
        ) from error
    if not all(0 <= value <= _LARGEST for value in values):
        raise CaptureError(
            f"{where}: {field}={text!r} must be finite, at least 0 and at most "
            f"{_LARGEST:g}; profile again"
        )
    return values


def _node(line: str, where: str) -> ProfileNode:
    """Parse ``name -- op -- key=value, …``; the op may itself hold `` -- ``."""
    name, _, rest = line.partition(" -- ")
    if len(name) > MOST_NAME:
        raise CaptureError(
            f"{where}: the name of a node has {len(name):,} characters, at most "
            f"{MOST_NAME:,} are read"
        )
    op, _, tail = rest.rpartition(" -- ")
    found: dict[str, tuple[float, ...]] = {}
    for part in tail.split(", "):
        key, _, value = part.partition("=")
        if key not in _FIELDS:
            raise CaptureError(
                f"{where}: unknown field {key!r}; a node has {', '.join(_FIELDS)}"
            )
        found[key] = _numbers(value.strip(), key, where)
    missing = [field for field in _FIELDS if field not in found]
    if missing or not op:
        raise CaptureError(
            f"{where}: node {name!r} lacks {', '.join(missing) or 'its op'}; a node is "
            f"'name -- op -- {'=…, '.join(_FIELDS)}=…'"
        )
    return ProfileNode(
        name=name.strip(),
        op=op,
        forward_ms=sum(found["forward_compute_time"]),
        backward_ms=sum(found["backward_compute_time"]),
        activations=found["activation_size"],
        parameter_bytes=sum(found["parameter_size"]),
    )


def _parse(
    text: str, source: str
) -> tuple[dict[str, ProfileNode], list[tuple[str, str, str]]]:
    """Parse nodes by name, and edges with the place they were read from."""
    nodes: dict[str, ProfileNode] = {}
    edges: list[tuple[str, str, str]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}, line {number}"
        if not line.strip():
            continue
        if line[0].isspace():
            parts = [part.strip() for part in line.split(" -- ")]
            if len(parts) != 2:
                raise CaptureError(
                    f"{where}: {line.strip()!r} is not an edge; write 'node1 -- node2'"
                )
            edges.append((parts[0], parts[1], where))
            continue
        node = _node(line, where)
        if node.name in nodes:
            raise CaptureError(f"{where}: node {node.name!r} is listed twice; keep one")
        nodes[node.name] = node
    for source_name, target, where in edges:
        for name in (source_name, target):
            if name not in nodes:
                raise CaptureError(
                    f"{where}: edge names {name!r}, which is no node; add its line"
                )
    return nodes, edges


def _rank(name: str) -> tuple[int, str]:
    """Sort key of a node: profiles number them in program order."""
    digits = re.search(r"(\d{1,18})$", name)
    return (int(digits.group(1)) if digits else 0, name)


def _ordered(
    nodes: Mapping[str, ProfileNode], edges: list[tuple[str, str, str]], source: str
) -> list[str]:
    """Names in topological order, by number among those that are ready."""
    waiting = dict.fromkeys(nodes, 0)
    after: dict[str, list[str]] = {}
    for start, stop, _ in edges:
        after.setdefault(start, []).append(stop)
        waiting[stop] += 1
    ready = [_rank(name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for follower in after.get(name, ()):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, _rank(follower))
    if len(order) < len(nodes):
        left = sorted(set(nodes) - set(order), key=_rank)
        where = next(w for a, b, w in edges if a in left and b in left)
        raise CaptureError(
            f"{where}: the edges form a cycle through {left[0]!r}; {source} must be "
            f"acyclic"
        )
    return order


def _kind(op: str) -> BlockKind:
    return next((kind for key, kind in _KINDS if re.search(key, op.lower())), "other")


def _block(index: int, node: ProfileNode, entering: float) -> Block:
    output = sum(node.activations)
    forward_s, backward_s = node.forward_ms * 1e-3, node.backward_ms * 1e-3
    return Block(
        index=index,
        name=node.name,
        layer=node.name,
        kind=_kind(node.op),
        modules=(node.name,),
        repeat=f"{node.op}|{forward_s}|{backward_s}|{output}",
        parameter_count=round(node.parameter_bytes / _ELEMENT_BYTES),
        parameter_bytes=node.parameter_bytes,
        saved_bytes=output,
        saved_selective_bytes=output,
        boundary_bytes=entering,
        measured_forward_s=forward_s,
        measured_backward_s=backward_s,
    )


def _edge(source: int, target: int, made: ProfileNode, reader: ProfileNode) -> Edge:
    """Edge with all outputs of a node, or the one that ``__getitem__`` takes out."""
    sizes = dict(enumerate(made.activations))
    chosen = _GETITEM.match(reader.op)
    if chosen and int(chosen.group(1)) in sizes and len(sizes) > 1:
        sizes = {int(chosen.group(1)): sizes[int(chosen.group(1))]}
    # Sizes are bytes, so that a byte string of that length stands for the tensor.
    return Edge(
        source=source,
        target=target,
        tensors=tuple(((round(size),), "uint8") for size in sizes.values()),
        bytes=sum(sizes.values()),
        identities=tuple(sizes),
        sent=tuple(sizes.values()),
    )


def parse_profile(
    path: str | os.PathLike[str],
) -> tuple[dict[str, ProfileNode], list[tuple[str, str, str]]]:
    """Parse the nodes by name and the edges of a profile, in the order of their lines.

    Args:
        path: A PipeDream ``graph.txt``.

    Returns:
        The nodes; and source, target and place in the file of each edge.

    Raises:
        CaptureError: If a line is malformed; names file, line and rule.
    """
    file = Path(path)
    text = read_text(file, "profile", error=CaptureError)
    nodes, edges = _parse(text, file.name)
    if not nodes:
        raise CaptureError(f"{file.name} has no nodes; give a PipeDream graph.txt")
    return nodes, edges


def read_profile(
    path: str | os.PathLike[str], *, batch: int = 1, name: str | None = None
) -> ModelGraph:
    """Read a PipeDream ``graph.txt``.

    Args:
        path: The profile.
        batch: Samples in the batch that was profiled; the file does not say.
        name: For people; the file's name by default.

    Returns:
        A graph with one block and unit a node. FLOPs are 0;
        ``measured_forward_s`` and ``measured_backward_s`` hold the times.

    Raises:
        CaptureError: If a line is malformed; names file, line and rule.
    """
    file = Path(path)
    nodes, listed = parse_profile(file)
    order = _ordered(nodes, listed, file.name)
    place = {node: index for index, node in enumerate(order)}
    pairs = sorted({(place[a], place[b]) for a, b, _ in listed})
    edges = tuple(_edge(a, b, nodes[order[a]], nodes[order[b]]) for a, b in pairs)
    entering = [0.0] * len(order)
    for edge in edges:
        entering[edge.target] += edge.bytes
    return ModelGraph(
        name=name or file.stem,
        ref=None,
        batch=batch,
        seq_len=None,
        dtype="float32",
        blocks=tuple(
            _block(index, nodes[key], entering[index])
            for index, key in enumerate(order)
        ),
        edges=edges,
        parameters=tuple(
            Parameter(
                name=f"{key}.weight",
                shape=(round(nodes[key].parameter_bytes / _ELEMENT_BYTES),),
                dtype="float32",
                block=place[key],
            )
            for key in order
            if nodes[key].parameter_bytes
        ),
        config={"source": "pipedream", "nodes": len(order)},
    )
