"""Blocks of a model: compiled, and computed again in backward.

``torch.compile`` of each block: blocks are small graphs without collectives of data
parallelism, and equal blocks share their code, so that compiling them takes seconds
where a whole model takes minutes. Activation checkpointing of each unit.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from planner.errors import ExecutionError
from planner.schema import Recompute

__all__ = ["apply_recompute", "compile_blocks", "require_compiler"]

#: What torch's CPU backend looks for, unless CXX names another.
_COMPILERS = ("g++", "clang++")


def require_compiler(device: torch.device) -> None:
    """Refuse to compile where torch would fail at the first step.

    Args:
        device: For which code is to be made.

    Raises:
        ExecutionError: On CPUs without a C++ compiler, on GPUs without Triton.
    """
    if device.type == "cuda":
        if importlib.util.find_spec("triton") is None:
            raise ExecutionError(
                "the plan has compile=True, which on GPUs needs Triton, and Triton is "
                "not installed; install it (pip install triton), or plan with "
                "compile=False"
            )
        return
    named = os.environ.get("CXX")
    wanted = (named,) if named else _COMPILERS
    if not any(shutil.which(name) for name in wanted):
        raise ExecutionError(
            f"the plan has compile=True, which on CPUs needs a C++ compiler, and "
            f"{' or '.join(wanted)} is not on the PATH; install one (apt-get install "
            f"g++), name one in CXX, or plan with compile=False"
        )


def compile_blocks(model: nn.Module, units: Sequence[str]) -> tuple[str, ...]:
    """Compile the forward of each block when it is first called.

    The forward is compiled, not the module: hooks on a block (gathers of weights,
    scatters of sequences) stay outside, and parameters keep their names. Code is made
    for the shapes of the first call; sizes that change (tokens of an expert) are made
    variable when they first do.

    Args:
        model: The model, or one stage of it, split and wrapped for recomputation
            already, not yet for data parallelism.
        units: FQNs of its pipeline units. Single layers (an embedding, a head) are
            left alone: they have nothing to fuse.

    Returns:
        FQNs of the blocks.
    """
    blocks = tuple(unit for unit in units if _is_block(model.get_submodule(unit)))
    # Code is kept by function, and blocks of one class have one function: where they
    # differ to the compiler (tp gives each its own parts), each is an entry of its
    # own, and past the limit torch would run them uncompiled.
    torch._dynamo.config.recompile_limit += len(blocks)
    torch._dynamo.config.accumulated_recompile_limit += len(blocks)
    for name in blocks:
        block = model.get_submodule(name)
        block.__dict__["forward"] = torch.compile(block.forward)
    return blocks


def _is_block(unit: nn.Module) -> bool:
    return any(True for _ in unit.children()) and any(True for _ in unit.parameters())


_ATEN = torch.ops.aten

#: Outputs kept under "selective": products and fused attention, which are dear to
#: compute; everything between them is computed again.
_KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.baddbmm.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_mm.default,
        _ATEN.convolution.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_fused_attention_overrideable.default,
    }
)


def _policy(_: Any, op: Any, *__: Any, **___: Any) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
    )


def _selective() -> Any:
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


class _BufferKeeper:
    """Recomputation of a unit from the buffers that its forward began with.

    Running statistics would else be updated twice, and a forward that reads what it
    updates would be computed again from other values.

    Args:
        unit: Whose buffers may change in forward.
        contexts: Other contexts of a forward and its recomputation.
    """

    def __init__(self, unit: nn.Module, contexts: Callable[[], Any]) -> None:
        self._contexts = contexts
        self._buffers = [
            (module, name)
            for module in unit.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def __call__(self) -> tuple[Any, Any]:
        """Return the contexts of one forward and of its recomputation."""
        begun: list[tuple[nn.Module, str, torch.Tensor]] = []
        first, again = self._contexts()
        return self._forward(first, begun), self._recomputation(again, begun)

    @contextmanager
    def _forward(
        self, inner: Any, begun: list[tuple[nn.Module, str, torch.Tensor]]
    ) -> Iterator[None]:
        before = [(m, n, m.get_buffer(n)) for m, n in self._buffers]
        versions = [buffer._version for _, _, buffer in before]
        copies = [buffer.detach().clone() for _, _, buffer in before]
        with inner:
            yield
        rows = zip(before, versions, copies, strict=True)
        changed = [
            (module, name, copy)
            for (module, name, buffer), version, copy in rows
            if module._buffers[name] is not buffer
            or buffer._version != version
            # Running statistics are updated without a new version.
            or isinstance(module, nn.modules.batchnorm._NormBase)
        ]
        # Buffers that this forward leaves as they are need no copies from now on.
        self._buffers = [(module, name) for module, name, _ in changed]
        begun += changed

    @contextmanager
    def _recomputation(
        self, inner: Any, begun: list[tuple[nn.Module, str, torch.Tensor]]
    ) -> Iterator[None]:
        now = [(module, name, module._buffers[name]) for module, name, _ in begun]
        for module, name, buffer in begun:
            module._buffers[name] = buffer.clone()
        try:
            with inner:
                yield
        finally:
            for module, name, current in now:
                module._buffers[name] = current


def _no_contexts() -> tuple[Any, Any]:
    return nullcontext(), nullcontext()


def apply_recompute(
    model: nn.Module, units: Iterable[str], how: Recompute, *, compiled: bool = False
) -> None:
    """Let the units of a stage keep less for backward, in place.

    The forward of each unit is wrapped, not the unit: names of parameters stay, and
    hooks on the unit itself (all-gathers, scatters) do not run again.

    Args:
        model: The stage.
        units: FQNs of its pipeline units; those without parameters are left alone.
        how: ``none``, ``selective`` or ``full``.
        compiled: Whether what is wrapped here will be compiled: compilers update
            buffers once by themselves.
    """
    if how == "none":
        return
    contexts = _no_contexts if how == "full" else _selective
    for name in units:
        unit = model.get_submodule(name)
        if any(True for _ in unit.parameters()):
            keeps = not compiled and any(True for _ in unit.buffers())
            wrapped = partial(
                checkpoint,
                unit.forward,
                use_reentrant=False,
                context_fn=_BufferKeeper(unit, contexts) if keeps else contexts,
            )
            unit.__dict__["forward"] = wrapped
