"""The folder of a training run: its settings, and its progress."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pydantic
import pydantic_core

from planner.errors import StrategyError, UnknownNameError
from planner.schema import write_atomically

__all__ = ["RunLog", "Watch", "check_training", "describe_run", "read_settings"]

#: Called with a stage, steps done, steps in all, and gains on the validation streams.
Watch = Callable[[str, int, int, tuple[float, ...]], None]

Config = TypeVar("Config")

#: Settings by the names that folders of older runs have.
_RENAMED = {
    "first_lessons": "first_examples",
    "lessons": "examples",
    "lesson_every": "example_every",
}


def check_training(network: int, fit: int, validation: range) -> None:
    """Check settings that trainings of both job streams have.

    Args:
        network: Hidden units of the network.
        fit: Hidden units of the scorer.
        validation: Seeds to validate on.

    Raises:
        StrategyError: If the sizes differ, or there are no seeds.
    """
    if network != fit:
        raise StrategyError(
            f"network.hidden={network}, but improvement ends with {fit} units "
            f"(fit.hidden, and last.hidden for each of last_fits but the first); give "
            f"the same, the network begins as the scorer that was fitted"
        )
    if not validation or validation.start < 0:
        raise StrategyError(
            f"validation_first={validation.start} is not negative, "
            f"validation_count={len(validation)} at least 1"
        )


def read_settings(path: str | Path, default: Config) -> Config:
    """Read settings from a JSON file; missing ones keep their defaults.

    Args:
        path: The file.
        default: Default settings, a dataclass.

    Raises:
        StrategyError: If it cannot be read, or a field is unknown or of a wrong value.
    """
    file = Path(path)
    try:
        data = pydantic_core.from_json(file.read_bytes())
        _know(data, default, "")
        return pydantic.TypeAdapter(type(default)).validate_python(data)
    except OSError as error:
        raise StrategyError(
            f"settings {file} cannot be read ({error.strerror}); give a JSON file"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"settings {file}: {where}: {first['msg']}") from error
    except (ValueError, UnknownNameError) as error:
        raise StrategyError(f"settings {file}: {error}") from error


def _know(data: Any, like: Any, where: str) -> None:
    """Refuse names that settings do not have; pydantic would ignore them silently.

    Raises:
        UnknownNameError: If there is one.
    """
    if not isinstance(data, dict):
        return
    known = [one.name for one in fields(like)]
    for name, value in data.items():
        if name not in known:
            raise UnknownNameError(f"setting{where}", name, known)
        inner = getattr(like, name)
        if is_dataclass(inner):
            _know(value, inner, f"{where or ' of'} {name}")


def _as_json(data: Any) -> bytes:
    return (json.dumps(data, indent=2, default=str) + "\n").encode()


def describe_run(config: Any, run: Path) -> None:
    """Write the settings of a run, or check that it has the same ones.

    Args:
        config: Settings, a dataclass.
        run: Folder of the run, made if it does not exist.

    Raises:
        StrategyError: If the folder holds a run of other settings.
    """
    run.mkdir(parents=True, exist_ok=True)
    path = run / "config.json"
    settings = json.loads(json.dumps(asdict(config)))
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))["settings"]
            held = {_RENAMED.get(name, name): value for name, value in kept.items()}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise StrategyError(
                f"{path} does not hold the settings of a run; give another folder, or "
                f"remove this one, and the run begins anew"
            ) from error
        if held != settings:
            changed = sorted(k for k in settings if settings[k] != held.get(k))
            raise StrategyError(
                f"{run} holds a run of other settings ({', '.join(changed)} differ); "
                f"give its own, or another folder"
            )
        return
    packages = ("meshwright", "torch", "sb3-contrib", "numpy")
    made = {
        "settings": settings,
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "machine": f"{platform.machine()} {platform.system()}",
        "packages": {name: version(name) for name in packages},
    }
    write_atomically(path, _as_json(made))


class RunLog:
    """Writes progress to ``progress.jsonl``.

    Args:
        run: Folder of the run.
        watch: Called at each stage.
    """

    def __init__(self, run: Path, watch: Watch | None = None) -> None:
        self._path, self._watch = run / "progress.jsonl", watch

    def write(self, **line: Any) -> None:
        """Append a line."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"time": now, **line}) + "\n")

    def stage(
        self, stage: str, done: int, of: int, gains: tuple[float, ...], **more: Any
    ) -> None:
        """Append a line with gains on the validation streams, and call ``watch``."""
        self.write(
            stage=stage,
            done=done,
            gains=[round(gain, 4) for gain in gains],
            gain=round(float(np.mean(gains)), 4),
            **more,
        )
        if self._watch is not None:
            self._watch(stage, done, of, gains)
