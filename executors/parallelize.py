"""One model part made parallel, top to bottom.

Tensor parallelism, then experts and context, then compilation and recomputation, then
data parallelism: each wraps what the one before has made, and no other order composes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from executors.communication.buckets import BucketedReplicas
from executors.communication.tables import ShardSums
from executors.deferred.materialize import Shards
from executors.deferred.recording import Recording
from executors.mesh import ProcessMesh
from executors.names import inside
from executors.offloading import offload_activations
from executors.strategies.batch_norms import synchronise_batch_norms
from executors.strategies.blocks import (
    apply_recompute,
    compile_blocks,
    require_compiler,
)
from executors.strategies.casts import WeightCasts
from executors.strategies.chunked_head import ChunkedHead
from executors.strategies.context import apply_context_parallel
from executors.strategies.data_parallel import (
    casts_of_weights,
    make_data_parallel,
    sum_shards,
)
from executors.strategies.experts import shard_experts
from executors.strategies.low_precision import multiply_in_float8
from executors.strategies.narrow import narrow_layers
from executors.strategies.shards import apply_halo
from executors.strategies.tensor_parallel import apply_tensor_parallel, styles_of_model
from planner.errors import ExecutionError
from planner.schema import Recompute, Strategy

__all__ = ["ParallelPart", "parallelize"]


@dataclass(frozen=True, kw_only=True)
class ParallelPart:
    """A model, or one stage of it, ready to train.

    Attributes:
        module: What is called; a DDP wrapper perhaps.
        inner: What holds the parameters under the model's own FQNs.
        units: FQNs of its pipeline units.
        partial: FQNs of parameters whose gradients are still to be summed over tp.
        zero_stage: What dp_shard splits.
        tried: Whether a loss has shown which parameters it depends on.
        head: Its last layer, if that computes the loss in chunks.
        sums: Means over replicas of what its shards reduce, if a send table finds them.
        casts: Of its weights, if it casts them itself.
    """

    module: nn.Module
    inner: nn.Module
    units: tuple[str, ...]
    partial: frozenset[str]
    zero_stage: int
    tried: bool = False
    head: ChunkedHead | None = None
    sums: ShardSums | None = None
    casts: WeightCasts | None = None

    def sync_gradients(self, last: bool) -> None:
        """Set whether the next backward is the last of the step.

        ZeRO 2 and 3 reduce-scatter after every microbatch, because whole gradients
        would take the memory that they are chosen to save; the all-reduce over
        replicas waits for the last. ZeRO 2 keeps the gathered weights until then.
        DDP is told by its ``no_sync`` instead.
        """
        module = self.module
        if isinstance(module, BucketedReplicas):
            module.sync = last
            module = module.module
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(last)
            module.set_requires_gradient_sync(last or self.zero_stage >= 2)
            module.set_requires_all_reduce(last)
            module.set_reshard_after_backward(last or self.zero_stage == 3)
        if self.sums is not None:
            self.sums.expect(last)

    def end_backward(self) -> None:
        """Wait for gradients that are exchanged in buckets of our own; collective."""
        if isinstance(self.module, BucketedReplicas):
            self.module.finish()
        if self.sums is not None:
            self.sums.finish()


def parallelize(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    *,
    units: Sequence[str] = (),
    recompute: Recompute = "none",
    causal: bool = True,
    recording: Recording | None = None,
    input_sharded: bool = False,
    output_sharded: bool = False,
    elsewhere: Collection[str] = (),
    spatial_inputs: Collection[str] = (),
) -> ParallelPart:
    """Make a model, or one stage of it, parallel along every axis but pp, in place.

    Args:
        model: Whole parameters, equal on all ranks, or deferred ones.
        strategy: What to do.
        place: Where this process stands.
        units: FQNs of the part's pipeline units, in order of execution.
        recompute: Of this part.
        causal: Whether its attention is, for cp.
        recording: What parameters without values get theirs from, shard by shard.
        input_sharded: Whether a stage receives a tp shard of the residual stream.
        output_sharded: Whether it sends one.
        elsewhere: FQNs of modules whose trained parameters have no values here.
        spatial_inputs: Inputs of forward of which cp ranks have shards.

    Raises:
        StrategyError: If tp or ep cannot split a module as the sharding says.
        ExecutionError: If blocks are to be compiled and there is no compiler, or
            products to be in float8, and the GPU or torchao cannot.
    """
    if strategy.compile:
        require_compiler(place.device)
    _multiply_in_float8(model, strategy, place, units)
    dtype = _torch_dtype(strategy.precision.parameter)
    lies = strategy.offload.states == "parameters"
    values = Shards(model, recording, place.device, dtype, elsewhere, on_host=lies)

    # 1. Tensor and sequence parallelism: patterns of names to shards.
    with values.recorded():
        split = _split_tensors(
            model, strategy, place, units, input_sharded, output_sharded
        )
        _split_over_copies(model, strategy, place)

        # 2. Experts move apart, and tokens to them.
        experts = _split_experts(model, strategy, place, split)
    values.to_meta()

    # 3. Statistics of a batch, attention over sequences, convolutions over samples that
    # ranks share.
    if strategy.semantics == "exact":
        synchronise_batch_norms(model, place)
    elif strategy.spatial:
        synchronise_batch_norms(model, place, ("cp",))
    if strategy.spatial:
        _split_samples(model, strategy, place, units, spatial_inputs)
    else:
        _split_sequences(model, strategy, place, units, causal)

    # 4. The loss in chunks, whose logits are computed again by themselves. Compilation
    # and recomputation, inside of the all-gathers that data parallelism adds.
    head = _chunk_loss(model, strategy, place, units)
    again = [unit for unit in units if head is None or unit != head.name]
    casts = casts_of_weights(model, strategy, place, units, recompute)
    _compile_and_recompute(model, again, strategy, recompute, casts)
    if strategy.offload.activations:
        offload_activations(model, again, place.device)
    if casts is not None and recompute == "none":
        casts.apply()

    # 5. Data parallelism: experts first, then units, then what is left.
    cast, fill = casts is not None, values.materialize
    module = make_data_parallel(model, strategy, place, units, experts, fill, cast=cast)
    values.materialize()
    partial = (one for one in split if not any(inside(one, fqn) for fqn in experts))
    return ParallelPart(
        module=module,
        inner=model,
        units=tuple(units),
        partial=frozenset(partial),
        zero_stage=strategy.zero_stage,
        head=head,
        sums=sum_shards(model, strategy, place),
        casts=casts,
    )


def _split_tensors(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    input_sharded: bool,
    output_sharded: bool,
) -> frozenset[str]:
    """Apply tp; names of parameters whose gradients are then to be summed over it."""
    if place.size("tp") == 1:
        return frozenset()
    head = strategy.stages[-1].modules[-1]
    return apply_tensor_parallel(
        model,
        strategy.sharding,
        place.along("tp"),
        units,
        head=head if strategy.divides_logits else None,
        input_sharded=input_sharded,
        output_sharded=output_sharded,
    )


def _split_over_copies(
    model: nn.Module, strategy: Strategy, place: ProcessMesh
) -> None:
    """Leave a copy its part of the layers, where copies divide them."""
    if strategy.synchronisation.splits:
        copies, index = place.size("replicate"), place.index("replicate")
        chains = strategy.synchronisation.chains
        narrow_layers(model, strategy.sharding, copies, index, chains=chains)


def _multiply_in_float8(
    model: nn.Module, strategy: Strategy, place: ProcessMesh, units: Sequence[str]
) -> None:
    """Convert linear layers for float8; a stage may have none, a whole model must.

    Other modules take their place, with the same parameters.
    """
    if strategy.precision.compute != "float8":
        return
    last = strategy.stages[-1].modules[-1]
    found = multiply_in_float8(model, units, last, place.device)
    if not found and place.size("pp") == 1:
        raise ExecutionError(
            "compute=float8 of a model without a linear layer (torch.nn.Linear) whose "
            "sizes 16 divides; plan with compute=bfloat16"
        )


def _chunk_loss(
    model: nn.Module, strategy: Strategy, place: ProcessMesh, units: Sequence[str]
) -> ChunkedHead | None:
    """Let the model's last layer compute the loss, if this part has it."""
    head = strategy.stages[-1].modules[-1] if strategy.stages else ""
    if strategy.loss_chunks == 1 or head not in units:
        return None
    group = place.group("tp") if strategy.divides_logits else None
    return ChunkedHead(model.get_submodule(head), head, strategy.loss_chunks, group)


