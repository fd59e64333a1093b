"""Ray as a queue: its nodes, placement groups, and actors that run a command.

A launch is a placement group and one detached actor for each host, all with names that
Ray gives once, so that a launch that is started twice runs once. A process of its own
asks Ray (``ray_client``): one that does not answer in time is ended, and another asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.admission.queues import ray_client
from planner.admission.queues.base import (
    ANSWER_S,
    PREFIX,
    Entry,
    Launch,
    NoAnswerError,
    QueueError,
    Snapshot,
    Status,
    field_of,
)
from planner.admission.queues.ray_client import host_of
from planner.schema.admission import StateHost

__all__ = ["RayQueue", "read_ray"]

_TYPE = "accelerator_type:"
#: Time that actors may take to answer; beyond it, they count as running.
_ACTORS_S = 5.0


class _Asker:
    """A process that asks Ray, started when it is needed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, address: str, limit_s: float, what: str, **question: Any) -> Any:
        """Return the answer to a question.

        Args:
            address: Address of the Ray cluster.
            limit_s: Time that the answer may take.
            what: Name of the question, for errors.
            question: The question.

        Raises:
            QueueError: If Ray refuses, or does not answer in time.
        """
        end_s = time.monotonic() + limit_s
        if self._process is None:
            actors_s = min(_ACTORS_S, limit_s / 4)
            self._process = subprocess.Popen(
                [sys.executable, "-P", ray_client.__file__, address, str(actors_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
        try:
            return self._answer(end_s, limit_s, what, json.dumps(question))
        except QueueError:
            # The next question goes to a process that connects anew.
            self.close()
            raise

    def _answer(self, end_s: float, limit_s: float, what: str, question: str) -> Any:
        assert self._process is not None
        into, out = self._process.stdin, self._process.stdout
        assert into is not None
        assert out is not None
        said = b""
        with contextlib.suppress(BrokenPipeError), selectors.DefaultSelector() as ready:
            into.write(f"{question}\n".encode())
            into.flush()
            ready.register(out, selectors.EVENT_READ)
            while not said.endswith(b"\n"):
                if not ready.select(max(0.0, end_s - time.monotonic())):
                    raise NoAnswerError("Ray", what, limit_s)
                if not (part := os.read(out.fileno(), 1 << 16)):
                    break
                said += part
        if not said.endswith(b"\n"):
            raise QueueError(
                f"the process that asks Ray ended at {what} (exit code "
                f"{self._process.wait()}); see with ray status whether Ray runs"
            )
        answer = json.loads(said)
        if "error" in answer:
            raise QueueError(f"Ray does not {what}: {answer['error']}")
        return answer["ok"]

    def close(self) -> None:
        """End the process."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._process = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RayQueue:
    """A Ray cluster.

    Attributes:
        address: Its address; ``auto`` for the one that runs on this machine.
        resource: Resource that devices are: GPU, or another that nodes have.
        names: Type that Ray gives devices to the name that throughputs have.
        answer_s: Time that Ray may take to answer.
    """

    address: str = "auto"
    resource: str = "GPU"
    names: Mapping[str, str] = field(default_factory=dict)
    answer_s: float = ANSWER_S
    _asker: _Asker = field(default_factory=_Asker, init=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the kind of queue."""
        return "ray"

    def read(self) -> Snapshot:
        """Return nodes with devices, and placement groups."""
        found = self._ask("tell its state", do="read", prefix=PREFIX)
        nodes, groups, codes = (found[what] for what in ("nodes", "groups", "codes"))
        return read_ray(nodes, groups, codes, self.resource, self.names)

    def launch(self, launch: Launch) -> str:
        """Make the placement group of a launch and its actors."""
        self._ask(
            f"launch {launch.name}",
            do="launch",
            name=launch.name,
            words=launch.words,
            devices=launch.devices,
            resource=self.resource,
        )
        return launch.name

    def stop(self, entry: str) -> None:
        """Ask commands of a launch to end; give its devices back once they have."""
        self._ask(f"stop {entry}", do="stop", name=entry)

    def revoke(self, launch: str) -> None:
        """Do nothing: what asked is ended, and names are used once."""

    def write_note(self, entry: str, text: str) -> None:
        """Do nothing: placement groups have no note."""

    def extend(self, entry: Entry, until_s: float) -> None:
        """Do nothing: the loop launches without a time limit."""

    def close(self) -> None:
        """End the process that asks Ray; it also ends with this one."""
        self._asker.close()

    def _ask(self, what: str, **question: Any) -> Any:
        return self._asker.ask(self.address, self.answer_s, what, **question)


def read_ray(
    nodes: Sequence[Mapping[str, Any]],
    groups: Mapping[str, Mapping[str, Any]],
    codes: Mapping[str, Sequence[int | None]],
    resource: str = "GPU",
    names: Mapping[str, str] | None = None,
) -> Snapshot:
    """Read ``ray.nodes()`` and ``placement_group_table()``.

    Args:
        nodes: The nodes.
        groups: The placement groups. Devices that tasks hold outside of any are not
            seen.
        codes: Exit codes of the commands of our groups, one for each actor that is
            alive; None for a command that runs, or does not yet.
        resource: Resource that devices are.
        names: Type that Ray gives devices to the name that throughputs have.

    Raises:
        QueueError: If a field is missing, or no node has the resource.
    """
    hosts: dict[str, StateHost] = {}
    names_of: dict[str, str] = {}
    for node in nodes:
        for known in ("NodeManagerHostname", "NodeManagerAddress"):
            field_of(node, "ray.nodes()", known)
        if not field_of(node, "ray.nodes()", "Alive"):
            continue
        host = host_of(node)
        names_of[field_of(node, "ray.nodes()", "NodeID")] = host
        has = field_of(node, "ray.nodes()", "Resources")
        count = int(has.get(resource, 0))
        if not count:
            continue
        if host in hosts:
            raise QueueError(
                f"two nodes of Ray are named {host}; start each with its own ray start "
                f"--node-name"
            )
        types = [name[len(_TYPE) :] for name in has if name.startswith(_TYPE)]
        device = types[0] if types else resource
        hosts[host] = StateHost(
            name=host, device=(names or {}).get(device, device), devices=count
        )
    if not hosts:
        raise QueueError(
            f"no node of Ray has the resource {resource}; start them with it"
        )
    entries = tuple(
        _entry(key, group, codes, names_of, resource)
        for key, group in groups.items()
        if group.get("state") != "REMOVED"
    )
    # Ray lists nodes in no order of its own.
    return Snapshot(hosts=tuple(hosts[name] for name in sorted(hosts)), entries=entries)


def _entry(
    key: str,
    group: Mapping[str, Any],
    codes: Mapping[str, Sequence[int | None]],
    names_of: Mapping[str, str],
    resource: str,
) -> Entry:
    where = "placement_group_table()"
    name = field_of(group, where, "name")
    devices: dict[str, int] = {}
    lost = group["state"] == "RESCHEDULING"
    for at, bundle in field_of(group, where, "bundles").items():
        node = names_of.get(group.get("bundles_to_node_id", {}).get(at, ""))
        count = int(bundle.get(resource, 0))
        if node is None:
            # Ray has given the node up, and may not have got to its groups.
            lost = lost or group["state"] == "CREATED"
        elif count:
            devices[node] = devices.get(node, 0) + count
    status: Status = "running" if group["state"] == "CREATED" or lost else "pending"
    ended = codes.get(name, ())
    ours = name.startswith(PREFIX)
    if ours and (lost or len(ended) < len(group["bundles"])):
        # An actor was never made, or has died.
        status = "failed"
    elif ours and status == "running" and all(code is not None for code in ended):
        status = "failed" if any(ended) else "done"
    return Entry(
        id=name if ours else key,
        name=name,
        status=status,
        devices=devices if status != "pending" else {},
        cause="host" if lost else None,
        kept=ours and status in ("done", "failed"),
    )
