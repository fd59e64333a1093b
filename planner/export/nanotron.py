"""Files for nanotron: the part of its YAML that a plan decides, and how to start it.

Written for nanotron 0.4 as on PyPI.
"""

from __future__ import annotations

from importlib.resources import files
from typing import TYPE_CHECKING, Any

from planner.errors import ExportError
from planner.export.texts import yaml_text
from planner.export.torchrun import (
    HERE,
    placed,
    rendezvous,
    require_address,
    visible_devices,
)
from planner.targets import layers_of_stages
from planner.targets.nanotron import PRECISIONS

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["export_nanotron", "nanotron_config"]

_HEAD = """For nanotron 0.4: what the plan decides, to go over a config of your own,
which has the model, the tokenizer, the data and the checkpoints; see run.sh.

The plan: {label}
What nanotron decides by itself:
  how tensors are split over tp, and that the loss is taken of sharded logits{cuts}
train_steps and the learning rate's schedule are placeholders: set them in this file."""

_CUTS = """
  where the model is cut: into stages of equal work, the plan has {layers} layers in
  each; a large vocabulary makes the head count as several layers, so look at its log"""

_SCRIPT = """#!/bin/sh
# Trains by plan.nanotron.yaml with nanotron 0.4. BASE names a config of your own,
# over which it goes; TRAIN is run_train.py of its repository, or your script.{once}
set -eu
: "${{BASE:?set BASE, a config of nanotron with your model, tokenizer and data}}"
: "${{TRAIN:=run_train.py}}"
: "${{CONFIG:=config.yaml}}"
{address}{here}
python "$here/merge.py" "$BASE" "$here/plan.nanotron.yaml" > "$CONFIG"
# nanotron wants its communication in one order.
export CUDA_DEVICE_MAX_CONNECTIONS=1
{visible}exec torchrun {where} --nproc-per-node={each} \\
    "$TRAIN" --config-file "$CONFIG" "$@"
"""

_ONCE = """
# Run it once on each of {hosts} hosts: NODE_RANK counts them from 0, MASTER_ADDR names
# the first. CONFIG is where the whole config is written."""


def nanotron_config(plan: Plan) -> dict[str, Any]:
    """Sections of nanotron's YAML that a plan decides.

    Raises:
        ExportError: If the model reads no sequences.
    """
    strategy, spec = plan.strategy, plan.strategy.optimizer
    # What nobody gave stays the base config's.
    given: dict[str, Any] = {}
    if spec.weight_decay is not None:
        given["weight_decay"] = spec.weight_decay
    if strategy.grad_clip_norm is not None:
        given["clip_grad"] = strategy.grad_clip_norm
    if spec.betas is not None:
        given["adam_beta1"], given["adam_beta2"] = spec.betas
    mesh, precision = strategy.mesh, strategy.precision
    if plan.workload.seq_len is None:
        raise ExportError(
            "workload.seq_len=None: nanotron trains on sequences of tokens; plan a "
            "model that reads them"
        )
    dtype, in_float32 = PRECISIONS[
        (precision.parameter, precision.compute, precision.reduce)
    ]
    sharded = mesh.dp_shard > 1 and strategy.zero_stage == 1
    return {
        "parallelism": {
            "dp": mesh.data_parallel,
            "pp": mesh.pp,
            "tp": mesh.tp,
            "expert_parallel_size": 1,
            "pp_engine": "1f1b" if strategy.schedule == "1F1B" else "afab",
            "tp_mode": (
                "REDUCE_SCATTER"
                if strategy.sharding.sequence_parallel
                else "ALL_REDUCE"
            ),
        },
        "tokens": {
            "sequence_length": plan.workload.seq_len,
            "micro_batch_size": strategy.microbatch_size,
            "batch_accumulation_per_replica": strategy.num_microbatches,
            "train_steps": 100,
        },
        "model": {"dtype": dtype},
        "optimizer": {
            "zero_stage": int(sharded),
            **given,
            "accumulate_grad_in_fp32": in_float32,
            "torch_adam_is_fused": True,
            "learning_rate_scheduler": {
                "learning_rate": spec.learning_rate,
                "lr_warmup_steps": 0,
                "lr_warmup_style": "constant",
                "lr_decay_style": "linear",
                "min_decay_lr": spec.learning_rate,
            },
        },
    }


def export_nanotron(plan: Plan) -> dict[str, str]:
    """``plan.json``, ``plan.nanotron.yaml``, ``merge.py`` and ``run.sh``.

    Names of models and clusters are in ``plan.json`` alone.

    Raises:
        ExportError: If ranks are not numbered host by host, or the model reads no
            sequences.
    """
    placement = placed(plan)
    hosts, each = len(placement.hosts), len(placement.local)
    strategy = plan.strategy
    stages = layers_of_stages(strategy) if strategy.mesh.pp > 1 else None
    cuts = _CUTS.format(layers=len(stages[0].layers)) if stages else ""
    script = _SCRIPT.format(
        once=_ONCE.format(hosts=hosts) if hosts > 1 else "",
        address=require_address(hosts),
        here=HERE,
        where=rendezvous(hosts, " \\\n    "),
        each=each,
        visible=visible_devices(placement),
    )
    head = _HEAD.format(label=strategy.label(), cuts=cuts)
    merge = files("planner.export").joinpath("nanotron_merge.py")
    return {
        "plan.json": plan.to_json(),
        "plan.nanotron.yaml": yaml_text(nanotron_config(plan), header=head),
        "merge.py": merge.read_text(encoding="utf-8"),
        "run.sh": script,
    }