def _split_experts(
    model: nn.Module, strategy: Strategy, place: ProcessMesh, split: frozenset[str]
) -> tuple[str, ...]:
    """Apply ep; names of the modules that hold experts.

    Each tp rank sends its own tokens to experts of which it would have found a part of
    the gradient, ``split``, and all tokens to others.
    """
    if place.size("ep") == 1:
        return ()
    styles = styles_of_model(model, strategy.sharding)
    experts = tuple(fqn for fqn, style in styles.items() if style == "experts")
    for fqn in experts:
        apart = any(inside(name, fqn) for name in split)
        streams = place.size("tp") if apart else 1
        shard_experts(model.get_submodule(fqn), fqn, place.along("ep"), streams)
    return experts


def _split_sequences(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    causal: bool,
) -> None:
    """Apply cp."""
    context = place.group("cp")
    if context is not None:
        algorithm = strategy.context_algorithm
        apply_context_parallel(
            model, units or ("",), context, algorithm=algorithm, causal=causal
        )


def _split_samples(
    model: nn.Module,
    strategy: Strategy,
    place: ProcessMesh,
    units: Sequence[str],
    inputs: Collection[str],
) -> None:
    """Apply cp to images or volumes."""
    context = place.group("cp")
    if context is not None:
        apply_halo(model, units, context, factors=strategy.spatial, inputs=inputs)


def _compile_and_recompute(
    model: nn.Module,
    units: Sequence[str],
    strategy: Strategy,
    recompute: Recompute,
    casts: WeightCasts | None,
) -> None:
    """Compile blocks, inside of full recomputation and outside of selective.

    Units that are computed again cast their weights again: between the two.

    Code of a block runs again as a whole; which of its ops are kept is for the compiler
    to decide.
    """
    compiles = strategy.compile
    if compiles and recompute != "selective":
        compile_blocks(model, units)
    if casts is not None and recompute != "none":
        casts.apply()
    outside = compiles and recompute == "selective"
    apply_recompute(model, units, recompute, compiled=outside)
    if outside:
        compile_blocks(model, units)


def _torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype
