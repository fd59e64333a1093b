"""Measuring a live process group: how fast its ranks compute and talk.

:func:`probe_process_group` runs on every rank of an initialised group, gloo or NCCL.
Ranks that share a machine also share its cores, its memory and its network, so what is
measured is what training meets: collectives of all groups of one size run at the same
time, and computing is measured both alone and together.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from planner.cluster.detect import usable_cores
from planner.cluster.probing import computing, talking
from planner.cluster.probing.session import Session
from planner.errors import ClusterError
from planner.schema.probe import ProbeDocument, ProbeEnvironment

__all__ = ["probe_process_group"]

#: Shares of the time budget.
_MATMUL, _MEMORY, _P2P, _COLLECTIVES = 0.25, 0.05, 0.1, 0.4


def probe_process_group(
    *, seconds: float = 10.0, seed: int = 0, name: str = "local", date: str = ""
) -> dict[str, Any]:
    """Measure the default process group; call it on every rank.

    Sets torch to one thread a rank while it measures.

    Args:
        seconds: About how long to measure; a tenth more or less, plus warming up.
        seed: Of the random factors.
        name: What the probe is called, and the calibration of its cluster.
        date: When it is made, as the caller wants it written.

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
        session = Session.open(seed)
        document = _measure(session, seconds, name, date)
    finally:
        torch.set_num_threads(threads)
    if session.rank:
        return {}
    elapsed = time.perf_counter() - started
    done = document.model_copy(update={"seed": seed, "elapsed_s": elapsed})
    return done.model_dump(mode="json")


def _measure(session: Session, seconds: float, name: str, date: str) -> ProbeDocument:
    overhead = session.slowest(computing.op_overhead(session))
    matmul = computing.matmuls(session, seconds * _MATMUL)
    fixed, rates = computing.fit_rates(matmul, session.main_dtype)
    bandwidth = computing.memory_bandwidth(session, seconds * _MEMORY)
    links = talking.links(session, seconds * _P2P)
    collectives = talking.collectives(session, seconds * _COLLECTIVES)
    return ProbeDocument(
        name=name,
        backend=session.backend,
        device_name=session.device_name,
        host_of_rank=session.host_of_rank,
        compute_slots=computing.compute_slots(session, matmul),
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
