#!/usr/bin/env python3
"""Train by plan.json, which stands beside this file, under ``accelerate launch``.

It needs torch, numpy and accelerate, transformers for models of its own, and nothing of
Meshwright; see run.sh. The config of accelerate says how the model is divided; what it
has no words for is here: microbatches, optimizer, clipping, precision of reductions.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

__all__ = ["main"]

Plan = dict[str, Any]
Batch = dict[str, torch.Tensor]

_IGNORED = -100


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", default=str(Path(__file__).with_name("plan.json")))
    parser.add_argument(
        "--model",
        help="hf:PATH of a transformers config, or module:factory of your own; "
        "by default the hf:PATH that the plan names",
    )
    parser.add_argument("--data", help="token ids, a one-dimensional integer .npy file")
    parser.add_argument("--weights", help="state dict to start from, of torch.save")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--losses", help="where to write the loss of each step, JSON")
    return parser.parse_args()


def _builder(ref: str | None) -> Callable[..., nn.Module]:
    """Return the model's factory; it is called with the mesh of tp if there is one."""
    kind, _, where = (ref or "").partition(":")
    if kind == "hf" and where:
        return lambda *mesh: _from_config(where, *mesh)
    if kind and where:
        sys.path.insert(0, str(Path.cwd()))
        factory: Callable[..., nn.Module] = getattr(
            importlib.import_module(kind), where
        )
        return factory
    raise SystemExit(
        f"train.py: the plan's model is {ref!r}, which this script cannot make; name "
        f"it with --model hf:PATH or --model module:factory"
    )


def _from_config(path: str, *mesh: Any) -> nn.Module:
    import transformers

    if mesh:
        raise SystemExit(
            "train.py: tp > 1 wants a model that comes in sharded; give --model "
            "module:factory, whose factory is called with the mesh of tp"
        )
    config = transformers.AutoConfig.from_pretrained(path, use_cache=False)
    kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
    make = kind.from_config if kind is transformers.AutoModelForCausalLM else kind
    model: nn.Module = make(config)
    return model


def _layer_classes(plan: Plan, model: nn.Module) -> list[str]:
    """Classes of the numbered blocks in the plan: what FSDP wraps one by one."""
    names = [name for stage in plan["strategy"]["stages"] for name in stage["modules"]]
    blocks = [name for name in names if name.rpartition(".")[2].isdigit()]
    return sorted({type(model.get_submodule(name)).__name__ for name in blocks})


def _accelerator(plan: Plan) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import MixedPrecisionPolicy

    strategy = plan["strategy"]
    plugin = None
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":
        # All else of the plugin is in the environment, where accelerate launch put it.
        precision = strategy["precision"]
        policy = {
            "param_dtype": getattr(torch, precision["compute"]),
            "reduce_dtype": getattr(torch, precision["reduce"]),
        }
        whole = set(precision.values()) == {"float32"}
        plugin = FullyShardedDataParallelPlugin(
            mixed_precision_policy=MixedPrecisionPolicy(**({} if whole else policy))
        )
    accelerator = Accelerator(
        gradient_accumulation_steps=strategy["num_microbatches"], fsdp_plugin=plugin
    )
    asked = int(np.prod([strategy["mesh"][axis] for axis in _AXES]))
    if accelerator.num_processes != asked:
        raise SystemExit(
            f"train.py: {accelerator.num_processes} processes, the plan is for {asked};"
            f" start it with run.sh"
        )
    return accelerator


_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _optimizer(plan: Plan, model: nn.Module) -> torch.optim.Optimizer:
    spec = plan["strategy"]["optimizer"]
    decay = spec["weight_decay"] or 0.0
    settings = {"lr": spec["learning_rate"], "weight_decay": decay}
    if spec["momentum"]:
        settings["momentum"] = spec["momentum"]
    if spec["betas"] is not None:
        settings["betas"] = tuple(spec["betas"])
    made: torch.optim.Optimizer = getattr(torch.optim, spec["name"])(
        model.parameters(), **settings
    )
    return made


def _batches(plan: Plan, data: str | None, steps: int, seed: int) -> Iterator[Batch]:
    """The global batch of each step, the same on every process."""
    inputs, count = plan["workload"]["inputs"], plan["workload"]["global_batch"]
    if data is not None and [spec["name"] for spec in inputs] != ["input_ids"]:
        raise SystemExit("train.py: --data holds tokens, the model reads other inputs")
    tokens = np.load(data, mmap_mode="r", allow_pickle=False) if data else None
    for step in range(steps):
        if tokens is None:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
            yield {spec["name"]: _random(spec, count, generator) for spec in inputs}
            continue
        length = inputs[0]["shape"][0]
        places = np.random.default_rng([seed, step])
        starts = places.integers(0, len(tokens) - length + 1, count)
        rows = np.stack([tokens[start : start + length] for start in starts])
        yield {"input_ids": torch.from_numpy(rows.astype(np.int64))}


def _random(spec: Plan, count: int, generator: torch.Generator) -> torch.Tensor:
    shape, dtype = (count, *spec["shape"]), getattr(torch, spec["dtype"])
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.ones(shape, dtype=dtype)
    return torch.randint(spec["high"] or 2, shape, generator=generator).to(dtype)


