"""Train the network for elastic jobs by evolution strategies, on windows of traces.

Each generation draws pairs of opposite changes of the weights. All of them play the
same windows, so what differs between the two of a pair is due to the weights alone.
The weights move towards the changes after which fewer jobs were blocked.

A run is a folder with ``config.json`` (settings), ``progress.jsonl``, ``state.npz``
(the last generation, from which the run is resumed) and ``policy/`` (the weights that
were best on the validation windows).

Source: Salimans et al. 2017, "Evolution strategies as a scalable alternative to
reinforcement learning".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.elastic.costs import ReshardCost
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticConfig, ElasticSession
from envs.elastic.throughput import ThroughputTable, elasticflow_throughputs
from envs.elastic.traces import JobTrace, at_load, read_trace, window
from planner.errors import StrategyError
from policies.elastic.cheapest import CheapestFirst, Chooser, fluid_order
from policies.elastic.learned import (
    ElasticNetwork,
    NetworkOrder,
    make_network,
    save_network,
)
from policies.elastic.registry import play
from policies.run_folder import RunLog, Watch, describe_run

__all__ = [
    "ElasticTrainConfig",
    "Stream",
    "Trained",
    "blocked",
    "fitting_hosts",
    "train_elastic",
]

Floats = NDArray[np.float64]

_HOST = 8
#: Decays of the mean and the square of gradients, as of Adam.
_DECAYS = (0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticTrainConfig:
    """Settings of a training run.

    Attributes:
        seed: Seed of everything that is drawn.
        traces: ElasticFlow's traces to train on.
        validation: The trace to validate on.
        jobs: Jobs of a window.
        loads: Loads of windows.
        crowding: Device-seconds that the jobs of a window need over those that the
            cluster has; one of these is drawn.
        hidden: Units of each layer.
        generations: Generations.
        pairs: Pairs of opposite changes in each.
        windows: Windows that all of them play.
        sigma: Standard deviation of a change.
        rate: Length of a step.
        validate_every: Generations between validations.
        validation_windows: Windows of the validation, at each load.
    """

    seed: int = 0
    traces: tuple[str, ...] = ("cluster01", "cluster02", "cluster04")
    validation: str = "cluster03"
    jobs: int = 100
    loads: tuple[float, ...] = (0.5, 1.0, 1.5)
    crowding: tuple[float, ...] = (0.7, 1.0, 1.5, 2.5, 4.0)
    hidden: int = 8
    generations: int = 30
    pairs: int = 4
    windows: int = 4
    sigma: float = 0.2
    rate: float = 0.1
    validate_every: int = 5
    validation_windows: int = 5

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in (
                "jobs",
                "hidden",
                "generations",
                "pairs",
                "windows",
                "validate_every",
                "validation_windows",
            )
        }
        for name, value in counts.items():
            if value < 1:
                raise StrategyError(f"{name}={value}; give at least 1")
        if not self.sigma > 0.0 or not self.rate > 0.0:
            raise StrategyError(
                f"sigma={self.sigma}, rate={self.rate}; give positive numbers"
            )
        if not self.traces or not self.loads or not self.crowding:
            raise StrategyError(
                f"{len(self.traces)} traces, {len(self.loads)} loads and "
                f"{len(self.crowding)} values of crowding; give at least one of each"
            )


class Trained(NamedTuple):
    """A network, and how it did on the validation windows.

    Attributes:
        network: The network.
        validated_on: The trace, the number of windows, and the shares of jobs that
            the rule and the network block.
    """

    network: ElasticNetwork
    validated_on: dict[str, Any]


class Stream(NamedTuple):
    """Jobs of a window on a cluster.

    Attributes:
        trace: The jobs.
        hosts: Hosts of eight devices.
    """

    trace: JobTrace
    hosts: int


def fitting_hosts(trace: JobTrace, source: ThroughputTable, crowding: float) -> int:
    """Return the hosts of a cluster that some jobs crowd, a power of two from 8 to 256.

    Args:
        trace: The jobs.
        source: Their throughputs.
        crowding: Least device-seconds of the jobs over those of the cluster from the
            first submission to the last deadline but a tenth.
    """
    rates = source.rates()[trace.model, 0, :, 0]
    slack_s = trace.deadline_s - trace.submit_s
    with np.errstate(divide="ignore"):
        time_s = trace.iterations[:, None] / rates
    degrees = np.array(source.degrees)
    cost_s = np.where(time_s <= slack_s[:, None], time_s * degrees, np.inf).min(axis=1)
    span_s = float(np.quantile(trace.deadline_s, 0.9))
    need = float(cost_s[np.isfinite(cost_s)].sum()) / span_s / crowding / _HOST
    return int(2 ** np.clip(np.round(np.log2(max(need, 1.0))), 3, 8))


def blocked(stream: Stream, source: ThroughputTable, choose: Chooser) -> float:
    """Play a stream; return the share of its jobs that are blocked."""
    session = ElasticSession(
        ElasticConfig(
            trace=stream.trace,
            source=source,
            cluster=(
                HostPool(kind=source.kinds[0], hosts=stream.hosts, devices=_HOST),
            ),
            cost=ReshardCost(),
        )
    )
    play(session, CheapestFirst(choose))
    return session.summary().blocked


@dataclass(slots=True)
class _State:
    """The last generation: the weights, and Adam's means."""

    done: int
    weights: Floats
    mean: Floats
    square: Floats
    best: Floats
    best_gain: float = 0.0
    gains: tuple[float, ...] = field(default=())


