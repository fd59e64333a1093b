"""The operator's loop on a queue that answers as SLURM does."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.admission.serving import Serving, wait_for


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill()


def _all_over(serving: Serving, count: int) -> Any:
    answer = serving.call("GET", "/status")
    if answer is None:
        return None
    jobs = {job["name"]: job for job in answer[1]["jobs"]}
    over = all(job["ended_s"] is not None for job in jobs.values())
    return jobs if over and len(jobs) == count else None


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))]
)
def test_killed_at_any_moment_no_job_is_lost_or_doubled(
    serving: Serving, seed: int
) -> None:
    draw = random.Random(seed)
    jobs = [serving.job(f"job{at}", draw.uniform(0.2, 1.0)) for at in range(6)]
    waiting = list(jobs)
    for _ in range(6):
        serving.start()
        end = time.monotonic() + draw.uniform(1.2, 2.5)
        while time.monotonic() < end:
            if waiting:
                # What was not answered is asked again.
                answer = serving.call("POST", "/jobs", waiting[0])
                if answer is not None and answer[0] in (200, 202):
                    waiting.pop(0)
            if draw.random() < 0.2:
                serving.faults(nonsense=1, lost=1)
            time.sleep(0.02)
        serving.kill()
    serving.start()
    for job in waiting:
        wait_for(lambda job=job: serving.call("POST", "/jobs", job))
    done = wait_for(lambda: _all_over(serving, len(jobs)), 60)
    assert {job["status"] for job in done.values()} == {"done"}, done
    once = Counter(f"job{at} {what}" for at in range(6) for what in ("start", "end"))
    assert Counter(serving.lines()) == once


def test_lost_answers_and_refusals_launch_once(serving: Serving) -> None:
    serving.start()
    wait_for(lambda: serving.call("GET", "/status"))
    serving.faults(lost=1, refused=3, nonsense=3)
    assert serving.call("POST", "/jobs", serving.job("a", 0.3))[0] == 202
    wait_for(lambda: _all_over(serving, 1))
    assert serving.lines() == ["a start", "a end"]
    events = serving.call("GET", "/status")[1]["events"]
    problems = [each["text"] for each in events if each["kind"] == "problem"]
    assert any("which is not JSON" in text for text in problems)
    serving.process.send_signal(signal.SIGTERM)
    assert serving.process.wait(10) == 0


def test_an_elastic_job_gives_way_and_comes_back(serving: Serving) -> None:
    serving.start()
    wait_for(lambda: serving.call("GET", "/status"))
    wide = serving.job("wide", 1.0, iterations=4000, elastic=True, deadline_s=None)
    wide["command"] = ["sleep", "60"]
    serving.call("POST", "/jobs", wide)
    wait_for(lambda: [job["state"] for job in serving.jobs("wide")] == ["RUNNING"])
    wait_for(lambda: serving.jobs("wide")[0]["comment"] == "meshwright: no promise")
    # Both at once, as neither can wait for the other: the wide one has to go.
    for name in ("x", "y"):
        job = serving.job(name, 8.0, deadline_s=time.time() + 19, min_degree=2)
        assert serving.call("POST", "/jobs", job)[0] == 202
    wait_for(lambda: {"x end", "y end"} <= set(serving.lines()))
    wait_for(lambda: len(serving.jobs("wide")) == 2)
    states = [job["state"] for job in serving.jobs("wide")]
    assert states in (["FAILED", "PENDING"], ["FAILED", "RUNNING"])
    assert serving.call("DELETE", "/jobs/wide")[0] == 200
    wait_for(lambda: serving.jobs("wide")[1]["state"] in ("FAILED", "CANCELLED"))
    assert len(serving.jobs("wide")) == 2


def test_the_endpoint_checks_what_it_is_given(serving: Serving) -> None:
    token = "0123456789abcdef"
    serving.environment["MESHWRIGHT_TOKEN"] = token
    serving.start()
    answer = wait_for(lambda: serving.call("GET", "/status"))
    assert answer == (
        401,
        {"error": "send the token as Authorization: Bearer TOKEN"},
    )
    bearer = {"Authorization": f"Bearer {token}"}
    job = serving.job("a", 0.1)
    for changed, said in (
        ({"iterations": -1}, "field iterations: must be above 0"),
        ({"deadline_s": 0.5}, "deadline_s=0.5 is not after"),
        ({"command": []}, "job a has no command"),
        ({"command": ["a\0b"]}, "command has a NUL character"),
        ({"name": "../a"}, "field name"),
    ):
        code, data = serving.call("POST", "/jobs", {**job, **changed}, **bearer)
        assert code == 400
        assert said in data["error"]
    assert serving.call("POST", "/jobs", job, **bearer)[0] == 202
    assert serving.call("POST", "/jobs", job, **bearer)[0] == 200
    again = {**job, "iterations": 9}
    assert serving.call("POST", "/jobs", again, **bearer)[0] == 409
    unknown = serving.job("b", 0.1, model="nut")
    serving.call("POST", "/jobs", unknown, **bearer)
    told = wait_for(
        lambda: (
            (found := serving.call("GET", "/jobs/b", **bearer))[1]["status"]
            == "declined"
            and found
        )
    )
    assert "did you mean 'net'?" in told[1]["reason"]
    text = {"Content-Type": "text/plain", **bearer}
    assert serving.call("POST", "/jobs", job, **text)[0] == 400
    code, data = serving.call("PUT", "/jobs", job, **bearer)
    assert (code, data["error"]) == (501, "Unsupported method ('PUT')")


def test_a_queue_that_contradicts_the_journal_is_refused(serving: Serving) -> None:
    stray = {"id": 1, "name": "mw-stray-1", "nodes": ["n0"], "gpus": 1}
    jobs = [{**stray, "state": "PENDING", "start": 0}]
    (serving.queue / "1.sh").write_text("sleep 5\n")
    (serving.queue / "jobs.json").write_text(json.dumps(jobs))
    answer = serving.run("--once")
    assert answer.returncode == 1
    assert "the queue has mw-stray-1 (1), which journal" in answer.stderr
    assert "end it in the queue" in answer.stderr


def test_one_look_at_a_queue_that_answers_nonsense_is_an_error(
    serving: Serving,
) -> None:
    assert serving.run("--once").returncode == 0
    (serving.folder / "bin" / "squeue").write_text("#!/bin/sh\necho '{\"jobs\": 0}'\n")
    answer = serving.run("--once")
    assert answer.returncode == 1
    assert "slurm answered what makes no sense (TypeError" in answer.stderr
    assert "run this again" in answer.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "give a token with --token-file"),
        (("--poll-s", "-1"), "--poll-s -1.0; give a time of at least 0.05 s"),
        (("--port", "65536"), "--port 65536; give a port from 1 to 65535, or 0"),
        (("--rate-margin", "1"), "give a share from 0 to below 1"),
        (("--queue", "kueue"), "--queue kueue needs --local-queue and --image"),
        (("--device", "a100"), "write QUEUE=NAME"),
    ],
)
def test_wrong_options_are_one_line(
    serving: Serving, words: tuple[str, ...], said: str, monkeypatch, capsys
) -> None:
    from planner.cli.main import main

    monkeypatch.delenv("MESHWRIGHT_TOKEN", raising=False)
    code = main([*serving.words()[3:], *words])
    assert code == 1
    assert said in capsys.readouterr().err
