"""Records made by a rule: jobs of three models on the first devices that are free."""

from __future__ import annotations

import numpy as np

from planner.schema.stream import (
    StreamCluster,
    StreamJobs,
    StreamModel,
    StreamPlan,
    StreamRecord,
)

__all__ = ["made_record"]

_SEQUENTIAL_S = (400.0, 900.0, 2000.0)


def made_record(
    count: int = 120,
    *,
    hosts: int = 2,
    per_host: int = 8,
    policy: str = "always_4",
    degree: int = 4,
    seed: int = 0,
    names: tuple[str, str, str] = ("small", "middle", "large"),
    cluster: str = "made",
) -> StreamRecord:
    """Every job asks for so many devices and takes whole groups of them, or none.

    Args:
        count: Jobs.
        hosts: Of the cluster.
        per_host: Devices of each.
        policy: What to call the rule.
        degree: Devices of a job; divides those of a host.
        seed: Of arrivals; the same jobs whatever the degree.
        names: Of the models.
        cluster: Its name.
    """
    generator = np.random.default_rng(seed)
    interval_s = sum(_SEQUENTIAL_S) / 3 / (hosts * per_host) / 1.2
    arrival = np.cumsum(generator.exponential(interval_s, count))
    model = generator.integers(0, 3, count)
    beta = np.round(generator.uniform(0.1, 1.0, count), 2)
    horizon_s = float(count * interval_s)
    free_at = np.zeros(hosts * per_host // degree)
    rows = []
    for at, kind, share in zip(arrival, model, beta, strict=True):
        if at > horizon_s:
            break
        takes_s = _SEQUENTIAL_S[kind] / degree**0.9
        place = int(np.argmax(free_at <= at))
        late = takes_s > share * _SEQUENTIAL_S[kind]
        room = bool(free_at[place] <= at)
        ran = room and not late
        if ran:
            free_at[place] = at + takes_s
        ended = ran and at + takes_s <= horizon_s
        outcome = "met" if ended else "unfinished"
        if not ran:
            outcome = "late" if late else "no_room"
        rows.append(
            {
                "arrival_s": float(at),
                "model": int(kind),
                "beta": float(share),
                "size": 1.0,
                "asked": degree,
                "decided_s": float(at),
                "start_s": float(at) if ran else None,
                "end_s": float(at + takes_s) if ended else None,
                "plan": int(kind) if ran else -1,
                "devices": place if ran else -1,
                "done": min(1.0, (horizon_s - float(at)) / takes_s) if ran else 0.0,
                "outcome": outcome,
            }
        )
    return StreamRecord(
        world="job-stream-world",
        cluster=StreamCluster(name=cluster, hosts=((hosts, per_host),)),
        offered_load=1.2,
        seed=seed,
        policy=policy,
        horizon_s=horizon_s,
        interval_s=interval_s,
        blocked=("refused", "no_room", "late"),
        models=tuple(
            StreamModel(name=name, sequential_s=seconds)
            for name, seconds in zip(names, _SEQUENTIAL_S, strict=True)
        ),
        plans=tuple(
            StreamPlan(
                model=kind,
                label=f"dp{degree}",
                degree=degree,
                alone_s=seconds / degree**0.9,
            )
            for kind, seconds in enumerate(_SEQUENTIAL_S)
        ),
        device_sets=tuple(
            ((first, first + degree - 1),)
            for first in range(0, hosts * per_host, degree)
        ),
        jobs=StreamJobs.model_validate(
            {name: [row[name] for row in rows] for name in StreamJobs.model_fields}
        ),
    )
