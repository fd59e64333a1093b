"""A schedule is one record: everything else is looked up from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner import plan, predict
from planner.cost import PARTS, CostModel
from planner.cost.pipelines import RowTimes
from planner.cost.pipelines.flushed import Flushed
from planner.cost.table.rows import Columns
from planner.cost.table.stages import Summaries
from planner.errors import ExportError, PlanFileError, UnknownNameError
from planner.export import export_files, exporter_names
from planner.report.build import build_report
from planner.report.page import html_page
from planner.schema import Strategy, schedule_names, schedule_spec
from planner.schema import schedules as registry
from planner.schema.schedules import (
    ScheduleSpec,
    register_schedule,
    schedule_name,
    schedules,
)
from planner.schema.violations import executor_violations
from planner.simulate.actions import IntArray, PipelineRank
from planner.simulate.durations import FloatArray
from planner.simulate.looped import interleaved_rows
from tests.cost.made import device, hosts, row, setting_for, table_of, uniform_graph


def eager_rows(one: PipelineRank) -> IntArray:
    """1F1B with twice as many forwards ahead."""
    return interleaved_rows(one)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> ScheduleSpec:
    spec = replace(
        schedule_spec("Interleaved1F1B"),
        name="EagerOfTests",
        code=41,
        virtual_stages=(1, 1),
        order=f"{__name__}:eager_rows",
        closed_form="chains",
        representative=False,
        runs=None,
    )
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    register_schedule(spec)
    return spec


def test_codes_and_names_are_used_once(eager: ScheduleSpec) -> None:
    assert len({spec.code for spec in schedules()}) == len(schedule_names())
    assert schedule_name(41) == eager.name
    with pytest.raises(ValueError, match="code 41"):
        register_schedule(replace(eager, name="Other"))
    with pytest.raises(ValueError, match="never used twice"):
        register_schedule(replace(eager, code=42))
    with pytest.raises(KeyError, match="40"):
        schedule_name(40)


def test_a_registered_schedule_is_planned_priced_and_drawn(eager: ScheduleSpec) -> None:
    made = plan(
        "gpt2",
        "dgx-a100:1",
        global_batch=64,
        seq_len=256,
        pin={"pp": 4, "schedule": eager.name},
        target="any",
        partitioner="exhaustive",
    )
    assert made.strategy.schedule == eager.name
    assert eager.name in made.strategy.label()
    assert eager.name in made.summary()
    twin = made.strategy.model_copy(update={"schedule": "Interleaved1F1B"})
    same = predict("gpt2", "dgx-a100:1", twin, seq_len=256)
    priced = same.prediction.model_copy(
        update={
            "leans_on": made.prediction.leans_on,
            "step_time_interval_s": made.prediction.step_time_interval_s,
        }
    )
    assert priced == made.prediction
    assert f"{eager.name}: no measured run, ± 25%" in made.prediction.leans_on
    assert eager.name in html_page([build_report(made)])
    assert any("no class of torch" in reason for reason in made.not_runnable)


class _Twice(Flushed):
    """Rows that take twice as long as those of a pipeline that is flushed."""

    def rows(
        self, rows: Columns, summaries: Summaries, core_contention: FloatArray
    ) -> RowTimes:
        found = super().rows(rows, summaries, core_contention)
        return replace(found, parts_s=2 * found.parts_s)


TWICE = _Twice()


def test_pipelines_are_priced_as_their_schedules_record_says(
    eager: ScheduleSpec,
) -> None:
    slow = replace(eager, name="Slow", code=42, prices=f"{__name__}:TWICE")
    register_schedule(slow)
    graph, cluster = uniform_graph(8), hosts((1, 4, device()))
    rows = [row(pp=4, schedule=code, num_microbatches=8) for code in (42, 41, 42)]
    parts = CostModel(setting_for(graph, cluster)).table(table_of(*rows)).parts_s
    pipeline = PARTS.index("data_parallel")
    assert parts[:, PARTS.index("compute")].min() > 0
    assert parts[0, :pipeline] == pytest.approx(2 * parts[1, :pipeline])
    assert parts[2].tolist() == parts[0].tolist()


def test_every_launcher_refuses_what_it_has_no_words_for(eager: ScheduleSpec) -> None:
    given = Strategy(
        schedule=eager.name, num_microbatches=8, mesh={"pp": 2}, semantics="exact"
    )
    made = predict("gpt2", "dgx-a100:1", given, seq_len=256)
    for target in exporter_names():
        if target == "json":
            continue
        with pytest.raises(ExportError, match=eager.name):
            export_files(made, target)


def test_the_executors_refuse_what_torch_has_no_class_for(eager: ScheduleSpec) -> None:
    given = Strategy(schedule=eager.name, num_microbatches=8, mesh={"pp": 2})
    assert any("no class of torch" in reason for reason in executor_violations(given))


def test_an_unknown_schedule_is_refused_everywhere() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        schedule_spec("1f1b")
    with pytest.raises(PlanFileError, match="EagerOfTests"):
        predict("gpt2", "dgx-a100:1", {"schedule": "EagerOfTests"}, seq_len=256)
