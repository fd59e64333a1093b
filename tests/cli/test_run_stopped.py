"""Runs that a signal, or a loss that is not finite, ends by an exit code of its own."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

from tests.cli.runs import TOKENS, changed
from tests.cli.shell import meshwright, start


def test_a_signal_saves_behind_the_step_and_the_run_goes_on(
    plan_file: Path, tmp_path: Path
) -> None:
    kept, log = tmp_path / "kept", tmp_path / "log.jsonl"
    options = ("--data", TOKENS, "--checkpoint-dir", kept, "--log", log)
    with start("run", plan_file, "--steps", "4000", *options) as process:
        while not (log.exists() and '"event": "step"' in log.read_text()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 75
    (name,) = [one.name for one in kept.glob("step-*")]
    done = int(name.removeprefix("step-"))
    assert err.splitlines()[-1] == (
        f"meshwright: stopped by SIGTERM after step {done} of 4000, saved in {kept}; "
        f"go on with --resume"
    )
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert steps[-1] == {"event": "end", "step": done, "stopped": "SIGTERM"}
    more = ("--steps", str(done + 1), *options, "--resume", "--json")
    again = meshwright("run", plan_file, *more)
    assert again.code == 0, again.err
    assert again.json["first_step"] == done


def test_a_loss_that_is_not_finite_has_an_exit_code(plan_file: Path) -> None:
    plan = json.loads(plan_file.read_text())
    optimizer = plan["strategy"]["optimizer"] | {"learning_rate": 1e30}
    file = changed(plan_file, strategy={"optimizer": optimizer})
    answer = meshwright("run", file, "--steps", "6")
    assert answer.code == 3
    assert "lower the learning rate" in answer.err
