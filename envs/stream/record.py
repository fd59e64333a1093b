"""An episode of the job stream as a document."""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from envs.ramp.record import device_runs
from envs.stream.summary import summarize
from planner.errors import StrategyError
from planner.schema.stream import (
    StreamCluster,
    StreamJobs,
    StreamModel,
    StreamPlan,
    StreamRecord,
)

if TYPE_CHECKING:
    from envs.stream.session import StreamSession

__all__ = ["stream_record"]


def stream_record(session: StreamSession) -> StreamRecord:
    """The session's episode, as far as it has gone.

    Args:
        session: Of a configuration with ``record=True``.

    Raises:
        StrategyError: If nothing was logged.
    """
    if session.log is None:
        raise StrategyError(
            "nothing was kept of the episode; give record=True to the environment"
        )
    session.log.measure(session.state)
    kept, stream, tables = session.log.jobs, session.stream, session.tables
    count = len(kept)
    ways, plans = _plans(session)
    sets = {one.devices: None for one in kept if one.devices}
    numbers = {runs: number for number, runs in enumerate(sets)}
    model = stream.model[:count].tolist()
    summary = summarize(tables, session.state)
    told = {**asdict(summary), "blocking_rate": summary.blocking_rate}
    return StreamRecord(
        world="job-stream-world",
        cluster=_cluster(session),
        horizon_s=float(session.state.clock[1]),
        interval_s=float(session.state.clock[2]),
        blocked=("refused", "no_room", "late"),
        models=tuple(
            StreamModel(name=name, sequential_s=float(seconds))
            for name, seconds in zip(
                session.names, tables.sequential_jct_s, strict=True
            )
        ),
        plans=plans,
        device_sets=tuple(sets),
        jobs=StreamJobs(
            arrival_s=tuple(stream.time_s[:count].tolist()),
            model=tuple(model),
            beta=tuple(stream.beta[:count].tolist()),
            size=tuple(stream.size[:count].tolist()),
            asked=tuple(one.asked for one in kept),
            decided_s=tuple(one.decided_s for one in kept),
            start_s=tuple(one.start_s for one in kept),
            end_s=tuple(one.end_s for one in kept),
            plan=tuple(
                -1 if one.way is None else ways[kind, *one.way]
                for kind, one in zip(model, kept, strict=True)
            ),
            devices=tuple(numbers.get(one.devices, -1) for one in kept),
            done=tuple(one.done for one in kept),
            outcome=tuple(one.outcome for one in kept),
        ),
        summary={name: float(value) for name, value in told.items()},
    )


def _plans(
    session: StreamSession,
) -> tuple[dict[tuple[int, int, int], int], tuple[StreamPlan, ...]]:
    """Plans that jobs ran by: model, shape and reach to their number, and all."""
    log, tables = session.log, session.tables
    ways: dict[tuple[int, int, int], int] = {}
    plans = []
    for number, one in enumerate(log.jobs if log is not None else ()):
        if one.way is None:
            continue
        model, (choice, reach) = int(session.stream.model[number]), one.way
        if (model, choice, reach) in ways:
            continue
        ways[model, choice, reach] = len(ways)
        plan, shape = session.plan(model, choice, reach), session.shapes[choice]
        on = f"{shape.hosts} {'host' if shape.hosts == 1 else 'hosts'}"
        plans.append(
            StreamPlan(
                model=model,
                label=f"{'a plan' if plan is None else plan.label} on {on}",
                degree=shape.devices,
                alone_s=float(
                    tables.steps[model] * tables.step_s[model, choice, reach, 0]
                ),
            )
        )
    return ways, tuple(plans)


def _cluster(session: StreamSession) -> StreamCluster:
    network = session.network
    sizes = np.bincount(network.host_of_device, minlength=network.num_hosts).tolist()
    return StreamCluster(
        name=network.cluster.name,
        hosts=tuple((len(list(run)), size) for size, run in groupby(sizes)),
        occupied=device_runs(np.flatnonzero(~network.usable).tolist()),
    )
