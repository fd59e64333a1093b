"""Measure a live process group: the speed of its devices and of its links.

:func:`probe_process_group` runs on every rank of an initialised group, gloo or NCCL.
Ranks that share a machine also share its cores, its memory and its network, so what is
measured is what training meets: collectives of all groups of one size run at the same
time, and computing is measured both alone and together.
"""

from __future__ import annotations

import hashlib
import math
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from planner.cluster.detect import usable_cores, usable_memory_bytes
from planner.cluster.presets import known_type
from planner.errors import ClusterError
from planner.schema.cluster import CollectiveKind, MeasuredCollective
from planner.schema.probe import (
    MatmulPoint,
    MeasuredLink,
    ProbeDocument,
    ProbeEnvironment,
)

__all__ = ["fit_line", "probe_process_group"]

#: Shares of the time budget.
_MATMUL, _MEMORY, _P2P, _COLLECTIVES = 0.25, 0.05, 0.1, 0.4
_MOST_ROUNDS = 200
#: Sides of square products.
_CPU_SIZES = (64, 128, 256, 512)
_GPU_SIZES = (512, 1024, 2048, 4096, 8192)
#: Bytes of messages and of full tensors.
_MESSAGES = (4_096, 65_536, 1 << 20, 8 << 20)
_KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)


