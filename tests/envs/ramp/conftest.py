"""The benchmark's five jobs on its topology, read once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envs.ramp.job import RampJob
from envs.ramp.jobs import RampJobs
from envs.ramp.topology import RampTopology

MODELS = ("resnet18", "vgg16", "gnmt", "squeezenet1_0", "alexnet")


@pytest.fixture(scope="session")
def jobs() -> RampJobs:
    folder = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "pipedream"
    if not folder.is_dir():
        pytest.skip("MESHWRIGHT_DATA has no pipedream folder")
    profiles = {model: folder / f"{model}.txt" for model in MODELS}
    read = {name: RampJob.from_profile(path) for name, path in profiles.items()}
    return RampJobs(read, RampTopology())
