"""Gradients in buckets of our own without a codec, on gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from executors.communication.buckets import Bucket, BucketedReplicas, PlainExchange
from executors.communication.tables import TableExchange
from planner.schema.buckets import cut_into_buckets
from planner.schema.send_tables import ring
from tests.distributed.pool import Pool
from tests.distributed.test_codecs import BUCKET, back, batches, small


def beside_ddp(world: int) -> float:
    """Largest relative difference of gradients and weights from DDP's."""
    group = dist.group.WORLD
    assert group is not None
    ours = BucketedReplicas(small(), group, PlainExchange(), BUCKET)
    ddp = DistributedDataParallel(small(), gradient_as_bucket_view=True)
    first, second = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (ours, ddp)
    )
    worst = 0.0
    for step in batches(dist.get_rank(), 4):
        first.zero_grad()
        second.zero_grad()
        for number, micro in enumerate(step):
            ours.sync = number == 1
            back(ours, micro)
            if number == 1:
                back(ddp, micro)
            else:
                with ddp.no_sync():
                    back(ddp, micro)
        ours.finish()
        for a, b in zip(ours.parameters(), ddp.parameters(), strict=True):
            assert a.grad is not None
            assert b.grad is not None
            gap = (a.grad - b.grad).abs().max() / b.grad.abs().max()
            worst = max(worst, float(gap))
        first.step()
        second.step()
    pairs = zip(ours.parameters(), ddp.parameters(), strict=True)
    gaps = [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]
    return max(worst, *gaps)


@pytest.mark.parametrize("world", [2, 4])
def test_own_buckets_average_as_ddp_does(pool: Pool, world: int) -> None:
    assert max(pool.run(beside_ddp, world, world)) < 1e-6


class Branches(nn.Module):
    """The second rank uses another branch, none uses the last, the first runs last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
        out: torch.Tensor = self.branches[which](self.branches[0](x))
        return out


def unused() -> tuple[list[list[float] | None], list[int]]:
    """Gradients after a step in which each rank uses another branch, and the order."""
    group = dist.group.WORLD
    assert group is not None
    ours = BucketedReplicas(Branches(), group, PlainExchange(), 1024)
    for _ in range(2):
        for parameter in ours.parameters():
            parameter.grad = None
        ours(torch.ones(1, 4), 1 + dist.get_rank()).sum().backward()
        ours.finish()
    grads = [p.grad for p in ours.parameters()]
    order = ours.state()["order"].tolist()
    return [None if g is None else g.flatten().tolist() for g in grads], order


def test_parameters_that_some_or_no_rank_uses(pool: Pool) -> None:
    (first, order), (second, other) = pool.run(unused, 2)
    assert first == second
    assert order == other
    assert [one is None for one in first] == [False] * 6 + [True] * 2
    # Of a bias, each rank's ones count half.
    assert first[3] == first[5] == [0.5] * 4


def learned_order() -> list[list[int]]:
    """Order of buckets at first, and after a backward that comes by them otherwise."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
    group = dist.group.WORLD
    assert group is not None
    ours = BucketedReplicas(layers, group, PlainExchange(), 1024)
    found = [list(ours._order)]
    x = torch.ones(1, 16)
    for layer in reversed(layers):
        x = layer(x)
    x.sum().backward()  # type: ignore[no-untyped-call]
    ours.finish()
    return [*found, list(ours._order)]


def test_the_order_of_buckets_is_learned_in_the_first_backward(pool: Pool) -> None:
    for before, after in pool.run(learned_order, 2):
        assert before == sorted(before)
        assert after == before[::-1]
        assert len(after) > 2


def test_buckets_are_cut_from_the_last_parameter_back() -> None:
    mib = 2**20
    assert cut_into_buckets([mib, 30 * mib, 10, mib], None) == ((3,), (2, 1), (0,))
    assert cut_into_buckets([600, 600, 600], 1024) == ((2, 1), (0,))
    assert cut_into_buckets([], None) == ()


class Noted(TableExchange):
    """A ring that notes the bucket of each message of it."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ring(range(ranks)))
        self.noted: list[int] = []

    def run(self, bucket: Bucket) -> Iterator[None]:
        for _ in super().run(bucket):
            self.noted.append(bucket.index)
            yield


def in_order(needed_first: bool) -> tuple[list[int], list[list[float]]]:
    """Buckets of messages of a second step, and its gradients."""
    group = dist.group.WORLD
    assert group is not None
    exchange = Noted(group.size())
    ours = BucketedReplicas(small(), group, exchange, BUCKET, needed_first=needed_first)
    for step in batches(dist.get_rank(), 2):
        exchange.noted.clear()
        for number, micro in enumerate(step):
            ours.sync = number == len(step) - 1
            back(ours, micro)
        ours.finish()
    grads = [p.grad for p in ours.parameters() if p.grad is not None]
    return list(exchange.noted), [grad.flatten().tolist() for grad in grads]


def test_buckets_that_are_needed_first_are_sent_first(pool: Pool) -> None:
    (filled, grads), *_ = pool.run(in_order, 3, False)
    (needed, same), *others = pool.run(in_order, 3, True)
    last = max(filled)
    assert last >= 1
    assert all(other[0] == needed for other in others)
    # All have begun in backward; behind it, the first layers' messages come first.
    begun = last + 1
    behind = needed[begun:]
    assert behind == sorted(behind, reverse=True)
    assert filled[begun:] != behind
    assert sorted(filled) == sorted(needed)
    for one, other in zip(grads, same, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