def probe_process_group(
    *, seconds: float = 10.0, seed: int = 0, name: str = "local", date: str = ""
) -> dict[str, Any]:
    """Measure the default process group; call it on every rank.

    Sets torch to one thread a rank while it measures.

    Args:
        seconds: About how long to measure; a tenth more or less, plus warming up.
        seed: Seed of the random factors.
        name: Name of the probe, and the calibration of its cluster.
        date: Date to write into it, in the form the caller wants.

    Returns:
        On rank 0 a :class:`~planner.schema.probe.ProbeDocument` as JSON data; an
        empty dict elsewhere.

    Raises:
        ClusterError: If there is no process group, or the ranks of one host do not
            follow one another.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise ClusterError(
            "no process group to probe: call torch.distributed.init_process_group "
            "first, or run meshwright probe"
        )
    started = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        session = _Session.open(seed)
        document = _measure(session, seconds, name, date)
    finally:
        torch.set_num_threads(threads)
    if session.rank:
        return {}
    elapsed = time.perf_counter() - started
    done = document.model_copy(update={"seed": seed, "elapsed_s": elapsed})
    return done.model_dump(mode="json")


def _measure(session: _Session, seconds: float, name: str, date: str) -> ProbeDocument:
    overhead = session.slowest(_op_overhead(session))
    matmul = _matmuls(session, seconds * _MATMUL)
    fixed, rates = _fit_rates(matmul, session.main_dtype)
    bandwidth = _memory_bandwidth(session, seconds * _MEMORY)
    links = _links(session, seconds * _P2P)
    collectives = _collectives(session, seconds * _COLLECTIVES)
    return ProbeDocument(
        name=name,
        backend=session.backend,
        device_name=session.device_name,
        host_of_rank=session.host_of_rank,
        compute_slots=_compute_slots(session, matmul),
        peak_flops_per_s=rates,
        half_efficiency_flops=max(0.0, fixed - overhead) * rates[session.main_dtype],
        kernel_overhead_s=overhead,
        memory_bytes=session.memory_bytes,
        memory_bandwidth_bytes_per_s=bandwidth,
        matmul=matmul,
        links=links,
        collectives=collectives,
        environment=ProbeEnvironment(
            torch_version=str(torch.__version__),
            host_hashes=session.host_hashes,
            usable_cores=usable_cores(),
            threads_per_rank=1,
            date=date,
        ),
    )


# -- Ranks -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Session:
    """The process group as one rank sees it, and its timers."""

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
    def open(cls, seed: int) -> _Session:
        """Exchange hosts, names and memory with all ranks."""
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
        # Every rank plans with the memory that the fullest of them has left.
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
        """Draw normal numbers on the device."""
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
        """Wait until all ranks are here and this device has done its work."""
        import torch.distributed as dist

        self.finish()
        dist.barrier()
        self.finish()

    def finish(self) -> None:
        """Wait until this device has done its work."""
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


# -- Computing -------------------------------------------------------------------


def _op_overhead(session: _Session) -> float:
    """Seconds of an op on one element, launched back to back."""
    one = session.random(1)

    def hundred() -> None:
        for _ in range(100):
            one.add(1.0)

    return session.median_alone(hundred, 0.05) / 100


def _matmuls(session: _Session, budget_s: float) -> tuple[MatmulPoint, ...]:
    """Time square products, first by one rank of each host, then by all at once."""
    sizes = _GPU_SIZES if session.on_gpu else _CPU_SIZES
    dtypes = (torch.float32, torch.bfloat16)
    share = budget_s / (2 * len(sizes) * len(dtypes))
    points = []
    for dtype in dtypes:
        for size in sizes:
            a = session.random(size, size, dtype=dtype)
            b = session.random(size, size, dtype=dtype)
            out = torch.empty_like(a)

            def product(
                a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out
            ) -> None:
                torch.mm(a, b, out=out)

            session.wait()
            alone = 0.0
            if session.rank == session.ranks_of_host[0]:
                alone = session.median_alone(product, share)
            alone = session.slowest(alone)
            together = _while_all_compute(session, product, share)
            points.append(
                MatmulPoint(
                    dtype=str(dtype).removeprefix("torch."),
                    size=size,
                    alone_s=alone,
                    together_s=max(together, 1e-9),
                )
            )
    return tuple(points)


def _while_all_compute(
    session: _Session, work: Callable[[], object], budget_s: float
) -> float:
    """Mean seconds of a call while every rank is busy with the same.

    A fixed time rather than a fixed count: nobody stops early and leaves the cores to
    the others. Mean rather than median: a rank that waits for a core for a whole time
    slice waits in few calls, but it does wait.
    """
    session.wait()
    start = time.perf_counter()
    calls = 0
    while time.perf_counter() - start < max(budget_s, 0.02):
        work()
        calls += 1
        if session.on_gpu and calls % 16 == 0:
            session.finish()
    session.finish()
    return session.mean((time.perf_counter() - start) / calls)


def _fit_rates(
    points: Sequence[MatmulPoint], main_dtype: str
) -> tuple[float, dict[str, float]]:
    """Fit the fixed seconds of the main dtype, and the rate of each dtype."""
    rates, fixed = {}, 0.0
    for dtype in dict.fromkeys(point.dtype for point in points):
        chosen = [point for point in points if point.dtype == dtype]
        flops = [2.0 * point.size**3 for point in chosen]
        begin, rates[dtype] = fit_line(flops, [point.alone_s for point in chosen])
        if dtype == main_dtype:
            fixed = begin
    return fixed, rates


def _compute_slots(session: _Session, points: Sequence[MatmulPoint]) -> float:
    """Ranks of one host that compute at full rate at the same time.

    At least 1: a rank alone does, and less can only be a neighbour's noise.
    """
    per_host = max(session.host_of_rank.count(h) for h in set(session.host_of_rank))
    if per_host == 1:
        return 1.0
    sizes = sorted({point.size for point in points})[-2:]
    kept = [
        point.alone_s / point.together_s
        for point in points
        if point.size in sizes and point.dtype == session.main_dtype
    ]
    slots = per_host * statistics.median(kept)
    return float(min(max(slots, 1.0), per_host))


def _memory_bandwidth(session: _Session, budget_s: float) -> float:
    """Bytes read and written per second by a large copy, first rank of each host."""
    source = torch.zeros(
        (1 << 28) if session.on_gpu else (1 << 24), device=session.device
    )
    target = torch.empty_like(source)
    session.wait()
    seconds = 0.0
    if session.rank == session.ranks_of_host[0]:
        seconds = session.median_alone(lambda: target.copy_(source), budget_s)
    moved = 2 * source.numel() * source.element_size()
    return moved / session.slowest(seconds)


# -- Links -----------------------------------------------------------------------


def _links(session: _Session, budget_s: float) -> tuple[MeasuredLink, ...]:
    """Time rings of messages, inside each host and from host to host."""
    rings = {"host": _ring_inside(session), "network": _ring_across(session)}
    used = {scope: ring for scope, ring in rings.items() if ring is not None}
    found = []
    for scope, (target, origin) in used.items():
        times = []
        for size in _MESSAGES:
            out = torch.zeros(size, dtype=torch.uint8, device=session.device)
            into = torch.empty_like(out)

            def exchange(
                out: torch.Tensor = out,
                into: torch.Tensor = into,
                target: int = target,
                origin: int = origin,
            ) -> None:
                _exchange(out, into, target, origin)

            share = budget_s / (len(used) * len(_MESSAGES))
            times.append(session.median_together(exchange, share))
        alpha, bandwidth = fit_line(_MESSAGES, times)
        found.append(
            MeasuredLink.model_validate(
                {"scope": scope, "alpha_s": alpha, "bandwidth_bytes_per_s": bandwidth}
            )
        )
    return tuple(found)


def _exchange(out: torch.Tensor, into: torch.Tensor, target: int, origin: int) -> None:
    import torch.distributed as dist

    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, out, target), dist.P2POp(dist.irecv, into, origin)]
    )
    for work in works:
        work.wait()


def _ring_inside(session: _Session) -> tuple[int, int] | None:
    """Next and previous rank of this host; None if some host has a single rank."""
    counts = [session.host_of_rank.count(h) for h in set(session.host_of_rank)]
    if min(counts) == 1:
        return None
    ranks = session.ranks_of_host
    place = ranks.index(session.rank)
    return ranks[(place + 1) % len(ranks)], ranks[place - 1]


def _ring_across(session: _Session) -> tuple[int, int] | None:
    """Rank at the same place on the next and the previous host; None for one host."""
    counts = {session.host_of_rank.count(h) for h in set(session.host_of_rank)}
    if len(session.host_hashes) == 1:
        return None
    stride = counts.pop() if len(counts) == 1 else 1
    size = session.world_size
    return (session.rank + stride) % size, (session.rank - stride) % size


def _group_sizes(world_size: int) -> tuple[int, ...]:
    """Powers of two that divide the world, and the world itself."""
    powers = (2**i for i in range(1, math.ceil(math.log2(max(world_size, 2))) + 1))
    sizes = {size for size in powers if world_size % size == 0}
    if world_size > 1:
        sizes.add(world_size)
    return tuple(sorted(sizes))


def _collectives(session: _Session, budget_s: float) -> tuple[MeasuredCollective, ...]:
    """Time each kind of collective on groups of each size, at several sizes."""
    import torch.distributed as dist

    sizes = _group_sizes(session.world_size)
    if not sizes:
        return ()
    share = budget_s / (len(sizes) * len(_KINDS) * len(_MESSAGES))
    found = []
    for group_size in sizes:
        mine = None
        for start in range(0, session.world_size, group_size):
            # Every rank must take part in making every group.
            group = dist.new_group(list(range(start, start + group_size)))
            if start <= session.rank < start + group_size:
                mine = group
        for kind in _KINDS:
            ladder = [size // group_size * group_size for size in _MESSAGES]
            times = [
                session.median_together(
                    _collective(session, kind, mine, group_size, size), share
                )
                for size in ladder
            ]
            alpha, bandwidth = fit_line(ladder, times)
            found.append(
                MeasuredCollective(
                    kind=kind,
                    group_size=group_size,
                    alpha_s=alpha,
                    bandwidth_bytes_per_s=bandwidth,
                )
            )
        dist.destroy_process_group(mine)
    return tuple(found)


def _collective(
    session: _Session, kind: CollectiveKind, group: Any, group_size: int, size: int
) -> Callable[[], object]:
    """Return a call that runs one collective over a full tensor of ``size`` bytes."""
    import torch.distributed as dist

    part = max(1, size // group_size // 4)
    full = torch.zeros(part * group_size, device=session.device)
    shard = torch.zeros(part, device=session.device)
    other = torch.zeros_like(full)
    # torch 2.13 deprecates the names that torch 2.11 knows.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[CollectiveKind, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(full, group=group),
        "all_gather": lambda: gather(full, shard, group=group),
        "reduce_scatter": lambda: scatter(shard, full, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, full, group=group),
    }
    return calls[kind]


# -- Fitting ---------------------------------------------------------------------


def fit_line(sizes: npt.ArrayLike, times_s: npt.ArrayLike) -> tuple[float, float]:
    """Fit the fixed time and the rate of t = fixed + size / rate.

    Least squares on relative errors, so that small sizes count as much as large ones;
    neither part may be negative.

    Args:
        sizes: Bytes or FLOPs, at least one positive. Shape [n].
        times_s: Measured seconds, positive. Shape [n].

    Returns:
        Fixed seconds, at least 0, and rate per second, positive.
    """
    x = np.asarray(sizes, dtype=float)
    t = np.asarray(times_s, dtype=float)
    if len(np.unique(x)) > 1:
        design = np.stack([1 / t, x / t], axis=1)
        (fixed, slope), *_ = np.linalg.lstsq(design, np.ones_like(t), rcond=None)
        if fixed >= 0 and slope > 0:
            return float(fixed), float(1 / slope)
        if slope <= 0:
            # Times that do not grow: all of it is fixed, the rate is what was reached.
            return float(np.median(t)), float((x / t).max())
    # Through the origin: minimise sum (1 - slope x / t)^2.
    ratio = x / t
    return 0.0, float((ratio**2).sum() / ratio.sum())
