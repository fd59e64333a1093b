"""Weights of a network in files: safetensors beside a JSON that describes them.

Nothing is unpickled: weights from elsewhere cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

import pydantic
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import nn

from planner.errors import StrategyError
from planner.schema import write_atomically

__all__ = ["SavedNetwork", "WeightFiles"]

_Network = TypeVar("_Network", bound=nn.Module)


@dataclass(frozen=True, eq=False, kw_only=True)  # no slots: generic
class SavedNetwork(Generic[_Network]):
    """A policy as it is kept.

    Attributes:
        network: That scores.
        notes: What it was trained and validated on.
    """

    network: _Network
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)  # no slots: generic
class WeightFiles(Generic[_Network]):
    """How policies of one kind are kept.

    Attributes:
        kind: What the policy is called in errors.
        name: Of the folder of weights that come with the package.
        version: Of what the files hold: raised when that changes, and weights of
            another one are then refused.
        made: Class of the network, called with its sizes, which it has as ``config``.
        sizes: Class of the sizes, a dataclass.
        names: Of the numbers that the network sees, by what they are of.
    """

    kind: str
    name: str
    version: int
    made: type[_Network]
    sizes: type[Any]
    names: Mapping[str, tuple[str, ...]]

    def shipped_folder(self) -> Path:
        """Of the weights that come with the package."""
        return Path(str(files("policies") / "weights" / self.name))

    def save(self, policy: SavedNetwork[_Network], folder: str | Path) -> None:
        """Write ``policy.safetensors`` and ``config.json``.

        Args:
            policy: To be kept.
            folder: Made if it is not there.
        """
        target, network = Path(folder), policy.network
        target.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: part.detach().contiguous()
            for name, part in network.state_dict().items()
        }
        described = {
            "format_version": self.version,
            "network": asdict(network.config),  # type: ignore[call-overload]
            **self.names,
            "notes": policy.notes,
        }
        # Weights first: a description that is there has its weights beside it.
        write_atomically(target / "policy.safetensors", save(tensors))
        text = json.dumps(described, indent=2) + "\n"
        write_atomically(target / "config.json", text.encode())

    def load(self, folder: str | Path | None = None) -> SavedNetwork[_Network]:
        """Read a policy, ready to be used.

        Args:
            folder: That :meth:`save` wrote; by default the weights that come with the
                package.

        Raises:
            StrategyError: If files are missing, damaged, or of another version.
        """
        source = self.shipped_folder() if folder is None else Path(folder)
        described = _read_description(source, self.sizes, self.kind, self.names)
        path = source / "config.json"
        if described.format_version != self.version:
            raise StrategyError(
                f"{path} has format_version={described.format_version}, this "
                f"Meshwright reads {self.version}; train the policy again, or install "
                f"the version that wrote it"
            )
        for what, ours in self.names.items():
            theirs = getattr(described, what)
            if theirs != ours:
                other = sorted(set(theirs) ^ set(ours)) or "their order"
                raise StrategyError(
                    f"{path} is of a policy with other {what} than this Meshwright's "
                    f"({other} differ); train it again"
                )
        network = self.made(described.network)
        _fill(network, source)
        return SavedNetwork(network=network.eval(), notes=described.notes)


def _read_description(
    source: Path, config: type[Any], kind: str, names: Mapping[str, tuple[str, ...]]
) -> Any:
    fields: dict[str, Any] = {
        "format_version": (int, ...),
        "network": (config, ...),
        **dict.fromkeys(names, (tuple[str, ...], ...)),
        "notes": (dict[str, Any], ...),
    }
    shape = pydantic.create_model(
        "Description", __config__=pydantic.ConfigDict(extra="forbid"), **fields
    )
    path = source / "config.json"
    try:
        return shape.model_validate_json(path.read_bytes())
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); give the folder of a {kind} "
            f"policy, with policy.safetensors and config.json"
        ) from error
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise StrategyError(f"{path}: {where}: {first['msg']}") from error


def _fill(network: nn.Module, source: Path) -> None:
    path = source / "policy.safetensors"
    try:
        network.load_state_dict(load(path.read_bytes()))
    except OSError as error:
        raise StrategyError(
            f"{path} cannot be read ({error.strerror}); it belongs to config.json"
        ) from error
    except SafetensorError as error:
        raise StrategyError(
            f"{path} holds no weights ({error}); copy it again"
        ) from error
    except RuntimeError as error:
        raise StrategyError(
            f"{path} does not go with its config.json "
            f"({' '.join(str(error).split())[:200]}); write both anew"
        ) from error
