"""Tiny real models, hand-written plans, and single-process references."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from executors import build_model
from executors.checkpoints.snapshot import full_gradients, full_parameters
from executors.data import synthetic_batch
from executors.deferred.model import record
from executors.losses import LossFunction
from executors.mesh import build_mesh
from executors.trainer import Trainer
from planner.schema import (
    ClusterReference,
    InputSpec,
    Mesh,
    ModelReference,
    Optimizer,
    Plan,
    Precision,
    Prediction,
    Provenance,
    Stage,
    StageMemory,
    Strategy,
    TensorSharding,
    Workload,
)
from planner.schema.base import fingerprint_parameters
from tests.models.stacks import STACKS
from tests.models.tiny import TINY, built

LAYERS, VOCAB, SEQ, BATCH = 4, 96, 16, 16

LLAMA_SHARDING = {
    "embed_tokens": "vocab",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise",
}

_NO_MEMORY = StageMemory(
    rank=0,
    device_type="cpu",
    parameters_bytes=0,
    gradients_bytes=0,
    optimizer_bytes=0,
    activations_bytes=0,
    buffers_bytes=0,
    reserve_bytes=0,
    limit_bytes=1,
)

UNITS = {
    "llama": (
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(LAYERS)),
        "model.norm",
        "lm_head",
    ),
    "mixtral": (
        "model.embed_tokens",
        *(f"model.layers.{i}" for i in range(LAYERS)),
        "model.norm",
        "lm_head",
    ),
    "bert": (
        "bert.embeddings",
        *(f"bert.encoder.layer.{i}" for i in range(LAYERS)),
        "cls",
    ),
    "gpt2": (
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        *(f"transformer.h.{i}" for i in range(LAYERS)),
        "transformer.ln_f",
        "lm_head",
    ),
    **{name: stack.units for name, stack in STACKS.items()},
}


def build(name: str, *, tied: bool = False) -> nn.Module:
    """Seeded: a Llama with grouped queries, a GPT-2 with tied embeddings, a stack."""
    if name in TINY:
        return built(name)
    torch.manual_seed(0)
    if name in STACKS:
        return STACKS[name].build()
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCAB,
                use_cache=False,
                tie_word_embeddings=tied,
            )
        )
    if name == "mixtral":
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(
            MixtralConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_local_experts=4,
                num_experts_per_tok=2,
                vocab_size=VOCAB,
                use_cache=False,
            )
        )
    if name == "bert":
        from transformers import BertConfig, BertForMaskedLM

        return BertForMaskedLM(
            BertConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=LAYERS,
                num_attention_heads=4,
                vocab_size=VOCAB,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    return gpt2()


def gpt2(dropout: float = 0.0) -> nn.Module:
    """A GPT-2 with that share of activations dropped."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            n_embd=32,
            n_layer=LAYERS,
            n_head=4,
            n_positions=64,
            vocab_size=VOCAB,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def _patterns(name: str, mesh: Mesh) -> dict[str, Any]:
    patterns: dict[str, Any] = {}
    if mesh.tp > 1:
        patterns |= {
            pattern: style
            for pattern, style in LLAMA_SHARDING.items()
            if name == "llama" or ".mlp." not in pattern
        }
    if mesh.ep > 1:
        patterns["layers.*.mlp.experts"] = "experts"
    return patterns


def _has_batch_norms(model: nn.Module) -> bool:
    kind = nn.modules.batchnorm._BatchNorm
    return any(isinstance(module, kind) for module in model.modules())


def make_plan(name: str = "llama", **changes: Any) -> Plan:
    """A plan by hand; changes are the strategy's fields, or mesh degrees."""
    model = build(name, tied=changes.pop("tied", False))
    degrees = {k: changes.pop(k) for k in list(changes) if k in Mesh.model_fields}
    mesh = Mesh(**degrees)
    recompute = changes.pop("recompute", "none")
    sequence_parallel = changes.pop("sequence_parallel", False)
    loss_parallel = changes.pop("loss_parallel", False)
    attention = changes.pop("attention", "causal")
    virtual = changes.get("virtual_stages", 1)
    schedule = changes.get("schedule", "GPipe")
    micro = changes.pop("num_microbatches", 1)
    size = BATCH // micro // mesh.data_parallel
    if _has_batch_norms(model) and (micro > 1 or mesh.pp > 1):
        changes.setdefault("semantics", "approximate")
    shell = Strategy(
        mesh=mesh, schedule=schedule, virtual_stages=virtual, num_microbatches=micro
    )
    units, count = UNITS[name], mesh.pp * virtual
    bounds = [round(len(units) * i / count) for i in range(count + 1)]
    stages = tuple(
        Stage(
            rank=shell.rank_of_stage(i),
            modules=units[bounds[i] : bounds[i + 1]],
            recompute=recompute,
        )
        for i in range(count)
    )
    strategy = Strategy(
        mesh=mesh,
        num_microbatches=micro,
        microbatch_size=size,
        stages=stages,
        sharding=TensorSharding(
            patterns=_patterns(name, mesh),
            sequence_parallel=sequence_parallel,
            loss_parallel=loss_parallel,
        ),
        precision=changes.pop("precision", Precision(compute="float32")),
        optimizer=changes.pop("optimizer", Optimizer(name="SGD", learning_rate=0.5)),
        **changes,
    )
    parameters = dict(model.named_parameters())
    return Plan(
        model=ModelReference(
            name=name,
            parameters=sum(p.numel() for p in parameters.values()),
            tensors=len(parameters),
            fingerprint=fingerprint_parameters(
                (n, p.shape) for n, p in parameters.items()
            ),
            attention=attention,
            whole_stream=None,
            spatial_sizes=_spatial_sizes(name) if mesh.cp > 1 else (),
        ),
        cluster=ClusterReference(
            name="local", num_devices=mesh.num_devices, device_types={}, fingerprint=""
        ),
        workload=_workload(name),
        strategy=strategy,
        prediction=Prediction(
            step_time_s=1,
            breakdown_s={},
            memory=tuple(
                _NO_MEMORY.model_copy(update={"rank": r}) for r in range(mesh.pp)
            ),
            samples_per_s=1,
            fidelity="analytic",
        ),
        provenance=Provenance(
            meshwright_version="0",
            partitioner="hand",
            objective="throughput",
            seed=0,
            evaluations={},
            memory_fraction=0.9,
        ),
    )


