"""Start gloo ranks on this machine for the tests of the probe."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _rank(
    rank: int, world: int, port: int, out: str, work: Callable[..., Any], options: Any
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    try:
        result = work(**options)
    finally:
        dist.destroy_process_group()
    Path(out, f"{rank}.json").write_text(json.dumps(result))


def run_ranks(
    world: int, folder: Path, work: Callable[..., Any], **options: Any
) -> list[Any]:
    """Return the result of ``work(**options)`` on each rank."""
    args = (world, free_port(), str(folder), work, options)
    mp.spawn(_rank, args=args, nprocs=world)
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(world)]
