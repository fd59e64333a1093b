"""The benchmark's jobs on a topology, and what decisions need of them as arrays."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.ramp.job import NUM_TRAINING_STEPS, RampJob
from envs.ramp.placement import (
    BlockTable,
    SplitJob,
    block_table,
    place,
    requested_sizes,
    split_job,
)
from envs.ramp.step_time import JobEdges, job_edges, link_rates, step_time_s, sub_graph
from envs.ramp.topology import RampTopology
from planner.errors import CaptureError, ClusterError

__all__ = [
    "MODELS",
    "RampJobs",
    "RampTables",
    "ramp_tables",
    "read_jobs",
]

Array = NDArray[np.float64]
Flags = NDArray[np.bool_]
Index = NDArray[np.int64]


class RampJobs:
    """The jobs of a benchmark on a topology, with their placements and step times.

    Both depend only on the job, its degree and the servers that are held, so that
    worlds share them.

    Args:
        jobs: Jobs by name.
        topology: Topology of the cluster.
    """

    def __init__(self, jobs: Mapping[str, RampJob], topology: RampTopology) -> None:
        self.jobs, self.topology = dict(jobs), topology
        self.degrees: tuple[int, ...] = tuple(topology.degrees.tolist())
        self._rates = link_rates(topology)
        self._edges: dict[str, JobEdges] = {n: job_edges(j) for n, j in jobs.items()}
        self._split: dict[tuple[str, int], SplitJob] = {
            (name, degree): split_job(job, degree, topology)
            for name, job in jobs.items()
            for degree in self.degrees
        }
        self._steps: dict[tuple[str, int, bytes], float] = {}
        free = np.zeros(topology.num_servers, dtype=np.bool_)
        self._empty: dict[tuple[str, int], float] = {}
        for name, degree in self._split:
            servers = self.place(name, degree, free)
            self._empty[name, degree] = (
                np.inf if servers is None else self.jct_s(name, degree, servers)
            )

    def forget(self) -> None:
        """Drop the known step times, to measure how long computing them takes."""
        self._steps.clear()

    def split(self, name: str, degree: int) -> SplitJob:
        """Return a job split to a degree."""
        return self._split[name, degree]

    def place(self, name: str, degree: int, busy: Flags) -> Index | None:
        """Servers of each op's sub-ops, then -1; None without room. Shape [n, p]."""
        split = self._split[name, degree]
        shape = (len(split.splits), int(split.splits.max()))
        servers = np.full(shape, -1, dtype=np.int64)
        fits = place(split, busy, self.topology.memory_bytes, servers)
        return servers if fits else None

    def jct_s(self, name: str, degree: int, servers: Index) -> float:
        """Return the completion time of a placed job."""
        key = (name, degree, servers.tobytes())
        if key not in self._steps:
            split = self._split[name, degree]
            graph = sub_graph(self._edges[name], split.splits, servers, self._rates)
            self._steps[key] = step_time_s(graph)
        return NUM_TRAINING_STEPS * self._steps[key]

    def empty_jct_s(self, name: str, degree: int) -> float:
        """Return the completion time on an empty cluster; infinity if it never fits."""
        return self._empty[name, degree]


#: Models of the benchmark, in its order.
MODELS = ("resnet18", "vgg16", "gnmt", "squeezenet1_0", "alexnet")


def read_jobs(
    folder: str | os.PathLike[str] | None = None,
    models: tuple[str, ...] = MODELS,
    topology: RampTopology | None = None,
) -> RampJobs:
    """Read profiles; the same jobs are read once a process.

    Args:
        folder: Folder of ``<model>.txt`` files; by default ``pipedream`` in the folder
            that the environment variable MESHWRIGHT_DATA names.
        models: Names of profiles, in the order in which jobs are numbered.
        topology: Topology of the cluster; the benchmark's by default.

    Raises:
        CaptureError: If the folder or a profile is missing or malformed.
    """
    if folder is None:
        data = os.environ.get("MESHWRIGHT_DATA")
        if data is None:
            raise CaptureError(
                "MESHWRIGHT_DATA is not set, and the jobs are read from its folder "
                "pipedream; set it, or give the folder of profiles"
            )
        folder = Path(data) / "pipedream"
    chosen = RampTopology() if topology is None else topology
    return _read(Path(folder).absolute(), tuple(models), chosen)


@lru_cache(maxsize=8)
def _read(folder: Path, models: tuple[str, ...], topology: RampTopology) -> RampJobs:
    jobs = {}
    for model in models:
        path = folder / f"{model}.txt"
        if not path.is_file():
            found = sorted(file.stem for file in folder.glob("*.txt"))
            raise CaptureError(
                f"{folder} has no profile {path.name}; it has: "
                f"{', '.join(found) or 'none'}"
            )
        jobs[model] = RampJob.from_profile(path)
    return RampJobs(jobs, topology)


class RampTables(NamedTuple):
    """Jobs and topology for compiled code. j jobs, d degrees, s requests at most.

    Attributes:
        degrees: In ascending order. Shape [d].
        splits: Largest split of a job at a degree. Shape [j, d].
        sizes: Sizes of the blocks that a job requests, then 0. Shape [j, d, s].
        blocks: Blocks of the topology.
        empty_jct_s: Completion time on an empty cluster; infinite where the job never
            fits. Shape [j, d].
        sequential_jct_s: Completion time on one device. Shape [j].
        demand_bytes: Bytes that a job adds to the throughput. Shape [j].
        num_servers: Servers of the topology.
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
    """Make the tables of a benchmark's jobs, in their order.

    Raises:
        ClusterError: If blocks alone do not decide placements, because a job may fill a
            server's memory, or if there are more than 64 servers.
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