def _target(batch: Batch, kind: str, shift: int) -> torch.Tensor | None:
    """Label or token of each output, ``shift`` tokens ahead."""
    if kind != "cross_entropy":
        return None
    if "labels" not in batch and "decoder_input_ids" in batch:
        batch, shift = {"labels": batch["decoder_input_ids"]}, 1
    integers = [t for t in batch.values() if not t.is_floating_point()]
    whole = batch.get("labels", batch.get("input_ids", integers[0]))
    mask = batch.get("attention_mask")
    if "labels" not in batch and mask is not None and mask.shape == whole.shape:
        whole = whole.masked_fill(mask == 0, _IGNORED)
    if whole.ndim == 1 or not shift:
        return whole
    return functional.pad(whole[..., shift:], (0, shift), value=_IGNORED)


def _loss(output: Any, target: torch.Tensor | None, kind: str) -> torch.Tensor:
    """Sum over targets; a mean for the other kinds of loss."""
    wanted = "loss" if kind == "model" else "logits"
    found = getattr(output, wanted, output)
    value: torch.Tensor = found[0] if isinstance(found, tuple) else found
    value = value.float()
    if target is None:
        return value.mean() if kind == "model" else value.square().mean()
    total: torch.Tensor = functional.cross_entropy(
        value.flatten(0, -2), target.flatten(), ignore_index=_IGNORED, reduction="sum"
    )
    return total


def _positions(batch: Batch) -> Batch:
    """Add positions of tokens in a sequence that is to be divided."""
    tokens = batch.get("input_ids")
    if tokens is None:
        raise SystemExit("train.py: cp > 1 divides input_ids, the model reads others")
    row = torch.arange(tokens.shape[1], device=tokens.device)
    return {**batch, "position_ids": row.expand_as(tokens).clone()}


def _step(plan: Plan, accelerator: Any, model: nn.Module, batch: Batch) -> torch.Tensor:
    """Forward and backward of all microbatches; this process's share of the loss."""
    strategy, kind = plan["strategy"], plan["workload"]["loss"]
    mesh, size = strategy["mesh"], strategy["microbatch_size"]
    count, data = strategy["num_microbatches"], mesh["dp_replicate"] * mesh["dp_shard"]
    target = _target(batch, kind, plan["workload"].get("label_shift", 1))
    terms = data * count if target is None else int((target != _IGNORED).sum())
    first = accelerator.process_index // (mesh["cp"] * mesh["tp"]) * count * size
    total = torch.zeros((), device=accelerator.device)
    for index in range(count):
        rows = slice(first + index * size, first + (index + 1) * size)
        part = {k: v[rows].to(accelerator.device) for k, v in batch.items()}
        wanted = None if target is None else target[rows].to(accelerator.device)
        if mesh["cp"] > 1:
            part = _positions(part)
        buffers = [*part.values()] + ([] if wanted is None else [wanted])
        with accelerator.accumulate(model):
            if mesh["cp"] > 1:
                with accelerator.maybe_context_parallel(
                    buffers=buffers,
                    buffer_seq_dims=[1] * len(buffers),
                    no_restore_buffers=set(buffers),
                ):
                    loss = _loss(model(**part), wanted, kind) / terms
                    accelerator.backward(loss * data * mesh["cp"] * count)
            else:
                loss = _loss(model(**part), wanted, kind) / terms
                # accelerate divides by microbatches, the reduction by processes.
                accelerator.backward(loss * data * count)
        total += loss.detach()
    return total


def main() -> None:
    """Train, and print the loss of every step on the first process."""
    options = _options()
    plan: Plan = json.loads(Path(options.plan).read_text(encoding="utf-8"))
    strategy, mesh = plan["strategy"], plan["strategy"]["mesh"]
    accelerator = _accelerator(plan)
    torch.manual_seed(options.seed)
    build = _builder(options.model or plan["model"]["ref"])
    model = build(*([accelerator.torch_device_mesh["tp"]] if mesh["tp"] > 1 else []))
    if options.weights:
        model.load_state_dict(torch.load(options.weights, weights_only=True))
    model.to(getattr(torch, strategy["precision"]["parameter"])).train()
    if accelerator.is_fsdp2:
        classes = _layer_classes(plan, model)
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = classes
    model, optimizer = accelerator.prepare(model, _optimizer(plan, model))
    losses: list[float] = []
    for batch in _batches(plan, options.data, options.steps, options.seed):
        total = _step(plan, accelerator, model, batch)
        if strategy["grad_clip_norm"] is not None:
            accelerator.clip_grad_norm_(model.parameters(), strategy["grad_clip_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(total, "sum")) / mesh["tp"])
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.6f}", flush=True)
    if options.losses and accelerator.is_main_process:
        Path(options.losses).write_text(json.dumps(losses), encoding="utf-8")
    # Else DDP's reducer, which goes last, is the last to hold gloo's group: it joins
    # gloo's thread without letting go of Python's lock, for which that thread may wait.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


if __name__ == "__main__":
    main()
