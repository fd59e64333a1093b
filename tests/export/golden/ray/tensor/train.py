#!/usr/bin/env python3
"""Trains by plan.json on Ray Train: tp8 mb1x8 full clip1.

    python train.py --steps 1000
    ray job submit --working-dir . -- python train.py --steps 1000

The Ray cluster that is there is used (RAY_ADDRESS, or one of this machine), else one is
started here. Every machine of it needs meshwright[ray], the model, and the data at the
same place. Written for Ray 2.60.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path
from typing import Any

# Ray without its dashboard complains every second; read when ray is imported.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "Controller actor state")

import ray
import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from executors import run
from planner.capture import load_model
from planner.cli.options import model_of_plan
from planner.errors import MeshwrightError
from planner.schema import Plan

NAME = "meshwright-llama3-8b-c744e5"
#: Ranks of the plan, and how many of them one machine has.
WORKERS, PER_HOST = 8, 8
USE_GPU = True

# Yours to set.
#: CPUs that Ray sets aside for a rank; may be less than 1.
CPUS_PER_WORKER = 1.0
#: "H100", where a cluster has GPUs of several kinds; None for any.
ACCELERATOR: str | None = None
#: Seconds until all ranks have their place, if others use the cluster.
START_TIMEOUT_S = 300
#: Seconds that a rank waits for the others.
TIMEOUT_S = 600


def scaling() -> ScalingConfig:
    """One worker a rank, packed host by host: ranks are numbered by host."""
    resources = {"CPU": CPUS_PER_WORKER, **({"GPU": 1} if USE_GPU else {})}
    return ScalingConfig(
        num_workers=WORKERS,
        use_gpu=USE_GPU,
        resources_per_worker=resources,
        placement_strategy="STRICT_PACK",
        accelerator_type=ACCELERATOR,
    )


def train(config: dict[str, Any]) -> dict[str, Any]:
    """What every worker does, in the process group that Ray has made."""
    if Path(config["folder"]).is_dir():
        # Ray moves workers to a folder of its own; models are named from here.
        os.chdir(config["folder"])
    here = ray.train.get_context().get_local_world_size()
    if here != PER_HOST:
        raise RuntimeError(
            f"Ray put {here} ranks on one machine, the plan has {PER_HOST} on "
            f"each; free whole machines, or plan for this cluster"
        )
    plan = Plan.from_json(config["plan"])
    result = run(
        plan,
        load_model(config["model"], seq_len=plan.workload.seq_len).build,
        config["data"],
        steps=config["steps"],
        seed=config["seed"],
        device=str(get_device()),
        checkpoint_dir=config["checkpoint_dir"],
        resume=config["checkpoint_dir"] is not None,
    )
    # What still holds the group goes before Ray ends it: gloo may wait for ever else.
    gc.collect()
    return {"losses": list(result.losses), "first_step": result.first_step}


def require_room() -> None:
    """End here, where Ray would wait for machines that do not come."""
    have = ray.cluster_resources()
    for what, wanted in scaling().total_resources.items():
        if have.get(what, 0) < wanted:
            sys.exit(
                f"the Ray cluster has {have.get(what, 0):g} {what}, the plan's "
                f"{WORKERS} ranks need {wanted:g}; join more machines with ray "
                f"start, plan for fewer devices, or lower CPUS_PER_WORKER in train.py"
            )


def main() -> None:
    """Read the plan, start the workers, print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="where the plan does not say, or says code")
    parser.add_argument("--data", help=".npy file of token ids; random ones without")
    parser.add_argument("--checkpoint-dir", help="a folder that all machines see")
    parser.add_argument("--storage", help="Ray's results; ~/ray_results by default")
    given = parser.parse_args()
    file = Path(__file__).resolve().parent / "plan.json"
    try:
        plan = Plan.load(file)
        model = model_of_plan(plan, str(file), given.model)
    except MeshwrightError as error:
        sys.exit(str(error))
    os.environ.setdefault(
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", str(START_TIMEOUT_S)
    )
    ray.init()
    try:
        require_room()
        trainer = TorchTrainer(
            train,
            train_loop_config={
                "plan": plan.to_json(),
                "model": model,
                "data": given.data and str(Path(given.data).absolute()),
                "folder": str(Path.cwd()),
                "steps": given.steps,
                "seed": given.seed,
                "checkpoint_dir": given.checkpoint_dir
                and str(Path(given.checkpoint_dir).absolute()),
            },
            scaling_config=scaling(),
            torch_config=TorchConfig(timeout_s=TIMEOUT_S),
            run_config=RunConfig(
                name=NAME,
                storage_path=given.storage,
                failure_config=FailureConfig(controller_failure_limit=0),
            ),
        )
        result = trainer.fit()
    except TrainingFailedError as error:
        sys.exit(str(error))
    finally:
        ray.shutdown()
    losses = result.return_value["losses"]
    if losses:
        first, last = losses[0], losses[-1]
        print(f"loss {first:.4f} -> {last:.4f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
