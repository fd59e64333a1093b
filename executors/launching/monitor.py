"""Listen to launched processes until all are done or one has failed, then end them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

import planner.errors
from executors.exception_chain import is_consequence
from planner.errors import ExecutionError, MeshwrightError, RankFailedError

__all__ = ["Losses", "Monitor", "OnFailure", "Rank"]

#: Whether the other ranks stop when one fails.
OnFailure = Literal["stop", "continue"]

# The name that docs/executors.md gives: users filter by it, wherever this file lies.
_LOG = logging.getLogger("executors.monitor")

#: Output lines of each rank kept for the message, should it die.
_KEPT_LINES = 40
#: After a first failure, how long others may fail too, in seconds: the culprit is
#: not always the first to be seen.
_GRACE_S = 0.5
#: The same while none has failed but by what another's death does to it: on a busy
#: machine the culprit may be seconds behind.
_CONSEQUENCE_S = 5.0
#: Time between two looks for ranks that hang, in seconds.
_LOOK_S = 0.5
#: A warning of Python's, or of torch's C++.
_WARNING = re.compile(r"\S+:\d+: \w*Warning: |\[W\d{4} ")
#: How a rank begins the line that says why it ended itself.
_OWN = "meshwright: "
_NO_CAUSE = 2  # of :attr:`Rank.blame`


@dataclass(kw_only=True)
class Rank:
    """A launched process and its state.

    Attributes:
        index: Its rank.
        messages: Descriptor of the pipe with its JSON lines.
        output: Descriptor of the pipe with its stdout and stderr.
        pid: Once it has been started.
        code: Exit code once it has ended; below 0 if a signal ended it.
        result: What its function returned.
        error: Type, text and traceback of what it raised.
    """

    index: int
    messages: int
    output: int
    pid: int | None = None
    code: int | None = None
    result: Any = None
    error: dict[str, str] | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))

    @property
    def failed(self) -> bool:
        """True if it raised or ended badly."""
        return self.error is not None or bool(self.code)

    @property
    def blame(self) -> int:
        """Likelihood that it is the cause: killed 0, its own error 1, consequence 2."""
        if self.code is not None and self.code < 0 and self.error is None:
            return 0
        text = self.error["text"] if self.error else "\n".join(self.lines)
        # A rank that names another one is not the cause itself.
        named = self.error is not None and self.error["type"] == "RankFailedError"
        return _NO_CAUSE if named or is_consequence(text) else 1


class Losses(Protocol):
    """Where ranks that continue without each other tell of losses."""

    def tell(self, rank: int) -> None:
        """Tell the others that a rank has ended."""

    def why_hung(self, rank: int) -> str:
        """Return why the others went on without a rank; empty if they did not."""


class Monitor:
    """Reads the pipes of all launched processes.

    Args:
        spawner: The process that forks the ranks.
        ranks: In order.
        control: Descriptor on which the spawner tells of starts and ends.
        on_message: Called as ``on_message(rank, value)``.
        losses: Where ranks that continue without each other learn who has ended;
            None if they do not continue.
    """

    def __init__(
        self,
        spawner: subprocess.Popen[bytes],
        ranks: Sequence[Rank],
        control: int,
        on_message: Callable[[int, Any], None] | None,
        losses: Losses | None = None,
    ) -> None:
        self._spawner = spawner
        self._ranks = ranks
        self._on_message = on_message
        self._losses, self._looked = losses, time.monotonic()
        self._said: deque[str] = deque(maxlen=_KEPT_LINES)
        self._rest: dict[int, bytes] = {}
        self._readers: dict[int, Callable[[str], None]] = {}
        assert spawner.stdout is not None
        self._readers[spawner.stdout.fileno()] = self._said.append
        self._readers[control] = self._control
        for rank in ranks:
            self._readers[rank.messages] = self._message_of(rank)
            self._readers[rank.output] = self._output_of(rank)

    def watch(self, timeout_s: float | None) -> None:
        """Return when every rank has ended well, or, if they continue, when one has.

        Args:
            timeout_s: Longest to wait, in seconds; None for ever.
        Raises:
            RankFailedError: If one has not, or none has; or the spawner died.
            MeshwrightError: The very error, if that is what a rank raised.
            ExecutionError: If the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        failed_at: float | None = None
        with selectors.DefaultSelector() as selector:
            for stream in self._readers:
                os.set_blocking(stream, False)
                selector.register(stream, selectors.EVENT_READ)
            while not self._over():
                gone = self._spawner.poll() is not None
                for key, _ in selector.select(timeout=0.05):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)
                now = time.monotonic()
                if self._losses is not None and now - self._looked > _LOOK_S:
                    self._looked = now
                    self._kill_hung(self._losses)
                if failed_at is None and self._failed():
                    failed_at = now
                if failed_at is not None and now - failed_at > self._patience():
                    self._blame()
                # It may have told of the last end just before it went.
                ended = all(rank.code is not None for rank in self._ranks)
                if gone and not ended and failed_at is None:
                    self._raise_lost()
                if deadline is not None and now > deadline:
                    raise ExecutionError(
                        f"{len(self._ranks)} ranks did not end within {timeout_s:g} s "
                        f"and were stopped; allow more time, or see what they wait for"
                    )
            for stream in self._readers:
                while self._read(stream):
                    pass

    def _over(self) -> bool:
        """Return True if nobody is left to wait for, and enough have ended well."""
        codes = [rank.code for rank in self._ranks]
        if self._losses is None:
            return all(code == 0 for code in codes)
        return None not in codes and 0 in codes

    def _failed(self) -> bool:
        """Return True if a rank has failed, or all have where the others continue."""
        if self._losses is None:
            return any(rank.failed for rank in self._ranks)
        return all(rank.code for rank in self._ranks)

    def end(self) -> None:
        """Kill whatever is left, with all that it started."""
        # Also where a rank itself is gone: what it started may still run.
        pids = [rank.pid for rank in self._ranks if rank.pid is not None]
        for pid in [self._spawner.pid, *pids]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._spawner.wait()
        assert self._spawner.stdout is not None
        self._spawner.stdout.close()

    def _read(self, stream: int) -> bool:
        """Read the available bytes; False at the end of the stream, or if none."""
        try:
            data = os.read(stream, 1 << 16)
        except BlockingIOError:
            return False
        *lines, rest = (self._rest.pop(stream, b"") + data).split(b"\n")
        self._rest[stream] = rest
        for line in lines:
            self._readers[stream](line.decode(errors="replace"))
        return bool(data)

    def _control(self, line: str) -> None:
        message = json.loads(line)
        value = message["value"]
        rank = self._ranks[value["rank"]]
        if message["kind"] == "started":
            rank.pid = value["pid"]
        else:
            rank.code = value["code"]
            if rank.code and self._losses is not None:
                self._lose(rank, self._losses, again=value["again"])

    def _kill_hung(self, losses: Losses) -> None:
        """Kill the ranks that the others went on without, though they live."""
        for rank in self._ranks:
            if rank.pid is None or rank.code is not None:
                continue
            reason = losses.why_hung(rank.index)
            if reason:
                who = f"rank {rank.index} of {len(self._ranks)}"
                _LOG.warning("%s is killed: %s", who, reason)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank.pid, signal.SIGKILL)

    def _lose(self, rank: Rank, losses: Losses, *, again: bool) -> None:
        """Go on without a rank, which may have been started again."""
        while self._read(rank.messages) or self._read(rank.output):
            pass
        losses.tell(rank.index)
        then = "it is started again" if again else "the others continue"
        _LOG.warning("%s; %s", self._ending(rank), then)
        if again:
            # Its last line may have no end.
            self._rest.pop(rank.messages, None)
            rank.code = rank.error = rank.pid = None
            rank.lines.clear()

    def _message_of(self, rank: Rank) -> Callable[[str], None]:
        def read(line: str) -> None:
            message = json.loads(line)
            if message["kind"] == "result":
                rank.result = message["value"]
            elif message["kind"] == "error":
                rank.error = message["value"]
            elif self._on_message is not None:
                self._on_message(rank.index, message["value"])

        return read

    def _output_of(self, rank: Rank) -> Callable[[str], None]:
        def read(line: str) -> None:
            rank.lines.append(line)
            _LOG.debug("rank %d: %s", rank.index, line)

        return read

    def _patience(self) -> float:
        """Seconds after the first failure in which others may fail too."""
        found = [rank.blame for rank in self._ranks if rank.failed]
        waited_for = len(found) < len(self._ranks) and min(found) == _NO_CAUSE
        return _CONSEQUENCE_S if waited_for else _GRACE_S

    def _blame(self) -> NoReturn:
        """Raise for the rank that is most likely the cause."""
        failed = (rank for rank in self._ranks if rank.failed)
        rank = min(failed, key=lambda rank: (rank.blame, rank.index))
        if rank.error is not None:
            who = f"rank {rank.index} of {len(self._ranks)}"
            _LOG.info("%s:\n%s", who, rank.error["traceback"])
            raise _raised(who, rank.error)
        last = "" if self._own_words(rank) else _last_words(rank.lines)
        raise RankFailedError(
            f"{self._ending(rank)}; the other ranks were stopped{last}"
        )

    def _own_words(self, rank: Rank) -> str:
        """Reason that a rank gave for ending itself; empty if it gave none."""
        said = [line for line in rank.lines if line.startswith(_OWN)]
        return said[-1].removeprefix(_OWN) if said else ""

    def _ending(self, rank: Rank) -> str:
        """Words for how a rank ended."""
        who = f"rank {rank.index} of {len(self._ranks)}"
        if rank.error is not None:
            return f"{who} raised {rank.error['type']}: {rank.error['text']}"
        code = rank.code or 0
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        return self._own_words(rank) or f"{who} {killed or f'exited {code}'}"

    def _raise_lost(self) -> NoReturn:
        """Raise because the spawner ended without a report on its ranks."""
        raise RankFailedError(
            f"the {len(self._ranks)} ranks could not be started or lost their parent "
            f"(exit {self._spawner.poll()})" + _last_words(self._said)
        )


def _raised(who: str, error: Mapping[str, str]) -> MeshwrightError:
    """Rebuild the error of a rank: itself if it is one of ours, else a failed rank."""
    kind = getattr(planner.errors, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, MeshwrightError):
        # Some are made of parts; none is remade out of its text.
        return kind.__new__(kind, error["text"])
    said = ": ".join(filter(None, (error["type"], error["text"])))
    failed = RankFailedError(f"{who} raised {said}; the other ranks were stopped")
    failed.add_note(f"{who}:\n{error['traceback']}")
    return failed


def _last_words(lines: Sequence[str]) -> str:
    """The last lines of an output that are no warnings, behind a semicolon."""
    told: list[str] = []
    warned = False
    for line in lines:
        # Python prints the line of code that warned below the warning, indented.
        warned = bool(_WARNING.match(line)) or (warned and line.startswith("  "))
        if not warned and line.strip():
            told.append(line.strip())
    return f"; last output: {' | '.join(told[-3:])}" if told else ""
