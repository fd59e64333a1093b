"""A network that orders waiting jobs, lets some wait, and weighs who grows.

It reads every job alive as numbers relative to the cluster and to the job's slack, and
pools over those that wait and those that run, so one set of weights serves clusters of
any size and any number of jobs. It chooses only the order in which
:class:`policies.elastic.cheapest.CheapestFirst` tries jobs: what may be promised is
checked there, whatever the weights are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydantic
import torch
from numpy.typing import NDArray

from planner.errors import StrategyError
from policies.elastic.cheapest import Order, fluid_order
from policies.elastic.promises import Needs
from policies.saved import read_weights, shipped_folder, write_weights

__all__ = [
    "FORMAT_VERSION",
    "ElasticNetwork",
    "NetworkOrder",
    "load_network",
    "make_network",
    "save_network",
]

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

#: Raised when the meaning of features or outputs changes: other weights are refused.
FORMAT_VERSION = 1

#: Features of a job, and of all jobs together.
_JOB, _ALL = 10, 5
#: Largest absolute value of a feature.
_MOST = 6.0
#: Device-seconds of a job that runs nowhere.
_FOREVER_S = 1e15
#: A job waits if this much is exceeded; a new network lets none wait.
_WAIT = 1.0


class ElasticNetwork(NamedTuple):
    """Weights of the network.

    Attributes:
        job: From the features of a job to its encoding. Shape [features + 1, hidden].
        context: From the mean encodings of waiting and running jobs, and the features
            of all, to the context. Shape [2 hidden + features + 1, hidden].
        out: From both to a job's place, its wish to wait, and its weight where free
            devices are shared. Shape [2 hidden + 1, 3].
    """

    job: Floats
    context: Floats
    out: Floats

    @property
    def hidden(self) -> int:
        """Units of each layer."""
        units: int = self.job.shape[1]
        return units

    def flat(self) -> Floats:
        """Return all weights in one row."""
        return np.concatenate([part.ravel() for part in self])

    def filled(self, values: Floats) -> ElasticNetwork:
        """Return a network of this shape with other weights."""
        sizes = np.cumsum([part.size for part in self])[:-1]
        parts = np.split(values, sizes)
        return ElasticNetwork(
            *(new.reshape(old.shape) for new, old in zip(parts, self, strict=True))
        )


def make_network(hidden: int, seed: int) -> ElasticNetwork:
    """Return a network that decides as the rule does: its last layer is 0.

    Args:
        hidden: Units of each layer.
        seed: Seed of the other layers.

    Raises:
        StrategyError: If there are no units.
    """
    if hidden < 1:
        raise StrategyError(f"hidden={hidden}; give at least 1 unit")
    random = np.random.default_rng(seed)

    def layer(inputs: int) -> Floats:
        drawn: Floats = random.standard_normal((inputs + 1, hidden)) / np.sqrt(inputs)
        drawn[-1] = 0.0
        return drawn

    return ElasticNetwork(
        layer(_JOB), layer(2 * hidden + _ALL), np.zeros((2 * hidden + 1, 3))
    )


class NetworkOrder:
    """Order of waiting jobs by a network.

    Args:
        network: The weights.
    """

    def __init__(self, network: ElasticNetwork) -> None:
        self._network = network

    def __call__(self, needs: Needs) -> Order:
        """Return the order in which waiting jobs are tried."""
        base = fluid_order(needs)
        count = len(needs.jobs)
        if not count:
            return base
        place = np.ones(count)
        place[base.first] = np.arange(len(base.first)) / max(1, len(base.first))
        found = _outputs(self._network, needs, place)
        waiting = base.first[found[base.first, 1] <= _WAIT]
        key = place[waiting] - found[waiting, 0]
        return Order(
            waiting[np.argsort(key, kind="stable")],
            base.declined,
            np.exp(np.clip(found[:, 2], -3.0, 3.0)),
        )


def _outputs(network: ElasticNetwork, needs: Needs, place: Floats) -> Floats:
    """Outputs for each job. Shape [jobs, 3]."""
    jobs = _job_features(needs, place)
    encoded = np.maximum(jobs @ network.job[:-1] + network.job[-1], 0.0)
    waiting = needs.undecided
    pooled = [
        encoded[group].mean(axis=0) if group.any() else np.zeros(network.hidden)
        for group in (waiting, ~waiting)
    ]
    whole = np.concatenate([*pooled, _all_features(needs)])
    context = np.maximum(whole @ network.context[:-1] + network.context[-1], 0.0)
    hidden = network.hidden
    shared = context @ network.out[hidden:-1] + network.out[-1]
    found: Floats = encoded @ network.out[:hidden] + shared
    return found


def _log(values: Floats) -> Floats:
    clipped: Floats = np.clip(np.log(np.maximum(values, 1e-9)), -_MOST, _MOST)
    return clipped


def _job_features(needs: Needs, place: Floats) -> Floats:
    """Features of jobs relative to capacity and slack. Shape [jobs, features]."""
    rows = np.arange(len(needs.jobs))
    slack_s = np.maximum(needs.slack_s, 1.0)
    # A job that no devices suffice for counts as on those on which it is fastest.
    least = np.where(needs.able, needs.ranked[:, 0], needs.rates.argmax(axis=1))
    size, supply = needs.size, needs.supply
    slow_s = np.minimum(needs.time_s[rows, least] * size[least], _FOREVER_S)
    cost_s = np.where(needs.able, needs.cost_s, slow_s)
    mean_s = float(np.mean(cost_s)) or 1.0
    fastest_s = needs.time_s.min(axis=1)
    other = (needs.held >= 0) & (needs.kinds[needs.held] != needs.kinds[least])
    then = np.where(other, needs.held, np.maximum(needs.held, least))
    then_s = needs.time_s[rows, then]
    return np.stack(
        [
            _log(cost_s / mean_s) / 2.0,
            _log(cost_s / (slack_s * supply)) / 3.0,
            _log(size[least] / supply) / 3.0,
            _log(fastest_s / slack_s),
            _log(then_s / slack_s),
            _log(slack_s / 3600.0) / 2.0,
            _height(needs, least, 0),
            np.where(needs.held >= 0, _height(needs, needs.held, 1), 0.0),
            needs.undecided.astype(np.float64),
            place,
        ],
        axis=1,
    )


def _height(needs: Needs, options: Index, more: int) -> Floats:
    """Place of options among those that each job can use of the type. Shape [n]."""
    kind = needs.kinds[options]
    first = np.searchsorted(needs.kinds, kind)
    usable = needs.tops[np.arange(len(options)), kind] - first
    found: Floats = (options - first + more) / np.maximum(usable, 1)
    return found


def _all_features(needs: Needs) -> Floats:
    """Features of all jobs together. Shape [features]."""
    waiting = needs.undecided
    size, supply = needs.size, needs.supply
    held = np.where(needs.held >= 0, size[needs.held], 0.0)
    least = np.where(needs.able, size[needs.ranked[:, 0]], 0.0)
    slack_s = np.maximum(needs.slack_s, 1.0)
    asked = needs.cost_s[waiting] / slack_s[waiting] / supply
    return np.array(
        [
            held.sum() / supply,
            np.where(waiting, 0.0, least).sum() / supply,
            float(_log(np.array([1e-3 + asked[np.isfinite(asked)].sum()]))[0]) / 3.0,
            float(np.log1p(waiting.sum())) / 4.0,
            float(np.log(supply / 256.0)) / 2.0,
        ]
    )


class _Described(pydantic.BaseModel):
    """Contents of ``config.json``."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    format_version: int
    hidden: int
    notes: dict[str, Any]


