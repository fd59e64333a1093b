"""The benchmark's jobs, read from the folder of profiles."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from envs.ramp.job import RampJob
from envs.ramp.topology import RampTopology
from envs.ramp.world import RampJobs
from planner.errors import CaptureError

__all__ = ["MODELS", "read_jobs"]

#: The benchmark's five models, in its order.
MODELS = ("resnet18", "vgg16", "gnmt", "squeezenet1_0", "alexnet")


def read_jobs(
    folder: str | os.PathLike[str] | None = None,
    models: tuple[str, ...] = MODELS,
    topology: RampTopology | None = None,
) -> RampJobs:
    """Read profiles; the same jobs are read once a process.

    Args:
        folder: Of ``<model>.txt`` files; by default the ``pipedream`` folder in
            the one that the environment variable MESHWRIGHT_DATA names.
        models: Names of profiles, in the order in which jobs are numbered.
        topology: Of the cluster; the benchmark's by default.

    Raises:
        CaptureError: If the folder or a profile is not there, or is malformed.
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