def train_elastic(
    config: ElasticTrainConfig,
    folder: str | Path,
    data: str | Path | None = None,
    *,
    watch: Watch | None = None,
) -> Trained:
    """Train, or resume a run.

    Args:
        config: Settings; the same ones to resume a run.
        folder: Folder of the run, made if it does not exist.
        data: Folder of ElasticFlow's traces; by default in ``MESHWRIGHT_DATA``.
        watch: Called after each validation.
    Returns:
        The network that was best on the validation windows, also in ``policy/``; one
        that decides as the rule does, if none was better.
    Raises:
        StrategyError: If the traces are missing, or the folder holds a run of other
            settings.
    """
    traces, source = _read(config, data)
    run = Path(folder)
    describe_run(config, run)
    log, like = RunLog(run, watch), make_network(config.hidden, config.seed)
    judged = list(_validation(config, traces[config.validation], source))
    rule = np.array([blocked(one, source, fluid_order) for one in judged])
    state = _load(run, like)
    while state.done < config.generations:
        change = _generation(config, state, like, traces, source)
        log.write(stage="evolve", done=state.done, length=round(change, 5))
        if state.done % config.validate_every == 0:
            network = like.filled(state.weights)
            ours = [blocked(one, source, NetworkOrder(network)) for one in judged]
            state.gains = tuple((rule - np.array(ours)).tolist())
            gain = float(np.mean(state.gains))
            if gain > state.best_gain:
                state.best, state.best_gain = state.weights.copy(), gain
            log.stage("evolve", state.done, config.generations, state.gains)
        _store(run, state)
    best = like.filled(state.best)
    validated_on = {
        "trace": config.validation,
        "windows": len(judged),
        "rule_blocked": float(rule.mean()),
        "blocked": float(rule.mean()) - state.best_gain,
    }
    trained_on = {"traces": list(config.traces), "seed": config.seed}
    notes = {"trained_on": trained_on, "validated_on": validated_on}
    save_network(best, run / "policy", notes)
    return Trained(best, validated_on)


def _read(
    config: ElasticTrainConfig, data: str | Path | None
) -> tuple[dict[str, JobTrace], ThroughputTable]:
    if data is None:
        data = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "traces/elasticflow"
    folder = Path(data)
    if not folder.is_dir():
        raise StrategyError(
            f"{folder} with ElasticFlow's traces is not there; set MESHWRIGHT_DATA to "
            "the folder of the data, or give the folder of the traces"
        )
    source = elasticflow_throughputs(folder / "throughputs_A100")
    names = (*config.traces, config.validation)
    return {
        name: read_trace(folder / f"{name}.csv.gz", "elasticflow", source)
        for name in names
    }, source


