"""Sums and updates that go on beside the next forward change no number."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from executors import Callback, prepare, run
from executors.communication.ahead import sum_sequence
from executors.communication.buckets import BucketedReplicas
from executors.communication.tables import TableExchange
from executors.data import synthetic_batch
from executors.dryrun import dry_run
from planner.schema import Communication, Optimizer, Overlap, Plan, Precision
from planner.schema.send_tables import ring
from planner.schema.strategy_parts import Collective
from tests.distributed.cases import build, make_plan
from tests.distributed.pool import Pool

ADAM = Optimizer(name="AdamW", learning_rate=1e-2, ema=0.8)
STEPS = 6


def plan_with(buckets: str, model: str, ranks: int, **settings: Any) -> Plan:
    return make_plan(
        model,
        dp_replicate=ranks,
        optimizer=settings.pop("optimizer", ADAM),
        overlap=Overlap(bucket_bytes=4096),
        communication=Communication(
            replicas=Collective(algorithm="ring"), buckets=buckets
        ),
        **settings,
    )


def _values(named: Any) -> dict[str, list[float]]:
    return {name: one.detach().flatten().tolist() for name, one in named}


def stepped(plan_json: str, ahead: bool) -> dict[str, Any]:
    """Losses, state at the end, and the number of buckets left open by each step."""
    plan = Plan.from_json(plan_json)
    schedule = partial(LinearLR, start_factor=1.0, end_factor=0.1, total_iters=STEPS)
    losses, left = [], []
    with prepare(plan, lambda: build(plan.model.name), scheduler=schedule) as training:
        replicas = training.trainer.parts[0].module
        assert isinstance(replicas, BucketedReplicas)
        for step in range(STEPS):
            batch = synthetic_batch(plan.workload, step)
            losses.append(training.step(batch, ahead=ahead).loss)
            left.append(len(replicas._open.left))
        evaluation = training.evaluate(synthetic_batch(plan.workload, 99))
        state = training.state_dict()
        kept = {
            n: v
            for n, v in state.items()
            if "random" not in n and v.is_floating_point()
        }
        return {
            "losses": losses,
            "left": left,
            "buckets": len(replicas.buckets),
            "evaluation": evaluation,
            "state": _values((n, _local(v)) for n, v in kept.items()),
        }


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


CASES = {
    "two": ("llama", 2, {}),
    "accumulated": ("gpt2", 2, {"num_microbatches": 2}),
    "four": ("gpt2", 4, {"optimizer": Optimizer(name="SGD", learning_rate=0.1)}),
    "cast": ("llama", 2, {"precision": Precision(compute="bfloat16")}),
    "recomputed": ("llama", 2, {"recompute": "full"}),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_left_open_are_bit_for_bit_those_that_end(pool: Pool, name: str) -> None:
    model, ranks, settings = CASES[name]
    needed = plan_with("needed", model, ranks, **settings).to_json()
    filled = plan_with("filled", model, ranks, **settings).to_json()
    overlapped = pool.run(stepped, ranks, needed, True)
    plain = pool.run(stepped, ranks, filled, False)
    for ours, theirs in zip(overlapped, plain, strict=True):
        # Two steps show the order; each later one is left open with all buckets.
        assert ours["left"] == [0, 0, *[ours["buckets"]] * (STEPS - 2)]
        assert ours["buckets"] > 3
        assert theirs["left"] == [0] * STEPS
        for what in ("losses", "evaluation", "state"):
            assert ours[what] == theirs[what]
    assert len(overlapped[0]["state"]) > 20


def ran(plan_json: str, options: dict[str, Any]) -> dict[str, Any]:
    """Results of a run that evaluates and saves, and how many steps were left open."""
    plan = Plan.from_json(plan_json)
    reader = options.pop("reader", None)
    callbacks = [Reader(reads=reader)] if reader is not None else []
    batch = synthetic_batch(plan.workload, 99)
    kept = BucketedReplicas._leave_open
    with mock.patch.object(
        BucketedReplicas, "_leave_open", autospec=True, side_effect=kept
    ) as left:
        result = run(
            plan,
            lambda: build(plan.model.name),
            eval_data=[batch],
            callbacks=callbacks,
            **options,
        )
    return {
        "losses": result.losses,
        "evaluations": result.evaluations,
        "norms": result.grad_norms,
        "read": callbacks[0].read if callbacks else [],
        "open": left.call_count,
    }


class Reader(Callback):
    """Reads the first weight after each step, by itself or by the loop's grace."""

    needs_grad_norm = True

    def __init__(self, *, reads: bool) -> None:
        self.reads_weights = reads
        self.read: list[float] = []

    def on_step(self, state: Any, report: Any) -> None:
        if self.reads_weights:
            weight = next(state.prepared.trainer.parts[0].inner.parameters())
            self.read.append(float(_local(weight.detach()).double().sum()))


OPTIONS: dict[str, dict[str, Any]] = {
    "evaluated": {"evaluate_every": 2},
    "saved": {"checkpoint_every": 2, "check_replicas_every": 3},
    "norms": {"reader": False},
    "read": {"reader": True},
    "skipping": {"on_nonfinite": "skip"},
}
#: Steps of six that nobody forbids to leave open; a norm ends one that was.
OPEN = {"evaluated": 4, "saved": 4, "norms": 4, "read": 0, "skipping": 0}


