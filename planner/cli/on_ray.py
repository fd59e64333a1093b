"""``meshwright run --on ray``: the processes of a plan as workers of Ray Train."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planner.cli.output import note
from planner.errors import ExecutionError, MeshwrightError, RankFailedError

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["train_on_ray"]

_LOG = logging.getLogger(__name__)

#: How long ranks may wait for their place, if others use the cluster, in seconds.
_START_S = 300.0
#: How long a collective may wait for a rank, in seconds.
_TIMEOUT_S = 600
#: How often messages of ranks are asked for, in seconds.
_POLL_S = 0.5
#: How long Ray may take to answer where it lives.
_ANSWER_S = 10.0


class _Mailbox:
    """An actor that keeps messages of ranks until they are fetched."""

    def __init__(self) -> None:
        self._mail: list[tuple[int, str, Any]] = []

    def put(self, rank: int, kind: str, value: Any) -> None:
        """Keep a message of a rank."""
        self._mail.append((rank, kind, value))

    def take(self) -> list[tuple[int, str, Any]]:
        """Return all messages since the last call, in order."""
        mail, self._mail = self._mail, []
        return mail


class _Letters:
    """The driver's side of a mailbox: a thread that reads it."""

    def __init__(self, on_message: Callable[[int, Any], None]) -> None:
        import ray

        self.box = ray.remote(num_cpus=0)(_Mailbox).remote()
        self.errors: list[tuple[int, dict[str, Any]]] = []
        self._on_message = on_message
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._over.wait(_POLL_S):
            self._take()

    def _take(self) -> None:
        import ray

        try:
            mail = ray.get(self.box.take.remote(), timeout=_ANSWER_S)
        except Exception as error:  # Ray is going; training tells why
            _LOG.debug("no letters: %s", error)
            return
        for rank, kind, value in mail:
            if kind == "error":
                self.errors.append((rank, value))
            else:
                self._on_message(rank, value)

    def close(self) -> None:
        """Read the last messages; once."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join(_ANSWER_S)
        self._take()


def train_on_ray(
    plan: Plan,
    arguments: Mapping[str, Any],
    *,
    address: str | None,
    on_message: Callable[[int, Any], None],
) -> dict[str, Any]:
    """Train as :func:`planner.cli.rank.train_rank` does, on Ray.

    Args:
        plan: A plan that Ray Train can express.
        arguments: Arguments of ``train_rank``.
        address: Address of the Ray cluster; None for the running one, else one is
            started on this machine; ``local`` to start one in any case.
        on_message: Called as ``on_message(rank, value)``, in a thread.

    Returns:
        The result of rank 0.
    Raises:
        ExecutionError: If Ray is not installed or not reached, or has too little room.
        MeshwrightError: If a rank raised one.
        RankFailedError: If a rank died or raised something else.
    """
    from planner.export.registry import require_expressible
    from planner.targets import get_target

    require_expressible(get_target("ray"), plan)
    _require_ray()
    with _ray(plan, address), tempfile.TemporaryDirectory(prefix="meshwright-") as home:
        _require_room(plan)
        ranks = plan.strategy.mesh.num_devices
        note(f"starting {ranks} Ray workers: {plan.strategy.label()}")
        letters = _Letters(on_message)
        try:
            return _fit(plan, arguments, letters, home)
        finally:
            letters.close()


def _require_ray() -> None:
    # Without its dashboard Ray Train complains every second; read on import.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Controller actor state")
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(_START_S))
    try:
        importlib.import_module("ray.train.torch")
    except ImportError as error:
        raise ExecutionError(
            f"--on ray needs Ray Train, which does not load here "
            f"({str(error).splitlines()[0]}); pip install 'meshwright[ray]'"
        ) from error


def _uses_gpus(plan: Plan) -> bool:
    from planner.targets.rules import is_cpu

    return not all(is_cpu(kind) for kind in plan.cluster.device_types)


@contextlib.contextmanager
def _ray(plan: Plan, address: str | None) -> Iterator[None]:
    """Be connected to Ray for the block; what was started is stopped after it."""
    import ray

    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        _connect(ray, address, plan.strategy.mesh.num_devices, quiet)
        yield
    finally:
        ray.shutdown()


def _connect(ray: Any, address: str | None, ranks: int, quiet: dict[str, Any]) -> None:
    asked = address or os.environ.get("RAY_ADDRESS")
    if asked != "local":
        try:
            ray.init(address=asked or "auto", **quiet)
            return
        except (ConnectionError, RuntimeError, ValueError) as error:
            if asked:
                raise ExecutionError(
                    f"no Ray cluster at {asked}: {_line(error)}; start one there with "
                    f"ray start --head, or use --ray-address local"
                ) from error
    try:
        # As many processes as there are ranks, as meshwright run starts without Ray.
        cores = max(ranks, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cores, include_dashboard=False, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ExecutionError(
            f"Ray does not start on this machine: {error}; see /tmp/ray, or name a "
            f"cluster with --ray-address"
        ) from error


def _require_room(plan: Plan) -> None:
    """Refuse what Ray would wait for.

    Raises:
        ExecutionError: With what the cluster has, and what the plan needs.
    """
    import ray

    ranks, have = plan.strategy.mesh.num_devices, ray.cluster_resources()
    for what in ("CPU", "GPU") if _uses_gpus(plan) else ("CPU",):
        if have.get(what, 0.0) < ranks:
            raise ExecutionError(
                f"the Ray cluster has {have.get(what, 0.0):g} {what}s, the plan has "
                f"{ranks} ranks with one each; join more machines with ray start, or "
                f"plan for fewer devices"
            )


def _fit(
    plan: Plan, arguments: Mapping[str, Any], letters: _Letters, home: str
) -> dict[str, Any]:
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
    from ray.train.torch import TorchConfig, TorchTrainer

    from planner.export.torchrun import placed

    placement = placed(plan)
    gpus = _uses_gpus(plan)
    config = {
        "arguments": {**arguments, "plan_text": plan.to_json()},
        "per_host": None if arguments["force"] else len(placement.local),
        "folder": os.getcwd(),  # noqa: PTH109  # a text, for another machine
        "mailbox": letters.box,
    }
    trainer = TorchTrainer(
        _train,
        train_loop_config=config,
        scaling_config=ScalingConfig(
            num_workers=plan.strategy.mesh.num_devices,
            use_gpu=gpus,
            placement_strategy="STRICT_PACK" if len(placement.hosts) == 1 else "PACK",
        ),
        torch_config=TorchConfig(timeout_s=_TIMEOUT_S),
        run_config=RunConfig(
            storage_path=home, failure_config=FailureConfig(controller_failure_limit=0)
        ),
    )
    try:
        return dict(trainer.fit().return_value)
    except TrainingFailedError as error:
        letters.close()
        raise _cause(error, letters.errors, plan.strategy.mesh.num_devices) from error


def _cause(
    error: Exception, told: list[tuple[int, dict[str, Any]]], ranks: int
) -> MeshwrightError:
    """The error of a failed training: the first of Meshwright's own, else the first."""
    for _, what in told:
        if isinstance(what["own"], MeshwrightError):
            return what["own"]
    for rank, what in told:
        failed = RankFailedError(
            f"rank {rank} of {ranks} raised {what['said']}; the other ranks were "
            f"stopped"
        )
        failed.add_note(what["traceback"])
        return failed
    cause = getattr(error, "controller_failure", None)
    if cause is not None:
        return ExecutionError(
            f"Ray did not start the {ranks} ranks: {_line(cause)}; look what else uses "
            f"the cluster (ray status)"
        )
    failures: dict[int, Exception] = getattr(error, "worker_failures", {})
    rank, why = next(iter(sorted(failures.items())), (0, error))
    return RankFailedError(
        f"rank {rank} of {ranks} died: {_line(why)}; the other ranks were stopped"
    )


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _train(config: dict[str, Any]) -> dict[str, Any]:
    """Train as one worker, in the process group that Ray has made."""
    import gc

    import ray.train
    from ray.train.torch import get_device

    from executors.exception_chain import explain, own_error
    from planner.cli.rank import train_rank

    context = ray.train.get_context()
    rank, box = context.get_world_rank(), config["mailbox"]
    if os.path.isdir(config["folder"]):  # noqa: PTH112  # as os.chdir
        # Ray moves workers to a folder of its own; models are named from here.
        os.chdir(config["folder"])

    def emit(message: Any) -> None:
        box.put.remote(rank, "message", message)

    try:
        _require_host(config["per_host"], context.get_local_world_size())
        arguments = {**config["arguments"], "device": str(get_device())}
        result = train_rank(arguments, emit)
    except Exception as error:
        own = own_error(error)
        said = ": ".join(filter(None, (type(error).__name__, explain(error))))
        what = {"own": own, "said": said, "traceback": traceback.format_exc()}
        ray.get(box.put.remote(rank, "error", what), timeout=_ANSWER_S)
        raise
    # What still holds the group goes before Ray ends it: gloo may wait for ever else.
    gc.collect()
    return result


def _require_host(planned: int | None, here: int) -> None:
    if planned is not None and planned != here:
        raise ExecutionError(
            f"Ray put {here} ranks on one machine, the plan has {planned} on each; "
            f"free whole machines, plan for this cluster, or --force to run anyway"
        )
