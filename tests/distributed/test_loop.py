"""The loop of a run: callbacks, early ends, kept checkpoints, numbers not finite."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from executors import Callback, Samples, launch, run
from executors.data import synthetic_batch
from planner.errors import ExecutionError, NonFiniteError
from planner.schema import Optimizer, Plan
from tests.distributed.cases import VOCAB, build, make_plan
from tests.distributed.pool import Pool

ADAM = Optimizer(name="AdamW", learning_rate=0.01)
PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}
ZERO3 = {"dp_shard": 2, "zero_stage": 3}
LOCAL = {
    "dp_replicate": 2,
    "synchronisation": {"kind": "local_steps", "period": 2},
    "semantics": "approximate",
}


class Recorder(Callback):
    """Writes down what it is told of; may stop a run, or send a signal to itself."""

    def __init__(self, at: int | None = None, number: int | None = None) -> None:
        self.at, self.number = at, number
        self.told: list[Any] = []

    def on_start(self, state: Any) -> None:
        self.told.append(("start", state.first))

    def on_step(self, state: Any, report: Any) -> None:
        self.told.append(("step", report.step + 1))
        if report.step + 1 == self.at:
            if self.number is None:
                state.stop("enough")
            else:
                signal.raise_signal(self.number)

    def on_evaluate(self, state: Any, done: int, loss: float) -> None:
        self.told.append(("evaluate", done))

    def on_save(self, state: Any, folder: Path) -> None:
        self.told.append(("save", folder.name))

    def on_end(self, state: Any, error: Any) -> None:
        self.told.append(("end", type(error).__name__))


def recorded(plan_json: str, options: dict[str, Any]) -> Any:
    """Return what a callback is told, losses, and why the run ended.

    One rank alone stops the run, or gets the signal.
    """
    plan = Plan.from_json(plan_json)
    acts = dist.get_rank() == options.pop("rank", 0)
    number = options.pop("number", None)
    recorder = Recorder(options.pop("at", None) if acts else None, number)
    options.pop("at", None)
    if options.pop("evaluates", False):
        batch = synthetic_batch(plan.workload, 99)
        options["eval_data"] = [batch]
    before = signal.getsignal(signal.SIGTERM)
    result = run(plan, lambda: build(plan.model.name), callbacks=[recorder], **options)
    assert signal.getsignal(signal.SIGTERM) == before
    return recorder.told, len(result.losses), result.stopped, result.evaluations


def test_callbacks_are_told_in_order_on_every_process(
    pool: Pool, tmp_path: Path
) -> None:
    plan = make_plan("llama", **PIPELINE)
    options = {
        "steps": 3,
        "evaluates": True,
        "evaluate_every": 2,
        "checkpoint_dir": str(tmp_path),
        "checkpoint_every": 2,
    }
    for told, *_ in pool.run(recorded, 2, plan.to_json(), options):
        assert told == [
            ("start", 0),
            ("step", 1),
            ("step", 2),
            ("evaluate", 2),
            ("save", "step-000002"),
            ("step", 3),
            ("evaluate", 3),
            ("save", "step-000003"),
            ("end", "NoneType"),
        ]


@pytest.mark.parametrize("strategy", [PIPELINE, ZERO3], ids=["pp", "zero3"])
def test_one_rank_that_stops_ends_all_behind_the_same_step(
    pool: Pool, tmp_path: Path, strategy: dict[str, Any]
) -> None:
    plan = make_plan("llama", **strategy)
    options = {"steps": 9, "at": 2, "rank": 1, "evaluates": True}
    options["checkpoint_dir"] = str(tmp_path)
    for told, steps, stopped, evaluations in pool.run(
        recorded, 2, plan.to_json(), options
    ):
        assert (steps, stopped) == (2, "enough")
        # It ends as its last step would have.
        assert [done for done, _ in evaluations] == [2]
        assert told[-3:] == [
            ("evaluate", 2),
            ("save", "step-000002"),
            ("end", "NoneType"),
        ]


@pytest.mark.parametrize(("name", "number"), [("TERM", 15), ("USR2", 12)])
def test_a_signal_to_one_rank_saves_and_ends_all(
    pool: Pool, tmp_path: Path, name: str, number: int
) -> None:
    plan = make_plan("llama", dp_replicate=2)
    options = {"steps": 9, "at": 3, "rank": 1, "number": number}
    options |= {"checkpoint_dir": str(tmp_path), "save_hf": str(tmp_path / "hf")}
    options["stop_signals"] = [] if name == "TERM" else [name]
    for told, steps, stopped, _ in pool.run(recorded, 2, plan.to_json(), options):
        assert (steps, stopped) == (3, f"SIG{name}")
        assert told[-2:] == [("save", "step-000003"), ("end", "NoneType")]
    assert not (tmp_path / "hf").exists()
    more = {"steps": 5, "checkpoint_dir": str(tmp_path), "resume": True}
    for told, steps, stopped, _ in pool.run(recorded, 2, plan.to_json(), more):
        assert (told[0], steps, stopped) == (("start", 3), 2, None)


def test_copies_that_are_apart_end_where_they_come_together(
    pool: Pool, tmp_path: Path
) -> None:
    plan = make_plan("llama", **LOCAL)
    options = {"steps": 8, "at": 3, "number": 15, "checkpoint_dir": str(tmp_path)}
    for _, steps, stopped, _ in pool.run(recorded, 2, plan.to_json(), options):
        assert (steps, stopped) == (4, "SIGTERM")


class _Failing(Callback):
    def on_step(self, state: Any, report: Any) -> None:
        raise KeyError("mine")


def ended(plan_json: str) -> Any:
    recorder = Recorder()
    plan = Plan.from_json(plan_json)
    with pytest.raises(KeyError, match="mine"):
        run(
            plan,
            lambda: build(plan.model.name),
            steps=2,
            callbacks=[_Failing(), recorder],
        )
    return recorder.told


def test_every_callback_is_told_of_an_error(pool: Pool) -> None:
    told = pool.run(ended, 1, make_plan("llama").to_json())[0]
    assert told == [("start", 0), ("end", "KeyError")]


def kept(plan_json: str, folder: str, losses: list[float], options: Any) -> Any:
    """Names of what a folder holds after a run whose evaluations give these losses."""
    from unittest import mock

    from executors.prepared import Prepared

    plan = Plan.from_json(plan_json)
    with mock.patch.object(Prepared, "evaluate", lambda self, _: losses[self.done - 1]):
        run(
            plan,
            lambda: build(plan.model.name),
            checkpoint_dir=folder,
            eval_data=[synthetic_batch(plan.workload, 99)],
            evaluate_every=1,
            **options,
        )
    dist.barrier()
    names = sorted(one.name for one in Path(folder).glob("step-*"))
    return names, (Path(folder) / "best").read_text().strip()


def test_the_best_checkpoint_stays_beside_the_last(pool: Pool, tmp_path: Path) -> None:
    plan = make_plan("llama", **ZERO3).to_json()
    losses = [5.0, 3.0, 4.0, 4.5, 3.5, 6.0, 2.0]
    options = {"keep_best": True, "keep_checkpoints": 2, "checkpoint_every": 2}
    args = (str(tmp_path), losses)
    found = pool.run(kept, 2, plan, *args, options | {"steps": 6})
    assert found[0] == (["step-000002", "step-000004", "step-000006"], "step-000002")
    # A run that goes on knows what the best was: 3.5 after 5 steps was none.
    again = options | {"steps": 7, "resume": True, "keep_checkpoints": 1}
    assert pool.run(kept, 2, plan, *args, again)[0] == (["step-000007"], "step-000007")


def test_going_back_before_the_best_finds_the_one_that_is_left(
    pool: Pool, tmp_path: Path
) -> None:
    plan = make_plan("llama").to_json()
    losses = [4.0, 5.0, 1.0, 6.0]
    options = {"keep_best": True, "keep_checkpoints": 9, "checkpoint_every": 1}
    found = pool.run(kept, 1, plan, str(tmp_path), losses, options | {"steps": 3})
    assert found[0][1] == "step-000003"
    back = options | {"steps": 2, "resume": "step-000001"}
    found = pool.run(kept, 1, plan, str(tmp_path), losses, back)
    assert found[0][1] == "step-000001"


def nonfinite(plan_json: str, policy: str, bad: int) -> Any:
    """Losses, skipped steps and states of a run of which one sample is spoiled."""
    plan = Plan.from_json(plan_json)
    states: list[torch.Tensor] = []

    def batch(step: int) -> dict[str, torch.Tensor]:
        rows = synthetic_batch(plan.workload, step)
        if "input_ids" in rows:
            rows["input_ids"] = rows["input_ids"].clamp(max=VOCAB - 2)
        if step == bad:
            for value in rows.values():
                # On one rank alone, where ranks have parts of the batch.
                value[-1] = VOCAB - 1 if value.dtype == torch.int64 else float("inf")
        return rows

    class Look(Callback):
        def on_step(self, state: Any, report: Any) -> None:
            trainer = state.prepared.trainer
            kept = [*trainer.all_parameters()]
            for part in trainer.parts.values():
                kept += part.inner.buffers()
            for values in trainer.optimizer.state.values():
                kept += values.values()
            flat = [_local(one).detach().flatten().float() for one in kept]
            states.append(torch.cat(flat).clone())

    try:
        result = run(
            plan,
            lambda: _poisoned(build(plan.model.name)),
            batch,
            steps=4,
            on_nonfinite=policy,
            callbacks=[Look()],
        )
    except ExecutionError as error:
        return type(error).__name__, str(error), error.exit_code
    return result.losses, result.skipped_steps, states


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _poisoned(model: nn.Module) -> nn.Module:
    """A Llama's last token has gradients that are not finite."""
    if hasattr(model, "model"):
        with torch.no_grad():
            model.model.embed_tokens.weight[-1] = 3e38
    return model


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("llama", {"dp_replicate": 2}),
        ("llama", ZERO3),
        ("llama", PIPELINE),
        ("llama", {"tp": 2, "loss_parallel": True, "grad_clip_norm": 1.0}),
        ("resnet", {"dp_shard": 2, "zero_stage": 1, "grad_clip_norm": 1.0}),
    ],
    ids=["dp", "zero3", "pp", "tp", "loss"],
)
def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(
    pool: Pool, model: str, strategy: dict[str, Any]
) -> None:
    plan = make_plan(model, optimizer=ADAM, **strategy).to_json()
    for losses, skipped, states in pool.run(nonfinite, 2, plan, "skip", 2):
        assert skipped == (2,)
        assert math.isfinite(losses[2]) == (model == "llama")
        assert all(map(math.isfinite, (*losses[:2], losses[3])))
        assert torch.equal(states[1], states[2])
        assert not torch.equal(states[2], states[3])


