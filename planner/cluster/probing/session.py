"""A process group as one rank sees it, and how it takes time."""

from __future__ import annotations

import hashlib
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from planner.cluster.detect import known_type, usable_memory_bytes
from planner.errors import ClusterError

__all__ = ["Session"]

_MOST_ROUNDS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """The process group as this rank sees it."""

    rank: int
    world_size: int
    backend: Any
    device: torch.device
    device_name: str
    memory_bytes: float
    host_of_rank: tuple[int, ...]
    host_hashes: tuple[str, ...]
    generator: torch.Generator = field(repr=False)

    @classmethod
    def open(cls, seed: int) -> Session:
        """Learn who is where."""
        import torch.distributed as dist

        backend = str(dist.get_backend())
        on_gpu = backend == "nccl"
        device = (
            torch.device("cuda", torch.cuda.current_device())
            if on_gpu
            else (torch.device("cpu"))
        )
        size = dist.get_world_size()
        digest = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
        digests: list[Any] = [None] * size
        dist.all_gather_object(digests, digest)
        hashes = tuple(dict.fromkeys(digests))
        hosts = tuple(hashes.index(digest) for digest in digests)
        if list(hosts) != sorted(hosts):
            raise ClusterError(
                f"hosts of ranks are {hosts}: number the ranks host by host, as "
                f"torchrun does"
            )
        if on_gpu:
            name = torch.cuda.get_device_name(device)
            memory = float(torch.cuda.get_device_properties(device).total_memory)
            known = known_type(name, memory)
            name = known.name if known else name.lower().replace(" ", "-")
            backend = "rccl" if torch.version.hip else backend
        else:
            name = "cpu"
            memory = usable_memory_bytes() / hosts.count(hosts[dist.get_rank()])
        # Every rank plans with what the fullest of them has left.
        least = torch.tensor([memory], dtype=torch.float64, device=device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return cls(
            rank=dist.get_rank(),
            world_size=size,
            backend=backend,
            device=device,
            device_name=name,
            memory_bytes=float(least.item()),
            host_of_rank=hosts,
            host_hashes=hashes,
            generator=torch.Generator(device).manual_seed(seed),
        )

    @property
    def on_gpu(self) -> bool:
        """True if ranks compute on GPUs."""
        return self.device.type == "cuda"

    @property
    def main_dtype(self) -> str:
        """Data type whose rate and ramp are those of training here."""
        return "bfloat16" if self.on_gpu else "float32"

    @property
    def ranks_of_host(self) -> tuple[int, ...]:
        """Ranks on this rank's host."""
        mine = self.host_of_rank[self.rank]
        return tuple(r for r, host in enumerate(self.host_of_rank) if host == mine)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, generator=self.generator, device=self.device).to(
            dtype
        )

    def slowest(self, value: float) -> float:
        """Largest value of any rank."""
        import torch.distributed as dist

        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box.item())

    def mean(self, value: float) -> float:
        """Mean over all ranks."""
        import torch.distributed as dist

        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box)
        return float(box.item()) / self.world_size

    def wait(self) -> None:
        """Until all ranks are here and this device has done its work."""
        import torch.distributed as dist

        self.finish()
        dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Until this device has done its work."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def once(self, work: Callable[[], object]) -> float:
        """Seconds of one call."""
        start = time.perf_counter()
        work()
        self.finish()
        return time.perf_counter() - start

    def median_alone(self, work: Callable[[], object], budget_s: float) -> float:
        """Median seconds of a call that involves this rank alone."""
        work()
        first = max(self.once(work), 1e-7)
        rounds = max(3, min(_MOST_ROUNDS, int(budget_s / first)))
        return statistics.median(self.once(work) for _ in range(rounds))

    def median_together(self, work: Callable[[], object], budget_s: float) -> float:
        """Median seconds of a call that all ranks make, on the slowest rank.

        All make the same number of calls: the number comes from an agreed time.
        """
        work()
        self.wait()
        first = self.slowest(max(self.once(work), 1e-7))
        rounds = max(3, min(_MOST_ROUNDS, int(budget_s / first)))
        self.wait()
        return self.slowest(statistics.median(self.once(work) for _ in range(rounds)))
