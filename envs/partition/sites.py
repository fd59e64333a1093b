"""Clusters of several sites, after the networks that DT-FM measured.

Regions lie on a plane; the further apart two are, the longer the delay between them and
the lower the bandwidth, within the ranges of the published matrices.

Source: Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous
    Environments", arXiv 2206.01288, section 4.1; matrices of DS3Lab/DT-FM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from envs.partition.machines import Machine
from planner.cluster import Cluster, device_type
from planner.schema.cluster import ClusterDocument
from planner.units import gbit_per_s

__all__ = ["NETWORKS", "SiteNetwork", "sites_document"]

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNetwork:
    """Ranges of one published network.

    Attributes:
        regions: Fewest and most sites.
        inside_gbits: Bandwidth of a host within its site, lowest and highest, Gbit/s.
        inside_s: Delay within a site, seconds.
        across_s: Delay between sites, seconds.
    """

    regions: tuple[int, int]
    inside_gbits: tuple[float, float]
    inside_s: tuple[float, float]
    across_s: tuple[float, float]


#: Networks by name.
NETWORKS: Mapping[str, SiteNetwork] = {
    "data-centres": SiteNetwork(
        regions=(2, 3),
        inside_gbits=(5.0, 10.0),  # Yuan et al. 2022, case 3: text 10, matrix 5
        inside_s=(1e-3, 10e-3),  # Yuan et al. 2022, case 3: matrix 1 ms, text 10 ms
        across_s=(11e-3, 30e-3),  # Yuan et al. 2022, case 3: 11 ms; wider: assumption
    ),
    "on-demand": SiteNetwork(
        regions=(2, 4),
        inside_gbits=(10.0, 25.0),  # Yuan et al. 2022, case 1: 25 Gbit/s an instance
        inside_s=(20e-6, 200e-6),  # assumption: the matrix of case 1 has no delay
        across_s=(11e-3, 67e-3),  # Yuan et al. 2022, cases 3 and 4
    ),
    "regional": SiteNetwork(
        regions=(3, 5),
        inside_gbits=(2.0, 2.0),  # Yuan et al. 2022, case 4
        inside_s=(5e-3, 5e-3),  # Yuan et al. 2022, case 4
        across_s=(11e-3, 67e-3),  # Yuan et al. 2022, case 4
    ),
    "worldwide": SiteNetwork(
        regions=(4, 8),
        inside_gbits=(2.0, 2.0),  # Yuan et al. 2022, case 5
        inside_s=(5e-3, 5e-3),  # Yuan et al. 2022, case 5
        across_s=(11e-3, 238e-3),  # Yuan et al. 2022, case 5
    ),
}

#: Delay in ms and Gbit/s of pairs of cities; between them a straight line.
_DELAY_MS = (11, 24, 49, 67, 99, 124, 143, 172, 199, 228)  # Yuan et al. 2022, case 5
_GBITS = (  # Yuan et al. 2022, case 5, the same pairs
    1.12,
    1.08,
    1.1,
    1.05,
    0.799,
    0.482,
    0.42,
    0.5,
    0.465,
    0.335,
)
#: Spread of the bandwidth around that line, as the pairs of case 5 have it.
_SPREAD = 0.15


def sites_document(
    rng: np.random.Generator,
    kinds: Sequence[Machine],
    *,
    hosts: int,
    devices_per_host: int,
) -> ClusterDocument:
    """Spread hosts unevenly over sites, numbered in random order.

    Devices of one host share its port evenly.

    Args:
        rng: Source of randomness.
        kinds: Machines; each host is one of them, each site prefers some.
        hosts: Number of hosts.
        devices_per_host: Devices in each.
    """
    network = NETWORKS[str(rng.choice(sorted(NETWORKS)))]
    low, high = network.regions
    regions = int(rng.integers(min(low, hosts), min(high, hosts) + 1))
    site = _sites(rng, hosts, regions)
    taste = rng.dirichlet([0.7] * len(kinds), size=regions)
    picks = [int(rng.choice(len(kinds), p=taste[where])) for where in site]
    gbits, delay = _between(rng, network, regions)
    count = hosts * devices_per_host
    host = np.repeat(np.arange(hosts), devices_per_host)
    where = site[host]
    share = gbit_per_s(1.0) / devices_per_host
    bandwidth = gbits[where[:, None], where[None, :]] * share
    latency = delay[where[:, None], where[None, :]]
    for index, pick in enumerate(picks):
        run = slice(index * devices_per_host, (index + 1) * devices_per_host)
        inside = kinds[pick].inside
        cables = max(1, devices_per_host - 1) if inside.mesh else 1
        bandwidth[run, run] = inside.bandwidth_bytes_per_s * cables
        latency[run, run] = inside.latency_s
    types = [device_type(kinds[pick].device) for pick in picks]
    cluster = Cluster.from_matrices(
        _rounded(bandwidth),
        _rounded(latency),
        [types[int(index)] for index in host],
        host.tolist(),
        name=f"{regions} sites, {count} devices",
        source="drawn after Yuan et al. 2022, arXiv 2206.01288",
    )
    return cluster.document


def _sites(rng: np.random.Generator, hosts: int, regions: int) -> npt.NDArray[np.int64]:
    """Draw the site of each host; sites have uneven sizes, and none is empty."""
    share = rng.dirichlet([1.5] * regions)
    rest = rng.choice(regions, hosts - regions, p=share)
    return np.asarray(rng.permutation(np.concatenate([np.arange(regions), rest])))


def _between(
    rng: np.random.Generator, network: SiteNetwork, regions: int
) -> tuple[Floats, Floats]:
    """Draw Gbit/s and seconds between sites, within them on the diagonal. [r, r]."""
    place = rng.random((regions, 2))
    distance = np.linalg.norm(place[:, None] - place[None, :], axis=-1)
    near, far = network.across_s
    delay = near + (far - near) * np.minimum(1.0, distance)
    noise = rng.normal(0.0, _SPREAD, (regions, regions))
    noise = np.triu(noise, 1) + np.triu(noise, 1).T
    gbits = np.interp(delay * 1e3, _DELAY_MS, _GBITS) * np.exp(noise)
    own = np.arange(regions)
    gbits[own, own] = rng.uniform(*network.inside_gbits, regions)
    delay[own, own] = rng.uniform(*network.inside_s, regions)
    return gbits, delay


def _rounded(matrix: Floats) -> Floats:
    """Round to four digits, the precision of a measurement; files get shorter, too."""
    scale = 10.0 ** (3 - np.floor(np.log10(matrix)))
    return np.asarray(np.round(matrix * scale) / scale)
