"""Kinds of jobs and their op graphs."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from envs.ramp.graphs import model_op_graph
from envs.stream.jobs import PROFILES, JobType, built_in_jobs, profiled_jobs
from envs.stream.prices import PriceBook
from planner.errors import CaptureError, StrategyError

_FOLDER = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "pipedream"

_PROFILE = """\
node1 -- Input0 -- forward_compute_time=0.0, backward_compute_time=0.0, \
activation_size=100.0, parameter_size=0.0
node2 -- Linear(4, 4) -- forward_compute_time=1.0, backward_compute_time=3.0, \
activation_size=300.0, parameter_size=64.0
\tnode1 -- node2
"""


def test_built_in_graphs_are_in_the_book() -> None:
    book = PriceBook()
    sizes = []
    for job in built_in_jobs():
        graph = book.graph(job)
        source, target = graph.edge_index
        assert graph.name == job.name
        assert (graph.nodes[target, -1] > graph.nodes[source, -1]).all()
        assert (graph.nodes >= 0).all()
        sizes.append(len(graph.nodes))
    assert len(set(sizes)) > 5
    assert max(sizes) < 1000


def test_both_passes_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text(_PROFILE)
    job = JobType(name="tiny", ref=str(path), global_batch=2, steps=1)
    graph = model_op_graph(job.read_graph(), job.name)
    assert graph.edge_index.T.tolist() == [[0, 1], [1, 3], [3, 2]]
    assert graph.nodes[:, 0].tolist() == [0, 0, 1, 1]
    compute = np.array([0.0, 1.0, 0.0, 3.0])
    np.testing.assert_allclose(graph.nodes[:, 1], np.log1p(compute), rtol=1e-6)
    np.testing.assert_allclose(graph.nodes[:, -1], [0, 1 / 3, 1, 2 / 3], rtol=1e-6)


def test_a_fingerprint_is_of_model_and_batch(tmp_path: Path) -> None:
    path = tmp_path / "tiny.txt"
    path.write_text(_PROFILE)

    def of(**changes: object) -> str:
        fields = {"name": "a", "ref": str(path), "global_batch": 2, "steps": 1}
        return JobType(**{**fields, **changes}).fingerprint  # type: ignore[arg-type]

    first = of()
    moved = tmp_path / "moved.txt"
    moved.write_text(_PROFILE)
    assert of(name="b", steps=9, ref=str(moved)) == first
    assert of(global_batch=4) != first
    moved.write_text(_PROFILE.replace("3.0", "4.0"))
    assert of(ref=str(moved)) != first


@pytest.mark.skipif(not _FOLDER.is_dir(), reason="MESHWRIGHT_DATA has no pipedream")
def test_profiles_are_read_in_milliseconds() -> None:
    jobs = {job.name: job for job in profiled_jobs()}
    assert len(jobs) == 14
    graph = jobs["pipedream-gnmt"].read_graph()
    total = sum(
        (b.measured_forward_s or 0) + (b.measured_backward_s or 0) for b in graph.blocks
    )
    # 50 steps take 4470.80 where milliseconds are taken for seconds. Source: PAC-ML.
    assert total == pytest.approx(4470.80 / 50 / 1000, rel=1e-5)


def test_jobs_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StrategyError, match="steps=0"):
        JobType(name="a", ref="gpt2", global_batch=1, steps=0)
    with pytest.raises(CaptureError, match=f"no profile {PROFILES[0]}"):
        profiled_jobs(tmp_path)
    monkeypatch.delenv("MESHWRIGHT_DATA", raising=False)
    with pytest.raises(CaptureError, match="MESHWRIGHT_DATA is not set"):
        profiled_jobs()
