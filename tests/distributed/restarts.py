"""Script that torchrun starts in the test of restarts: it kills itself once.

``python restarts.py PLAN FOLDER STEPS VICTIM STEP``: rank VICTIM is killed as it asks
for the batch of a step, in torchrun's first attempt alone. Rank 0 prints its losses.
"""

from __future__ import annotations

import json
import os
import signal
import sys

import torch

from executors import run
from executors.data import synthetic_batch
from planner.schema import Plan
from tests.distributed.cases import build


def main() -> None:
    torch.set_num_threads(1)
    path, folder, steps, victim, fatal = sys.argv[1:]
    plan = Plan.load(path)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def data(step: int) -> dict[str, torch.Tensor]:
        if first and os.environ["RANK"] == victim and step == int(fatal):
            os.kill(os.getpid(), signal.SIGKILL)
        return synthetic_batch(plan.workload, step)

    result = run(
        plan,
        lambda: build(plan.model.name),
        data,
        steps=int(steps),
        checkpoint_dir=folder,
        checkpoint_every=2,
        resume=True,
    )
    if os.environ["RANK"] == "0":
        answer = {"first": result.first_step, "losses": list(result.losses)}
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
