"""Models by name: built in, from a transformers config, or one's own.

``llama3-8b`` is built in (``data/models.yaml``); ``hf:PATH`` reads a ``config.json``,
the folder that holds one, or that of an adapter; ``package.module:factory`` imports
one's own code, and is only followed where a user names it; :func:`load_config` takes
the fields of a config themselves. Nothing is downloaded and no weight is allocated.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from planner.adapters import ADAPTER_CONFIG, Adapter, adapter_base
from planner.capture.fakes import build_on_meta
from planner.capture.inputs import InputShape
from planner.capture.volumes import VOLUME_SOURCES, volume_inputs, volume_models
from planner.errors import CaptureError, MeshwrightError, UnknownNameError
from planner.reading import parse_json, read_text

__all__ = [
    "Architecture",
    "LoadedModel",
    "architectures",
    "built_in_models",
    "load_config",
    "load_model",
    "model_names",
]

#: Default tokens per sample where a config allows more.
_LONGEST_DEFAULT = 8192
_LENGTHS = ("max_position_embeddings", "n_positions")

#: Largest config.json; some list names of their labels.
_MOST_BYTES = 4 * 10**6
#: Most of what a model has a module, or a name, for each of, by words in the field's
#: name, and the largest of any other number.
_MOST = (
    (re.compile(r"(^|_)(n_?layers?|layers?|blocks?|depths?|stages?)(_|$)"), 2048),
    (re.compile(r"(^|_)(experts?|heads?|groups?)(_|$)"), 2**16),
    (re.compile(r"(^|_)labels?(_|$)"), 10**6),
)
_SIZES = re.compile(r"(^|_)(size|dim|vocab)(_|$)")
_MOST_SIZE = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A built-in model of transformers with its figures.

    Attributes:
        config: Name of the config class.
        model: Name of the model class.
        source: Where the figures are published.
        figures: Arguments of the config class that differ from its defaults.
        seq_len: Tokens per sample by default; None takes it from the config.
    """

    config: str
    model: str
    source: str
    figures: Mapping[str, Any]
    seq_len: int | None = None


