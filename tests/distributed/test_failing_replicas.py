"""Replicas of local steps that die, hang, and join again, on gloo processes."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model, launch, run
from executors.data import synthetic_batch
from executors.losses import LossFunction
from planner.errors import ExecutionError, RankFailedError, StrategyError
from planner.schema import Mesh, Optimizer, Plan, Precision
from planner.schema.methods import read_method
from planner.schema.violations import executor_violations
from tests.distributed.cases import build, largest_gap, make_plan
from tests.executors.launching.test_launcher import _gone

ENTRIES = "tests.distributed.failing"
COPIES, PERIOD, STEPS = 3, 3, 12
ADAMW = Optimizer(name="AdamW", learning_rate=1e-3)


def _plan(pin: str, compute: str = "float32") -> Plan:
    """Three copies of a perceptron, of 4 samples each."""
    made = make_plan(
        "perceptron",
        dp_replicate=2,
        semantics="approximate",
        optimizer=ADAMW,
        synchronisation=read_method("synchronisation", pin),
        precision=Precision(compute=compute),
    )
    data = made.to_data()
    data["strategy"]["mesh"]["dp_replicate"] = COPIES
    data["strategy"]["microbatch_size"] = 4
    data["workload"]["global_batch"] = data["cluster"]["num_devices"] = 4 * COPIES
    data["cluster"]["num_devices"] = COPIES
    return Plan.from_data(data)


class _Run:
    """A run of three copies, one of which is doomed."""

    def __init__(
        self, plan: Plan, tmp_path: Path, doom: tuple[int, int, str], **options: Any
    ) -> None:
        self.pids: list[int] = []
        #: Digests by step, of each rank.
        self.digests: list[dict[int, str]] = [{} for _ in range(COPIES)]
        self.results: list[Any] = []
        self._arguments = {
            "plan": plan.to_json(),
            "doom": doom,
            "flag": str(tmp_path / "died"),
            "steps": STEPS,
            "silence_s": options.pop("silence_s", 60.0),
        }
        self._options = options

    def start(self) -> list[Any]:
        self.results = launch(
            f"{ENTRIES}:train",
            self._arguments,
            processes=COPIES,
            on_message=self._hear,
            timeout_s=300,
            **self._options,
        )
        return self.results

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if "pid" in message:
            self.pids.append(message["pid"])
        else:
            self.digests[rank][message["step"]] = message["digest"]


class _Serial:
    """Three copies in one process: each trains on its own third of a batch."""

    def __init__(self, plan: Plan) -> None:
        self._plan, settings = plan, plan.strategy.synchronisation
        self.copies = [build_model(lambda: build("perceptron")) for _ in range(COPIES)]
        self.rules = [
            torch.optim.AdamW(c.parameters(), lr=1e-3, weight_decay=0.0)
            for c in self.copies
        ]
        spec = plan.strategy.optimizer
        for rule in self.rules:
            rule.param_groups[0]["weight_decay"] = spec.used_weight_decay
        self.whole: nn.Module = copy.deepcopy(self.copies[0])
        self._outer = torch.optim.SGD(
            self.whole.parameters(),
            lr=settings.outer_learning_rate,
            momentum=settings.outer_momentum,
            nesterov=settings.nesterov,
        )

    def train(self, steps: range, there: tuple[int, ...]) -> None:
        """Train the copies that are there; nobody has the samples of others."""
        for step in steps:
            batch = synthetic_batch(self._plan.workload, step)
            for index in there:
                own = {k: v.chunk(COPIES)[index] for k, v in batch.items()}
                loss = LossFunction(kind=self._plan.workload.loss, data_parallel=1)
                loss.prepare(own, 1)
                self.rules[index].zero_grad()
                loss(self.copies[index](**own), loss.target(own)).backward()
                self.rules[index].step()

    def exchange(self, there: tuple[int, ...]) -> None:
        """Step of the outer optimizer with the mean over the copies that are there."""
        pairs = zip(*(self.copies[i].parameters() for i in there), strict=True)
        for weight, own in zip(self.whole.parameters(), pairs, strict=True):
            mean = torch.stack([one.detach() for one in own]).mean(0)
            weight.grad = weight.detach() - mean
        self._outer.step()
        for index in there:
            self.copies[index].load_state_dict(self.whole.state_dict())

    def recover(self, index: int, source: int) -> None:
        """Give one copy all that another has."""
        self.copies[index].load_state_dict(self.copies[source].state_dict())
        state = copy.deepcopy(self.rules[source].state_dict())
        self.rules[index].load_state_dict(state)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {n: p.detach().numpy() for n, p in self.whole.named_parameters()}


def _far(result: dict[str, Any], weights: Mapping[str, np.ndarray]) -> float:
    found = {n: np.array(w, np.float32) for n, w in result["weights"].items()}
    return largest_gap(found, weights)


CONTINUE = f"local_steps:period={PERIOD},on_failure=continue"
OUTER = (
    f"diloco:period={PERIOD},outer_learning_rate=0.7,on_failure=continue,min_replicas=3"
)


def test_the_recovery_is_that_of_torchft() -> None:
    """Local weights at each step and global ones after each exchange, exactly.

    Source: torchft, diloco_regression_test.py, test_diloco_mocked_failure_recovery.
    """
    folder = os.environ.get("MESHWRIGHT_DATA")
    if not folder:
        pytest.skip("MESHWRIGHT_DATA is not set; see docs/data.md")
    name = "DiLoCoMockedUpdateTest.test_diloco_mocked_failure_recovery_0.json"
    (path,) = (Path(folder) / "torchft").glob(f"*{name}")
    recorded = json.loads(path.read_text(encoding="utf-8"))
    pin = (
        "local_steps:period=6,fragments=2,outer_learning_rate=2,on_failure=continue,"
        "min_replicas=2"
    )
    results = launch(
        f"{ENTRIES}:recovery",
        {"pin": pin},
        processes=2,
        on_failure="continue",
        max_restarts=1,
        timeout_s=300,
    )
    for found, (theirs,) in zip(results, recorded, strict=True):
        for kind, steps in theirs.items():
            expected = {
                step: [value[0][0] for value in weights.values()]
                for step, weights in steps.items()
            }
            assert found[kind] == expected


def test_the_others_continue_without_a_replica_that_is_killed(tmp_path: Path) -> None:
    """In the middle of a period; from the next exchange on the mean is over two."""
    plan = _plan(CONTINUE)
    tried = _Run(plan, tmp_path, (1, 4, "SIGKILL"), on_failure="continue")
    first, lost, last = tried.start()
    assert lost is None
    assert len(first["losses"]) == len(last["losses"]) == STEPS
    equal = [tried.digests[0][s] == tried.digests[2][s] for s in range(STEPS)]
    assert equal == [(s + 1) % PERIOD == 0 for s in range(STEPS)]

    serial, there = _Serial(plan), tuple(range(COPIES))
    for begin in range(0, STEPS, PERIOD):
        if begin == PERIOD:
            there = (0, 2)
        serial.train(range(begin, begin + PERIOD), there)
        serial.exchange(there)
    assert _far(first, serial.weights) <= 3e-5
    assert _gone(tried.pids)


def test_a_replica_that_is_started_again_joins_at_an_exchange(tmp_path: Path) -> None:
    """With weights, both optimizers' states and the step of a peer."""
    plan = _plan(OUTER)
    tried = _Run(
        plan, tmp_path, (0, 4, "SIGKILL"), on_failure="continue", max_restarts=1
    )
    joined, *others = tried.start()
    assert joined["first"] == 2 * PERIOD
    assert [other["first"] for other in others] == [0, 0]
    exchanges = range(3 * PERIOD - 1, STEPS, PERIOD)
    for step in exchanges:
        assert len({digests[step] for digests in tried.digests}) == 1
    between = {digests[3 * PERIOD - 2] for digests in tried.digests}
    assert len(between) == COPIES

    serial, all_three = _Serial(plan), tuple(range(COPIES))
    serial.train(range(PERIOD), all_three)
    serial.exchange(all_three)
    serial.train(range(PERIOD, 2 * PERIOD), (1, 2))
    serial.exchange((1, 2))
    serial.recover(0, 1)
    for begin in range(2 * PERIOD, STEPS, PERIOD):
        serial.train(range(begin, begin + PERIOD), all_three)
        serial.exchange(all_three)
    for result in (joined, *others):
        assert _far(result, serial.weights) <= 3e-5


