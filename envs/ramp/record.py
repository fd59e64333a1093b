"""Documents of episodes of the replay."""

from __future__ import annotations

from dataclasses import asdict

from envs.ramp.episodes import OUTCOMES as DECIDED
from envs.ramp.episodes import LoggedEpisode, RampEpisodes
from planner.errors import StrategyError
from planner.schema.stream import (
    StreamCluster,
    StreamJobs,
    StreamModel,
    StreamPlan,
    StreamRecord,
)

__all__ = ["device_runs", "ramp_record"]

#: Ends of jobs and the horizon this close count as equal, as in RampWorld.
_SAME_TIME_S = 1e-7


def device_runs(devices: list[int]) -> tuple[tuple[int, int], ...]:
    """Return the first and last of each run of consecutive numbers.

    Args:
        devices: Ascending.
    """
    runs: list[tuple[int, int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], device)
        else:
            runs.append((device, device))
    return tuple(runs)


def ramp_record(episodes: RampEpisodes, row: int, interval_s: float) -> StreamRecord:
    """Make the document of one of several episodes, as far as it has gone.

    Args:
        episodes: Episodes with a log.
        row: Number of the episode.
        interval_s: Mean time between its arrivals.

    Raises:
        StrategyError: If there is no log.
    """
    if episodes.log is None or row not in episodes.log.episodes:
        raise StrategyError(
            "nothing was kept of the episode; give record=True to the environment"
        )
    kept = episodes.log.episodes[row]
    names = list(episodes.jobs.jobs)
    plans: dict[tuple[int, int], StreamPlan] = {}
    sets: dict[int, int] = {}
    columns = [
        _row(kept, number, names, plans, sets, episodes.horizon_s)
        for number in range(len(kept.arrivals))
    ]
    servers = range(episodes.tables.num_servers)
    shape = episodes.jobs.topology
    summary = episodes.summary(row)
    fields = tuple(StreamJobs.model_fields)
    return StreamRecord(
        world="job-stream",
        cluster=StreamCluster(
            name=f"RAMP {shape.groups} x {shape.racks} x {shape.servers}",
            hosts=((len(servers), 1),),
        ),
        horizon_s=episodes.horizon_s,
        interval_s=interval_s,
        blocked=("refused", "no_room", "late", "unfinished"),
        models=tuple(
            StreamModel(
                name=name,
                sequential_s=job.sequential_jct_s,
                demand_bytes=float(job.demand_bytes),
            )
            for name, job in episodes.jobs.jobs.items()
        ),
        plans=tuple(plans.values()),
        device_sets=tuple(
            device_runs([d for d in servers if (mask >> d) & 1]) for mask in sets
        ),
        jobs=StreamJobs.model_validate(
            {name: tuple(one[name] for one in columns) for name in fields}
        ),
        summary={**asdict(summary), "blocking_rate": summary.blocking_rate},
    )


def _row(
    kept: LoggedEpisode,
    number: int,
    names: list[str],
    plans: dict[tuple[int, int], StreamPlan],
    sets: dict[int, int],
    horizon_s: float,
) -> dict[str, object]:
    """Return the row of one job; add its plan and its set of servers if new."""
    arrival = kept.arrivals[number]
    model = names.index(arrival.model)
    found: dict[str, object] = {
        "arrival_s": arrival.time_s,
        "model": model,
        "beta": arrival.beta,
        "size": 1.0,
        "asked": 0,
        "decided_s": None,
        "start_s": None,
        "end_s": None,
        "plan": -1,
        "devices": -1,
        "done": 0.0,
        "outcome": "undecided",
    }
    if number >= len(kept.outcome):
        return found
    decided = DECIDED[kept.outcome[number]]
    found |= {"asked": kept.degree[number], "decided_s": arrival.time_s}
    if decided != "placed":
        return found | {"outcome": decided}
    split, jct_s, mask = kept.split[number], kept.jct_s[number], kept.servers[number]
    plan = StreamPlan(
        model=model, label=f"split into {split}", degree=split, alone_s=jct_s
    )
    plans.setdefault((model, split), plan)
    sets.setdefault(mask, len(sets))
    end_s = arrival.time_s + jct_s
    ended = end_s <= horizon_s + _SAME_TIME_S
    return found | {
        "start_s": arrival.time_s,
        "end_s": end_s if ended else None,
        "plan": list(plans).index((model, split)),
        "devices": sets[mask],
        "done": min(1.0, (horizon_s - arrival.time_s) / jct_s),
        "outcome": "met" if ended else "unfinished",
    }
