"""Adapter to torch.export: a model's graph in which chosen modules stay modules.

The only file that touches ``torch.export._swap``, a private module. Seen to work with
torch 2.11 to 2.13.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export import _swap as torch_swap
from torch.export.passes import move_to_device_pass
from torch.export.unflatten import _generate_flatten_spec

from executors.losses import LossKind, select_output
from planner.errors import ExecutionError

__all__ = ["ExportedModel", "export_model"]

#: Name of the model within the wrapper that is exported.
_INNER = "inner"


class _Selected(nn.Module):
    """A model whose forward returns the one tensor that its loss is made from."""

    def __init__(self, model: nn.Module, kind: LossKind) -> None:
        super().__init__()
        self.inner = model
        self.kind = kind

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        return select_output(self.inner(**inputs), self.kind)


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """A graph of aten ops and of calls to the model's own units.

    Attributes:
        root: Holds what the graph refers to.
        inputs: Placeholder names, the model's keywords.
        output: Fake tensor like the one that the model returns.
    """

    root: fx.GraphModule
    inputs: tuple[str, ...]
    output: torch.Tensor

    def fqn(self, target: str) -> str:
        """A name as the model has it; the wrapper's is cut off."""
        return target.removeprefix(f"{_INNER}.")


def export_model(
    model: nn.Module,
    inputs: Mapping[str, torch.Tensor],
    units: Sequence[str],
    kind: LossKind,
    device: torch.device,
) -> ExportedModel:
    """Trace a model's forward, keeping its units as the modules they are.

    Nothing is computed: parameters and inputs are stood in for by fake tensors.

    Args:
        model: On the CPU.
        inputs: Keywords of forward, one microbatch.
        units: FQNs of modules to keep whole.
        kind: Which output is kept; see :func:`executors.losses.select_output`.
        device: Where the stages will run; constants in the graph are moved there.

    Raises:
        ExecutionError: If torch cannot export the model, or forward never calls one
            of the units.
    """
    names = {f"{_INNER}.{unit}": model.get_submodule(unit) for unit in units}
    try:
        program = torch.export.export(
            _Selected(model, kind),
            (),
            dict(inputs),
            strict=False,
            preserve_module_call_signature=tuple(names),
        )
    except Exception as error:  # export raises what the model's own code raises, too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ExecutionError(
            f"torch.export cannot trace {type(model).__name__}, which pipeline stages "
            f"need: {reason[0]}; plan with pp=1"
        ) from error
    if device.type != "cpu":
        program = move_to_device_pass(program, device)
    _refuse_repeated(program, names)
    with warnings.catch_warnings(), _swap_corrected():
        # torch inserts specs before it registers them.
        warnings.filterwarnings("ignore", message="Attempted to insert a get_attr Node")
        root = torch_swap._swap_modules(program, dict(names))
    _drop_checks(root)
    _refuse_uncalled(root, names)
    placeholders = (n for n in root.graph.nodes if n.op == "placeholder")
    return ExportedModel(
        root=root,
        inputs=tuple(str(node.target) for node in placeholders),
        output=_output(program),
    )


def _refuse_repeated(program: ExportedProgram, names: Mapping[str, nn.Module]) -> None:
    for entry in program.module_call_graph:
        name, _, again = entry.fqn.partition("@")
        if again and name in names:
            raise ExecutionError(
                f"forward calls {name.removeprefix(f'{_INNER}.')!r} more than once, "
                f"which one pipeline stage cannot; plan with pp=1"
            )


@contextmanager
def _swap_corrected() -> Iterator[None]:
    """Put two faults of torch's swap right, for the block; both are there up to 2.13.

    It numbers a module's outputs by who reads them first, so that a unit that returns
    two tensors has them exchanged, silently. And it hands all outputs of one unit to
    the next as a single argument, if nothing else reads them.
    """
    numbering = torch_swap._deconstruct_outputs
    shortcut = torch_swap._remove_extraneous_pytrees
    torch_swap._deconstruct_outputs = _deconstruct_outputs
    torch_swap._remove_extraneous_pytrees = _leave_pytrees
    try:
        yield
    finally:
        torch_swap._deconstruct_outputs = numbering
        torch_swap._remove_extraneous_pytrees = shortcut


def _leave_pytrees(gm: fx.GraphModule) -> None:
    gm.graph.eliminate_dead_code()


def _deconstruct_outputs(
    gm: fx.GraphModule,
    signature: Any,
    module_node: fx.Node,
    node_name_map: dict[str, fx.Node],
    orig_outputs: tuple[fx.Node, ...],
) -> None:
    spec = _generate_flatten_spec(gm, module_node, signature.out_spec)
    names = [getattr(argument, "name", None) for argument in signature.outputs]
    for output in orig_outputs:
        if output.name not in names:
            raise ExecutionError(
                f"a value from within {module_node.target} ({output.name}) is read "
                f"outside of it, but is not returned; plan with pp=1"
            )
        with gm.graph.inserting_after(spec):
            index = names.index(output.name)
            picked = gm.graph.call_function(operator.getitem, (spec, index))
        output.replace_all_uses_with(picked, propagate_meta=True)
        node_name_map[output.name] = picked


def _drop_checks(root: fx.GraphModule) -> None:
    """Erase run-time guards: they name devices and shapes of the traced model."""
    for node in reversed(list(root.graph.nodes)):
        guard = node.op == "call_module" and node.target == "_guards_fn"
        check = node.target is torch.ops.aten._assert_tensor_metadata.default
        if (guard or check) and not node.users:
            root.graph.erase_node(node)


def _output(program: ExportedProgram) -> torch.Tensor:
    node = next(node for node in program.graph.nodes if node.op == "output")
    name = program.graph_signature.user_outputs[0]
    found = next(n for n in node.all_input_nodes if n.name == name)
    value: torch.Tensor = found.meta["val"]
    return value


def _refuse_uncalled(root: fx.GraphModule, names: Mapping[str, nn.Module]) -> None:
    called = {node.target for node in root.graph.nodes if node.op == "call_module"}
    missing = [name.removeprefix(f"{_INNER}.") for name in names if name not in called]
    if missing:
        raise ExecutionError(
            f"the plan puts {missing[0]!r} on a stage, but the model's forward never "
            f"calls it (of {len(missing)} such); plan again for this model"
        )
