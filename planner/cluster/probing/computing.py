"""How fast ranks compute: alone, together, and against memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from planner.cluster.fit import fit_line
from planner.cluster.probing.session import Session
from planner.schema.probe import MatmulPoint

__all__ = ["compute_slots", "fit_rates", "matmuls", "memory_bandwidth", "op_overhead"]

_CPU_SIZES = (64, 128, 256, 512)
_GPU_SIZES = (512, 1024, 2048, 4096, 8192)


def op_overhead(session: Session) -> float:
    """Seconds of an op on one element, launched back to back."""
    one = session.random(1)

    def hundred() -> None:
        for _ in range(100):
            one.add(1.0)

    return session.median_alone(hundred, 0.05) / 100


def matmuls(session: Session, budget_s: float) -> tuple[MatmulPoint, ...]:
    """Square products: the first rank of each host alone, then all ranks at once."""
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
    session: Session, work: Callable[[], object], budget_s: float
) -> float:
    """Mean seconds a call takes while every rank is busy with the same.

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


def fit_rates(
    points: Sequence[MatmulPoint], main_dtype: str
) -> tuple[float, dict[str, float]]:
    """Fixed seconds of the main dtype, and the rate of each."""
    rates, fixed = {}, 0.0
    for dtype in dict.fromkeys(point.dtype for point in points):
        chosen = [point for point in points if point.dtype == dtype]
        flops = [2.0 * point.size**3 for point in chosen]
        begin, rates[dtype] = fit_line(flops, [point.alone_s for point in chosen])
        if dtype == main_dtype:
            fixed = begin
    return fixed, rates


def compute_slots(session: Session, points: Sequence[MatmulPoint]) -> float:
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


def memory_bandwidth(session: Session, budget_s: float) -> float:
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
