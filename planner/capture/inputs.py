"""Example inputs, given as tensors or only by their shapes."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from planner.capture.private_apis import tree_flatten, tree_unflatten
from planner.errors import CaptureError

__all__ = ["MOST_KEPT", "ExampleInputs", "InputShape", "read_inputs"]

#: Default bound of synthetic integers.
_DEFAULT_HIGH = 2
#: Largest tensor whose values are kept.
MOST_KEPT = 1 << 18
#: Most runs of equal integers that a plan keeps of an input.
_MOST_RUNS = 256
#: Arguments that change the container of what forward returns and nothing in it.
_OF_OUTPUTS = frozenset({"return_dict"})


@dataclass(frozen=True, slots=True, kw_only=True)
class InputShape:
    """One input by its shape alone.

    Attributes:
        shape: Batch dim first.
        dtype: Torch name; a floating one is replaced by the compute dtype.
        high: Bound of synthetic integers, None for floats.
        values: Known integers in order as (value, times), a value of None standing for
            any; None if all may be any.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int | None = None
    values: tuple[tuple[int | None, int], ...] | None = None

    def known(self) -> torch.Tensor:
        """Return the tensor of its values, on the CPU; zeros where they may be any."""
        runs = [(value or 0, times) for value, times in self.values or ()]
        value, times = torch.tensor(runs).unbind(1)
        flat = value.repeat_interleave(times)
        return flat.to(getattr(torch, self.dtype)).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleInputs:
    """Arguments of a forward, tensors as shapes.

    Attributes:
        positional: Positional arguments; tensors are :class:`InputShape`.
        keyword: Keyword arguments, the same.
        shapes: (name, shape) of every tensor, in order.
    """

    positional: tuple[Any, ...]
    keyword: Mapping[str, Any]
    shapes: tuple[tuple[str, InputShape], ...]

    @property
    def batch(self) -> int:
        """Samples: dim 0 of the first input, 1 for a scalar.

        Where values are known, the largest that divides dim 0 of all inputs: those of
        one sample may fill several rows.
        """
        rows = [shape.shape[0] if shape.shape else 1 for _, shape in self.shapes]
        return math.gcd(*rows) if self.has_values else rows[0]

    @property
    def has_values(self) -> bool:
        """True if values of any input are known."""
        return any(shape.values is not None for _, shape in self.shapes)

    @property
    def labelled(self) -> bool:
        """True if a tensor is named as labels are."""
        names = (name.rsplit(".", 1)[-1].lower() for name, _ in self.shapes)
        return any(name == "y" or "label" in name or "target" in name for name in names)

    def sample_values(
        self, names: Collection[str]
    ) -> dict[str, tuple[tuple[int | None, int], ...]]:
        """Known integers of the first sample, by input, where they are few runs.

        Args:
            names: Of the inputs that are looked at.
        """
        found: dict[str, tuple[tuple[int | None, int], ...]] = {}
        for name, shape in self.shapes:
            left = math.prod(shape.shape) // self.batch
            runs: list[tuple[int | None, int]] = []
            for value, times in (shape.values or ()) if name in names else ():
                if not left:
                    break
                runs.append((value, min(times, left)))
                left -= runs[-1][1]
            if runs and len(runs) <= _MOST_RUNS:
                found[name] = tuple(runs)
        return found

    def materialise(
        self, make: Callable[[InputShape], torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with ``make(shape)`` in the place of every tensor."""
        flat, spec = tree_flatten((self.positional, dict(self.keyword)))
        made = [make(leaf) if isinstance(leaf, InputShape) else leaf for leaf in flat]
        positional, keyword = tree_unflatten(made, spec)
        return tuple(positional), keyword


def _is_shape(value: object) -> bool:
    """True for ``((1, 4096), "int64")``, the dtype by name or as such."""
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and isinstance(value[0], tuple | list)
        and all(isinstance(size, int) for size in value[0])
        and isinstance(value[1], str | torch.dtype)
    )


def _shape_of(value: Any, high: int) -> InputShape:
    if isinstance(value, InputShape):
        return value
    if isinstance(value, torch.Tensor):
        shape, name = tuple(value.shape), str(value.dtype)
    else:
        shape, name = tuple(value[0]), str(value[1])
    name = name.removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CaptureError(
            f"example input has dtype {name!r}, which torch does not have; use a torch "
            f"name such as 'int64' or 'bfloat16'"
        )
    whole = not (dtype.is_floating_point or dtype.is_complex)
    return InputShape(
        shape=shape,
        dtype=name,
        high=high if whole else None,
        values=_values_of(value) if whole else None,
    )


def _values_of(given: Any) -> tuple[tuple[int, int], ...] | None:
    """Return the integers of a real tensor; zeros alone stand for any."""
    real = isinstance(given, torch.Tensor) and type(given) is torch.Tensor
    if not real or given.device.type == "meta" or given.numel() > MOST_KEPT:
        return None
    if not given.any():
        return None
    runs = torch.unique_consecutive(
        given.detach().cpu().to(torch.int64).flatten(), return_counts=True
    )
    return tuple(zip(*(part.tolist() for part in runs), strict=True))


def _lower(value: Any, high: int) -> Any:
    """Replace every tensor or shape in nested containers by an :class:`InputShape`."""
    if isinstance(value, torch.Tensor | InputShape) or _is_shape(value):
        return _shape_of(value, high)
    if isinstance(value, Mapping):
        return {key: _lower(item, high) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_lower(item, high) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    return value


def _parameter_names(module: torch.nn.Module, count: int) -> list[str]:
    """Names of positional arguments in forward's signature.

    Raises:
        CaptureError: If forward takes some by position alone.
    """
    parameters = inspect.signature(module.forward).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(names) < count:
        raise CaptureError(
            f"example_inputs give forward {count} positional arguments, of which it "
            f"takes {len(names)} ({', '.join(names) or 'none'}) by a name, and plans "
            f"call it with keywords; plan for a module around yours that names them"
        )
    return names[:count]


def _named_shapes(name: str, value: Any) -> list[tuple[str, InputShape]]:
    if isinstance(value, InputShape):
        return [(name, value)]
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{name}.{index}", item) for index, item in enumerate(value)]
    else:
        return []
    return [pair for key, item in items for pair in _named_shapes(key, item)]


def _require_plain(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that training by a plan could not give forward again.

    Raises:
        CaptureError: For a container of tensors, and a value that is not the default.
    """
    for name, value in arguments.items():
        tensors = [each for each, _ in _named_shapes(name, value)]
        if tensors == [name] or name in _OF_OUTPUTS:
            continue
        if tensors:
            listed = ", ".join(each.rpartition(".")[2] for each in tensors)
            raise CaptureError(
                f"example_inputs give {name!r} as a {type(value).__name__} of tensors, "
                f"and plans call forward with one tensor a keyword; plan for a module "
                f"around yours that takes them one by one ({listed})"
            )
        default = _default(module, name)
        if value == default or not (value or default):
            continue
        raise CaptureError(
            f"example_inputs give {name}={value!r}, which is no tensor and not "
            f"forward's default ({default!r}), and plans call forward with tensors "
            f"alone; make it the default, or plan for a module around yours that "
            f"gives it"
        )


def _default(module: torch.nn.Module, name: str) -> Any:
    """Return the default of an argument of forward, None if it has none."""
    with contextlib.suppress(TypeError, ValueError, KeyError):
        found = inspect.signature(module.forward).parameters[name].default
        return None if found is inspect.Parameter.empty else found
    return None


def read_inputs(
    module: torch.nn.Module, example: Any, *, high: int | None = None
) -> ExampleInputs:
    """Read example inputs in any of the forms a caller may have.

    Args:
        module: Its forward gives positional inputs their names.
        example: A mapping (keyword arguments), a tuple or list (positional ones), or
            a single tensor. Each leaf is a tensor, real, meta or fake, or a shape
            ``((1, 4096), "int64")``.
        high: Bound of synthetic integers, for example the vocabulary size.

    Raises:
        CaptureError: If there is no tensor among them, or what training by a plan,
            which calls forward with tensors by name, could not give it again.
    """
    bound = _DEFAULT_HIGH if high is None else high
    positional: tuple[Any, ...] = ()
    keyword: dict[str, Any] = {}
    if isinstance(example, Mapping):
        keyword = {str(key): _lower(value, bound) for key, value in example.items()}
    elif isinstance(example, tuple | list) and not _is_shape(example):
        positional = tuple(_lower(value, bound) for value in example)
    else:
        positional = (_lower(example, bound),)
    shapes: list[tuple[str, InputShape]] = []
    names = _parameter_names(module, len(positional))
    named = [*zip(names, positional, strict=True), *keyword.items()]
    for name, value in named:
        shapes.extend(_named_shapes(name, value))
    if not shapes:
        raise CaptureError(
            "example_inputs hold no tensor; give a tensor, a tuple, or a mapping such "
            "as {'input_ids': ((1, 4096), 'int64')}"
        )
    _require_plain(module, dict(named))
    return ExampleInputs(positional=positional, keyword=keyword, shapes=tuple(shapes))
