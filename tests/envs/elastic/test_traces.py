"""Traces in four published formats, their loads, and what is wrong with bad ones."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from envs.elastic.throughput import (
    arena_throughputs,
    check_one_source,
    elasticflow_throughputs,
)
from envs.elastic.traces import at_load, read_trace, window
from planner.errors import StrategyError, UnknownNameError
from tests.envs.elastic.small import table, trace

HEAD = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu"
GOOD = f"{HEAD},duration\nb,120,50,net,400,64,2,25\na,100,30,net,130,64,1,30\n"


def _write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_elasticflow_trace(tmp_path: Path) -> None:
    found = read_trace(_write(tmp_path, GOOD), "elasticflow", table())
    assert found.job_id == ("a", "b")
    assert found.submit_s.tolist() == [0.0, 20.0]
    assert found.deadline_s.tolist() == [30.0, 300.0]
    assert found.iterations.tolist() == [30.0, 50.0]
    assert found.duration_s.tolist() == [30.0, 25.0]


def test_philly_names_of_columns_and_gzip(tmp_path: Path) -> None:
    path = tmp_path / "philly.csv.gz"
    head = "job_id,submit_time,iteration,model_name,ddl,batch_size,num_gpu"
    with gzip.open(path, "wt") as file:
        file.write(f"{head}\n0,5,10,net,25,64,4\n")
    found = read_trace(path, "elasticflow", table())
    assert found.deadline_s.tolist() == [20.0]
    assert np.isnan(found.duration_s).all()


@pytest.mark.parametrize(
    ("trace_format", "text"),
    [
        (
            "philly",
            "timestamp,duration,num_gpus,gpu_time,cluster\n"
            "2017-10-09 07:01:55,66.0,3,66.0,vc\n2017-10-09 07:00:55,10,1,10,other\n",
        ),
        (
            "openb",
            "name,num_gpu,creation_time,scheduled_time,deletion_time\n"
            "cpu,0,1,1,5\nnever-started,1,2,,50\npod,3,40,40,106\n",
        ),
    ],
)
def test_models_and_deadlines_are_drawn(
    tmp_path: Path, trace_format: str, text: str
) -> None:
    group = "vc" if trace_format == "philly" else None
    path = _write(tmp_path, text)
    found = read_trace(path, trace_format, table(), group=group, seed=3)
    # Three devices go up to four, which do 3 iterations per second.
    assert found.gpus.tolist() == [4]
    assert found.iterations.tolist() == [198.0]
    assert 33.0 <= found.deadline_s[0] <= 99.0
    again = read_trace(path, trace_format, table(), group=group, seed=3)
    assert again.deadline_s.tolist() == found.deadline_s.tolist()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a,-1,30,net,130,64,1", r"submit='-1'; give a number from 0"),
        ("a,1e40,30,net,130,64,1", r"line 2: submit='1e40'"),
        ("a,100,0,net,130,64,1", r"iterations='0'; give a number from 1"),
        ("a,100,nan,net,130,64,1", r"iterations='nan'"),
        ("a,100,30,net,99,64,1", r"deadline=99 of a job submitted at 100; give"),
        ("a,100,30,net,1e9,64,1", r"by at most 20 years"),
        ("a,100,30,net,130,64,1.5", r"gpus='1.5'; give a whole number"),
        ("a,100,30,net,130,,1", r"batch=''"),
        ("a,100,30,net,130,64.5,1", r"batch='64.5'; give a whole number"),
        (
            "a,5,30,net,130,64,1\nb,3e9,30,net,3000000030,64,1",
            r"job a submitted at 5 s and job b at 3000000000 s.*; give all times",
        ),
        (
            "a,100,30,net,130,64,1\na,105,30,net,130,64,1",
            r"line 3: job 'a' is in .*line 2, too; give each job one line",
        ),
    ],
)
def test_bad_lines(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        read_trace(_write(tmp_path, f"{HEAD}\n{line}\n"), "elasticflow", table())


def test_unknown_model_and_format(tmp_path: Path) -> None:
    path = _write(tmp_path, f"{HEAD}\na,100,30,nett,130,64,1\n")
    with pytest.raises(UnknownNameError, match="did you mean 'net/64'"):
        read_trace(path, "elasticflow", table())
    with pytest.raises(UnknownNameError, match="did you mean 'elasticflow'"):
        read_trace(path, "elastic-flow", table())


def test_missing_column_file_and_jobs(tmp_path: Path) -> None:
    path = _write(tmp_path, "job_id,submission_time\na,1\n")
    with pytest.raises(StrategyError, match="no column deadline or ddl"):
        read_trace(path, "elasticflow", table())
    with pytest.raises(StrategyError, match="cannot read trace"):
        read_trace(tmp_path / "none.csv", "elasticflow", table())
    with pytest.raises(StrategyError, match="no job that needs a device"):
        read_trace(_write(tmp_path, HEAD + "\n"), "elasticflow", table())


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("plain.csv.gz", b"a,b\n", "not a gzipped file.*; give a whole gzipped file"),
        (
            "cut.csv.gz",
            gzip.compress(b"a,b\n" * 99, mtime=0)[:-9],
            "end-of-stream marker",
        ),
        ("other.csv", b"\xff\xfea,b\n", "byte 0 is not UTF-8 text; save it as UTF-8"),
        ("long.csv", b"a" * 200_000, "line 0: field larger .*; give a CSV file"),
    ],
)
def test_files_that_are_no_table(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(StrategyError, match=message):
        read_trace(path, "elasticflow", table())


def test_job_larger_than_the_table(tmp_path: Path) -> None:
    text = "timestamp,duration,num_gpus,cluster\n5,66,8,vc\n"
    with pytest.raises(
        StrategyError, match="gpus=8; the throughputs of small end at 4"
    ):
        read_trace(_write(tmp_path, text), "philly", table())


def test_devices_on_which_no_model_runs(tmp_path: Path) -> None:
    text = "timestamp,duration,num_gpus,cluster\n5,66,2,vc\n"
    source = table({"gpu": (1.0, 0.0, 0.0)})
    with pytest.raises(StrategyError, match="gpus=2; no model of small has a thr"):
        read_trace(_write(tmp_path, text), "philly", source)


@pytest.mark.parametrize("times", ["9,8,10", "0,20,10", "0,0,6000000000"])
def test_pods_whose_times_contradict(tmp_path: Path, times: str) -> None:
    text = f"name,num_gpu,creation_time,scheduled_time,deletion_time\np,1,{times}\n"
    with pytest.raises(StrategyError, match="line 2: it is submitted at"):
        read_trace(_write(tmp_path, text), "openb", table())


def test_time_scaling_keeps_the_slack() -> None:
    found = at_load(trace((0, 10, 5, 1), (100, 130, 5, 1)), 2.0)
    assert found.submit_s.tolist() == [0.0, 50.0]
    assert found.deadline_s.tolist() == [10.0, 80.0]


def test_thinning_keeps_a_share() -> None:
    jobs = trace(*((float(n), n + 9.0, 5.0, 1) for n in range(1000)))
    kept = at_load(jobs, 0.25, "thinning", seed=1)
    assert 200 < len(kept) < 300
    assert set(kept.job_id) < set(jobs.job_id)
    assert kept.submit_s[0] == 0.0


@pytest.mark.parametrize(
    ("load", "how"), [(0.2, "time"), (2.1, "time"), (1.5, "thinning")]
)
def test_loads_out_of_range(load: float, how: str) -> None:
    with pytest.raises(StrategyError, match=f"load={load} by {how}"):
        at_load(trace((0, 10, 5, 1)), load, how)  # type: ignore[arg-type]


def test_window() -> None:
    jobs = trace((0, 10, 5, 1), (4, 10, 5, 1), (7, 10, 5, 1))
    assert window(jobs, 1, 2).submit_s.tolist() == [0.0, 3.0]
    with pytest.raises(StrategyError, match="jobs 2 to 3 of small, which has 3"):
        window(jobs, 2, 2)


def test_elasticflow_throughputs(tmp_path: Path) -> None:
    folder = tmp_path / "throughputs_A100"
    folder.mkdir()
    _write(folder, "global_batch_size,1,2,4\n64,1.5,2.5,\n", "net.csv")
    found = elasticflow_throughputs(folder)
    assert found.kinds == ("a100",)
    assert found.degrees == (1, 2, 4)
    assert found.rates()[0, 0, :, 0].tolist() == [1.5, 2.5, 0.0]
    _write(folder, "global_batch_size,1\n64,-2\n", "net.csv")
    with pytest.raises(StrategyError, match="line 2: 1='-2'; give a number"):
        elasticflow_throughputs(folder)
    with pytest.raises(StrategyError, match="has no throughputs"):
        elasticflow_throughputs(tmp_path / "none")


def test_arena_throughputs(tmp_path: Path) -> None:
    head = "model,params,global_batch,gpu,hosts,gpus_per_host,n_gpus,iter_time_s\n"
    rows = (
        "bert,1B,8,a100,1,4,4,2.0\nbert,1B,8,a100,2,2,4,4.0\nbert,1B,8,v100,1,2,2,-1\n"
    )
    found = arena_throughputs(_write(tmp_path, head + rows))
    assert found.models[0] == ("bert__1B", 8)
    assert found.rates()[0, 0, 1].tolist() == [0.5, 0.25]
    assert not found.rates()[0, 1].any()
    with pytest.raises(StrategyError, match="iter_time_s=0; give a positive time"):
        arena_throughputs(_write(tmp_path, head + "bert,1B,8,a100,1,4,4,0\n"))


def test_sources_are_not_mixed() -> None:
    one = table()
    check_one_source([one, one])
    other = elasticflow = table()
    object.__setattr__(elasticflow, "name", "other")
    with pytest.raises(StrategyError, match="of other and of small in one comparison"):
        check_one_source([one, other])
