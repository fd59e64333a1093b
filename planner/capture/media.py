"""Default pictures for models of transformers that read text and pictures.

A processor turns pictures into patches and marks their places in the text by tokens of
their own. A config alone says how large the pictures of its vision tower are; how many
tokens one becomes is asked of the model itself, on tensors without memory.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from planner.capture.fakes import fake_copy, quiet_state
from planner.capture.inputs import InputShape
from planner.capture.private_apis import fake_mode, known_tensor, quiet_forward
from planner.capture.shapes import ShapeCache
from planner.capture.trace import Tracer
from planner.errors import CaptureError

__all__ = ["has_vision", "with_pictures"]

#: Most ops of a vision tower.
_MOST_OPS = 500_000
#: Pixels along each side of a picture where the config leaves its size to the data.
_SIDE = 448
#: One more than the most parts, and the whole, that a model cuts a picture into.
_MOST_TILES = 8
#: Names of the token that stands for a piece of a picture.
_TOKENS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
#: Inputs that tell a token of a picture (1) from one of text (0).
_KINDS = ("mm_token_type_ids", "token_type_ids")


def has_vision(module: torch.nn.Module, config: Any) -> bool:
    """Return True if a model's forward reads pictures beside its text."""
    tower = getattr(config, "vision_config", None)
    return tower is not None and "pixel_values" in _parameters(module.forward)


def with_pictures(
    module: torch.nn.Module, config: Any, inputs: Mapping[str, Any], pictures: int
) -> dict[str, Any]:
    """Return inputs of forward with pictures, and their places in the text.

    Args:
        module: On any device; it is not run.
        config: Of transformers.
        inputs: Text; ``input_ids`` has shape [samples, tokens].
        pictures: For each sample.

    Raises:
        CaptureError: If what the model reads as a picture is not known, or its tokens
            are more than a sample has.
    """
    text: InputShape = inputs["input_ids"]
    samples, length = text.shape
    token = next(
        (found for key in _TOKENS if (found := _id(config, key)) is not None), None
    )
    if token is None:
        made = next(_candidates(module, config, samples, pictures))
        return {**inputs, **made}
    one, tokens = _tokens_of_one(module, config)
    taken = pictures * tokens
    if taken >= length:
        raise CaptureError(
            f"seq_len={length} has no room for text beside images_per_sample="
            f"{pictures} of {tokens} tokens; use seq_len={2 * taken} or more, or fewer "
            f"pictures"
        )
    media = {name: _repeated(shape, samples * pictures) for name, shape in one.items()}

    def marked(inside: int, outside: int | None, like: InputShape) -> InputShape:
        runs = ((inside, taken), (outside, length - taken)) * samples
        return InputShape(
            shape=like.shape, dtype=like.dtype, high=like.high, values=runs
        )

    kinds = InputShape(shape=text.shape, dtype="int64", high=2)
    told = _parameters(module.forward)
    return {
        **inputs,
        "input_ids": marked(token, None, text),
        **media,
        **{name: marked(1, 0, kinds) for name in _KINDS if name in told},
    }


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _id(config: Any, key: str) -> int | None:
    found = getattr(config, key, None)
    return found if isinstance(found, int) else None


def _repeated(shape: InputShape, times: int) -> InputShape:
    """Return one picture's input for several, along dim 0."""
    rows, *rest = shape.shape
    return InputShape(
        shape=(rows * times, *rest),
        dtype=shape.dtype,
        high=shape.high,
        values=None if shape.values is None else shape.values * times,
    )


def _candidates(
    module: torch.nn.Module, config: Any, samples: int, pictures: int
) -> Iterator[dict[str, InputShape]]:
    """Shapes that a model may read one picture in, the likeliest first."""
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


def _tokens_of_one(
    module: torch.nn.Module, config: Any
) -> tuple[dict[str, InputShape], int]:
    """Return what a model reads of one picture, and how many tokens that becomes.

    Raises:
        CaptureError: If it reads pictures in none of the known shapes.
    """
    why = ""
    if callable(getattr(module, "get_image_features", None)):
        mode = fake_mode(valued=True)
        copy: Any = fake_copy(module, mode, None)
        for inputs in _candidates(module, config, 1, 1):
            try:
                return inputs, _count(copy, mode, inputs)
            except Exception as error:
                text = " ".join(str(error).split())[:120]
                why = f"{type(error).__name__}: {text}"
    held = sum(
        part.numel() for name, part in module.named_parameters() if "vis" in name
    )
    raise CaptureError(
        f"{type(module).__name__} has a vision tower ({held:,} parameters), and what "
        f"it reads as a picture is not known ({why or 'no get_image_features'}); give example_inputs of its "
        f"processor by a function module:factory, or train on text alone: "
        f"images_per_sample=0"
    )


def _count(module: Any, mode: Any, inputs: Mapping[str, InputShape]) -> int:
    """Run the vision tower on fake tensors and count the tokens that come out."""
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
            found = module.get_image_features(**arguments)
        found = getattr(found, "pooler_output", found)
    parts = found if isinstance(found, list | tuple) else [found]
    return sum(part.numel() // part.shape[-1] for part in parts)
