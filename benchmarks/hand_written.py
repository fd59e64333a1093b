"""The scripts that one would write with torch alone, for a Llama of transformers.

What Meshwright's executors are held against: FSDP2, tensor parallelism by
``parallelize_module``, 1F1B by ``torch.distributed.pipelining``, and all three at once,
in the order and with the settings of torchtitan's Llama
(github.com/pytorch/torchtitan, torchtitan/models/llama3/infra/parallelize.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

__all__ = ["HandWritten", "Recipe"]

_IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Model, machines and framework that a script is written for.

    Attributes:
        degrees: Of ``pp``, ``dp`` and ``tp``, outermost first.
        microbatches: Of a pipeline's step.
        zero_stage: 3 to free weights after forward, 2 to keep them.
        bounds: Layers [first, last) of each pipeline stage.
        dtype: Of weights and arithmetic.
        compiled: Whether each layer is compiled.
        learning_rate: Of AdamW.
    """

    degrees: Mapping[str, int]
    microbatches: int
    zero_stage: int
    bounds: Sequence[tuple[int, int]]
    dtype: torch.dtype
    compiled: bool
    learning_rate: float


class _Stage(nn.Module):
    """Some layers of a Llama; the first stage embeds, the last one has the head."""

    def __init__(self, model: Any, bounds: tuple[int, int], layers: int) -> None:
        super().__init__()
        first, last = bounds
        self.embed = model.model.embed_tokens if first == 0 else None
        self.rotary = model.model.rotary_emb
        self.layers = nn.ModuleList(model.model.layers[first:last])
        self.norm = model.model.norm if last == layers else None
        self.head = model.lm_head if last == layers else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x if self.embed is None else self.embed(x)
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=rotary, position_ids=positions)
        if self.head is None:
            return hidden
        logits: torch.Tensor = self.head(self.norm(hidden))  # type: ignore[misc]
        return logits


def _mesh(degrees: Mapping[str, int], device: torch.device) -> DeviceMesh:
    names = tuple(name for name, degree in degrees.items() if degree > 1) or ("dp",)
    sizes = tuple(degrees[name] for name in names)
    return init_device_mesh(device.type, sizes, mesh_dim_names=names)


def _split_layers(layers: nn.ModuleList, mesh: DeviceMesh) -> None:
    for layer in layers:
        # Queries, keys and values share one all-reduce of their input's gradient.
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        )
        mlp = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
        parallelize_module(
            layer,
            mesh,
            {
                "self_attn": attention,
                "self_attn.q_proj": ColwiseParallel(),
                "self_attn.k_proj": ColwiseParallel(),
                "self_attn.v_proj": ColwiseParallel(),
                "self_attn.o_proj": RowwiseParallel(),
                "mlp": mlp,
                "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(),
                "mlp.down_proj": RowwiseParallel(),
            },
        )


class HandWritten:
    """Trains a Llama on one rank.

    Args:
        model: ``LlamaForCausalLM`` with equal weights on every rank; taken apart.
        recipe: What to write.
        device: Of this rank.
    """

    def __init__(self, model: Any, recipe: Recipe, device: torch.device) -> None:
        self._recipe, self._device = recipe, device
        self._mesh = _mesh(recipe.degrees, device)
        self._sizes = dict(
            zip(self._mesh.mesh_dim_names or (), self._mesh.shape, strict=True)
        )
        model.to(device, recipe.dtype).train()
        embed, layers = model.model.embed_tokens, model.model.layers
        norm, head = model.model.norm, model.lm_head
        self._module: nn.Module = model
        stage, stages = 0, self._sizes.get("pp", 1)
        if stages > 1:
            stage = self._mesh.get_local_rank("pp")
            part = _Stage(model, recipe.bounds[stage], len(layers))
            self._module, layers = part, part.layers
        first, last = stage == 0, stage == stages - 1
        if self._sizes.get("tp", 1) > 1:
            tp = self._mesh["tp"]
            _split_layers(layers, tp)
            if first:
                rows = RowwiseParallel(input_layouts=Replicate())
                parallelize_module(embed, tp, rows)
            if last:
                columns = ColwiseParallel(output_layouts=Replicate())
                parallelize_module(head, tp, columns)
        if recipe.compiled:
            for layer in layers:
                layer.compile(dynamic=False)
        if self._sizes.get("dp", 1) > 1:
            ends = ([embed] if first else [], [norm, head] if last else [])
            self._shard(layers, *ends)
        self._schedule = self._pipeline(stage, stages) if stages > 1 else None
        self._last = last
        self._optimizer = torch.optim.AdamW(
            self._module.parameters(), lr=recipe.learning_rate, weight_decay=0.0
        )

    def _shard(
        self, layers: nn.ModuleList, embed: list[nn.Module], end: list[nn.Module]
    ) -> None:
        mesh, free = self._mesh["dp"], self._recipe.zero_stage == 3
        for layer in (*embed, *layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=free)
        if end:
            # Backward begins with these: freeing them would be for nothing.
            fully_shard(end, mesh=mesh, reshard_after_forward=False)  # type: ignore[arg-type]
        fully_shard(self._module, mesh=mesh, reshard_after_forward=free)

    def _pipeline(self, stage: int, stages: int) -> Schedule1F1B:
        group = self._mesh["pp"].get_group()
        part = PipelineStage(self._module, stage, stages, self._device, group=group)
        return Schedule1F1B(part, self._recipe.microbatches, loss_fn=_loss)

    def step(self, batch: Mapping[str, torch.Tensor]) -> float:
        """Train on one global batch of ``input_ids`` [batch, sequence].

        Returns:
            Mean loss of the global batch.
        """
        replicas = self._sizes.get("dp", 1)
        index = self._mesh.get_local_rank("dp") if replicas > 1 else 0
        tokens = batch["input_ids"].chunk(replicas)[index].to(self._device)
        labels = functional.pad(tokens[:, 1:], (0, 1), value=_IGNORED)
        self._optimizer.zero_grad()
        if self._schedule is None:
            loss = _loss(self._module(input_ids=tokens).logits, labels)
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            loss = self._run_schedule(tokens, labels)
        self._optimizer.step()
        return self._mean(loss.detach())

    def _run_schedule(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        arguments = (tokens,) if self._mesh.get_local_rank("pp") == 0 else ()
        target = labels if self._last else None
        assert self._schedule is not None
        self._schedule.step(
            *arguments, target=target, losses=losses, return_outputs=False
        )
        if not self._last:
            return torch.zeros((), device=self._device)
        return torch.stack(losses).mean()

    def _mean(self, loss: torch.Tensor) -> float:
        """Only the last stage has losses; the ranks of tp have the same."""
        loss = loss / (self._sizes.get("dp", 1) * self._sizes.get("tp", 1))
        dist.all_reduce(loss)
        return float(loss)


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=_IGNORED
    )
