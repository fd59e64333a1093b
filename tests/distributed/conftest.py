"""One pool for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    workers = Pool(8)
    yield workers
    workers.close()
