"""Ray as a queue: its nodes, placement groups, and actors that run a command.

A launch is a placement group and one detached actor for each host, all with names that
Ray gives once, so that a launch that is started twice runs once.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.admission.queues.base import (
    PREFIX,
    Entry,
    Launch,
    QueueError,
    Snapshot,
    Status,
    field_of,
)
from planner.schema.admission import StateHost

__all__ = ["RayQueue", "read_ray"]

_NAMESPACE = "meshwright"
_TYPE = "accelerator_type:"
#: Time that Ray may take to answer.
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RayQueue:
    """A Ray cluster.

    Attributes:
        address: Its address; ``auto`` for the one that runs on this machine.
        resource: Resource that devices are: GPU, or another that nodes have.
        names: Type that Ray gives devices to the name that throughputs have.
    """

    address: str = "auto"
    resource: str = "GPU"
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the kind of queue."""
        return "ray"

    def read(self) -> Snapshot:
        """Return nodes with devices, and placement groups."""
        ray = self._connected()
        from ray.util.placement_group import placement_group_table

        try:
            nodes, groups = ray.nodes(), placement_group_table()
        except Exception as error:
            raise QueueError(f"Ray does not answer: {_line(error)}") from error
        names = [
            each["name"]
            for each in groups.values()
            if each["name"].startswith(PREFIX) and each["state"] == "CREATED"
        ]
        codes = {name: self._codes(ray, name) for name in names}
        return read_ray(nodes, groups, codes, self.resource, self.names)

    def launch(self, launch: Launch) -> str:
        """Make the placement group of a launch and start its actors."""
        ray = self._connected()
        try:
            self._start(ray, launch)
        except Exception as error:
            # What holds devices and runs nothing is taken away again.
            self.stop(launch.name)
            raise QueueError(f"Ray refuses {launch.name}: {_line(error)}") from error
        return launch.name

    def stop(self, entry: str) -> None:
        """End the commands of a launch, and give its devices back."""
        ray = self._connected()
        from ray.util.placement_group import (
            get_placement_group,
            placement_group_table,
            remove_placement_group,
        )

        groups = [each for each in placement_group_table().values() if _is(each, entry)]
        for at in range(sum(len(each["bundles"]) for each in groups)):
            try:
                runner = ray.get_actor(f"{entry}/{at}", namespace=_NAMESPACE)
            except ValueError:
                continue
            try:
                ray.get(runner.stop.remote(), timeout=_ANSWER_S)
            except Exception as error:
                raise QueueError(
                    f"{entry}/{at} does not stop: {_line(error)}"
                ) from error
            ray.kill(runner)
        if groups:
            remove_placement_group(get_placement_group(entry))

    def revoke(self, launch: str) -> None:
        """Do nothing: a command either was answered or did not arrive."""

    def write_note(self, entry: str, text: str) -> None:
        """Do nothing: placement groups have no note."""

    def extend(self, entry: Entry, until_s: float) -> None:
        """Do nothing: the loop launches without a time limit."""

    def _connected(self) -> Any:
        try:
            import ray
        except ImportError as error:
            raise QueueError("ray is not installed; pip install ray") from error
        if not ray.is_initialized():
            try:
                ray.init(
                    address=self.address,
                    namespace=_NAMESPACE,
                    log_to_driver=False,
                    logging_level="ERROR",
                )
            except Exception as error:
                raise QueueError(
                    f"no Ray cluster at {self.address}: {_line(error)}; start one "
                    f"with ray start --head"
                ) from error
        return ray

    def _start(self, ray: Any, launch: Launch) -> None:
        from ray.util.placement_group import (
            get_placement_group,
            placement_group,
            placement_group_table,
        )
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        places = {
            each["NodeManagerHostname"]: f"node:{each['NodeManagerAddress']}"
            for each in ray.nodes()
            if each["Alive"]
        }
        bundles = [
            # A sliver of a resource that only this node has pins the bundle to it.
            {self.resource: float(count), places[host]: 0.001}
            for host, count in launch.devices.items()
        ]
        known = list(placement_group_table().values())
        if not any(_is(each, launch.name) for each in known):
            placement_group(
                bundles, strategy="PACK", name=launch.name, lifetime="detached"
            )
        group = get_placement_group(launch.name)
        ray.get(group.ready(), timeout=_ANSWER_S)
        runner = ray.remote(num_cpus=0)(_Runner)
        for at, count in enumerate(launch.devices.values()):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=at
            )
            made = runner.options(
                name=f"{launch.name}/{at}",
                namespace=_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=strategy,
                **self._share(count),
            ).remote()
            variables = {
                "MESHWRIGHT_LAUNCH": launch.name,
                "MESHWRIGHT_NODE_RANK": str(at),
                "MESHWRIGHT_NODES": str(len(bundles)),
            }
            ray.get(made.start.remote(launch.words, variables), timeout=_ANSWER_S)

    def _share(self, count: int) -> dict[str, Any]:
        """Devices of an actor: Ray shows a process the GPUs that it asked for."""
        if self.resource == "GPU":
            return {"num_gpus": count}
        if self.resource == "CPU":
            return {"num_cpus": count}
        return {"resources": {self.resource: count}}

    def _codes(self, ray: Any, name: str) -> list[int | None]:
        """Return exit codes of a launch's commands, as many as it has actors."""
        found: list[int | None] = []
        while True:
            try:
                runner = ray.get_actor(f"{name}/{len(found)}", namespace=_NAMESPACE)
            except ValueError:
                return found
            try:
                found.append(ray.get(runner.poll.remote(), timeout=_ANSWER_S))
            except Exception as error:
                raise QueueError(f"{name} does not answer: {_line(error)}") from error


