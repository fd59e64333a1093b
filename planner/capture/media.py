"""Default pictures and recordings for models of transformers that read them with text.

A processor turns pictures into patches and marks their places in the text by tokens of
their own. A config alone says how large the pictures of its vision tower are; how many
tokens one becomes is asked of the model itself, on tensors without memory.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from planner.capture.fakes import fake_copy, quiet_state
from planner.capture.inputs import InputShape
from planner.capture.private_apis import fake_mode, known_tensor, quiet_forward
from planner.capture.shapes import ShapeCache
from planner.capture.trace import Tracer
from planner.errors import CaptureError

__all__ = ["has_media", "with_media"]

#: Most ops of a tower.
_MOST_OPS = 500_000
#: Pixels along each side of a picture where the config leaves its size to the data.
_SIDE = 448
#: One more than the most parts, and the whole, that a model cuts a picture into.
_MOST_TILES = 8
#: Inputs that tell a token of a picture or recording (1) from one of text (0).
_KINDS = ("mm_token_type_ids", "token_type_ids")
_Shapes = dict[str, InputShape]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Medium:
    """Something that a model reads beside text.

    Attributes:
        name: For people.
        tower: Field of a config that describes what reads it.
        reads: Argument of forward.
        features: Method that returns its tokens' features.
        tokens: Fields of a config that name the token that stands for a piece of it.
        candidates: Returns shapes that a model may read one in, the likeliest first.
    """

    name: str
    tower: str
    reads: str
    features: str
    tokens: tuple[str, ...]
    candidates: Callable[[torch.nn.Module, Any, int, int], Iterator[_Shapes]]


def has_media(module: torch.nn.Module, config: Any) -> bool:
    """Return True if a model's forward reads pictures or sound beside its text."""
    return bool(_media(module, config))


