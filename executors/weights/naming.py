"""Parameters of a model from the tensors of weight files, and the way back.

Files of Hugging Face's format name tensors as their first release did. For models of
transformers the library knows what has been renamed, merged or split since
(``transformers.conversion_mapping``); others have their parameters' FQNs in the file.
Which tensors make a parameter is found by converting tensors without values. Seen to
work with transformers 5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from executors.weights.adapters import AdapterNames
from executors.weights.files import WeightFiles
from planner.errors import ExecutionError

__all__ = ["Naming", "ReadTensor", "Reading"]

#: Dtypes of weights that can be trained on; others are codes that scales go with.
_TRAINED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTensor:
    """A parameter or buffer as files give it.

    Attributes:
        shape: Of the whole.
        dtype: Of the stored values.
        stored: The one tensor that it is, in the files; None if it is converted.
        group: Conversion that it comes from, see :class:`Reading`; -1 for none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stored: str | None = None
    group: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Tensors of the files that are converted together.

    Attributes:
        name: First of the parameters that they become.
        converter: Of transformers, without tensors.
        sources: Pattern and name of each tensor, in order.
    """

    name: str
    converter: Any
    sources: list[tuple[str, str]] = field(default_factory=list)


@dataclass(kw_only=True)
class Reading:
    """Where each parameter of a model is in files.

    Attributes:
        files: The files.
        tensors: By FQN, those of the model alone.
        unused: Names of stored tensors that the model has no place for.
    """

    files: WeightFiles
    tensors: Mapping[str, ReadTensor]
    unused: Sequence[str]
    _groups: Sequence[_Group]
    _convert: Callable[[_Group, Callable[[str], torch.Tensor]], dict[str, torch.Tensor]]
    _last: tuple[int, dict[str, torch.Tensor]] = (-1, {})

    def part(self, name: str, places: tuple[slice, ...]) -> torch.Tensor:
        """Read a part of a parameter; what conversions need is read whole.

        Args:
            name: FQN.
            places: One slice a dimension.
        """
        read = self.tensors[name]
        if read.stored is not None:
            return self.files.part(read.stored, places)
        if self._last[0] != read.group:
            self._last = (-1, {})
            made = self._convert(self._groups[read.group], self.files.whole)
            self._last = read.group, made
        return self._last[1][name][places]


class Naming:
    """Names and conversions between a model and its weight files.

    Of a model with adapters, these alone are stored.

    Args:
        model: The whole model, with or without values. Its shapes and its
            configuration are read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.config = getattr(model, "config", None)
        #: Of a model with adapters, which are saved without their base.
        self.adapters = AdapterNames.of(model)
        self._shapes = {
            name: tuple(tensor.shape)
            for name, tensor in model.state_dict().items()
            if isinstance(tensor, torch.Tensor)
        }
        self._state = self._shapes
        if self.adapters is not None:
            base = self.adapters.base.items()
            self._state = {name: self._shapes[own] for own, name in base}
        self._floats = {n for n, p in model.named_parameters() if p.is_floating_point()}
        self._prefix = getattr(model, "base_model_prefix", "") or None
        self._forward, self._back = _transforms(model)
        # None where names are FQNs, and nothing is converted.
        used = any((*self._forward, self._back, self._prefix))
        self._model: nn.Module | None = model if used else None

    def read(self, files: WeightFiles, ties: Mapping[str, str]) -> Reading:
        """Find each parameter and buffer of the model in files.

        Args:
            files: The files.
            ties: First FQN of a parameter, by each of its other FQNs; a file needs
                one of them.

        Raises:
            ExecutionError: If stored tensors cannot be converted, or have another
                shape than the model's.
        """
        found, groups = self._found(files)
        if self.adapters is not None:
            found = self._adapted(found)
        for name, first in ties.items():
            if name in found and first not in found:
                found[first] = found[name]
        wrong = [
            f"{name} is {list(read.shape)} there and {list(self._shapes[name])} here"
            for name, read in found.items()
            if read.shape != self._shapes.get(name, read.shape)
        ]
        if wrong:
            raise ExecutionError(
                f"{files.path} is of another model: {_few(wrong)}; name weights of "
                f"this model"
            )
        coded = [
            f"{name} is stored as {str(read.dtype).removeprefix('torch.')}"
            for name, read in found.items()
            if name in self._floats and read.dtype not in _TRAINED
        ]
        if coded:
            raise ExecutionError(
                f"{files.path} holds quantized weights: {_few(coded)}; name weights of "
                f"16 or 32 bits"
            )
        known = {name: read for name, read in found.items() if name in self._shapes}
        used = {read.stored for read in known.values()}
        for index in {read.group for read in known.values() if read.group >= 0}:
            used |= {name for _, name in groups[index].sources}
        return Reading(
            files=files,
            tensors=known,
            unused=sorted(files.tensors.keys() - used),
            _groups=groups,
            _convert=self._converted,
        )

    def _found(self, files: WeightFiles) -> tuple[dict[str, ReadTensor], list[_Group]]:
        found: dict[str, ReadTensor] = {}
        groups: dict[str, _Group] = {}
        for name in _natural(files.tensors):
            target, pattern, converter = self._target(name)
            if converter is None:
                stored = files.tensors[name]
                found[target] = ReadTensor(
                    shape=stored.shape, dtype=stored.dtype, stored=name
                )
                continue
            group = groups.setdefault(target, _Group(name=target, converter=converter))
            group.sources.append((pattern, name))

        def without_values(name: str) -> torch.Tensor:
            stored = files.tensors[name]
            return torch.empty(stored.shape, dtype=stored.dtype, device="meta")

        for index, group in enumerate(groups.values()):
            for target, tensor in self._converted(group, without_values).items():
                found[target] = ReadTensor(
                    shape=tuple(tensor.shape), dtype=tensor.dtype, group=index
                )
        return found, list(groups.values())

    def _adapted(self, found: Mapping[str, ReadTensor]) -> dict[str, ReadTensor]:
        """Tensors by the names of the adapted model: its base's, and adapters."""
        assert self.adapters is not None
        base, stored = self.adapters.base, self.adapters.stored
        made = {own: found[name] for own, name in base.items() if name in found}
        made |= {own: found[name] for own, name in stored.items() if name in found}
        taken = {*base.values(), *stored.values()}
        return made | {name: one for name, one in found.items() if name not in taken}

    def _target(self, name: str) -> tuple[str, str, Any]:
        """FQN of a stored tensor; pattern and converter if it is one of several."""
        if self._model is None:
            return name, "", None
        from transformers.core_model_loading import rename_source_key

        renamings, converters = self._forward
        target, pattern = rename_source_key(
            name, renamings, converters, self._prefix, self._state
        )
        if pattern is None:
            return target, "", None
        chosen = next(c for c in converters if pattern in c.source_patterns)
        return target, pattern, chosen

    def _converted(
        self, group: _Group, read: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(group.converter)
        for pattern, name in group.sources:
            converter.add_tensor(group.name, name, pattern, read(name))
        try:
            made = converter.convert(group.name, model=self._model, config=self.config)
        except Exception as error:  # whatever a conversion raises on odd tensors
            names = _few([name for _, name in group.sources])
            raise ExecutionError(
                f"cannot make {group.name} of {names}: {type(error).__name__}: "
                f"{error}; name weights that transformers reads"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }

    def together(self, names: Iterable[str]) -> list[tuple[str, ...]]:
        """Group parameters by the stored tensors that they make.

        Args:
            names: FQNs.
        """
        if self.adapters is not None:
            return [(name,) for name in names if name in self.adapters.stored]
        if self._model is None:
            return [(name,) for name in names]
        from transformers.core_model_loading import apply_converters

        groups: dict[str, list[str]] = {}
        for name in names:
            target, pattern = apply_converters(name, self._back)
            groups.setdefault(name if pattern is None else target, []).append(name)
        return [tuple(group) for group in groups.values()]

    def stored(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of a file from those of a model.

        Args:
            tensors: One group of :meth:`together`, by FQN.
        """
        if self.adapters is not None:
            return {self.adapters.stored[n]: value for n, value in tensors.items()}
        if self._model is None:
            return dict(tensors)
        from transformers.core_model_loading import revert_weight_conversion

        made: dict[str, torch.Tensor] = revert_weight_conversion(
            self._model, dict(tensors)
        )
        # Parts of one tensor are written as tensors of their own.
        return {name: value.contiguous() for name, value in made.items()}


def _transforms(model: nn.Module) -> tuple[tuple[list[Any], list[Any]], list[Any]]:
    """Renamings and converters of transformers for a model, and converters back."""
    try:
        from transformers import PreTrainedModel
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            PrefixChange,
            WeightConverter,
            WeightRenaming,
        )
    except ImportError:
        return ([], []), []
    if not isinstance(model, PreTrainedModel):
        return ([], []), []
    forward = get_model_conversion_mapping(model)
    back = [
        transform
        for transform in get_model_conversion_mapping(model, add_legacy=False)
        if not isinstance(transform, PrefixChange)
    ]
    # What the library would work out anew at each tensor.
    model._weight_conversions = back
    reverse = [transform.reverse_transform() for transform in back[::-1]]
    return (
        [t for t in forward if isinstance(t, WeightRenaming)],
        [t for t in forward if isinstance(t, WeightConverter)],
    ), [t for t in reverse if isinstance(t, WeightConverter)]


def _natural(names: Collection[str]) -> list[str]:
    """Names in order, numbers in them by size: lists of modules stay in order."""

    def key(name: str) -> list[tuple[int, int, str]]:
        parts = name.split(".")
        return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts]

    return sorted(names, key=key)


def _few(said: Sequence[str]) -> str:
    more = f" (and {len(said) - 3} more)" if len(said) > 3 else ""
    return f"{'; '.join(said[:3])}{more}"