@pytest.mark.parametrize(
    ("pin", "compute"),
    [
        (OUTER, "bfloat16"),
        (f"{OUTER},delay=1", "float32"),
        (f"{CONTINUE},min_replicas=3,top=64", "float32"),
    ],
    ids=["bfloat16", "delay", "largest entries"],
)
def test_whoever_joins_is_equal_after_the_next_exchange(
    tmp_path: Path, pin: str, compute: str
) -> None:
    tried = _Run(
        _plan(pin, compute),
        tmp_path,
        (1, 4, "SIGKILL"),
        on_failure="continue",
        max_restarts=1,
    )
    tried.start()
    assert min(tried.digests[1].keys() - set(range(4))) == 2 * PERIOD
    for step in range(3 * PERIOD - 1, STEPS, PERIOD):
        assert len({digests[step] for digests in tried.digests}) == 1


def test_a_plan_that_stops_names_the_replica(tmp_path: Path) -> None:
    tried = _Run(_plan(f"local_steps:period={PERIOD}"), tmp_path, (1, 4, "SIGKILL"))
    said = r"^rank 1 of 3 was killed by SIGKILL; the other ranks were stopped"
    with pytest.raises(RankFailedError, match=said):
        tried.start()
    assert len(tried.pids) == COPIES
    assert _gone(tried.pids)


