"""Federations on gloo processes: exchanges of unlike members, losses, and joining."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from executors import build_model, launch, run_federation
from executors.data import synthetic_batch
from executors.losses import LossFunction
from planner.errors import ExecutionError
from planner.schema import Federation, Optimizer
from planner.schema.methods import read_method
from tests.distributed.cases import build, largest_gap
from tests.executors.launching.test_launcher import _gone
from tests.federations import free_ports, make_federation, member_plan

PERIOD, STEPS = 2, 6
RATE = 0.1
SGD = Optimizer(name="SGD", learning_rate=RATE)


def _further(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.further)


def _exchange(pin: str) -> Any:
    return read_method("synchronisation", pin)


class _Run:
    """A run of a federation."""

    def __init__(self, federation: Federation, **arguments: Any) -> None:
        self.pids: list[int] = []
        #: Digests of all weights by step, of each process.
        self.digests: list[dict[int, str]] = [{} for _ in federation.processes]
        self._federation = federation
        self._arguments = {
            "federation": federation.to_json(),
            "steps": STEPS,
            **arguments,
        }
        self.results: list[Any] = []

    def start_each(self, *runs: dict[str, Any]) -> list[list[Any]]:
        """Results of several runs by the same processes, one after the other."""
        ports = free_ports(len(runs))
        self._arguments["runs"] = [
            {**run, "port": port} for run, port in zip(runs, ports, strict=True)
        ]
        return [*zip(*self.start(entry="train_each"), strict=True)]

    def start(self, entry: str = "train", **options: Any) -> list[Any]:
        self.results = launch(
            f"tests.distributed.federated:{entry}",
            self._arguments,
            processes=len(self._federation.processes),
            on_message=self._hear,
            timeout_s=240,
            **options,
        )
        return self.results

    def _hear(self, process: int, message: dict[str, Any]) -> None:
        if "pid" in message:
            self.pids.append(message["pid"])
        else:
            self.digests[process][message["step"]] = message["digest"]

    def equal_after(self, step: int) -> bool:
        """True if all processes that were there have equal weights after a step."""
        return len({one[step] for one in self.digests if step in one}) == 1


class _Serial:
    """Members in one process: each trains on its own part of a batch."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        name = federation.members[0].plan.model.name
        self.copies = [
            build_model(lambda: build(name)) for _ in range(len(federation.members))
        ]
        plan = federation.members[0].plan
        self.rules = [
            torch.optim.SGD(
                c.parameters(), lr=RATE, momentum=plan.strategy.optimizer.momentum
            )
            for c in self.copies
        ]
        self.whole: nn.Module = copy.deepcopy(self.copies[0])
        outer = federation.exchange
        self._outer = torch.optim.SGD(
            self.whole.parameters(),
            lr=outer.outer_learning_rate,
            momentum=outer.outer_momentum,
            nesterov=outer.nesterov,
        )

    def train(self, steps: Sequence[int], there: Sequence[int]) -> None:
        """Train the members that are there; nobody has the samples of others."""
        plan = self._federation.members[0].plan
        workload = plan.workload.model_copy(
            update={"global_batch": self._federation.global_batch}
        )
        for step in steps:
            batch = synthetic_batch(workload, step)
            for index in there:
                first = self._federation.first_samples[index]
                size = self._federation.members[index].plan.workload.global_batch
                own = {k: v[first : first + size] for k, v in batch.items()}
                loss = LossFunction(kind=workload.loss, data_parallel=1)
                loss.prepare(own, 1)
                self.rules[index].zero_grad()
                loss(self.copies[index](**own), loss.target(own)).backward()
                self.rules[index].step()

    def exchange(self, there: Sequence[int]) -> None:
        """Step of the outer optimizer with the weighted mean of those there."""
        shares = self._federation.shares(there)
        pairs = zip(*(self.copies[i].parameters() for i in there), strict=True)
        for weight, own in zip(self.whole.parameters(), pairs, strict=True):
            mean = sum(
                share * one.detach()
                for share, one in zip(shares.values(), own, strict=True)
            )
            weight.grad = weight.detach() - mean
        self._outer.step()
        for index in there:
            self.copies[index].load_state_dict(self.whole.state_dict())

    def join(self, index: int) -> None:
        """Give a member the weights of the others."""
        self.copies[index].load_state_dict(self.whole.state_dict())

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return {n: p.detach().numpy() for n, p in self.whole.named_parameters()}