class _Runner:
    """An actor that runs a command once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        """Start the command, unless it was started before."""
        if self._process is None:
            self._process = subprocess.Popen(
                list(words), env={**os.environ, **variables}
            )

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        return None if self._process is None else self._process.poll()

    def stop(self, grace_s: float = 10.0) -> None:
        """End the command: SIGTERM, and SIGKILL later."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _is(group: Mapping[str, Any], name: str) -> bool:
    return bool(group["name"] == name and group["state"] != "REMOVED")


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]


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
        codes: Exit codes of the commands of our groups, one for each actor; None for
            a command that runs.
        resource: Resource that devices are.
        names: Type that Ray gives devices to the name that throughputs have.

    Raises:
        QueueError: If a field is missing, or no node has the resource.
    """
    hosts: dict[str, StateHost] = {}
    host_of: dict[str, str] = {}
    for node in nodes:
        host = field_of(node, "ray.nodes()", "NodeManagerHostname")
        host_of[field_of(node, "ray.nodes()", "NodeID")] = host
        has = field_of(node, "ray.nodes()", "Resources")
        count = int(has.get(resource, 0))
        if not node.get("Alive") or not count:
            continue
        if host in hosts:
            raise QueueError(f"two nodes of Ray are named {host}; give each its name")
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
        _entry(key, group, codes, host_of, resource)
        for key, group in groups.items()
        if group.get("state") != "REMOVED"
    )
    return Snapshot(hosts=tuple(hosts.values()), entries=entries)


def _entry(
    key: str,
    group: Mapping[str, Any],
    codes: Mapping[str, Sequence[int | None]],
    host_of: Mapping[str, str],
    resource: str,
) -> Entry:
    where = "placement_group_table()"
    name = field_of(group, where, "name")
    devices: dict[str, int] = {}
    for at, bundle in field_of(group, where, "bundles").items():
        node = host_of.get(group.get("bundles_to_node_id", {}).get(at, ""))
        count = int(bundle.get(resource, 0))
        if node is not None and count:
            devices[node] = devices.get(node, 0) + count
    status: Status = "running" if group["state"] == "CREATED" else "pending"
    ended = codes.get(name, ())
    ours = name.startswith(PREFIX)
    if ours and status == "running":
        if len(ended) < len(group["bundles"]):
            # An actor was never made, or has died with its node.
            status = "failed"
        elif all(code is not None for code in ended):
            status = "failed" if any(ended) else "done"
    return Entry(
        id=name if ours else key,
        name=name,
        status=status,
        devices=devices if status != "pending" else {},
    )