@cache
def architectures() -> Mapping[str, Architecture]:
    """Built-in models by name."""
    text = Path(__file__).with_name("data").joinpath("models.yaml").read_text("utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return {
        name: Architecture(
            config=family["config"],
            model=family["model"],
            source=entry.get("source") or family["source"],
            figures={**family.get("shared", {}), **entry["figures"]},
            seq_len=family.get("seq_len"),
        )
        for family in yaml.load(text, loader)  # noqa: S506 - both loaders are safe
        for name, entry in family["models"].items()
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be built, and inputs to run it with.

    Attributes:
        name: For people.
        ref: Name it was asked for by; None for the fields of a config.
        build: Makes the module; on the meta device no weight is allocated.
        inputs: Arguments of forward, as
            :func:`planner.capture.inputs.read_inputs` takes them.
        seq_len: Tokens per sample; None without a sequence.
        config: Of transformers; None for own code.
        made: Makes a module of such a config.
        images: Pictures, or recordings, of each sample, if the model reads any beside
            its text.
    """

    name: str
    ref: str | None
    build: Callable[[], torch.nn.Module]
    inputs: Any
    seq_len: int | None = None
    config: Any = None
    made: Callable[[Any], torch.nn.Module] | None = None
    images: int = 0


def model_names() -> tuple[str, ...]:
    """Names of the built-in models, sorted."""
    return tuple(sorted((*architectures(), *volume_models())))


def built_in_models() -> dict[str, tuple[str, str]]:
    """Class and source of the figures of each built-in model, by name, sorted."""
    found = {name: (one.model, one.source) for name, one in architectures().items()}
    for name in volume_models():
        kind = name.partition("-")[0]
        found[name] = VOLUME_SOURCES[kind]
    return dict(sorted(found.items()))


def load_model(
    ref: str,
    *,
    seq_len: int | None = None,
    batch: int = 1,
    allow_remote_code: bool = False,
    images_per_sample: int = 1,
) -> LoadedModel:
    """Return a model by name.

    Args:
        ref: A built-in name, ``hf:PATH``, or ``module:factory``, where the factory
            takes no arguments and returns a module or ``(module, example inputs)``.
        seq_len: Tokens per sample; from the config by default, at most 8,192.
        batch: Samples.
        allow_remote_code: Whether code that comes with a ``hf:`` folder may run.
        images_per_sample: Pictures, or recordings, of each sample of a model of
            transformers that reads any; 0 for text alone.

    Raises:
        UnknownNameError: If no built-in model has that name.
        CaptureError: If the config cannot be read or asks to run its own code.
    """
    if batch < 1 or (seq_len is not None and seq_len < 1):
        raise CaptureError(
            f"batch={batch} and seq_len={seq_len} must be at least 1; use larger ones"
        )
    if images_per_sample < 0:
        raise CaptureError(
            f"images_per_sample={images_per_sample} is negative; use 0 for text alone"
        )
    if ref.startswith("hf:"):
        found = _from_path(ref, seq_len, batch, allow_remote_code)
        return replace(found, images=found.images * images_per_sample)
    if ":" in ref:
        return _from_code(ref)
    if ref in volume_models():
        return LoadedModel(
            name=ref,
            ref=ref,
            build=volume_models()[ref],
            inputs=volume_inputs(ref, batch),
        )
    if ref not in architectures():
        raise UnknownNameError("model", ref, model_names())
    entry = architectures()[ref]
    library = _transformers()
    config = getattr(library, entry.config)(**entry.figures)
    made = getattr(library, entry.model)
    return _loaded(
        ref, ref, config, made, seq_len=seq_len or entry.seq_len, batch=batch
    )


def load_config(
    data: Mapping[str, Any],
    *,
    name: str | None = None,
    seq_len: int | None = None,
    batch: int = 1,
    images_per_sample: int = 1,
) -> LoadedModel:
    """Return a model from the fields of a transformers config; runs no code of its own.

    Args:
        data: As in ``config.json``: ``model_type``, what differs from its defaults,
            and ``architectures`` where the model is no language model.
        name: For people; the model type by default.
        seq_len: As for :func:`load_model`.
        batch: Samples.
        images_per_sample: As for :func:`load_model`.

    Raises:
        CaptureError: If transformers knows no such config, or a field is wrong.
    """
    _require_buildable(data, "the config")
    given = dict(data)
    kind = given.pop("model_type", None)
    if not isinstance(kind, str):
        raise CaptureError(
            f"a config has model_type={kind!r}; give the name of a model type of "
            f"transformers, such as 'llama'"
        )
    # Entries for code of another repository; the classes of transformers are used.
    given.pop("auto_map", None)
    library = _transformers()
    try:
        config = library.AutoConfig.for_model(kind, **given)
    except Exception as error:  # config classes run code of their own
        raise CaptureError(
            f"config of model_type={kind!r} is none that transformers "
            f"{library.__version__} reads: {' '.join(str(error).split())[:200]}; "
            f"correct its fields"
        ) from error
    made = _model_class(library, config, data, allow_remote_code=False)
    found = _loaded(name or kind, None, config, made, seq_len=seq_len, batch=batch)
    return replace(found, images=found.images * images_per_sample)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise CaptureError(
            "this model needs transformers, which is not installed; run "
            "pip install 'meshwright[hf]'"
        ) from error


def _config_data(path: Path) -> dict[str, Any]:
    """Read the JSON of a config, and check that it is one."""
    try:
        text = read_text(path, "config", most=_MOST_BYTES, error=CaptureError)
    except CaptureError as error:
        raise CaptureError(
            f"hf:{path}: {error}; name a config.json of transformers or the folder "
            f"that holds one, already on this machine"
        ) from error
    # Some published configs have infinities among their generation settings.
    data = parse_json(text, f"hf:{path}", "config", plain=False, error=CaptureError)
    if not isinstance(data, dict) or "model_type" not in data:
        raise CaptureError(
            f"hf:{path} has no 'model_type'; give a config.json of transformers"
        )
    _require_buildable(data, f"hf:{path}")
    return data


def _require_buildable(data: Mapping[str, Any], where: str) -> None:
    """Refuse numbers of modules, and sizes, that no model has.

    Raises:
        CaptureError: Naming the first such field and the most that is read.
    """
    inner: list[Mapping[str, Any]] = [data]
    while inner:
        part = inner.pop()
        for name, value in part.items():
            if isinstance(value, Mapping):
                inner.append(value)
                continue
            most = _most(str(name))
            for number in value if isinstance(value, list | tuple) else (value,):
                if isinstance(number, Mapping):
                    inner.append(number)
                elif isinstance(number, int) and abs(number) > most:
                    raise CaptureError(
                        f"{where} has {name}={number}; at most {most:,} is read"
                    )


def _most(name: str) -> int:
    """Largest whole number of a field."""
    if _SIZES.search(name):
        return _MOST_SIZE
    return next((most for words, most in _MOST if words.search(name)), _MOST_SIZE)


def _from_path(
    ref: str, seq_len: int | None, batch: int, allow_remote_code: bool
) -> LoadedModel:
    try:
        given = Path(ref.removeprefix("hf:")).expanduser()
    except RuntimeError as error:
        raise CaptureError(f"{ref}: {error} Name the path without ~") from error
    adapter = None
    name = None
    if (given / ADAPTER_CONFIG).is_file():
        adapter, name = Adapter.read(given), given.name
        given = adapter_base(given)
    path = given / "config.json" if given.is_dir() else given
    data = _config_data(path)
    if "auto_map" in data and not allow_remote_code:
        raise CaptureError(
            f"hf:{path} has auto_map={data['auto_map']!r}, which would run code that "
            f"came with the model; read it, then give --allow-remote-code (in Python "
            f"load_model(..., allow_remote_code=True)), or remove auto_map to use the "
            f"class that transformers has"
        )
    library = _transformers()
    try:
        config = library.AutoConfig.from_pretrained(
            str(path.parent) if path.name == "config.json" else str(path),
            trust_remote_code=allow_remote_code,
            local_files_only=True,
        )
    except Exception as error:  # config classes run code of their own
        raise CaptureError(
            f"hf:{path} is not a config that transformers {library.__version__} reads: "
            f"{' '.join(str(error).split())[:200]}; check model_type="
            f"{data['model_type']!r}"
        ) from error
    made = _model_class(library, config, data, allow_remote_code)
    if adapter is not None:
        made = _adapted(made, adapter)
    name = name or (path.parent.name if path.name == "config.json" else path.stem)
    return _loaded(
        name or str(data["model_type"]), ref, config, made, seq_len=seq_len, batch=batch
    )


def _adapted(
    made: Callable[[Any], torch.nn.Module], adapter: Adapter
) -> Callable[[Any], torch.nn.Module]:
    return lambda config: adapter.add(made(config))


def _model_class(
    library: Any, config: Any, data: Mapping[str, Any], allow_remote_code: bool
) -> Callable[[Any], torch.nn.Module]:
    """Return the class that the config names, or an automatic choice by its type."""
    named = data.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    own = getattr(library, first, None) if isinstance(first, str) else None
    if own is not None and isinstance(own, type) and issubclass(own, torch.nn.Module):
        return own

    def automatic(_: Any) -> torch.nn.Module:
        for kind in ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel"):
            auto = getattr(library, kind)
            if allow_remote_code or type(config) in auto._model_mapping:
                built: torch.nn.Module = auto.from_config(
                    config, trust_remote_code=allow_remote_code
                )
                return built
        raise CaptureError(
            f"transformers has no model for model_type={config.model_type!r}; name a "
            f"class under 'architectures' in config.json"
        )

    return automatic


def _loaded(
    name: str,
    ref: str | None,
    config: Any,
    made: Callable[[Any], torch.nn.Module],
    *,
    seq_len: int | None,
    batch: int,
) -> LoadedModel:
    try:
        inputs, length = _config_inputs(config, seq_len, batch)
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, MeshwrightError):
            raise
        raise CaptureError(
            f"the config of {name} does not say what its inputs are ({error}); correct "
            f"its sizes"
        ) from error
    return LoadedModel(
        name=name,
        ref=ref,
        build=lambda: made(config),
        inputs=inputs,
        seq_len=length,
        config=config,
        made=made,
        images=1 if "input_ids" in inputs else 0,
    )


def _length(config: Any, seq_len: int | None) -> int:
    """Tokens per sample; checked where positions are learned."""
    longest = next(
        (
            value
            for key in _LENGTHS
            if isinstance(value := getattr(config, key, None), int)
        ),
        None,
    )
    rotary = any(hasattr(config, key) for key in ("rope_parameters", "rope_theta"))
    if seq_len is None:
        return min(longest or 1024, _LONGEST_DEFAULT)
    if longest is not None and seq_len > longest and not rotary:
        raise CaptureError(
            f"seq_len={seq_len} exceeds the {longest} learned positions of this model; "
            f"use at most {longest}"
        )
    return seq_len


def _config_inputs(
    config: Any, seq_len: int | None, batch: int
) -> tuple[dict[str, Any], int | None]:
    """Inputs of forward, and tokens per sample, for a transformers config."""
    source = getattr(config, "text_config", None) or config
    high = getattr(source, "vocab_size", None)

    def tokens(length: int) -> InputShape:
        return InputShape(shape=(batch, length), dtype="int64", high=high or 2)

    inputs: dict[str, Any] = {}
    length: int | None
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        frames = 2 * config.max_source_positions
        inputs["input_features"] = InputShape(
            shape=(batch, config.num_mel_bins, frames), dtype="float32"
        )
        length = min(seq_len or 448, config.max_target_positions)
        inputs["decoder_input_ids"] = tokens(length)
    elif hasattr(config, "image_size") and high is None:
        size = config.image_size
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = getattr(config, "num_channels", 3)
        inputs["pixel_values"] = InputShape(
            shape=(batch, channels, height, width), dtype="float32"
        )
        length = None
    else:
        length = _length(source, seq_len)
        inputs["input_ids"] = tokens(length)
        if getattr(config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = tokens(length)
    if length is not None and hasattr(source, "use_cache"):
        inputs["use_cache"] = False
    return inputs, length


def _from_code(ref: str) -> LoadedModel:
    """Import ``module:factory`` and call the factory."""
    where, _, name = ref.partition(":")
    here = str(Path.cwd())
    added = here not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(where)
    except ImportError as error:
        raise CaptureError(
            f"model {ref!r}: cannot import {where!r} ({error}); give module:factory "
            f"with a module on the Python path or in this folder"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
    factory = getattr(module, name, None)
    if not callable(factory):
        raise CaptureError(
            f"model {ref!r}: {where!r} has no function {name!r}; name one that returns "
            f"a module, or (module, example inputs)"
        )
    inputs: list[Any] = [None]

    def build() -> torch.nn.Module:
        made = factory()
        if isinstance(made, tuple) and len(made) == 2:
            made, inputs[0] = made
        if not isinstance(made, torch.nn.Module):
            raise CaptureError(
                f"model {ref!r}: the factory returned {type(made).__name__}; return an "
                f"nn.Module, or (module, example inputs)"
            )
        return made

    try:
        build_on_meta(build, None, valued=True)
    except CaptureError:
        # Integers that have values may meet tensors that have none.
        build_on_meta(build, None)
    return LoadedModel(name=name, ref=ref, build=build, inputs=inputs[0])