def with_media(
    module: torch.nn.Module, config: Any, inputs: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Return inputs of forward with media, and their places in the text.

    Args:
        module: On any device; it is not run.
        config: Of transformers.
        inputs: Text; ``input_ids`` has shape [samples, tokens].
        count: Pictures, or recordings, of each sample.

    Raises:
        CaptureError: If what the model reads as one is not known, or its tokens are
            more than a sample has.
    """
    text: InputShape = inputs["input_ids"]
    samples, length = text.shape
    found = dict(inputs)
    marks: list[tuple[int | None, int]] = []
    for medium in _media(module, config):
        token = _id(config, medium.tokens)
        if token is None:
            found |= next(medium.candidates(module, config, samples, count))
            continue
        one, tokens = _tokens_of_one(module, config, medium)
        found |= {key: _repeated(item, samples * count) for key, item in one.items()}
        # A token of text ends each: several in a row are told apart by it.
        marks += [(token, tokens), (None, 1)] * count
    taken = sum(tokens for _, tokens in marks)
    if taken > length:
        raise CaptureError(
            f"seq_len={length} has no room for text beside {taken} tokens of "
            f"images_per_sample={count}; use seq_len={2 * taken} or more, or fewer"
        )
    if marks:
        rest = length - taken
        marks.append((None, rest))
        found["input_ids"] = replace(text, values=tuple(marks) * samples)
        kinds = replace(
            text,
            high=2,
            values=tuple((int(token is not None), n) for token, n in marks) * samples,
        )
        told = _parameters(module.forward)
        found |= {name: kinds for name in _KINDS if name in told}
    return found


def _media(module: torch.nn.Module, config: Any) -> list[_Medium]:
    told = _parameters(module.forward)
    return [
        medium
        for medium in (_PICTURES, _SOUND)
        if medium.reads in told and getattr(config, medium.tower, None) is not None
    ]


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _id(config: Any, keys: Iterable[str]) -> int | None:
    found = (getattr(config, key, None) for key in keys)
    return next((value for value in found if isinstance(value, int)), None)


def _repeated(shape: InputShape, times: int) -> InputShape:
    """Return the input of one medium for several, along dim 0."""
    rows, *rest = shape.shape
    values = None if shape.values is None else shape.values * times
    return replace(shape, shape=(rows * times, *rest), values=values)


def _pictures(
    module: torch.nn.Module, config: Any, samples: int, pictures: int
) -> Iterator[_Shapes]:
    tower = config.vision_config
    told = _parameters(getattr(module, "get_image_features", module.forward))
    channels = next(
        (
            value
            for key in ("in_channels", "in_chans", "num_channels")
            if isinstance(value := getattr(tower, key, None), int)
        ),
        3,
    )
    count = samples * pictures
    if "image_grid_thw" in told:
        patch = tower.patch_size
        step = getattr(tower, "spatial_merge_size", 1)
        side = max(1, _SIDE // (patch * step)) * step
        wide = channels * getattr(tower, "temporal_patch_size", 1) * patch * patch
        yield {
            "pixel_values": _floats(count * side * side, wide),
            "image_grid_thw": _integers((1, side, side), count),
        }
        return
    size = getattr(tower, "image_size", None) or _SIDE
    high, wide = size if isinstance(size, list | tuple) else (size, size)
    whole = _floats(count, channels, high, wide)
    sizes = {"image_sizes": _integers((high, wide), count)}
    if "image_sizes" in told:
        yield {"pixel_values": whole, **sizes}
        for tiles in range(2, _MOST_TILES):
            tiled = _floats(count, tiles, channels, high, wide)
            yield {"pixel_values": tiled, **sizes}
    yield {"pixel_values": whole}
    yield {"pixel_values": _floats(samples, pictures, channels, high, wide)}


def _floats(*shape: int) -> InputShape:
    return InputShape(shape=shape, dtype="float32")


def _integers(row: tuple[int, ...], count: int) -> InputShape:
    return InputShape(
        shape=(count, len(row)),
        dtype="int64",
        high=max(row) + 1,
        values=tuple((value, 1) for value in row) * count,
    )


def _sound(
    module: torch.nn.Module, config: Any, samples: int, recordings: int
) -> Iterator[_Shapes]:
    tower, count = config.audio_config, samples * recordings
    bins = getattr(tower, "num_mel_bins", getattr(tower, "input_dim", 80))
    frames = 2 * int(getattr(tower, "max_source_positions", None) or 1500)
    ones = InputShape(
        shape=(count, frames), dtype="int64", high=2, values=((1, count * frames),)
    )
    told = _parameters(module.forward)
    masks = ("feature_attention_mask", "input_features_mask")
    mask = {name: ones for name in masks if name in told}
    yield {"input_features": _floats(count, bins, frames), **mask}
    yield {"input_features": _floats(count, frames, bins), **mask}


_PICTURES = _Medium(
    name="picture",
    tower="vision_config",
    reads="pixel_values",
    features="get_image_features",
    tokens=("image_token_id", "image_token_index", "media_placeholder_token_id"),
    candidates=_pictures,
)
_SOUND = _Medium(
    name="recording",
    tower="audio_config",
    reads="input_features",
    features="get_audio_features",
    tokens=("audio_token_id", "audio_token_index"),
    candidates=_sound,
)


def _tokens_of_one(
    module: torch.nn.Module, config: Any, medium: _Medium
) -> tuple[_Shapes, int]:
    """Return what a model reads of one medium, and how many tokens that becomes.

    Raises:
        CaptureError: If it reads one in none of the known shapes.
    """
    why = f"it has no {medium.features}"
    if callable(getattr(module, medium.features, None)):
        mode = fake_mode(valued=True)
        copy: Any = fake_copy(module, mode, None)
        for inputs in medium.candidates(module, config, 1, 1):
            try:
                return inputs, _count(copy, mode, inputs, medium.features)
            except Exception as error:
                text = " ".join(str(error).split())[:120]
                why = f"{type(error).__name__}: {text}"
    raise CaptureError(
        f"{type(module).__name__} reads a {medium.name} as {medium.reads}, of a shape "
        f"that is not known here ({why}), and without one its {medium.tower} computes "
        f"nothing; give example_inputs of its processor by a function module:factory, "
        f"or train on text alone: images_per_sample=0"
    )


def _count(
    module: Any, mode: Any, inputs: Mapping[str, InputShape], features: str
) -> int:
    """Run a tower on fake tensors and count the tokens that come out."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)
    tracer = Tracer(module, op_budget=_MOST_OPS, hooks=False, shapes=ShapeCache(mode))

    def made(shape: InputShape) -> torch.Tensor:
        if shape.values is not None:
            return known_tensor(mode, shape.known)
        return torch.zeros(shape.shape, dtype=dtype)

    with (
        quiet_state(),
        warnings.catch_warnings(),
        mode,
        torch.no_grad(),
        quiet_forward(),
    ):
        warnings.simplefilter("ignore")
        arguments = {name: made(shape) for name, shape in inputs.items()}
        with tracer:
            found = getattr(module, features)(**arguments)
        for kind in ("pooler_output", "last_hidden_state"):
            if getattr(found, kind, None) is not None:
                found = getattr(found, kind)
                break
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)
