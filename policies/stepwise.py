"""Training step by step in a folder, which goes on where it stopped.

The folder has ``checkpoint/`` and TensorBoard events. What a step draws is to depend on
its number alone, so that a run that was stopped ends as one that was not.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from planner.errors import MeshwrightError
from planner.schema import write_atomically
from policies.run_folder import read_settings

__all__ = ["Steps", "StepwiseRun", "drawn", "run_from_shell"]

_Config = TypeVar("_Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """How far a run goes.

    Attributes:
        count: Of steps.
        every: Steps between validations.
        rate: Of learning at first; it falls to nothing along a cosine.
        keep_last: Whether the last state is kept, not the one best on validation.
        stop_after: Steps after which to stop, to be gone on with later; from the last
            validation on, if that is not a multiple of ``every``.
    """

    count: int
    every: int
    rate: float
    keep_last: bool = False
    stop_after: int | None = None

    def rate_at(self, step: int) -> float:
        """Of learning at a step."""
        return self.rate * 0.5 * (1 + float(np.cos(np.pi * step / self.count)))


@dataclass(slots=True, kw_only=True)
class StepwiseRun:
    """Where a run stands.

    Attributes:
        network: That learns.
        optimiser: Of it.
        best: State of the network that is kept.
        best_gain: Its gain on validation.
        done: Steps so far.
    """

    network: nn.Module
    optimiser: torch.optim.Optimizer
    best: dict[str, torch.Tensor] = field(default_factory=dict)
    best_gain: float = -np.inf
    done: int = 0

    def _save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "next.pt"
        torch.save(
            {
                "network": self.network.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "best": self.best,
                "best_gain": self.best_gain,
                "done": self.done,
            },
            path,
        )
        write_atomically(folder / "run.pt", path.read_bytes())
        path.unlink()

    def _load(self, folder: Path) -> None:
        held: dict[str, Any] = torch.load(folder / "run.pt", weights_only=True)
        self.network.load_state_dict(held["network"])
        self.optimiser.load_state_dict(held["optimiser"])
        self.best, self.best_gain = held["best"], float(held["best_gain"])
        self.done = int(held["done"])

    def _judge(self, gain: float, keep: bool = False) -> None:
        if keep or gain > self.best_gain:
            self.best_gain = gain
            state = self.network.state_dict()
            self.best = {name: part.clone() for name, part in state.items()}

    def begin(self, folder: Path, gain: Callable[[], float]) -> None:
        """Take up the run of a folder, or begin one.

        Args:
            folder: Of the run.
            gain: Validates the network as it is.
        """
        if (folder / "checkpoint" / "run.pt").exists():
            self._load(folder / "checkpoint")
        else:
            self._judge(gain())

    def go(
        self,
        folder: Path,
        steps: Steps,
        *,
        step: Callable[[], dict[str, float]],
        gain: Callable[[], float],
        watch: Callable[..., None] | None = None,
    ) -> None:
        """Go on to the end; the network is then the one that is kept.

        Args:
            folder: Of the run.
            steps: How far.
            step: Makes one, up to the slopes; what it returns is told by name.
            gain: Validates the network.
            watch: Told of steps done, of the last ones' means, and of the gain.
        """
        told: list[dict[str, float]] = []
        last = min(steps.count, steps.stop_after or steps.count)
        with SummaryWriter(str(folder / "events")) as events:
            while self.done < last:
                for part in self.optimiser.param_groups:
                    part["lr"] = steps.rate_at(self.done)
                self.optimiser.zero_grad()
                told.append(step())
                nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
                self.optimiser.step()
                self.done += 1
                if self.done % steps.every and self.done < steps.count:
                    continue
                found = gain()
                means = {n: float(np.mean([t[n] for t in told])) for n in told[0]}
                told.clear()
                self._judge(found, steps.keep_last)
                self._save(folder / "checkpoint")
                for name, mean in means.items():
                    events.add_scalar(f"train/{name}", mean, self.done)
                events.add_scalar("validation/gain", found, self.done)
                if watch is not None:
                    watch(self.done, *means.values(), found)
        self.network.load_state_dict(self.best)


def drawn(count: int, most: int, rng: np.random.Generator) -> list[int]:
    """Some of the numbers below ``count``, each once."""
    found: list[int] = rng.choice(count, min(count, most), replace=False).tolist()
    return found


def run_from_shell(
    arguments: Sequence[str] | None,
    about: str | None,
    default: _Config,
    train: Callable[[_Config, str], object],
    log: logging.Logger,
) -> int:
    """Train from the command line; the exit code of the error if an input is wrong.

    Args:
        arguments: ``--out DIR`` and, if wanted, ``--settings FILE.json``.
        about: What is trained.
        default: Settings that the file does not name.
        train: Does it, in a folder.
        log: Is told of errors.
    """
    parser = argparse.ArgumentParser(description=(about or "").split("\n", 1)[0])
    parser.add_argument("--out", required=True, metavar="DIR")
    parser.add_argument("--settings", metavar="FILE.json")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    try:
        config = default
        if options.settings:
            config = read_settings(options.settings, config)
        train(config, options.out)
    except MeshwrightError as error:
        log.error("%s", error)
        return error.exit_code
    return 0
