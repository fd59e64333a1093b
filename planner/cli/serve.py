"""The command ``meshwright serve``."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from planner.cli.on_slurm import sbatch_options
from planner.cli.options import OptionalFile
from planner.cli.output import note
from planner.errors import ExecutionError, PlanFileError, StrategyError
from planner.schema.base import write_atomically

if TYPE_CHECKING:
    from planner.admission.journal import Journal
    from planner.admission.operator import Operator
    from planner.admission.queues import Queue

__all__ = ["ServeCommand"]

#: Time after which a signal is seen at the latest.
_SIGNAL_S = 0.2
Renames = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="QUEUE=NAME",
        help="Name that throughputs have for a device type of the queue.",
    ),
]
SbatchOptions = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(metavar="OPTION", help="Long option of sbatch, such as account=lab."),
]


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Promise deadlines to jobs of a queue, and launch, resize and stop them."""

    queue: Literal["slurm", "kueue", "ray"]
    """Queue that runs the jobs."""
    journal: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """Folder of the journal. A loop that was stopped or killed goes on from it. With
    SLURM, all nodes must see it."""
    throughputs: Annotated[str, tyro.conf.arg(metavar="FILE")]
    """Throughputs of the jobs: a CSV table, or JSON."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on."""
    port: int = 8765
    """Port to listen on; 0 for any, which endpoint.json in the journal's folder has."""
    token_file: OptionalFile = None
    """File whose first line is the token that requests must bear."""
    poll_s: float = 10.0
    """Time between two looks at the queue."""
    answer_s: float = 60.0
    """Time that the queue may take to answer a command."""
    guard_s: float = 60.0
    """Time before its deadline by which a job has to end when it is admitted; what the
    queue takes to start and stop jobs comes off it."""
    restart_s: float = 30.0
    """Time from a launch to the first iteration."""
    rate_margin: float = 0.05
    """Share by which jobs may be slower than their throughputs."""
    device: Renames = ()
    sbatch: SbatchOptions = ()
    namespace: str = "default"
    """Namespace of Kueue."""
    local_queue: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """LocalQueue of Kueue."""
    image: Annotated[str | None, tyro.conf.arg(metavar="IMAGE")] = None
    """Image of Kueue's containers."""
    resource: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Resource that devices are; nvidia.com/gpu for Kueue, GPU for Ray."""
    ray_address: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "auto"
    """Address of the Ray cluster."""
    once: bool = False
    """Look at the queue once, act, and end, without listening."""

    def run(self) -> None:
        """Look, decide and act until a signal.

        Raises:
            StrategyError: If an option is wrong.
            JournalError: If the journal is damaged, in use, or contradicts the queue.
            ExecutionError: If the one look of --once could not be acted on.
        """
        from planner.admission.journal import Journal
        from planner.admission.operator import Operator, OperatorSettings
        from planner.admission.throughputs import load_throughputs
        from planner.schema.admission import ResizePrice

        self._check()
        queue, token = self._queue(), self._token()
        settings = OperatorSettings(
            throughputs=load_throughputs(self.throughputs),
            price=ResizePrice(restart_s=self.restart_s),
            rate_margin=self.rate_margin,
            poll_s=self.poll_s,
            guard_s=self.guard_s,
        )
        journal = Journal(self.journal, self.queue)
        try:
            operator = Operator(queue, journal, settings)
            if self.once:
                if not operator.tick():
                    raise ExecutionError(
                        "nothing, or not all, was done; mend what the warning says "
                        "and run this again"
                    )
                return
            self._loop(operator, journal, token)
        finally:
            journal.close()

    def _check(self) -> None:
        for name, least in (
            ("poll_s", 0.05),
            ("answer_s", 0.05),
            ("guard_s", 0.0),
            ("restart_s", 0.0),
        ):
            if not least <= getattr(self, name) < 1e9:
                raise StrategyError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}; give a time of "
                    f"at least {least:g} s"
                )
        if not 0 <= self.port <= 65535:
            raise StrategyError(
                f"--port {self.port}; give a port from 1 to 65535, or 0 for any"
            )
        if not 0.0 <= self.rate_margin < 1.0:
            raise StrategyError(
                f"--rate-margin {self.rate_margin}; give a share from 0 to below 1"
            )

    def _loop(self, operator: Operator, journal: Journal, token: str | None) -> None:
        from planner.admission.server import make_server, run_server

        woken = threading.Event()
        server = make_server(journal, self.host, self.port, token=token, wake=woken.set)
        run_server(server)
        host, port = server.server_address[:2]
        # For programs that start it, and those that report progress.
        endpoint = json.dumps({"host": str(host), "port": port, "pid": os.getpid()})
        write_atomically(journal.folder / "endpoint.json", f"{endpoint}\n".encode())
        note(f"listening on http://{host!s}:{port}, journal {journal.path}")
        with _signals() as received:
            try:
                while not received:
                    woken.clear()
                    operator.tick()
                    end = time.monotonic() + self.poll_s
                    while not received and (left := end - time.monotonic()) > 0.0:
                        if woken.wait(min(left, _SIGNAL_S)):
                            break
            finally:
                server.shutdown()
                server.server_close()

    def _token(self) -> str | None:
        if self.token_file is None:
            return os.environ.get("MESHWRIGHT_TOKEN") or None
        try:
            lines = Path(self.token_file).read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanFileError(
                f"cannot read the token of {self.token_file}: {error}"
            ) from error
        if not lines:
            raise PlanFileError(
                f"{self.token_file} is empty; write a token, for example of openssl "
                f"rand -hex 16"
            )
        return lines[0]

    def _queue(self) -> Queue:
        from planner.admission.queues import KueueQueue, RayQueue, SlurmQueue

        names = dict(_rename(text) for text in self.device)
        if self.queue == "slurm":
            claims = str((Path(self.journal) / "claims").absolute())
            options = sbatch_options(self.sbatch)
            return SlurmQueue(
                claims=claims, options=options, names=names, answer_s=self.answer_s
            )
        if self.queue == "ray":
            resource = self.resource or "GPU"
            return RayQueue(
                address=self.ray_address,
                resource=resource,
                names=names,
                answer_s=self.answer_s,
            )
        if self.local_queue is None or self.image is None:
            raise StrategyError(
                "--queue kueue needs --local-queue and --image, for the JobSets that "
                "it creates"
            )
        return KueueQueue(
            local_queue=self.local_queue,
            image=self.image,
            namespace=self.namespace,
            resource=self.resource or "nvidia.com/gpu",
            names=names,
            answer_s=self.answer_s,
        )


def _rename(text: str) -> tuple[str, str]:
    theirs, _, ours = (part.strip() for part in text.partition("="))
    if not theirs or not ours:
        raise StrategyError(
            f"--device {text!r}; write QUEUE=NAME, for example "
            f"NVIDIA-A100-SXM4-80GB=a100"
        )
    return theirs, ours


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT, so that the loop ends behind its present look."""
    received: list[int] = []

    def take(number: int, _: object) -> None:
        received.append(number)

    before = {
        each: signal.signal(each, take) for each in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
