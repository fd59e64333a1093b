"""Defaults for all tests."""

from __future__ import annotations

import gc
import os

import pytest

from tests.tiers import read

# Most tests plan for the plan's own sake; those of certificates ask for them.
os.environ.setdefault("MESHWRIGHT_CERTIFY", "0")

#: Folders whose tests compile kernels of streams of jobs; those that compile kernels
#: of plans, too, come last.
_STREAMS = (
    "tests/envs/ramp/",
    "tests/envs/stream/",
    "tests/policies/ramp/",
    "tests/policies/stream/",
    "tests/envs/",
    "tests/policies/",
    "tests/benchmarks/",
)
#: Its tests compile most kernels of plans.
_PLANS = "tests/search/"

# What imports make stays; going through it took a third of the time of collection.
gc.disable()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that ``tiers.txt`` leaves to longer suites."""
    tiers = read()
    for item in items:
        tier = tiers.get(item.nodeid)
        if tier is not None:
            item.add_marker(getattr(pytest.mark, tier))


class _Order:
    """Puts tests in order, of those that are left."""

    @staticmethod
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Let streams come first, and plans in the middle of all.

        There the second of two workers begins. If both begin with streams of jobs, or
        with plans, each compiles the same kernels, for more than a minute.
        """
        first = sorted((i for i in items if _place(i) < len(_STREAMS)), key=_place)
        plans = [item for item in items if item.nodeid.startswith(_PLANS)]
        others = {*first, *plans}
        rest = [item for item in items if item not in others]
        half = max(len(items) // 2 - len(first), 0)
        items[:] = [*first, *rest[:half], *plans, *rest[half:]]


def _place(item: pytest.Item) -> int:
    """Number of the item's folder among streams, or how many they are."""
    starts = (n for n, name in enumerate(_STREAMS) if item.nodeid.startswith(name))
    return next(starts, len(_STREAMS))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Order())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how long a test took, where that is asked for."""
    path = os.environ.get("MESHWRIGHT_TEST_TIMES")
    # The process that starts workers hears of each test, too, as of a node.
    if path is not None and not hasattr(report, "node"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
        with open(f"{path}.{worker}", "a", encoding="utf-8") as file:
            file.write(f"{report.duration:.2f} {report.nodeid}\n")