def save_network(
    network: ElasticNetwork, folder: str | Path, notes: dict[str, Any]
) -> None:
    """Write weights with their description.

    Args:
        network: The weights.
        folder: Made if it does not exist.
        notes: Training and validation, JSON values.
    """
    described = _Described(
        format_version=FORMAT_VERSION, hidden=network.hidden, notes=notes
    )
    tensors = {
        name: torch.from_numpy(part.copy()) for name, part in network._asdict().items()
    }
    write_weights(folder, tensors, described.model_dump())


def load_network(folder: str | Path | None = None) -> ElasticNetwork:
    """Read weights that :func:`save_network` wrote.

    Args:
        folder: Their folder; None for those that ship.

    Raises:
        StrategyError: If they are missing, damaged, or of another version.
    """
    path = shipped_folder("elastic") if folder is None else Path(folder)
    held = read_weights(path, _Described, {"format_version": FORMAT_VERSION})
    like = make_network(max(1, held.described.hidden), 0)
    wanted = {name: part.shape for name, part in like._asdict().items()}
    found = {name: tuple(part.shape) for name, part in held.tensors.items()}
    if found != wanted:
        raise StrategyError(
            f"weights in {path} have the shapes {found}; hidden="
            f"{held.described.hidden} has {wanted}, write both files anew"
        )
    return ElasticNetwork(
        *(held.tensors[name].numpy().astype(np.float64) for name in wanted)
    )