def _far(result: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> float:
    found = {n: np.array(w, np.float32) for n, w in result["weights"].items()}
    return largest_gap(found, weights)


def _trained(federation: Federation, steps: int = STEPS) -> dict[str, np.ndarray]:
    serial, there = _Serial(federation), range(len(federation.members))
    for step in range(steps):
        serial.train([step], there)
        if (step + 1) % federation.exchange.period == 0:
            serial.exchange(there)
    return serial.weights


def test_one_member_of_one_device_is_plain_training() -> None:
    federation = make_federation(member_plan(samples=4, optimizer=SGD))
    (result,) = _Run(federation).start()
    serial = _Serial(federation)
    serial.train(range(STEPS), [0])
    expected = {n: p.detach().numpy() for n, p in serial.copies[0].named_parameters()}
    assert _far(result, expected) <= 1e-6
    assert result["sent_bytes"] == result["exchanges"] == 0


@pytest.mark.parametrize("weighting", ["samples", _further("equal")])
def test_members_of_one_device_take_the_mean_after_each_step(weighting: str) -> None:
    plans = [member_plan(samples=n, optimizer=SGD) for n in (4, 2, 6)]
    federation = make_federation(
        *plans, exchange=_exchange("local_steps:period=1"), weighting=weighting
    )
    tried = _Run(federation)
    for result in tried.start():
        assert _far(result, _trained(federation)) <= 1e-6
    assert all(tried.equal_after(step) for step in range(STEPS))


UNLIKE = {
    "tp and one": [
        {"name": "llama", "samples": 4, "tp": 2},
        {"name": "llama", "samples": 2},
    ],
    "tp, tp with shards, pipeline": [
        {"name": "llama", "samples": 4, "tp": 2},
        {"name": "llama", "samples": 4, "tp": 2, "dp_shard": 2, "zero_stage": 3},
        {"name": "llama", "samples": 2, "pp": 2},
    ],
    "pipeline and one": [{"samples": 4, "pp": 2}, {"samples": 2}],
    "grid and one": [
        {"samples": 4, "pp": 2, "dp_replicate": 2},
        {"samples": 2},
    ],
    "shards, pipeline and one": [
        {"samples": 4, "dp_shard": 2, "zero_stage": 3},
        {"samples": 4, "pp": 2},
        {"samples": 2},
    ],
}


@pytest.mark.parametrize(
    ("name", "pin"),
    [
        ("tp and one", "local_steps"),
        ("grid and one", "local_steps"),
        ("shards, pipeline and one", "diloco"),
        _further("tp and one", "diloco"),
        _further("tp, tp with shards, pipeline", "local_steps"),
        _further("pipeline and one", "local_steps"),
        _further("pipeline and one", "diloco"),
        _further("grid and one", "diloco"),
        _further("shards, pipeline and one", "local_steps"),
    ],
)
def test_unlike_members_are_equal_after_an_exchange(name: str, pin: str) -> None:
    plans = [member_plan(**fields, optimizer=SGD) for fields in UNLIKE[name]]
    federation = make_federation(*plans, exchange=_exchange(f"{pin}:period={PERIOD}"))
    tried = _Run(federation)
    results = tried.start()
    for step in range(STEPS):
        assert tried.equal_after(step) == ((step + 1) % PERIOD == 0)
    expected = _trained(federation)
    for result in results:
        assert _far(result, expected) <= 1e-5


def test_all_members_end_with_the_mean_in_the_middle_of_a_period() -> None:
    plans = [member_plan(samples=n, optimizer=SGD) for n in (4, 2)]
    federation = make_federation(*plans, exchange=_exchange("local_steps:period=4"))
    tried = _Run(federation)
    first, second = tried.start()
    assert [tried.equal_after(step) for step in (3, 4, 5)] == [True, False, True]
    assert first["exchanges"] == second["exchanges"] == 2
    serial = _Serial(federation)
    for steps in (range(4), range(4, 6)):
        serial.train(steps, (0, 1))
        serial.exchange((0, 1))
    assert _far(first, serial.weights) <= 1e-6


def test_a_device_sends_its_share_of_what_it_owns() -> None:
    """2 (C - 1)/C of its bytes an exchange; all of them together exactly so."""
    plans = [member_plan(samples=4, pp=2), member_plan(samples=2)]
    federation = make_federation(*plans)
    first, second, alone = _Run(federation).start()
    model = build("perceptron")
    total = 4 * sum(p.numel() for p in model.parameters())
    exchanges = STEPS // PERIOD
    assert alone["sent_bytes"] == exchanges * total
    assert first["sent_bytes"] + second["sent_bytes"] == exchanges * total
    assert 0 < first["sent_bytes"] < exchanges * total


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "2"}, "2 processes were started, the 2 members have 3"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "torchrun ends all its ranks when one fails"),
    ],
)
def test_processes_that_do_not_fit_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    plans = [member_plan(samples=4, pp=2), member_plan(samples=2)]
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecutionError, match=said):
        run_federation(make_federation(*plans), lambda: build("perceptron"), steps=2)