def _spatial_sizes(name: str) -> tuple[int, ...]:
    """Sizes of the volumes or images of a model of convolutions."""
    shapes = STACKS[name].shapes.values() if name in STACKS else ()
    return next((shape[1:] for shape in shapes if len(shape) > 2), ())


def _workload(name: str) -> Workload:
    if name not in STACKS:
        tokens = InputSpec(name="input_ids", shape=(SEQ,), dtype="int64", high=VOCAB)
        return Workload(global_batch=BATCH, seq_len=SEQ, inputs=(tokens,))
    inputs = [
        InputSpec(name=key, shape=shape, dtype="int64", high=4)
        if key in STACKS[name].integers
        else InputSpec(name=key, shape=shape, dtype="float32")
        for key, shape in STACKS[name].shapes.items()
    ]
    return Workload(global_batch=BATCH, inputs=tuple(inputs), loss="mean_square")


def reference(plan: Plan, steps: int, *, tied: bool = False) -> list[dict[str, Any]]:
    """Plain training of the same model in this process: loss, gradients, weights."""
    model = build_model(lambda: build(plan.model.name, tied=tied))
    spec = plan.strategy.optimizer
    kind = getattr(torch.optim, spec.name)
    optimizer = kind(model.parameters(), lr=spec.learning_rate)
    history = []
    for step in range(steps):
        batch = synthetic_batch(plan.workload, step)
        optimizer.zero_grad()
        total = _backward(model, batch, plan)
        norm = None
        if plan.strategy.grad_clip_norm is not None:
            limit = plan.strategy.grad_clip_norm
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        grads = {
            n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad
        }
        optimizer.step()
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        history.append(
            {"loss": total, "norm": norm, "grads": grads, "weights": weights}
        )
    return history


def _backward(model: nn.Module, batch: dict[str, torch.Tensor], plan: Plan) -> float:
    """Loss of a global batch; batch norms see what the plan says they do."""
    strategy = plan.strategy
    normed = strategy.semantics == "approximate" and _has_batch_norms(model)
    parts = strategy.num_microbatches * strategy.mesh.data_parallel if normed else 1
    loss = LossFunction(
        kind=plan.workload.loss,
        data_parallel=1,
        label_shift=plan.workload.label_shift,
    )
    loss.prepare(batch, parts)
    total = 0.0
    for index in range(parts):
        micro = {name: value.chunk(parts)[index] for name, value in batch.items()}
        value = loss(model(**micro), loss.target(micro))
        value.backward()
        total += value.item()
    return total


def _first_names(
    tensors: dict[str, torch.Tensor], plan: Plan
) -> dict[str, torch.Tensor]:
    """Tied tensors under the name that the whole model lists them by."""
    first = {name: group[0] for group in plan.model.tied for name in group}
    return {first.get(name, name): tensor for name, tensor in tensors.items()}


def train(plan_json: str, steps: int, tied: bool = False) -> list[dict[str, Any]]:
    """The same by the plan, on this rank of the current group; whole tensors.

    Weights are put together after the last step alone: what one step does to them, the
    next one's loss and gradients tell.
    """
    plan = Plan.from_json(plan_json)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    # Even the smallest parameters are deferred, as large ones are.
    model, recording = record(lambda: build(plan.model.name, tied=tied), small_bytes=0)
    assert recording is not None
    trainer = Trainer(plan, model, place, recording)
    history = []
    for step in range(steps):
        result = trainer.step(synthetic_batch(plan.workload, step))
        found = {"grads": full_gradients(trainer)}
        if step == steps - 1:
            trainer.replicas.settle()
            found["weights"] = full_parameters(trainer)
        entry: dict[str, Any] = {"loss": result.loss, "norm": result.grad_norm}
        if place.rank == 0:
            for kind, tensors in found.items():
                named = _first_names(tensors, plan).items()
                entry[kind] = {name: t.float().numpy() for name, t in named}
        history.append(entry)
    return history


def largest_gap(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest difference of weights, over the largest number of each."""
    assert sorted(ours) == sorted(theirs)
    return max(
        float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max())
        for n in theirs
    )
