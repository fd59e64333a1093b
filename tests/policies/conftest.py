"""The benchmark's jobs, for policies to decide on."""

from __future__ import annotations

import pytest

from envs.ramp.tables import RampTables, ramp_tables
from envs.ramp.world import RampJobs
from tests.envs.ramp.conftest import jobs

__all__ = ["jobs", "tables"]


@pytest.fixture(scope="session")
def tables(jobs: RampJobs) -> RampTables:
    return ramp_tables(jobs)
