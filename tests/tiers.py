"""Tests that the default suite leaves to longer ones, listed in ``tiers.txt``.

``make test`` is to end within 10 minutes on 2 cores. Of each test function it keeps the
quickest case; other cases that take long are ``further`` (``make test-further``, and
so CI, runs them), and of those with several long cases all but one are ``slow`` (``make
test-all``). Some are ``slow`` by hand, as a quicker case of the same function runs the
same code. Cases from .6 seconds of processor time on left the default suite likewise,
but for those that are each of another fault, and so did functions whose quickest case
takes a second, but for one or two of each part. To add to the list::

    MESHWRIGHT_TEST_TIMES=times make test-all
    python -m tests.tiers times*
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["FILE", "chosen", "read", "read_times"]

FILE = Path(__file__).with_name("tiers.txt")

#: Seconds up to which every case is run by default, and the quickest of a function.
EACH_S, QUICKEST_S = 1.5, 5.0
#: Long cases of a function that CI runs, and seconds that make one long there.
FURTHER, FURTHER_S = 1, 2.0


def read(path: Path = FILE) -> dict[str, str]:
    """Tier of each listed test, by node id."""
    lines = path.read_text(encoding="utf-8").splitlines()
    pairs = (line.split(" ", 1) for line in lines if line and line[0] != "#")
    return {name: tier for tier, name in pairs}


def read_times(paths: Iterable[Path]) -> dict[str, float]:
    """Seconds of each test with its fixtures, by node id."""
    found: defaultdict[str, float] = defaultdict(float)
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            seconds, name = line.split(" ", 1)
            found[name] += float(seconds)
    return dict(found)


def chosen(times: Mapping[str, float]) -> dict[str, str]:
    """Tier of each test that is not run by default, by node id.

    Args:
        times: Seconds of each test.
    """
    functions: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, seconds in times.items():
        # A name with a path in it is another one elsewhere.
        if "[/" not in name:
            functions[name.partition("[")[0]].append((seconds, name))
    found: dict[str, str] = {}
    for cases in functions.values():
        left = [
            (seconds, name)
            for place, (seconds, name) in enumerate(sorted(cases))
            if seconds > (EACH_S if place else QUICKEST_S)
        ]
        for place, (seconds, name) in enumerate(left):
            long = place >= FURTHER and seconds > FURTHER_S
            found[name] = "slow" if long else "further"
    return dict(sorted(found.items()))


def main() -> None:
    """Add what takes long to the list; nothing leaves it."""
    parser = argparse.ArgumentParser(description="Add to tests/tiers.txt.")
    parser.add_argument("times", nargs="+", type=Path, help="what a run has written")
    times = read_times(parser.parse_args().times)
    before = read()
    slow = {name: tier for name, tier in before.items() if tier == "slow"}
    tiers = sorted({**before, **chosen(times), **slow}.items())
    lines = [f"{tier} {name}" for name, tier in tiers]
    head = "# Written by python -m tests.tiers; see there."
    FILE.write_text("\n".join([head, *lines]) + "\n", encoding="utf-8")
    print(f"{FILE}: {len(lines)} of {len(times)} tests are left to longer suites")


if __name__ == "__main__":
    main()
