"""Train a model of your own by a plan, under torchrun.

    meshwright plan --model hf:examples/tiny-llama --cluster local:4 \
        --global-batch 16 --seq-len 64 --out plan.json
    torchrun --nproc-per-node 4 examples/train.py plan.json examples/tiny-llama

Every process runs this file; ``run`` finds its rank in the environment.
"""

from __future__ import annotations

import argparse
import logging

from torch import nn

from executors import StepReport, run
from planner.schema import Plan


def build(config: str) -> nn.Module:
    """Any function that returns the whole model will do; this one reads a config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(config, use_cache=False)
    )
    return model


def show(report: StepReport) -> None:
    logging.info("step %d: loss %.4f", report.step + 1, report.loss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("config", help="folder or file of a transformers config")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("executors").setLevel(logging.WARNING)

    # Without data, synthetic tokens: pass an iterable of global batches instead, each
    # a mapping from forward's keyword to a tensor, equal on every rank.
    result = run(
        Plan.load(options.plan),
        lambda: build(options.config),
        steps=options.steps,
        on_step=show,  # called on rank 0 alone
    )
    if result.losses[-1] != result.losses[-1]:
        raise SystemExit("the loss is not a number")


if __name__ == "__main__":
    main()
