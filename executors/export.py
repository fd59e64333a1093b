"""Adapter to torch.export: a model's graph in which chosen modules stay modules.

The only file that touches ``torch.export._swap``, a private module. Seen to work with
torch 2.11 to 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export._swap import _swap_modules
from torch.export.passes import move_to_device_pass
from torch.utils._pytree import tree_unflatten

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
        unit_outputs: Fake output of each unit, by the name of its call node.
    """

    root: fx.GraphModule
    inputs: tuple[str, ...]
    output: torch.Tensor
    unit_outputs: Mapping[str, Any]

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
    with warnings.catch_warnings():
        # torch inserts specs before it registers them.
        warnings.filterwarnings("ignore", message="Attempted to insert a get_attr Node")
        root = _swap_modules(program, names)
    _drop_checks(root)
    outputs = _unit_outputs(program, root, names)
    placeholders = (n for n in root.graph.nodes if n.op == "placeholder")
    return ExportedModel(
        root=root,
        inputs=tuple(str(node.target) for node in placeholders),
        output=_output(program),
        unit_outputs=outputs,
    )


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


def _unit_outputs(
    program: ExportedProgram, root: fx.GraphModule, names: Mapping[str, nn.Module]
) -> dict[str, Any]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    signatures = {
        entry.fqn: entry.signature for entry in program.module_call_graph if entry.fqn
    }
    outputs: dict[str, Any] = {}
    called: set[str] = set()
    for node in root.graph.nodes:
        if node.op != "call_module" or node.target not in names:
            continue
        called.add(node.target)
        signature = signatures[node.target]
        assert signature is not None
        leaves = [
            values.get(getattr(argument, "name", ""), getattr(argument, "value", None))
            for argument in signature.outputs
        ]
        outputs[node.name] = tree_unflatten(leaves, signature.out_spec)
    missing = [name.removeprefix(f"{_INNER}.") for name in names if name not in called]
    if missing:
        raise ExecutionError(
            f"the plan puts {missing[0]!r} on a stage, but the model's forward never "
            f"calls it (of {len(missing)} such); plan again for this model"
        )
    return outputs
