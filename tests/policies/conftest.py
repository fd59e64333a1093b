"""The benchmark's jobs, for policies to decide on."""

from __future__ import annotations

import pytest

from envs.ramp.jobs import RampJobs, RampTables, ramp_tables
from tests.envs.ramp.conftest import jobs

__all__ = ["jobs", "tables"]


@pytest.fixture(scope="session")
def tables(jobs: RampJobs) -> RampTables:
    return ramp_tables(jobs)