def test_a_replica_that_hangs_is_as_good_as_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = _plan(CONTINUE)
    tried = _Run(
        plan, tmp_path, (1, 4, "SIGSTOP"), on_failure="continue", silence_s=12.0
    )
    first, lost, last = tried.start()
    assert lost is None
    assert len(first["losses"]) == len(last["losses"]) == STEPS
    assert tried.digests[0][STEPS - 1] == tried.digests[2][STEPS - 1]
    said = "rank 1 of 3 is killed: it gave no sign of life for 12 s"
    assert said in caplog.messages
    assert _gone(tried.pids)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_an_exchange_that_a_replica_dies_in_is_done_again(how: str) -> None:
    """By those that are left, with the messages that they had."""
    results = launch(
        f"{ENTRIES}:exchange",
        {"victim": 1, "signal": how, "silence_s": 12.0},
        processes=COPIES,
        on_failure="continue",
        timeout_s=300,
    )
    assert results == [[101.0, 101.0], None, [101.0, 101.0]]


def test_an_exchange_that_fails_again_and_again_ends_all() -> None:
    with pytest.raises(RankFailedError, match="exchange 2 among ranks 0, 1, 2 of 3"):
        launch(
            f"{ENTRIES}:exchange",
            {"victim": 1, "signal": None, "silence_s": 60.0},
            processes=COPIES,
            on_failure="continue",
            timeout_s=300,
        )


def test_a_warm_up_that_goes_on_is_refused() -> None:
    said = "on_failure=continue with warm_up_steps=4"
    with pytest.raises(StrategyError, match=said):
        read_method(
            "synchronisation",
            "post-local-sgd:period=4,warm_up_steps=4,on_failure=continue",
        )


def test_replicas_of_several_devices_are_refused() -> None:
    strategy = _plan(CONTINUE).strategy
    wide = strategy.model_copy(
        update={"mesh": Mesh(dp_replicate=2, dp_shard=2), "zero_stage": 3}
    )
    (said,) = executor_violations(wide)
    assert re.search("copies of 2 devices; .*dp_replicate=4 alone", said)
    many = strategy.synchronisation.model_copy(update={"min_replicas": 4})
    (said,) = executor_violations(strategy.model_copy(update={"synchronisation": many}))
    assert re.search("with dp_replicate=3; .* use min_replicas=3", said)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"checkpoint_dir": "kept"}, "takes its state from another; leave checkpoints"),
        ({"measure": True}, "measure the same plan with on_failure=stop"),
    ],
)
def test_what_needs_all_replicas_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ExecutionError, match=said):
        run(_plan(CONTINUE), lambda: build("perceptron"), steps=1, **options)


def test_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ExecutionError, match=r"torchrun ends all its ranks .*use mesh"):
        run(_plan(CONTINUE), lambda: build("perceptron"), steps=1)
