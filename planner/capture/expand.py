"""From a trace to the full list of ops: repeated calls are written out again."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import torch

from planner.capture.record import Call, Trace
from planner.graph.ops import OpGraph, ParameterTensor

__all__ = ["expand"]


class _Expansion:
    """Rows of a trace, with each repeated call replaced by the rows it repeats."""

    def __init__(self, trace: Trace, owners: dict[str, int]) -> None:
        self.trace = trace
        self.owners = owners
        self.names_of: dict[int, list[str]] = {}
        for name, index in owners.items():
            self.names_of.setdefault(index, []).append(name)
        self.rows: list[int] = []
        self.modules: list[str] = []
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: list[tuple[int, ...]] = []
        self.saves: list[tuple[int, int]] = []
        self.storages: list[int] = list(range(len(trace.storage_tensor)))
        self._saves_at = self._by_row()

    def _by_row(self) -> dict[int, list[int]]:
        """Storages saved at each row, in the module that saved them."""
        trace = self.trace
        found: dict[int, list[int]] = {}
        last = len(trace.names) - 1
        for row, storage, module in trace.saves:
            place = min(row, last)
            if trace.modules[place] != module and place:
                before = trace.modules[place - 1]
                place -= before == module or before.startswith(module + ".")
            found.setdefault(place, []).append(storage)
        return found

    def run(self) -> None:
        repeated = {
            call.rows[0]: call for call in self.trace.calls if call.template >= 0
        }
        for row in range(len(self.trace.names)):
            call = repeated.get(row)
            if call is None:
                self._append(row, self.trace.modules[row])
            else:
                self._repeat(call)

    def _append(self, row: int, module: str) -> None:
        trace = self.trace
        for storage in self._saves_at.get(row, ()):
            self.saves.append((len(self.rows), storage))
        self.rows.append(row)
        self.modules.append(module)
        self.inputs.append(trace.inputs[row])
        self.outputs.append(trace.outputs[row])

    def _repeat(self, call: Call) -> None:
        trace = self.trace
        template = trace.calls[call.template]
        cut = len(template.module)
        start, stop = template.rows
        renamed = dict(zip(template.inputs, call.inputs, strict=True))
        renamed.update(zip(template.outputs, call.outputs, strict=True))
        for row in range(start, stop):
            for storage in trace.outputs[row]:
                if storage not in renamed:
                    renamed[storage] = len(self.storages)
                    self.storages.append(storage)
        for i in {i for row in range(start, stop) for i in trace.inputs[row] if i < 0}:
            renamed[i] = self._parameter(i, template.module, call.module)
        for row in range(start, stop):
            for storage in self._saves_at.get(row, ()):
                self.saves.append((len(self.rows), renamed.get(storage, storage)))
            self.rows.append(row)
            module = trace.modules[row]
            inside = module.startswith(template.module)
            self.modules.append(call.module + module[cut:] if inside else module)
            self.inputs.append(tuple(renamed.get(i, i) for i in trace.inputs[row]))
            self.outputs.append(tuple(renamed.get(i, i) for i in trace.outputs[row]))

    def _parameter(self, key: int, template: str, module: str) -> int:
        """The parameter that takes the place of another in a repeated call."""
        for name in self.names_of.get(-1 - key, ()):
            if name.startswith(template + "."):
                twin = self.owners.get(module + name[len(template) :])
                if twin is not None:
                    return -1 - twin
        return key


def _parameters(
    module: torch.nn.Module, dtype: torch.dtype | None
) -> tuple[list[ParameterTensor], dict[str, int]]:
    """Distinct parameters, and the index of each under all of its names."""
    index_of: dict[int, int] = {}
    names: list[list[str]] = []
    tensors: list[torch.nn.Parameter] = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        index = index_of.setdefault(id(parameter), len(tensors))
        if index == len(tensors):
            tensors.append(parameter)
            names.append([])
        names[index].append(name)
    made = [
        ParameterTensor(
            name=aliases[0],
            aliases=tuple(aliases[1:]),
            shape=tuple(tensor.shape),
            dtype=str(
                dtype
                if dtype is not None and tensor.is_floating_point()
                else tensor.dtype
            ).removeprefix("torch."),
            trainable=tensor.requires_grad,
        )
        for tensor, aliases in zip(tensors, names, strict=True)
    ]
    return made, {name: i for i, group in enumerate(names) for name in group}


def _lists(module: torch.nn.Module) -> Iterator[str]:
    """Containers of modules that run one after another."""
    kinds = (torch.nn.ModuleList, torch.nn.Sequential)
    for name, child in module.named_modules():
        if isinstance(child, kinds) and len(child) > 1:
            yield name


def _splittable(module: torch.nn.Module) -> dict[str, str]:
    """FQN to ``linear``, ``transposed`` or ``embedding``."""
    # transformers' linear layer with a weight [in, out]; no model without it has it.
    library = sys.modules.get("transformers.pytorch_utils")
    transposed = getattr(library, "Conv1D", ())
    found = {}
    for name, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, torch.nn.Linear):
            found[name] = "linear"
        elif isinstance(child, transposed):
            found[name] = "transposed"
        elif isinstance(child, torch.nn.Embedding):
            found[name] = "embedding"
    return found


def expand(trace: Trace, module: torch.nn.Module, dtype: torch.dtype | None) -> OpGraph:
    """Write a trace out in full.

    Args:
        trace: As the tracer left it.
        module: The module that was traced, or the one it was copied from.
        dtype: Dtype that floating parameters had in the trace; None for their own.

    Returns:
        All forward ops, each with the cost of its backward.
    """
    parameters, owners = _parameters(module, dtype)
    full = _Expansion(trace, owners)
    full.run()
    rows = np.asarray(full.rows, dtype=np.int64)

    def column(values: object) -> np.ndarray:
        return np.asarray(values, dtype=np.float64)[rows]

    sizes = np.asarray(trace.storage_bytes, dtype=np.float64)
    return OpGraph(
        origin=full.rows,
        names=[trace.names[row] for row in full.rows],
        modules=full.modules,
        kernels=[trace.kernels[row] for row in full.rows],
        inputs=full.inputs,
        outputs=full.outputs,
        random=[trace.random[row] for row in full.rows],
        forward_bytes=column(trace.forward_bytes),
        weight_bytes=column(trace.weight_bytes),
        backward_flops=column(trace.backward_flops),
        backward_bytes=column(trace.backward_bytes),
        recompute_flops=column(trace.recompute_flops),
        transient=column(trace.transient),
        storage_bytes=sizes[np.asarray(full.storages, dtype=np.int64)],
        storage_tensor=[trace.storage_tensor[i] for i in full.storages],
        sources=trace.sources,
        constants=trace.constants,
        saves=full.saves,
        parameters=parameters,
        module_types={name: type(m).__name__ for name, m in module.named_modules()},
        children={
            name: tuple(f"{name}.{key}" if name else key for key in child._modules)
            for name, child in module.named_modules()
        },
        linear=_splittable(module),
        module_lists=frozenset(_lists(module)),
    )