def _validation(
    config: ElasticTrainConfig, trace: JobTrace, source: ThroughputTable
) -> Iterator[Stream]:
    count = config.validation_windows
    last = len(trace) - config.jobs
    for number in range(count):
        part = window(trace, number * last // max(1, count - 1), config.jobs)
        for at, load in enumerate(config.loads):
            jobs = at_load(part, load)
            crowding = config.crowding[(number + at) % len(config.crowding)]
            yield Stream(jobs, fitting_hosts(jobs, source, crowding))


def _generation(
    config: ElasticTrainConfig,
    state: _State,
    like: ElasticNetwork,
    traces: dict[str, JobTrace],
    source: ThroughputTable,
) -> float:
    """Move the weights by one generation; return the length of the step."""
    random = np.random.default_rng((config.seed, state.done))
    streams = [_draw(config, traces, source, random) for _ in range(config.windows)]
    changes = random.standard_normal((config.pairs, len(state.weights)))
    worth = np.zeros((config.pairs, len(streams)))
    for number, change in enumerate(changes):
        for sign in (1.0, -1.0):
            moved = like.filled(state.weights + sign * config.sigma * change)
            order = NetworkOrder(moved)
            for at, stream in enumerate(streams):
                worth[number, at] -= sign * blocked(stream, source, order)
    # A window in which many jobs are blocked counts no more than another.
    scale = np.sqrt((worth**2).mean(axis=0))
    worth = worth / np.where(scale > 0.0, scale, 1.0)
    slope = worth.mean(axis=1) @ changes / config.pairs
    state.done += 1
    state.mean = _DECAYS[0] * state.mean + (1.0 - _DECAYS[0]) * slope
    state.square = _DECAYS[1] * state.square + (1.0 - _DECAYS[1]) * slope**2
    mean = state.mean / (1.0 - _DECAYS[0] ** state.done)
    square = state.square / (1.0 - _DECAYS[1] ** state.done)
    step = config.rate * mean / (np.sqrt(square) + 1e-8)
    state.weights = state.weights + step
    return float(np.sqrt((step**2).mean()))


def _draw(
    config: ElasticTrainConfig,
    traces: dict[str, JobTrace],
    source: ThroughputTable,
    random: np.random.Generator,
) -> Stream:
    trace = traces[config.traces[int(random.integers(len(config.traces)))]]
    first = int(random.integers(len(trace) - config.jobs + 1))
    load = config.loads[int(random.integers(len(config.loads)))]
    jobs = at_load(window(trace, first, config.jobs), load)
    crowding = config.crowding[int(random.integers(len(config.crowding)))]
    return Stream(jobs, fitting_hosts(jobs, source, crowding))


def _load(run: Path, like: ElasticNetwork) -> _State:
    path, weights = run / "state.npz", like.flat()
    if not path.exists():
        zeros = np.zeros(len(weights))
        return _State(0, weights, zeros, zeros.copy(), weights.copy())
    try:
        with np.load(path, allow_pickle=False) as held:
            return _State(
                int(held["done"]),
                held["weights"],
                held["mean"],
                held["square"],
                held["best"],
                float(held["best_gain"]),
                tuple(held["gains"].tolist()),
            )
    except (OSError, KeyError, ValueError) as error:
        raise StrategyError(
            f"{path} is no state of a training run ({error}); remove it to begin anew"
        ) from error


def _store(run: Path, state: _State) -> None:
    part = run / "state.part"
    with part.open("wb") as stream:
        np.savez(
            stream,
            done=state.done,
            weights=state.weights,
            mean=state.mean,
            square=state.square,
            best=state.best,
            best_gain=state.best_gain,
            gains=np.array(state.gains),
        )
    part.replace(run / "state.npz")
