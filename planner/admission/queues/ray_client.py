"""Process that talks to Ray for a loop: a line of JSON in, a line of JSON out.

Ray ends a process whose cluster is gone for a minute, and some of its calls wait for
ever, so that the loop has this one ask. It ends with whoever started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import Any

__all__ = ["host_of", "main"]

_NAMESPACE = "meshwright"
_NODE = "ray.io/node-id"
#: Time between SIGTERM and SIGKILL.
_GRACE_S = 10.0
#: Code of a command that was stopped and then ended with 0; a shell's for SIGTERM.
_STOPPED = 143
#: Code of a command that does not start, as of a shell.
_NOT_FOUND = 127
#: Ends a group of processes when the actor that started it is gone; a line from the
#: actor says that they have ended. Not a child of the actor, which Ray may kill.
_GUARD = """
exec 3<&0
end() { kill -s TERM -- "-$0"; sleep "$1"; kill -s KILL -- "-$0"; }
(read _ <&3 || end "$1") >/dev/null 2>&1 &
"""


class _Runner:
    """Actor that runs a command once, with all processes that it starts.

    The command begins with the actor, so that an actor without one cannot be left.
    """

    def __init__(self, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self._code: int | None = None
        self._stopped = False
        try:
            self._process = subprocess.Popen(
                list(words), env={**os.environ, **variables}, start_new_session=True
            )
        except OSError as error:
            sys.stderr.write(f"{words[0]} does not start: {error}\n")
            self._code = _NOT_FOUND
            return
        theirs, self._guard = os.pipe()
        words = ("sh", "-c", _GUARD, str(self._process.pid), str(_GRACE_S))
        subprocess.run(words, stdin=theirs, start_new_session=True, check=True)
        os.close(theirs)

    def poll(self) -> int | None:
        """Return the exit code; None while the command runs."""
        if self._code is None and (code := self._process.poll()) is not None:
            # What it has left behind would hold devices that others get.
            self._signal(signal.SIGKILL)
            with contextlib.suppress(BrokenPipeError):
                os.write(self._guard, b"\n")
            os.close(self._guard)
            self._code = code or (_STOPPED if self._stopped else 0)
        return self._code

    def stop(self) -> int | None:
        """Ask the command to end: SIGTERM, and SIGKILL later; return as ``poll``."""
        if self.poll() is None and not self._stopped:
            self._stopped = True
            self._signal(signal.SIGTERM)
            timer = threading.Timer(_GRACE_S, self._kill)
            timer.daemon = True
            timer.start()
        return self.poll()

    def _kill(self) -> None:
        if self._process.returncode is None:
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


class _Client:
    """Ray, and what a loop asks of it.

    Args:
        ray: The module, connected.
        limit_s: Time that actors may take to answer.
    """

    def __init__(self, ray: Any, limit_s: float) -> None:
        self._ray, self._limit_s = ray, limit_s

    def read(self, prefix: str) -> dict[str, Any]:
        """Return nodes, placement groups, and exit codes of launches.

        Args:
            prefix: Beginning of the names of launches.
        """
        from ray.util.placement_group import placement_group_table

        groups = placement_group_table()
        ours = {
            each["name"]: each
            for each in groups.values()
            if each["name"].startswith(prefix) and each["state"] != "REMOVED"
        }
        codes = {
            name: self._codes(self._runners(name, len(each["bundles"])), each, "poll")
            for name, each in ours.items()
        }
        return {"nodes": self._ray.nodes(), "groups": groups, "codes": codes}

    def launch(
        self,
        name: str,
        words: Sequence[str],
        devices: Mapping[str, int],
        resource: str,
    ) -> None:
        """Make a placement group and its actors, or those that are missing.

        Args:
            name: Name of the launch.
            words: Words of the command.
            devices: Host to number of devices.
            resource: Resource that devices are.
        """
        from ray.util.placement_group import get_placement_group, placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        nodes = {host_of(x): x["NodeID"] for x in self._ray.nodes() if x["Alive"]}
        if gone := devices.keys() - nodes.keys():
            raise LookupError(f"Ray has no node {', '.join(sorted(gone))} any more")
        if not self._groups(name):
            placement_group(
                [{resource: float(count)} for count in devices.values()],
                strategy="PACK",
                name=name,
                lifetime="detached",
                bundle_label_selector=[{_NODE: nodes[host]} for host in devices],
            )
        group = get_placement_group(name)
        runner = self._ray.remote(num_cpus=0)(_Runner)
        for at, count in enumerate(devices.values()):
            variables = {
                "MESHWRIGHT_LAUNCH": name,
                "MESHWRIGHT_NODE_RANK": str(at),
                "MESHWRIGHT_NODES": str(len(devices)),
            }
            runner.options(
                name=f"{name}/{at}",
                namespace=_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=at
                ),
                **_share(resource, count),
            ).remote(list(words), variables)

    def stop(self, name: str) -> None:
        """End the commands of a launch; once they have, give its devices back."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        for each in self._groups(name):
            runners = self._runners(name, len(each["bundles"]))
            if (
                None in self._codes(runners, each, "stop")
                and each["state"] != "PENDING"
            ):
                return
            for runner in runners:
                self._ray.kill(runner)
            remove_placement_group(get_placement_group(name))

    def _groups(self, name: str) -> list[Mapping[str, Any]]:
        from ray.util.placement_group import placement_group_table

        found = placement_group_table().values()
        return [x for x in found if x["name"] == name and x["state"] != "REMOVED"]

    def _runners(self, name: str, most: int) -> list[Any]:
        """Return the actors of a launch that were made and are not known to be dead."""
        found = []
        for at in range(most):
            with contextlib.suppress(ValueError):
                found.append(self._ray.get_actor(f"{name}/{at}", namespace=_NAMESPACE))
        return found

    def _codes(
        self, runners: Sequence[Any], group: Mapping[str, Any], call: str
    ) -> list[int | None]:
        """Return what actors answer that are alive; None for one that does not."""
        if group["state"] == "PENDING":
            return [None] * len(runners)
        asked = [getattr(runner, call).remote() for runner in runners]
        ready, _ = (
            self._ray.wait(asked, num_returns=len(asked), timeout=self._limit_s)
            if asked
            else ([], [])
        )
        found: list[int | None] = []
        for each in asked:
            try:
                found.append(self._ray.get(each) if each in ready else None)
            except self._ray.exceptions.ActorUnavailableError:
                # Until Ray gives its node up, it may answer again.
                found.append(None)
            except self._ray.exceptions.RayActorError:
                # It is dead: its launch has fewer answers than hosts, which tells.
                continue
        return found


