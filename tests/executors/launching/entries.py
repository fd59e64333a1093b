"""Entry points of launched processes in tests of ``launch``; imports nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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
