"""Reports of elastic streams; those of journals are in tests.admission."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from envs.elastic.costs import FailureLaw
from envs.elastic.record import RecordedSession
from planner.cli.main import main
from planner.report.queue.data import read_elastic
from planner.report.queue.holders import find_holders
from planner.report.queue.page import queue_page
from planner.report.queue.tables import queue_markdown
from planner.schema.elastic import ElasticRecord
from policies.elastic.registry import make_rule, play
from tests.envs.elastic.small import config, give, recorded
from tests.report.browser import Page, open_browser
from tests.schema.documents import elastic_records


def _played(rule: str, load: float = 1.0, jobs: int = 60) -> ElasticRecord:
    random = np.random.default_rng(1)
    made = RecordedSession(
        config(
            *(
                (at / load, at / load + random.uniform(5, 60), random.uniform(5, 60), 1)
                for at in range(0, 4 * jobs, 4)
            ),
            failures=FailureLaw(mean_s=2000.0, repair_s=50.0, checkpoint_s=5.0),
        )
    )
    play(made, make_rule(rule))
    return made.record(rule, load)


def test_the_report_tells_who_ran_and_whose_devices_were_needed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    recorded().record("by hand").save(folder / "run.json")
    page, text = tmp_path / "page.html", tmp_path / "page.md"
    assert main(["report", str(folder), "-o", str(page), "--md", str(text)]) == 0
    told = text.read_text()
    assert "jobs: 4, promised: 2, blocked: 2, launches: 3" in told
    # The fourth needs 9 iterations in 4 s, and has 2 a second without the last device.
    assert "| job0 | promised | 1 | 1 | job3 |" in told
    assert "| job3 | declined | none | 0 |  | in time without job0 |" in told
    assert "| job2 | declined | none | 0 |  | takes 33.3 s at least, had 2 s |" in told
    assert "| job0 | met | promised | 2 | 60 s early |  |" in told
    assert "| too slow even alone | 1 | 100% |" in told
    assert "| declined, in time alone | 1 | 25% |" in told
    assert "| promise broken | 0 |  |" in told
    shown = page.read_text()
    tip = "job0, resumed\n1 gpu on 1 host\n10 s, after 20 s without devices"
    assert f'data-tip="{tip}"' in shown
    assert 'data-tip="job3: declined, in time alone\nin time without job0"' in shown
    # The deadlines of both promises are behind the end.
    assert 'class="limit"' not in shown
    assert 'data-tip="1 too slow even alone\njob2"' in shown


def test_late_jobs_and_broken_promises_are_marked(tmp_path: Path) -> None:
    one = RecordedSession(config((0, 9, 30, 1), (0, 9, 16, 1), (20, 25, 6, 1)))
    one.apply(give((0, 1), (1, 2), promised=[0]))
    while not one.over:
        one.apply(give((2, 1)) if 2 in one.alive else give())
    one.record("by hand").save(tmp_path / "run.json")
    (report,) = read_elastic([tmp_path])
    assert [job.cause for job in report.jobs] == ["broken", "", "late"]
    shown = queue_page([report])
    assert shown.count('class="limit"') == 1
    # All deadlines but the promised one.
    assert len(re.findall('<line class="front"', shown)) == 2
    told = queue_markdown([report])
    assert "| job0 | late | broken | 1 | 21 s late |" in told
    assert "| promise broken | 1 |" in told
    assert "| late, without a promise | 1 |" in told


def _work(record: ElasticRecord, job: int, without: tuple[int, ...]) -> float:
    """Iterations that a job does if others and its own devices are free, by loops."""
    jobs, pieces = record.jobs, record.pieces
    low, high = jobs.submit_s[job], jobs.deadline_s[job]
    times = {low, high, *pieces.start_s, *pieces.end_s, *(t for t, _ in record.devices)}
    inside = sorted(time for time in times if low <= time <= high)
    done = 0.0
    for start, end in pairwise(inside):
        (free,) = [counts for t, counts in record.devices if t <= start][-1]
        for at, other in enumerate(pieces.job):
            if pieces.start_s[at] <= start < pieces.end_s[at]:
                free -= 0 if other in (job, *without) else pieces.degree[at]
        rates = zip(record.degrees, record.models[0].rates[0], strict=True)
        done += (end - start) * max([r for n, r in rates if n <= free], default=0.0)
    return done


@pytest.mark.parametrize("rule", ["elasticflow", "edf"])
def test_holders_suffice_and_none_is_named_in_vain(rule: str) -> None:
    record = _played(rule, 2.0)
    jobs = range(len(record.jobs))
    blocked = [j for j in jobs if record.jobs.outcome[j] in ("late", "declined")]
    sizes = set()
    for found in find_holders(record, blocked):
        need = record.jobs.iterations[found.job]
        held = tuple(other for other in jobs if other != found.job)
        enough = _work(record, found.job, held) >= need
        assert found.enough == enough
        if enough:
            assert _work(record, found.job, found.by) >= need * (1 - 1e-5)
        for other in found.by:
            fewer = tuple(one for one in found.by if one != other)
            assert _work(record, found.job, fewer) < need
        sizes.add(len(found.by))
    assert len(sizes) >= 3


def test_runs_at_several_loads_are_laid_side_by_side(tmp_path: Path) -> None:
    records = [
        _played(rule, load) for rule in ("edf", "elasticflow") for load in (2, 1)
    ]
    for number, record in enumerate(records):
        record.save(tmp_path / f"{number}.json")
    reports = read_elastic([tmp_path])
    names = ["edf, load 1", "edf, load 2", "elasticflow, load 1", "elasticflow, load 2"]
    assert [report.label for report in reports] == names
    told = queue_markdown(reports)
    for record in records:
        share = f"{record.summary['blocked']:.1%}"
        assert f"| {record.policy}, load {record.trace_load:g} | 60 | {share} |" in told
    shown = queue_page(reports)
    assert shown.count("<details>") == 16
    assert shown.index("Blocked over load") < shown.index("Who ran when")


def test_many_jobs_are_cut_to_those_around_most_blocked_ones(tmp_path: Path) -> None:
    record = _played("elasticflow", 2.0, jobs=1100)
    record.save(tmp_path / "run.json")
    reports = read_elastic([tmp_path])
    shown = queue_page(reports)
    told = re.search(
        r"Of 1,100 jobs these are (.+?) to (.+?), with (.+?) of (.+?) ", shown
    )
    first, last, some, of = (int(one.replace(",", "")) for one in told.groups())
    blocked = [bool(job.cause) for job in reports[0].jobs]
    assert (last - first, of) == (199, sum(blocked))
    assert some == sum(blocked[first - 1 : last])
    assert some == max(sum(blocked[at : at + 200]) for at in range(901))
    assert "the last 1,000 of 1,100" in shown
    assert len(shown) < 2e6


@settings(max_examples=25, deadline=None)
@given(record=elastic_records())
def test_every_record_has_a_report(
    record: ElasticRecord, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("made") / "run.json"
    record.save(file)
    reports = read_elastic([file])
    assert queue_page(reports).startswith("<!DOCTYPE html>")
    assert f"jobs: {len(record.jobs)}" in queue_markdown(reports)


def test_damaged_folders_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page = tmp_path / "runs", tmp_path / "page.html"
    folder.mkdir()

    def refused() -> str:
        assert main(["report", str(folder), "-o", str(page)]) == 1
        assert not page.exists()
        return capsys.readouterr().err

    assert "has no records" in refused()
    good = recorded().record("by hand")
    good.save(folder / "a.json")
    good.save(folder / "b.json")
    both = f"{folder}/a.json and {folder}/b.json are both of by hand; report on one"
    assert both in " ".join(refused().split())
    text = good.to_json()
    (folder / "b.json").write_text(text[: len(text) // 2])
    assert f"{folder}/b.json: " in refused()
    (folder / "b.json").write_text(
        text.replace("job-", "").replace('"small"', '"other"')
    )
    assert "records of the traces" in refused()
    (folder / "b.json").write_text("{}")
    assert f"{folder}/b.json: field" in " ".join(refused().split())
    (folder / "b.json").unlink()
    assert main(["report", str(folder), "--svg", str(tmp_path / "page.svg")]) == 1
    assert "queues have no svg report" in capsys.readouterr().err
    assert main(["report", str(folder), "-o", str(page), "--model", "x"]) == 1
    assert "leave it out for elastic streams" in capsys.readouterr().err


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    yield from open_browser()


def test_the_page_fits_a_browser_and_shows_tips(browser: Page, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    for number, load in enumerate((1.0, 2.0)):
        _played("elasticflow", load).save(tmp_path / f"{number}.json")
    file.write_text(queue_page(read_elastic([tmp_path])))
    browser.size(1280)
    assert browser.open(file) == []
    assert browser.beyond(file, 420) == []