def test_the_run_stops_at_a_loss_that_is_not_finite_by_default(pool: Pool) -> None:
    plan = make_plan("perceptron", dp_replicate=2).to_json()
    for kind, text, code in pool.run(nonfinite, 2, plan, "stop", 1):
        assert (kind, code) == (NonFiniteError.__name__, 3)
        assert text.startswith("the loss of step 2 is nan on rank 1")


def test_a_run_that_continues_is_still_refused_weights_of_nan(pool: Pool) -> None:
    plan = make_plan("perceptron", dp_replicate=2).to_json()
    for kind, text, code in pool.run(nonfinite, 2, plan, "continue", 1):
        assert (kind, code) == (NonFiniteError.__name__, 3)
        assert "is not finite after step 4 on rank 0" in text


def test_skipping_is_refused_where_more_than_weights_is_kept(pool: Pool) -> None:
    plan = make_plan("llama", **LOCAL).to_json()
    for kind, text, _ in pool.run(nonfinite, 2, plan, "skip", 1):
        assert kind == "ExecutionError"
        assert "on_nonfinite='skip' with" in text
        assert "synchronisation=all_reduce" in text


class BlockWise(torch.optim.SGD):
    """Keeps states of a byte a number in blocks, as bitsandbytes does."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["absmax"] = torch.zeros(3)


def in_blocks(plan_json: str, folder: str) -> tuple[str, int]:
    told: list[Any] = []
    plan = Plan.from_json(plan_json)
    with pytest.raises(ExecutionError) as refused:
        run(
            plan,
            lambda: build(plan.model.name),
            steps=9,
            optimizer=lambda named: BlockWise([p for _, p in named], lr=0.1),
            on_step=told.append,
            checkpoint_dir=folder,
            checkpoint_every=5,
        )
    return str(refused.value), len(told)


def test_states_that_cannot_be_saved_are_refused_behind_the_first_step(
    pool: Pool, tmp_path: Path
) -> None:
    plan = make_plan("perceptron").to_json()
    found, steps = pool.run(in_blocks, 1, plan, str(tmp_path / "kept"))[0]
    assert steps == 0
    assert "BlockWise keeps 'absmax' of" in found
    assert "as [3], neither a scalar tensor nor of its shape" in found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_signals": ["USR1"]}, "save a checkpoint; give checkpoint_dir"),
        ({"stop_signals": ["KILL"], "checkpoint_dir": "x"}, "cannot end a run behind"),
        ({"keep_best": True}, "keep_best needs a folder"),
        ({"keep_best": True, "checkpoint_dir": "x"}, "give eval_data and evaluate_eve"),
        ({"on_nonfinite": "ignore"}, "use one of stop, skip, continue"),
    ],
)
def test_options_that_contradict_each_other(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExecutionError, match=message):
        run(make_plan("llama"), lambda: build("llama"), steps=1, **options)


def with_workers(given: dict[str, str], emit: Any) -> Any:
    """A whole group of processes gets the signal, those that load data too."""
    plan = Plan.from_json(given["plan"])
    tokens = synthetic_batch(plan.workload, 0)["input_ids"]
    found: list[int] = []

    class All(Callback):
        def on_step(self, state: Any, report: Any) -> None:
            if report.step == 1:
                children = psutil.Process().children()
                found.append(len(children))
                for one in children:
                    one.send_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGTERM)

    result = run(
        plan,
        lambda: build(plan.model.name),
        Samples(dataset=[{"input_ids": row} for row in tokens], workers=2),
        steps=9,
        callbacks=[All()],
        checkpoint_dir=given["folder"],
    )
    return result.stopped, len(result.losses), found


def test_workers_that_load_data_outlive_the_signal(tmp_path: Path) -> None:
    plan = make_plan("llama", dp_replicate=2).to_json()
    entry, given = f"{__name__}:with_workers", {"plan": plan, "folder": str(tmp_path)}
    for found in launch(entry, given, processes=2, timeout_s=120):
        assert found == ["SIGTERM", 2, [2]]
