"""Small tables and traces that the tests of elastic jobs share."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from envs.elastic.costs import FreeResize
from envs.elastic.pools import HostPool
from envs.elastic.record import RecordedSession
from envs.elastic.session import Allocation, ElasticConfig, ElasticSession
from envs.elastic.throughput import ModelKey, ThroughputTable
from envs.elastic.traces import JobTrace

KEY = ModelKey("net", 64)


def table(
    rates: dict[str, tuple[float, ...]] | None = None,
    degrees: tuple[int, ...] = (1, 2, 4),
) -> ThroughputTable:
    """Throughputs of one model: iterations per second by type and degree."""
    rates = rates or {"gpu": (1.0, 2.0, 3.0)}
    values = np.zeros((1, len(rates), len(degrees), 2))
    for at, row in enumerate(rates.values()):
        values[0, at, :, 0] = row
    return ThroughputTable(
        name="small", models=(KEY,), kinds=tuple(rates), degrees=degrees, table=values
    )


def trace(*jobs: tuple[float, float, float, int]) -> JobTrace:
    """Jobs of (submission, deadline, iterations, devices asked for)."""
    columns = np.array(jobs, dtype=np.float64)
    return JobTrace(
        name="small",
        job_id=tuple(f"job{number}" for number in range(len(jobs))),
        submit_s=columns[:, 0],
        deadline_s=columns[:, 1],
        iterations=columns[:, 2],
        model=np.zeros(len(jobs), dtype=np.int64),
        models=(KEY,),
        gpus=columns[:, 3].astype(np.int64),
        duration_s=np.full(len(jobs), np.nan),
        kind=("",) * len(jobs),
    )


def config(*jobs: tuple[float, float, float, int], **options: object) -> ElasticConfig:
    """Jobs on one host of four devices, where resizes are free."""
    fields = {
        "trace": trace(*jobs),
        "source": table(),
        "cluster": (HostPool(kind="gpu", hosts=1, devices=4),),
        "cost": FreeResize(),
    }
    return ElasticConfig(**{**fields, **options})  # type: ignore[arg-type]


def session(
    *jobs: tuple[float, float, float, int], **options: object
) -> ElasticSession:
    """A session of :func:`config`."""
    return ElasticSession(config(*jobs, **options))


def give(*pairs: tuple[int, int], **fields: object) -> Allocation:
    """Jobs and their degrees."""
    jobs, degrees = zip(*pairs, strict=True) if pairs else ((), ())
    more = {name: np.array(value, dtype=np.int64) for name, value in fields.items()}
    return Allocation(
        jobs=np.array(jobs, dtype=np.int64),
        degree=np.array(degrees, dtype=np.int64),
        **more,  # type: ignore[arg-type]
    )


def recorded() -> RecordedSession:
    """Four jobs: one is paused for another, one is too slow, one lacks a device."""
    one = RecordedSession(
        config((0, 100, 30, 1), (10, 60, 60, 1), (10, 12, 100, 1), (35, 39, 9, 1))
    )
    one.apply(give((0, 2), promised=[0]))  # 20 of its 30 iterations, until 10 s
    one.apply(give((0, 0), (1, 4), promised=[1], declined=[2]))
    assert one.now_s == 30.0  # the second has ended
    one.apply(give((0, 1)))
    assert one.now_s == 35.0
    one.apply(give(declined=[3]))
    assert (one.over, one.now_s) == (True, 40.0)
    return one


def write_traces(folder: Path) -> Path:
    """Two small traces in ElasticFlow's format, and throughputs of a model."""
    rates = folder / "throughputs_A100"
    rates.mkdir(parents=True)
    (rates / "net.csv").write_text("global_batch_size,1,2,4,8\n64,1.0,1.9,3.4,5.0\n")
    random = np.random.default_rng(0)
    for name in ("one", "two"):
        lines = ["job_id,submission_time,deadline,num_iteration,model_name,batch_size,"]
        lines[0] += "num_gpu,duration"
        for number, at in enumerate(np.sort(random.uniform(0, 400, 60))):
            due, left = at + random.uniform(100, 900), random.uniform(100, 2000)
            lines.append(f"{number},{at},{due},{left},net,64,1,{left}")
        with gzip.open(folder / f"{name}.csv.gz", "wt") as file:
            file.write("\n".join(lines) + "\n")
    return folder
