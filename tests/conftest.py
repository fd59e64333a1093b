"""Defaults for all tests."""

from __future__ import annotations

import gc
import os

import pytest

from tests.tiers import read

# Most tests plan for the plan's own sake; those of certificates ask for them.
os.environ.setdefault("MESHWRIGHT_CERTIFY", "0")

#: Folders whose tests compile kernels of streams of jobs.
_STREAMS = ("tests/benchmarks/", "tests/envs/", "tests/policies/")

# What imports make stays; going through it took a third of the time of collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ``tiers.txt`` leaves to longer suites; streams come first.

    Of two workers one begins in the middle of all tests. If both begin with streams of
    jobs, each compiles the same kernels, for more than a minute.
    """
    tiers = read()
    for item in items:
        tier = tiers.get(item.nodeid)
        if tier is not None:
            item.add_marker(getattr(pytest.mark, tier))
    items.sort(key=lambda item: not item.nodeid.startswith(_STREAMS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took, where that is asked for."""
    path = os.environ.get("MESHWRIGHT_TEST_TIMES")
    # The process that starts workers hears of each test, too, as of a node.
    if path is not None and not hasattr(report, "node"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        with open(f"{path}.{worker}", "a", encoding="utf-8") as file:
            file.write(f"{report.duration:.2f} {report.nodeid}\n")
