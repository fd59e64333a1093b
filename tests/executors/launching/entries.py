"""Entry points of launched processes in tests of ``launch``; imports nothing heavy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from planner.errors import FingerprintError

Emit = Callable[[Any], None]


def environment(args: dict[str, Any], emit: Emit) -> dict[str, str]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "MASTER_ADDR")
    return {name: os.environ[name] for name in names} | {"extra": args["extra"]}


def talk(args: dict[str, Any], emit: Emit) -> int:
    for number in range(args["count"]):
        emit({"number": number})
    sys.stdout.write("x" * 200_000 + "\n")  # more than a pipe holds
    return os.getpid()


def wait_for_ever(args: dict[str, Any], emit: Emit) -> None:
    emit(os.getpid())
    if os.environ["RANK"] == str(args.get("dies")):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ["RANK"] == str(args.get("exits")):
        sys.stderr.write("the disk is full\n")
        warnings.warn("a view was returned", UserWarning, stacklevel=1)
        sys.stderr.write("[W1125 17:12:33.788 TCPStore.cpp:340] [c10d] retrying\n")
        sys.stderr.flush()
        os._exit(7)
    time.sleep(600)


def breed(args: dict[str, Any], emit: Emit) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    emit(child.pid)
    emit(os.getpid())
    raise ValueError("one line\nand another")


def refuse(args: dict[str, Any], emit: Emit) -> None:
    raise FingerprintError("a plan for another model")


def wrap(args: dict[str, Any], emit: Emit) -> None:
    if os.environ["RANK"] == "1":
        try:
            try:
                raise FingerprintError("ours") if args["ours"] else OSError("disk full")
            except Exception as error:
                raise ValueError("in between") from error
        except ValueError as error:
            raise RuntimeError("\n  [Stage 1] failed to run forward:\n args") from error
    time.sleep(600)


def blame_the_peer(args: dict[str, Any], emit: Emit) -> None:
    if os.environ["RANK"] == "1":
        time.sleep(1.0)  # longer than others are waited for whose own fault it is
        raise MemoryError("no room")
    raise RuntimeError("Connection closed by peer [127.0.0.1]:1")


def reduce_for_ever(args: dict[str, Any], emit: Emit) -> None:
    """All-reduce on and on; one rank stops, dies, fails or sleeps after three."""
    import torch
    import torch.distributed as dist

    from executors.launching.process_group import process_group

    torch.set_num_threads(1)
    device = torch.device("cpu")
    with process_group(device, timeout_s=6.0, rank_timeout_s=args["rank_timeout_s"]):
        for number in range(100_000):
            if number == 3 and os.environ["RANK"] == str(args["victim"]):
                _suffer(args["fault"])
            dist.all_reduce(torch.ones(4))


def _suffer(fault: str) -> None:
    if fault == "raise":
        raise ValueError("no such batch")
    if fault == "sleep":
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, fault))


def main() -> None:
    """Be a rank that nobody watches: what it raises is its last line."""
    try:
        reduce_for_ever(json.loads(sys.argv[1]), print)
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
