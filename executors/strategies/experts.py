"""Expert parallelism: each rank holds some experts, and tokens travel to theirs.

A module that holds experts is known by how it is called, the way that all mixtures of
experts in ``transformers`` 5 are: ``experts(tokens, chosen, weights)`` with every
parameter's first dimension counting experts, and ``num_experts`` of them. Its own
forward computes what its rank's experts are to compute; nothing is dropped.
Source: Lepikhin et al. 2020 (GShard), section 3; Gale et al. 2022 (dropless).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from executors.strategies.collectives import exchange_rows
from planner.errors import StrategyError

__all__ = ["exchange_counts", "shard_experts"]


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.factor, None


def _scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    result: torch.Tensor = _ScaleGradient.apply(  # type: ignore[no-untyped-call]
        tensor, factor
    )
    return result


def shard_experts(
    module: nn.Module, fqn: str, mesh: DeviceMesh, streams: int = 1
) -> None:
    """Keep this rank's experts of a module, and send tokens to where theirs are.

    Gradients of experts come out as data parallelism expects them: their mean over
    the ranks that hold *equal* experts is the gradient, although each sums over the
    tokens of all ranks of the mesh, and tp ranks are no data-parallel ranks.

    Args:
        module: Holds experts; parameters still whole, equal on all ranks.
        fqn: Its name, for messages.
        mesh: The ep axis.
        streams: Ranks that each have a shard of one stream of tokens: tp's under
            sequence parallelism. Without, each tp rank sends all of them.

    Raises:
        StrategyError: If the module holds no experts in the known way, or ep does
            not divide them.
    """
    count = getattr(module, "num_experts", None)
    owned = dict(module.named_parameters())
    odd = [name for name, p in owned.items() if not p.ndim or p.shape[0] != count]
    if not isinstance(count, int) or odd or not owned:
        raise StrategyError(
            f"{fqn} is {type(module).__name__}, style 'experts' needs num_experts and "
            f"parameters of that first dimension{_shown(odd)}; use ep=1"
        )
    degree = mesh.size()
    if count % degree:
        raise StrategyError(
            f"ep={degree} does not divide the {count} experts of {fqn}; use an ep "
            f"that does"
        )
    for name, whole in owned.items():
        shard = whole.detach().chunk(degree)[mesh.get_local_rank()].clone()
        placed = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        holder, _, last = name.rpartition(".")
        parameter = nn.Parameter(placed, requires_grad=whole.requires_grad)
        setattr(module.get_submodule(holder), last, parameter)
    module.num_experts = count // degree  # type: ignore[assignment]
    compute = _Local(module)
    module.__dict__["forward"] = partial(
        _forward, compute, mesh.get_group(), count // degree, degree / streams
    )


def _shown(odd: list[str]) -> str:
    return f" (not so: {', '.join(odd)})" if odd else ""


class _Local:
    """Runs the module's own forward on plain tensors, which knows no DTensor."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._forward: Callable[..., torch.Tensor] = module.forward

    def __call__(self, *args: torch.Tensor) -> torch.Tensor:
        local = {
            name: parameter.to_local()
            for name, parameter in self._module.named_parameters()
            if isinstance(parameter, DTensor)
        }
        swapped = []
        for name, value in local.items():
            holder_name, _, last = name.rpartition(".")
            holder = self._module.get_submodule(holder_name)
            swapped.append((holder, last, holder._parameters.pop(last)))
            holder.__dict__[last] = value
        try:
            return self._forward(*args)
        finally:
            for holder, last, parameter in swapped:
                del holder.__dict__[last]
                holder._parameters[last] = parameter


def _forward(
    compute: Callable[..., torch.Tensor],
    group: dist.ProcessGroup,
    held: int,
    sums: float,
    tokens: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Experts' mixture of every token.

    Args:
        compute: Experts of this rank, on rows that chose one each.
        group: The ep axis.
        held: Experts on each rank.
        sums: Number by which gradients of experts are divided.
        tokens: Shape [tokens, hidden].
        chosen: Experts of each token. Shape [tokens, top_k].
        weights: Shape [tokens, top_k].

    Returns:
        Shape [tokens, hidden].
    """
    size, top_k = group.size(), chosen.shape[-1]
    expert = chosen.reshape(-1)
    # Stable: with equal routing, equal sums on every run.
    order = torch.argsort(expert, stable=True)
    arriving, sends, receives = exchange_counts(expert, held, group)
    rows = exchange_rows(tokens[order // top_k], group, sends=sends, receives=receives)
    own = torch.arange(held, device=rows.device).repeat(size)
    local = own.repeat_interleave(arriving, output_size=rows.shape[0])
    found = _compute(compute, rows, local, sums)
    back = exchange_rows(found, group, sends=receives, receives=sends)

    share = weights.reshape(-1)[order].unsqueeze(-1)
    mixed = torch.zeros_like(tokens)
    return mixed.index_add(0, order // top_k, (back * share).to(tokens.dtype))


def exchange_counts(
    expert: torch.Tensor, held: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, list[int], list[int]]:
    """Tell every rank how many rows come to each of its experts.

    Here, and only here, shapes follow the values of the routing.

    Args:
        expert: Which expert each row is for. Shape [rows].
        held: Experts on each rank.
        group: The ep axis.

    Returns:
        Rows that arrive for each expert of this rank, by rank that they come from
        (shape [ranks * held]); rows to each rank; rows from each rank.
    """
    size = group.size()
    counts = torch.bincount(expert, minlength=size * held)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    sends = counts.view(size, held).sum(1).tolist()
    receives = arriving.view(size, held).sum(1).tolist()
    return arriving, sends, receives


def _compute(
    compute: Callable[..., torch.Tensor],
    rows: torch.Tensor,
    expert: torch.Tensor,
    sums: float,
) -> torch.Tensor:
    """Compute one expert a row; divide parameter gradients by ``sums``."""
    count = rows.shape[0]
    if not count:
        # Every rank must come by gradients, or their reduction would not match.
        rows = torch.cat([rows, rows.new_zeros((1, rows.shape[1]))])
        expert = expert.new_zeros(1)
    ones = rows.new_ones((rows.shape[0], 1))
    entered = _scale_gradient(rows, sums)
    found = compute(entered, expert.unsqueeze(-1), ones)
    return _scale_gradient(found, 1.0 / sums)[:count]
