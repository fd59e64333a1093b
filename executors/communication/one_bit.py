"""1-bit Adam: signs of Adam's momentum are exchanged, its variance is frozen.

Source: Tang et al. 2021, arXiv 2102.02888; blocks have scales of their own, and Adam's
correction of its means goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from executors.communication.buckets import Bucket, local_values
from executors.communication.codecs import BucketCodec, join, pack, split, unpack
from planner.schema.methods.gradient_compression import OneBitAdam

__all__ = ["FrozenVarianceAdam", "OneBitAdamExchange"]


class FrozenVarianceAdam(torch.optim.Adam):
    """Adam that keeps its variance from a step on, as AdamW too.

    An entry whose variance is zero then had no gradient in any step before; it is left
    as it is, because a sign cannot say zero.

    Args:
        groups: Groups of a torch.optim.Adam or AdamW.
        warm_up_steps: Steps that are Adam's own.
    """

    def __init__(self, groups: list[dict[str, Any]], warm_up_steps: int) -> None:
        self.warm_up_steps = warm_up_steps
        super().__init__(groups)

    def done(self) -> int:
        """Steps so far."""
        steps = (state["step"] for state in self.state.values() if "step" in state)
        return int(max(steps, default=0))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step; of momentum alone after the warm-up."""
        if self.done() < self.warm_up_steps:
            return super().step(closure)
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and self.state.get(parameter):
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        gradient, rate = parameter.grad, group["lr"]
        assert gradient is not None
        gradient, parameter = local_values(gradient), local_values(parameter)
        if group["weight_decay"] and group["decoupled_weight_decay"]:
            parameter.mul_(1 - rate * group["weight_decay"])
        elif group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        state["step"] += 1
        momentum = local_values(state["exp_avg"])
        variance = local_values(state["exp_avg_sq"])
        momentum.lerp_(gradient, 1 - beta1)
        momentum.mul_(variance > 0)
        spread = math.sqrt(1 - beta2**self.warm_up_steps)
        below = variance.sqrt().div_(spread).add_(group["eps"])
        size = rate / (1 - beta1 ** float(state["step"]))
        parameter.addcdiv_(momentum, below, value=-size)


@dataclass(slots=True)
class _Blocks:
    """Entries of a bucket's blocks that are parameters', not gaps.

    Attributes:
        gaps: Parts of the bucket between parameters.
        counts: Entries of each block, at least 1. Shape [blocks, 1].
        own: Entries of the part that this rank averages. Shape [part, 512].
    """

    gaps: list[slice]
    counts: torch.Tensor
    own: torch.Tensor = field(repr=False)


class OneBitAdamExchange(BucketCodec):
    """Signs of Adam's momentum, averaged part by part and sent as signs again.

    Until the warm-up is over, whole gradients are averaged. Then a gradient is replaced
    by the one that Adam would make the exchanged momentum from.
    """

    def __init__(self, codec: OneBitAdam) -> None:
        self.codec = codec
        self.block = codec.BLOCK
        self._adam: FrozenVarianceAdam | None = None
        self._blocks: dict[int, _Blocks] = {}

    def layout(self, ranks: int) -> tuple[int, int]:
        """Parts of equal numbers of blocks, one a rank."""
        return self.block, self.block * ranks

    def keep(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Residuals of the own signs, and of the part that this rank averages."""
        valid = torch.ones_like(bucket.flat)
        gaps = bucket.gaps()
        for gap in gaps:
            valid[gap] = 0
        rows = valid.view(-1, self.block)
        own = self._own(rows).clone()
        counts = rows.sum(dim=1, keepdim=True).clamp_(min=1)
        self._blocks[bucket.index] = _Blocks(gaps, counts, own)
        return {"error": torch.zeros_like(bucket.flat), "part": torch.zeros_like(own)}

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the blocks that this rank averages."""
        return rows.chunk(self._group.size())[self._group.rank()]

    def optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return one that freezes its variance after the warm-up."""
        self._adam = FrozenVarianceAdam(
            optimizer.param_groups, self.codec.warm_up_steps
        )
        return self._adam

    def run(self, bucket: Bucket) -> Iterator[None]:
        """Average whole gradients, or signs of momentum."""
        adam, ranks = self._adam, self._group.size()
        if adam is None or adam.done() < self.codec.warm_up_steps:
            bucket.flat.div_(ranks)
            work: Any = dist.all_reduce(bucket.flat, group=self._group, async_op=True)
            yield
            work.wait()
            return
        flat, kept = bucket.flat, self._kept[bucket.index]
        blocks = self._blocks[bucket.index]
        beta1, momenta = adam.param_groups[0]["betas"][0], self._momenta(bucket, adam)
        for gap in blocks.gaps:
            flat[gap] = 0
        flat.mul_(1 - beta1)
        for view, momentum in zip(bucket.views, momenta, strict=True):
            if momentum is not None:
                view.add_(momentum, alpha=beta1)
        flat.add_(kept["error"])
        rows = flat.view(-1, self.block)
        message = self.encode(rows, blocks.counts)
        torch.sub(flat, self.decode(message).view(-1), out=kept["error"])
        for gap in blocks.gaps:
            kept["error"][gap] = 0
        arrived = torch.empty_like(message)
        work = dist.all_to_all_single(
            arrived, message, group=self._group, async_op=True
        )
        yield
        work.wait()
        mean = kept["part"]
        for part in arrived.chunk(ranks):
            mean.add_(self.decode(part), alpha=1 / ranks)
        mean.mul_(blocks.own)
        answer = self.encode(mean, self._own(blocks.counts))
        mean.sub_(self.decode(answer)).mul_(blocks.own)
        every, work = self.gather(answer)
        yield
        work.wait()
        torch.div(self.decode(every.flatten(0, 1)).view(-1), 1 - beta1, out=flat)
        for view, momentum in zip(bucket.views, momenta, strict=True):
            if momentum is not None:
                view.sub_(momentum, alpha=beta1 / (1 - beta1))

    def _momenta(
        self, bucket: Bucket, adam: FrozenVarianceAdam
    ) -> list[torch.Tensor | None]:
        every = (adam.state[p].get("exp_avg") for p in bucket.parameters)
        return [None if one is None else local_values(one) for one in every]

    def encode(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Signs, and mean magnitudes of blocks, the scale of least squared error.

        Args:
            rows: Shape [blocks, 512].
            counts: Entries that are not gaps. Shape [blocks, 1].

        Returns:
            Shape [blocks, 68], of uint8.
        """
        scales = rows.abs().sum(dim=1, keepdim=True) / counts
        return join(pack((rows >= 0).to(torch.uint8), 1), scales)

    def decode(self, message: torch.Tensor) -> torch.Tensor:
        """Values of a message. Shape [blocks, 512]."""
        packed, scales = split(message)
        signs = unpack(packed, 1).to(torch.float32)
        return signs.mul_(2).sub_(1).mul_(scales)
