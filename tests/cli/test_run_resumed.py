"""Each training method by ``meshwright run``: killed and resumed to the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.schema import Optimizer, Plan
from planner.schema.methods import methods
from tests.cli.shell import meshwright, start
from tests.models.classifiers import classifier_plan
from tests.plans import local_plan

_COPIES, _STEPS, _KILLED = 4, 12, 7
#: Settings in whose periods a short run has several exchanges.
_SHORT = {
    "asynchronous": "asynchronous:drain_every=8",
    "ravnest": "ravnest:drain_every=8",
    "local_steps": "local_steps:period=4",
    "post-local-sgd": "post-local-sgd:period=4,warm_up_steps=4",
    "diloco": "diloco:period=4",
    "streaming-diloco": "streaming-diloco:period=4,fragments=2,delay=1",
    "subnetworks": "subnetworks:local_steps=4",
    "block_subnetworks": "block_subnetworks:period=4",
    # Saved after a core step; the first replica, whose states others take, is weak.
    "masked": "masked:every=3,weak_replicas=0",
}
_CLASSIFIER = "tests.models.classifiers:classifier"
#: Steps between checkpoints: where all of these methods can be saved.
_EVERY = 4


def _pins() -> list[tuple[str, str]]:
    """Slot and value of every inexact method that is run, and of some presets."""
    return [
        (one.slot, _SHORT.get(name, name))
        for one in methods()
        if one.inexact and one.runs
        for name in (one.kind, *sorted(_SHORT.keys() & one.presets))
    ]


def _plan(slot: str, value: str) -> Plan:
    """Plan of a method: of stages or of copies, of a language model or a classifier."""
    if slot == "learning":
        return classifier_plan(_CLASSIFIER, 2, learning=value)
    # Two key and value heads go to two copies.
    copies = 2 if value.startswith("subnetworks") else _COPIES
    if slot == "asynchrony":
        # Adaptive optimizers do not go with older gradients.
        sgd = Optimizer(name="SGD", learning_rate=0.1)
        return local_plan(copies, optimizer=sgd, pp=copies, asynchrony=value)
    return local_plan(copies, dp_replicate=copies, **{slot: value})


def _losses(text: str) -> dict[int, str]:
    """Losses as printed, by step."""
    words = [line.split() for line in text.splitlines() if line.startswith("step ")]
    return {int(line[1]): line[-1] for line in words}


@pytest.mark.further
@pytest.mark.parametrize(("slot", "value"), _pins())
def test_a_killed_run_goes_on_as_if_it_had_not_been(
    slot: str, value: str, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    _plan(slot, value).save(plan)
    steps = ["--steps", f"{_STEPS}", "--checkpoint-every", f"{_EVERY}"]
    if slot == "learning":
        steps += ["--model", _CLASSIFIER]
    whole = meshwright("run", plan, *steps, "--checkpoint-dir", tmp_path / "whole")
    assert whole.code == 0, whole.err
    expected = _losses(whole.err)
    assert expected

    kept = ("--checkpoint-dir", tmp_path / "kept")
    with start("run", plan, *steps, *kept) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"step {_KILLED} "):
                process.kill()
                break
        process.communicate()
    assert process.returncode == -9
    resumed = meshwright("run", plan, *steps, *kept, "--resume")
    assert resumed.code == 0, resumed.err
    found = _losses(resumed.err)
    # A stage may have gone on a step before the signal reached it.
    assert min(found) in (_EVERY + 1, 2 * _EVERY + 1)
    assert found == {step: expected[step] for step in found}