def _share(resource: str, count: int) -> dict[str, Any]:
    """Devices of an actor: Ray shows a process the GPUs that it asked for."""
    if resource == "GPU":
        return {"num_gpus": count}
    if resource == "CPU":
        return {"num_cpus": count}
    return {"resources": {resource: count}}


def host_of(node: Mapping[str, Any]) -> str:
    """Return the name of a node: that of ``--node-name``, or of its machine.

    Args:
        node: Entry of ``ray.nodes()``.
    """
    name = node.get("NodeName") or node["NodeManagerAddress"]
    own = name != node["NodeManagerAddress"]
    return str(name if own else node["NodeManagerHostname"])


def _connected(address: str, limit_s: float) -> _Client:
    try:
        import ray
    except ImportError as error:
        raise RuntimeError(
            "ray is not installed; pip install 'meshwright[ray]'"
        ) from error
    try:
        ray.init(
            address=address,
            namespace=_NAMESPACE,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:
        raise RuntimeError(
            f"no Ray cluster at {address}: {_line(error)}; start one with ray start "
            f"--head, give its --ray-address, or set RAY_AUTH_MODE=token if it wants "
            f"a token"
        ) from error
    return _Client(ray, limit_s)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:200]


def _read_lines(into: SimpleQueue[str]) -> None:
    for line in sys.stdin:
        into.put(line)
    # Whoever asked has gone, and may have another process ask by now.
    os._exit(0)


def main(address: str, limit_s: float) -> None:
    """Answer lines of stdin until it ends.

    Args:
        address: Address of the Ray cluster.
        limit_s: Time that actors may take to answer.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    # What Ray prints is not an answer.
    os.dup2(2, 1)
    asked: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read_lines, args=(asked,), daemon=True).start()
    client: _Client | None = None
    while True:
        question = json.loads(asked.get())
        said: dict[str, Any]
        try:
            client = client or _connected(address, limit_s)
            said = {"ok": getattr(client, question.pop("do"))(**question)}
        except Exception as error:
            said = {"error": _line(error)}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