# -- Members that fail and join --------------------------------------------------------

CONTINUE = "local_steps:period=2,on_failure=continue"
OUTER = "diloco:period=2,on_failure=continue,min_replicas=2"


def _doomed(pin: str, tmp_path: Path, victims: Sequence[int], signal: str) -> _Run:
    """A pipeline of two, and one alone; victims end in the third step."""
    plans = [
        member_plan(samples=4, pp=2, optimizer=SGD),
        member_plan(samples=2, optimizer=SGD),
    ]
    federation = make_federation(*plans, exchange=_exchange(pin))
    doom = (list(victims), 2, signal)
    return _Run(federation, doom=doom, flag=str(tmp_path / "died"))


def test_the_others_go_on_without_a_member_that_is_killed(tmp_path: Path) -> None:
    """All of its processes, in the middle of a period."""
    tried = _doomed(CONTINUE, tmp_path, (0, 1), "SIGKILL")
    first, second, alone = tried.start(on_failure="continue")
    assert first is None
    assert second is None
    assert len(alone["losses"]) == STEPS
    federation = Federation.from_json(tried._arguments["federation"])
    serial = _Serial(federation)
    serial.train(range(2), (0, 1))
    serial.exchange((0, 1))
    for begin in range(2, STEPS, 2):
        serial.train(range(begin, begin + 2), (1,))
        serial.exchange((1,))
    assert _far(alone, serial.weights) <= 1e-6
    assert _gone(tried.pids)


@pytest.mark.parametrize("victims", [(0, 1), _further((1,)), _further((2,))], ids=str)
def test_a_member_that_is_started_again_joins_at_an_exchange(
    tmp_path: Path, victims: tuple[int, ...]
) -> None:
    """With weights, outer state and step of a member of another size.

    Of the pipeline one process may die alone: the other one ends with it.
    """
    tried = _doomed(OUTER, tmp_path, victims, "SIGKILL")
    results = tried.start(on_failure="continue", max_restarts=1)
    joined = 1 if victims == (2,) else 0
    firsts = {result["member"]: result["first"] for result in results}
    assert firsts == {joined: 4, 1 - joined: 0}
    assert tried.equal_after(5)
    federation = Federation.from_json(tried._arguments["federation"])
    serial, there = _Serial(federation), (0, 1)
    serial.train(range(2), there)
    serial.exchange(there)
    serial.train(range(2, 4), (1 - joined,))
    serial.exchange((1 - joined,))
    serial.join(joined)
    serial.train(range(4, 6), there)
    serial.exchange(there)
    for result in results:
        assert _far(result, serial.weights) <= 1e-5
