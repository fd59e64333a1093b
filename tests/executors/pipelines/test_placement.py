"""Views and in-place ops are followed to the value that owns the memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from executors.pipelines.placement import Aliases, keeps_state


def _traced(function: Callable[[torch.Tensor], torch.Tensor]) -> list[fx.Node]:
    graph = make_fx(function)(torch.ones(4, 4)).graph
    return [node for node in graph.nodes if node.op != "output"]


def _chain(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    row = y[1].view(2, 2).t()
    row.mul_(2)
    first, second = y.split(2)
    second.add_(first)
    return y.cos()


def test_writes_are_to_the_owner_of_the_memory() -> None:
    nodes = _traced(_chain)
    aliases = Aliases(nodes)
    named = {str(node.target): node for node in nodes}
    owner = named["aten.sin.default"]
    writers = [named["aten.mul_.Tensor"], named["aten.add_.Tensor"]]
    assert aliases.writes == {writer: {owner} for writer in writers}
    alone = {nodes[0], owner, named["aten.cos.default"]}
    for node in nodes:
        assert aliases.base(node) is (node if node in alone else owner)


@pytest.mark.parametrize(
    ("function", "shared"),
    [
        (lambda x: x.t(), True),
        (lambda x: x.expand(2, 4, 4), True),
        (lambda x: x.unbind()[0], True),
        (lambda x: x.clone(), False),
        (lambda x: x + 1, False),
        (lambda x: x.sort()[0], False),
        (lambda x: torch.cat([x, x]), False),
    ],
)
def test_what_shares_memory_is_what_torch_says(
    function: Callable[[torch.Tensor], torch.Tensor], shared: bool
) -> None:
    value = torch.ones(4, 4)
    storage = value.untyped_storage().data_ptr()
    assert (function(value).untyped_storage().data_ptr() == storage) is shared
    nodes = _traced(function)
    assert (Aliases(nodes).base(nodes[-1]) is nodes[0]) is shared


def test_dropout_and_running_statistics_count() -> None:
    def kept(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
        return any(keeps_state(node) for node in _traced(function))

    mean, var = torch.zeros(4), torch.ones(4)
    norm = torch.nn.functional.batch_norm
    graph = fx.Graph()
    batch_norm = graph.call_function(torch.ops.aten.batch_norm.default)
    assert keeps_state(batch_norm)
    assert kept(torch.rand_like)
    assert kept(lambda x: torch.nn.functional.dropout(x, 0.5))
    assert not kept(lambda x: norm(x, mean, var))
    assert not kept(torch.sin)
