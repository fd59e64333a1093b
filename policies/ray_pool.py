"""An executor whose functions run as tasks of a Ray cluster, on any of its machines."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ray

from envs.ray_vector import start_ray

__all__ = ["RayPool"]


class RayPool(Executor):
    """Runs functions on the machines of a Ray cluster, one on each CPU.

    The machines need this package and the files that the functions read.

    Args:
        address: Address of a running cluster; ``"auto"`` for the one that this machine
            belongs to, ``"local"`` for one of its own, which :meth:`shutdown` stops.

    Attributes:
        cpus: CPUs of the cluster.

    Raises:
        ExecutionError: If no cluster answers at the address.
    """

    def __init__(self, address: str) -> None:
        self._started = not ray.is_initialized()
        if self._started:
            start_ray(None if address == "local" else address, 1)
        self.cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._tasks: list[Any] = []

    def submit(
        self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Future[Any]:
        """Start a function; see :meth:`concurrent.futures.Executor.submit`."""
        task = ray.remote(_pickled).remote(fn, *args, **kwargs)
        every = [*self._tasks, task]
        _, self._tasks = ray.wait(every, num_returns=len(every), timeout=0)
        begun: Future[Any] = Future()
        begun.set_running_or_notify_cancel()
        task.future().add_done_callback(lambda ended: _settle(begun, ended))
        return begun

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the cluster if it was started here; else wait for tasks, or end them."""
        if self._started:
            ray.shutdown()
            return
        if cancel_futures:
            for task in self._tasks:
                ray.cancel(task)
        elif wait and self._tasks:
            ray.wait(self._tasks, num_returns=len(self._tasks))


def _pickled(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> bytes:
    # Ray shares the arrays of a result, which cannot be written to.
    return pickle.dumps(fn(*args, **kwargs))


def _settle(begun: Future[Any], ended: Future[bytes]) -> None:
    try:
        begun.set_result(pickle.loads(ended.result()))  # noqa: S301  # of this run
    except BaseException as error:  # whatever the function raised
        begun.set_exception(error)