@pytest.mark.parametrize("name", OPTIONS)
def test_who_reads_between_steps_reads_what_they_end_with(
    pool: Pool, tmp_path: Path, name: str
) -> None:
    found = {}
    for buckets in ("needed", "filled"):
        options = {"steps": STEPS, **OPTIONS[name]}
        if name == "saved":
            options["checkpoint_dir"] = str(tmp_path / buckets)
        text = plan_with(buckets, "llama", 2).to_json()
        found[buckets] = pool.run(ran, 2, text, options)[0]
    # The last step ends by itself, and of the others one shows what backward hides.
    assert found["needed"].pop("open") == OPEN[name]
    assert found["filled"].pop("open") == 0
    assert found["needed"] == found["filled"]
    assert len(found["needed"]["read"]) == (STEPS if name == "read" else 0)
    assert len(found["needed"]["norms"]) == (STEPS if "reader" in OPTIONS[name] else 0)


def resumed(plan_json: str, folder: str, steps: int) -> tuple[float, ...]:
    plan = Plan.from_json(plan_json)
    return run(
        plan,
        lambda: build(plan.model.name),
        steps=steps,
        checkpoint_dir=folder,
        checkpoint_every=4,
        keep_checkpoints=4,
        resume=steps > STEPS,
    ).losses


def test_a_checkpoint_between_open_steps_goes_on_alike(
    pool: Pool, tmp_path: Path
) -> None:
    needed, filled = (
        plan_with(one, "gpt2", 2).to_json() for one in ("needed", "filled")
    )
    pool.run(resumed, 2, needed, str(tmp_path), STEPS)
    later = pool.run(resumed, 2, filled, str(tmp_path), 2 * STEPS)[0]
    whole = pool.run(resumed, 2, filled, str(tmp_path / "whole"), 2 * STEPS)[0]
    assert later == whole[-len(later) :]


def test_a_dry_run_counts_the_same_messages() -> None:
    ours, theirs = (
        dry_run(plan_with(one, "gpt2", 2), lambda: build("gpt2"), 0)
        for one in ("needed", "filled")
    )
    assert ours == theirs


class Layers(nn.Module):
    """Layers, the first of which a caller may read the last one's weight before."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            x = x + self.layers[-1].weight.sum()
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Held(TableExchange):
    """A ring that holds back the sum of one bucket until it is let go, or for a while.

    Attributes:
        last: Number of the bucket; None to hold none.
        waited: Whether it was let go.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(ring(range(ranks)))
        self.last: int | None = None
        self.go, self.waited = threading.Event(), False
        self.fails = False

    def run(self, bucket: Any) -> Any:
        if self.fails:
            raise RuntimeError("the other rank is gone")
        if bucket.index == self.last:
            self.waited = self.go.wait(30)
        yield from super().run(bucket)


def _layers(reads: bool, needed: bool) -> tuple[BucketedReplicas, Held]:
    group = dist.group.WORLD
    assert group is not None
    exchange, model = Held(group.size()), Layers(reads)
    replicas = BucketedReplicas(
        model, group, exchange, 1024, needed_first=needed, units=list(model.layers)
    )
    replicas.ahead = needed
    return replicas, exchange


def _step(replicas: BucketedReplicas, adam: torch.optim.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    adam.zero_grad()
    x = torch.randn(8, 16, generator=generator)
    replicas(x).square().mean().backward()  # type: ignore[no-untyped-call]
    replicas.finish()
    replicas.step(adam)


def let_go() -> tuple[bool, bool]:
    """Tell if a first layer is computed while the last sum of the step before lasts."""
    replicas, exchange = _layers(False, True)
    adam = torch.optim.AdamW(replicas.parameters(), lr=0.1)
    for step in range(3):
        _step(replicas, adam, step)
    replicas.settle()
    assert replicas._early is not None
    last = sum_sequence(replicas._order, replicas._wanted, replicas._early)[-1]
    exchange.last = last
    first = replicas.module.layers[0]
    holder = first.register_forward_hook(lambda *_: exchange.go.set())
    exchange.go.clear()
    _step(replicas, adam, 3)
    before = exchange.go.is_set()
    exchange.go.clear()
    holder.remove()
    first.register_forward_hook(lambda *_: exchange.go.set())
    _step(replicas, adam, 4)
    replicas.settle()
    return before, exchange.waited


def test_a_forward_begins_before_the_last_sum_has_arrived(pool: Pool) -> None:
    for before, waited in pool.run(let_go, 2):
        assert before
        assert waited


def read_early(needed: bool) -> tuple[list[list[float]], list[int]]:
    replicas, _ = _layers(True, needed)
    adam = torch.optim.AdamW(replicas.parameters(), lr=0.1)
    for step in range(5):
        _step(replicas, adam, step)
    replicas.settle()
    return [p.detach().flatten().tolist() for p in replicas.parameters()], sorted(
        replicas._always
    )


def test_a_weight_that_is_read_outside_its_unit_is_waited_for(pool: Pool) -> None:
    (ours, always), (theirs, _) = (
        pool.run(read_early, 2, one)[0] for one in (True, False)
    )
    assert ours == theirs
    # The last layer's weight and bias are in the first bucket.
    assert always == [0]


def failing() -> str:
    replicas, exchange = _layers(False, True)
    adam = torch.optim.AdamW(replicas.parameters(), lr=0.1)
    for step in range(3):
        _step(replicas, adam, step)
    replicas.settle()
    exchange.fails = True
    try:
        _step(replicas, adam, 3)
        replicas.settle()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_sum_that_fails_beside_a_forward_is_told(pool: Pool) -> None:
    assert pool.run(failing, 2) == ["the other rank is gone"] * 2


def test_sums_beside_backward_are_spread_and_the_rest_is_wanted_first() -> None:
    filled, wanted = [0, 1, 2, 3, 4, 5], [0, 5, 4, 3, 2, 1]
    assert sum_sequence(filled, wanted, 0) == (0, 5, 4, 3, 2, 1)
    assert sum_sequence(filled, wanted, 3) == (0, 2, 4, 5, 3, 1)
    assert sum_sequence(filled, wanted, 9) == (0, 1, 2, 3, 4, 5)
