"""Which values of a graph share memory, and which ops write to it.

Source: alias annotations of torch's operator schemas, ``Tensor(a!)`` and ``Tensor(a)``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

__all__ = ["Aliases", "keeps_state"]

_ATEN = torch.ops.aten

#: Ops that update running statistics, of which their schemas do not tell.
_STATEFUL = frozenset({_ATEN.batch_norm.default, _ATEN.instance_norm.default})


def keeps_state(node: fx.Node) -> bool:
    """Whether to run an op twice is not the same as to run it once."""
    tags = getattr(node.target, "tags", ())
    return node.target in _STATEFUL or torch.Tag.nondeterministic_seeded in tags


class Aliases:
    """Views and in-place ops of a graph, followed to the value that owns the memory.

    Calls of modules are taken to return memory of their own.

    Args:
        nodes: In order of execution.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._base: dict[fx.Node, fx.Node] = {}
        #: Values that each op writes to, by op; each stands for its whole memory.
        self.writes: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in nodes:
            self._base[node] = self._follow(node)
            written = {self.base(value) for value in _arguments(node, written=True)}
            if written:
                self.writes[node] = frozenset(written)

    def base(self, node: fx.Node) -> fx.Node:
        """The first value in whose memory a value lies; itself, if it is no view."""
        return self._base.get(node, node)

    def _follow(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            # One of several views (of a split), or one of several new values.
            source = node.all_input_nodes[0]
            base = self.base(source)
            return node if base is source else base
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(value.alias_info for value in schema.returns):
            return node
        return next((self.base(value) for value in _arguments(node)), node)


def _arguments(node: fx.Node, *, written: bool = False) -> Iterator[fx.Node]:
    """Arguments whose memory an op shares with its result, or writes to."""
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        info = argument.alias_info
        if info is None or (written and not info.is_write):
            continue
        given = node.kwargs.get(argument.name)
        value = node.args[index] if index < len(node.args) else given
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, fx.Node):
                yield one
