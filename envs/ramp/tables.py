"""What decisions need to know of a benchmark's jobs and topology, as arrays."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.requests import BlockTable, block_table, requested_sizes
from envs.ramp.world import RampJobs
from planner.errors import ClusterError

__all__ = ["RampTables", "ramp_tables"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]


class RampTables(NamedTuple):
    """Jobs and topology for compiled code. j jobs, d degrees, s requests at most.

    Attributes:
        degrees: In ascending order. Shape [d].
        splits: Largest split of a job at a degree. Shape [j, d].
        sizes: Of the blocks that a job asks for, then 0. Shape [j, d, s].
        blocks: Of the topology.
        empty_jct_s: Completion time where no other job is; infinite where the job
            never fits. Shape [j, d].
        sequential_jct_s: On one device. Shape [j].
        demand_bytes: What throughput counts. Shape [j].
        num_servers: Of the topology.
    """

    degrees: Index
    splits: Index
    sizes: Index
    blocks: BlockTable
    empty_jct_s: Array
    sequential_jct_s: Array
    demand_bytes: Array
    num_servers: int


def ramp_tables(jobs: RampJobs) -> RampTables:
    """Lay the jobs of a benchmark out, in their order.

    Raises:
        ClusterError: If blocks do not settle placements, because a job may fill a
            server's memory, or do not fit masks of 64 bits.
    """
    topology = jobs.topology
    blocks = block_table(topology)
    if blocks is None:
        raise ClusterError(
            f"the topology has {topology.num_servers} servers; episodes side by side "
            f"take at most 64, RampWorld any number"
        )
    asked = {
        (name, degree): requested_sizes(jobs.split(name, degree), topology)
        for name in jobs.jobs
        for degree in jobs.degrees
    }
    shape = (len(jobs.jobs), len(jobs.degrees))
    most = max((len(s) for s in asked.values() if s is not None), default=1)
    sizes = np.zeros((*shape, most), dtype=np.int64)
    splits = np.zeros(shape, dtype=np.int64)
    empty = np.zeros(shape)
    for row, name in enumerate(jobs.jobs):
        for column, degree in enumerate(jobs.degrees):
            wanted = asked[name, degree]
            if wanted is None:
                memory = jobs.split(name, degree).memory.sum()
                raise ClusterError(
                    f"job {name} of {memory:.3g} bytes may fill a server of "
                    f"{topology.memory_bytes:.3g} bytes; episodes side by side need "
                    f"servers that hold a whole job, RampWorld does not"
                )
            sizes[row, column, : len(wanted)] = wanted
            splits[row, column] = jobs.split(name, degree).splits.max()
            empty[row, column] = jobs.empty_jct_s(name, degree)
    every = list(jobs.jobs.values())
    return RampTables(
        degrees=np.array(jobs.degrees, dtype=np.int64),
        splits=splits,
        sizes=sizes,
        blocks=blocks,
        empty_jct_s=empty,
        sequential_jct_s=np.array([job.sequential_jct_s for job in every]),
        demand_bytes=np.array([job.demand_bytes for job in every]),
        num_servers=topology.num_servers,
    )
