"""Linear and embedding layers of which each tp rank holds, and computes, a part.

Parameters are DTensors, so that ``fully_shard`` and checkpoints know their place on
the mesh; activations are plain tensors, so that nothing a model does with them can
lack a sharding rule.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from executors.strategies.collectives import reduce_from_region
from planner.errors import StrategyError

__all__ = ["Leave", "Memo", "is_transposed", "shard_embedding", "shard_linear"]

#: What is done with the output of a part: nothing, a sum, a gather.
Leave = Callable[[torch.Tensor], torch.Tensor]
#: id of a whole parameter to itself, the dimension it was split along, and its shard.
Memo = dict[int, tuple[nn.Parameter, int, nn.Parameter]]


def _local(parameter: torch.Tensor | None) -> torch.Tensor | None:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _split(
    module: nn.Module,
    name: str,
    dim: int,
    mesh: DeviceMesh,
    *,
    fqn: str,
    memo: Memo,
) -> None:
    """Put this rank's shard of a parameter in its place; tied ones stay tied."""
    full = getattr(module, name)
    if full is None:
        return
    known = memo.get(id(full))
    if known is not None:
        if known[1] != dim:
            raise StrategyError(
                f"{fqn}.{name} is tied to a parameter that tp splits along another "
                f"dimension; give both modules styles that split the same one "
                f"(vocab with colwise)"
            )
        setattr(module, name, known[2])
        return
    degree = mesh.size()
    if full.shape[dim] % degree:
        raise StrategyError(
            f"tp={degree} does not divide dimension {dim} of {fqn}.{name}, "
            f"{tuple(full.shape)}; use a tp that does, or do not shard {fqn}"
        )
    shard = full.detach().chunk(degree, dim)[mesh.get_local_rank()].clone()
    placed = DTensor.from_local(shard, mesh, [Shard(dim)], run_check=False)
    parameter = nn.Parameter(placed, requires_grad=full.requires_grad)
    memo[id(full)] = (full, dim, parameter)
    setattr(module, name, parameter)


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' ``Conv1D``: linear, with a weight [in, out]."""
    library = sys.modules.get("transformers.pytorch_utils")
    return isinstance(module, getattr(library, "Conv1D", ()))


def _forward_linear(
    module: nn.Module,
    leave: Leave,
    whole_bias: bool,
    transposed: bool,
    tensor: torch.Tensor,
) -> torch.Tensor:
    weight, bias = _local(module.weight), _local(module.bias)  # type: ignore[arg-type]
    assert weight is not None
    weight = weight.t() if transposed else weight
    if bias is None or not whole_bias:
        return leave(functional.linear(tensor, weight, bias))
    return leave(functional.linear(tensor, weight)) + bias


def _forward_embedding(
    module: nn.Embedding, mesh: DeviceMesh, ids: torch.Tensor
) -> torch.Tensor:
    weight = _local(module.weight)
    assert weight is not None
    rows = weight.shape[0]
    first = rows * mesh.get_local_rank()
    foreign = (ids < first) | (ids >= first + rows)
    padding = module.padding_idx
    own_padding = padding is not None and first <= padding < first + rows
    found = functional.embedding(
        (ids - first).masked_fill(foreign, 0),
        weight,
        padding - first if padding is not None and own_padding else None,
    )
    found = found.masked_fill(foreign.unsqueeze(-1), 0)
    return reduce_from_region(found, mesh.get_group())


def shard_linear(
    module: nn.Module,
    fqn: str,
    style: str,
    mesh: DeviceMesh,
    *,
    leave: Leave,
    memo: Memo,
) -> None:
    """Split a linear layer over tp, in place.

    Args:
        module: The layer; weight of shape [out, in], or [in, out] of a ``Conv1D``.
        fqn: Its name, for messages.
        style: ``colwise`` splits out, ``rowwise`` splits in.
        mesh: The tp axis.
        leave: Applied to the local product, before a rowwise bias is added.
        memo: Parameters split so far, so that tied ones stay one.

    Raises:
        StrategyError: If the module is no linear layer, or tp does not divide it.
    """
    transposed = is_transposed(module)
    if not transposed and not isinstance(module, nn.Linear):
        raise StrategyError(
            f"{fqn} is {type(module).__name__}, style {style!r} can split nn.Linear "
            f"and Conv1D alone; leave it out of the sharding or use tp=1"
        )
    dim = int((style == "rowwise") != transposed)
    _split(module, "weight", dim, mesh, fqn=fqn, memo=memo)
    if style == "colwise":
        _split(module, "bias", 0, mesh, fqn=fqn, memo=memo)
    forward = partial(_forward_linear, module, leave, style == "rowwise", transposed)
    module.__dict__["forward"] = forward


def shard_embedding(
    module: nn.Module,
    fqn: str,
    mesh: DeviceMesh,
    memo: Memo,
) -> None:
    """Split the rows of an embedding over tp, in place; arguments as for linear.

    A row of another rank reads as zero; the sum over ranks is the embedding.

    Raises:
        StrategyError: If the module is no plain ``nn.Embedding``, or tp does not
            divide its rows.
    """
    if not isinstance(module, nn.Embedding) or module.max_norm is not None:
        raise StrategyError(
            f"{fqn} is {type(module).__name__}, style 'vocab' can split nn.Embedding "
            f"without max_norm alone; leave it out of the sharding or use tp=1"
        )
    _split(module, "weight", 0, mesh, fqn=fqn, memo=memo)
    module.__dict__["forward"] = partial(_forward_embedding, module, mesh)
