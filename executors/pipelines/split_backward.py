"""Backward of a pipeline stage in two parts: gradients of inputs, then of weights.

torch's own ``stage_backward_input`` and ``stage_backward_weight`` lose the gradients
of weights whose path from the outputs meets no node on the way to a stage's inputs
(a decoder's embedding, a second tower), compute those of weights used at several
places twice or fail on them, and let two weights share one gradient tensor. Here a
weight is deferred only where that is certain to be right: where all that its gradient
depends on enters through one node. The gradients of all others are computed in the
first part.

The only file that overrides how ``torch.distributed.pipelining`` runs a backward
(``backward_maybe_with_nosync``). Seen to work with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from executors.strategies.casts import WeightCasts

__all__ = ["DeferredWeights", "SplitStage", "backward_inputs", "backward_weights"]

#: Class of nodes that are functions written in Python.
_PYTHON: type = torch._C._FunctionBase
#: Nodes that read the result of each node, in backward's order: those before it.
_Readers = Mapping[Node, Sequence[Node]]


@dataclass(slots=True, kw_only=True)
class DeferredWeights:
    """Weights whose gradients depend on what one node of the graph receives.

    Attributes:
        node: That node.
        weights: Parameters.
        grads: Gradients that the node received; empty until it did.
    """

    node: Node
    weights: list[torch.Tensor] = field(default_factory=list)
    grads: tuple[torch.Tensor | None, ...] = ()

    def keep(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Take the gradients that the node receives; a hook of it."""
        self.grads = grads


class SplitStage(PipelineStage):
    """A stage whose split backward computes every gradient, each once.

    Attributes:
        casts: With which the stage computes, if it casts its weights itself.
    """

    casts: WeightCasts | None = None

    def backward_maybe_with_nosync(
        self,
        backward_type: str,
        bwd_kwargs: dict[str, Any],
        last_backward: bool = False,
    ) -> tuple[tuple[torch.Tensor | None, ...], Any]:
        """Run one part of the backward of a microbatch."""
        if backward_type == "full":
            return super().backward_maybe_with_nosync(
                backward_type, bwd_kwargs, last_backward
            )
        if isinstance(self.submod, FSDPModule):
            # Gradients are reduced once, after the last microbatch.
            self.submod.set_is_last_backward(False)
            self.submod.set_reshard_after_backward(False)
            self.submod.set_requires_gradient_sync(False)
        if backward_type == "weight":
            backward_weights(bwd_kwargs["param_groups"])
            return (), None
        return backward_inputs(
            bwd_kwargs["stage_output"],
            bwd_kwargs["output_grads"],
            bwd_kwargs["input_values"],
            self.casts.leaves() if self.casts else self.submod.parameters(),
        )


def backward_inputs(
    outputs: Sequence[torch.Tensor],
    output_grads: Sequence[torch.Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Iterable[torch.Tensor],
) -> tuple[tuple[torch.Tensor | None, ...], list[DeferredWeights]]:
    """Compute gradients of inputs, and of weights that cannot be deferred.

    Args:
        outputs: Of the stage, or its loss; they are detached in place, so that what
            deferred weights do not need is freed.
        output_grads: Of each output; None for a loss.
        inputs: Of the stage; what needs no gradient among them is passed over.
        weights: Of the stage; gradients are added to their ``grad``.

    Returns:
        Gradients of the inputs, None where there is none; and the deferred weights,
        for :func:`backward_weights`.
    """
    given = output_grads or [torch.ones_like(output) for output in outputs]
    pairs = [
        (output, grad)
        for output, grad in zip(outputs, given, strict=True)
        if output.requires_grad and grad is not None
    ]
    wanted = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    trained = [weight for weight in weights if weight.requires_grad]
    roots = [get_gradient_edge(output).node for output, _ in pairs]
    at_once, deferred = _divide(roots, wanted, trained)
    if pairs and (wanted or at_once):
        hooks = [group.node.register_prehook(group.keep) for group in deferred]
        try:
            torch.autograd.backward(
                [output for output, _ in pairs],
                [grad for _, grad in pairs],
                inputs=[*wanted, *at_once],
                retain_graph=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
    for output in outputs:
        if not output._is_view():  # a view cannot be detached in place
            output.detach_()
    return tuple(_taken(x) for x in inputs), deferred


def backward_weights(deferred: Iterable[DeferredWeights]) -> None:
    """Compute the gradients of deferred weights, and add them to their ``grad``."""
    for group in deferred:
        given = [(n, grad) for n, grad in enumerate(group.grads) if grad is not None]
        group.grads = ()
        if given:
            torch.autograd.backward(
                [GradientEdge(group.node, n) for n, _ in given],
                [grad for _, grad in given],
                inputs=group.weights,
            )


def _taken(value: Any) -> torch.Tensor | None:
    """Take the gradient out of an input."""
    if not isinstance(value, torch.Tensor):
        return None
    grad, value.grad = value.grad, None
    return grad


def _divide(
    roots: Sequence[Node],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], list[DeferredWeights]]:
    """Divide weights into those of the first part and deferred ones.

    The first part runs every node on a path to an input or to a weight of that part.
    A weight may be deferred if all paths to it leave these nodes at one of them: the
    second part then runs that node again, and nothing else that has run before or
    that another weight needs.
    """
    readers, ends = _readers(roots), set(roots)
    run: set[Node] = set()
    _run_too(run, [get_gradient_edge(x).node for x in inputs], readers)
    left = [(weight, get_gradient_edge(weight).node) for weight in weights]
    left = [pair for pair in left if pair[1] in readers or pair[1] in ends]
    at_once: list[torch.Tensor] = []
    while True:
        groups: dict[Node, DeferredWeights] = {}
        late, early = [], []
        for weight, node in left:
            source = _only_source(node, run, readers, ends)
            if source is None:
                early.append((weight, node))
            else:
                late.append((weight, node))
                group = groups.setdefault(source, DeferredWeights(node=source))
                group.weights.append(weight)
        if not early:
            return at_once, list(groups.values())
        # The first part now runs more nodes: others may leave them at several.
        at_once += [weight for weight, _ in early]
        _run_too(run, [node for _, node in early], readers)
        left = late


def _readers(roots: Sequence[Node]) -> dict[Node, list[Node]]:
    """Nodes before each node of a graph, but for its roots."""
    readers: dict[Node, list[Node]] = {}
    todo, seen = list(roots), set(roots)
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is not None:
                readers.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
    return readers


def _run_too(run: set[Node], targets: Iterable[Node], readers: _Readers) -> None:
    """Add targets, and all nodes on a path to one, to the nodes that run."""
    todo = list(targets)
    while todo:
        node = todo.pop()
        if node not in run:
            run.add(node)
            todo += readers.get(node, ())


def _only_source(
    target: Node, run: Set[Node], readers: _Readers, ends: Set[Node]
) -> Node | None:
    """The one node that runs at which all paths to a target leave those that do.

    None if there are several, if a path from an output meets none, or if the node is
    a function written in Python, which nothing would keep alive for the second part.
    """
    sources: set[Node] = set()
    todo, seen = [target], {target}
    while todo:
        following = todo.pop()
        if following in ends:
            return None
        for node in readers[following]:
            if node in run:
                sources.add(node)
            elif node not in seen:
                seen.add(node)
                todo.append(node)
        if len(sources) > 1:
            return None
    (source,) = sources
    return None if isinstance(source, _PYTHON) else source
