"""Compute the prices that ship: built-in jobs on a few presets.

python -m envs.stream.prepare

Where the environment variable MESHWRIGHT_DATA names a folder with PipeDream's profiles,
those are priced as well, on the first preset.
"""

from __future__ import annotations

import logging
import os

from tqdm import tqdm

from envs.stream.jobs import built_in_jobs, profiled_jobs
from envs.stream.network import StreamNetwork
from envs.stream.prices import SHIPPED, PriceBook
from envs.stream.tables import stream_tables
from planner.cluster import Cluster, device_type

__all__ = ["PRESETS", "main"]

#: Clusters whose prices ship: preset, largest number of nodes, largest degree.
PRESETS = (("dgx-a100", 4, 32), ("dgx-h100", 4, 32), ("a40-pcie", 4, 32))

_log = logging.getLogger(__name__)


def main() -> None:
    """Write :data:`envs.stream.prices.SHIPPED`."""
    book = PriceBook(shipped=False)
    profiles = profiled_jobs() if os.environ.get("MESHWRIGHT_DATA") else ()
    for number, (preset, nodes, degree) in enumerate(PRESETS):
        network = StreamNetwork(Cluster.from_preset(preset, nodes))
        shapes = network.shapes(degree, spread=1)
        jobs = (*built_in_jobs(), *(profiles if number == 0 else ()))
        for job in tqdm(jobs, desc=preset, disable=None):
            if job not in profiles:
                # A profile is a graph already, and is quickly read.
                book.graph(job)
            book.sequential_step_s(job, device_type("a100-80"))
            stream_tables((job,), network, shapes, book)
    SHIPPED.parent.mkdir(exist_ok=True)
    book.save(SHIPPED)
    _log.info("wrote %s", SHIPPED)


if __name__ == "__main__":
    main()
