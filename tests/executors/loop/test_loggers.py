"""Numbers that loggers write, one process in a group of its own."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from executors import run
from executors.loop import LOGGERS, ProfilerTrace, make_logger
from executors.loop.profiling import steps_to_profile
from planner import plan
from planner.errors import ExecutionError, MeshwrightError, UnknownNameError
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.cases import BATCH, SEQ, build

STEPS = 3


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan(
        build("llama"),
        "local:1",
        global_batch=BATCH,
        example_inputs={"input_ids": ((1, SEQ), "int64")},
        precision=Precision(compute="float32"),
        optimizer=Optimizer(name="SGD", learning_rate=0.25),
    )


def trained(found: Plan, *callbacks: Any, **options: Any) -> Any:
    return run(
        found, lambda: build("llama"), steps=STEPS, callbacks=callbacks, **options
    )


def test_json_lines_have_each_step_beside_the_prediction(
    found: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "new" / "log.jsonl"
    kept = {"checkpoint_dir": tmp_path / "kept"}
    result = trained(found, make_logger("json", str(file)), **kept)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["start", *["step"] * 3, "save", "end"]
    start, *steps = lines[: STEPS + 1]
    prediction = found.prediction
    assert start["predicted"]["step_time_s"] == prediction.step_time_s
    assert start["predicted"]["mfu"] == prediction.model_flops_utilization
    flops = prediction.model_flops_utilization * prediction.step_time_s
    for number, step in enumerate(steps):
        assert step["step"] == number + 1
        assert step["loss"] == result.losses[number]
        # The plan clips.
        assert step["grad_norm"] == result.grad_norms[number]
        assert step["learning_rate"] == 0.25
        assert step["step_time_s"] == result.step_times_s[number]
        tokens_per_s = BATCH * SEQ / step["step_time_s"]
        assert step["tokens_per_s"] == pytest.approx(tokens_per_s)
        assert step["mfu"] == pytest.approx(flops / step["step_time_s"])
        assert step["peak_memory_bytes"] > found.model.parameters * 4
    assert lines[-2]["folder"] == str(tmp_path / "kept" / "step-000003")
    # A run that is resumed goes on in the same file.
    more = {"checkpoint_dir": tmp_path / "kept", "resume": True}
    trained(found, make_logger("json", str(file)), **more)
    assert json.loads(file.read_text().splitlines()[6])["step"] == 3


def test_the_gradient_norm_is_logged_without_clipping(
    found: Plan, tmp_path: Path
) -> None:
    strategy = found.strategy.model_copy(update={"grad_clip_norm": None})
    unclipped = found.model_copy(update={"strategy": strategy})
    clipped = found.strategy.model_copy(update={"grad_clip_norm": 1e9})
    file = tmp_path / "log.jsonl"
    trained(unclipped, make_logger("json", str(file)))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    norms = [line["grad_norm"] for line in lines if line["event"] == "step"]
    whole = trained(found.model_copy(update={"strategy": clipped})).grad_norms
    assert norms == pytest.approx(whole, rel=1e-5)


def test_an_error_is_the_last_line(found: Plan, tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"

    def data(step: int) -> Any:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        run(
            found,
            lambda: build("llama"),
            data,
            steps=1,
            callbacks=[make_logger("json", str(file))],
        )
    assert not file.exists()
    with pytest.raises(ZeroDivisionError):
        trained(
            found,
            make_logger("json", str(file)),
            on_step=lambda report: 1 // (1 - report.step),
        )
    assert json.loads(file.read_text().splitlines()[-1])["error"].startswith("integer")


def test_tensorboard_has_the_same_scalars(found: Plan, tmp_path: Path) -> None:
    result = trained(found, make_logger("tensorboard", str(tmp_path)))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    losses = events.Scalars("loss")
    assert [one.step for one in losses] == [1, 2, 3]
    assert [one.value for one in losses] == pytest.approx(result.losses)
    (predicted,) = events.Scalars("predicted/step_time_s")
    assert predicted.value == pytest.approx(found.prediction.step_time_s)
    assert {"mfu", "tokens_per_s", "grad_norm", "learning_rate"} <= set(
        events.Tags()["scalars"]
    )


def test_wandb_gets_the_run(found: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    module: Any = types.ModuleType("wandb")

    class Run:
        def log(self, values: dict[str, float], step: int) -> None:
            said.append((step, values["loss"]))

        def finish(self) -> None:
            said.append("finished")

    def init(project: str, config: dict[str, Any]) -> Run:
        said.append((project, config["plan"]))
        return Run()

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    result = trained(found, make_logger("wandb", "mine"))
    steps = list(enumerate(result.losses, start=1))
    assert said == [("mine", found.strategy.label()), *steps, "finished"]


@pytest.mark.parametrize(
    ("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")]
)
def test_a_library_that_is_missing_is_named(
    name: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ExecutionError, match=f"not installed: pip install {name}"):
        make_logger(name, "x")


def test_unknown_loggers_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'tensorboard'"):
        make_logger("tensorbord", "x")
    assert sorted(LOGGERS) == ["json", "tensorboard", "wandb"]


def test_a_log_that_cannot_be_written(found: Plan, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"cannot write the log .*name another"):
        trained(found, make_logger("json", str(tmp_path)))


def test_a_trace_has_the_steps_that_were_asked_for(found: Plan, tmp_path: Path) -> None:
    trained(found, ProfilerTrace("2:3", tmp_path))
    (file,) = tmp_path.iterdir()
    assert file.name == "rank-0-steps-2-3.json"
    names = [
        event.get("name", "") for event in json.loads(file.read_text())["traceEvents"]
    ]
    assert sum(name.startswith("Optimizer.step") for name in names) == 2


@pytest.mark.parametrize("text", ["", "0:2", "3:2", "a", "1:2:3"])
def test_steps_to_profile_are_two_numbers(text: str) -> None:
    with pytest.raises(ExecutionError, match="5:8"):
        steps_to_profile(text)
    assert steps_to_profile("5:8") == (5, 8)
    assert steps_to_profile("4") == (4, 4)


def test_steps_behind_the_end_are_not_profiled(found: Plan, tmp_path: Path) -> None:
    with pytest.raises(ExecutionError, match="the run does steps 1 to 3"):
        trained(found, ProfilerTrace("4:5", tmp_path))
