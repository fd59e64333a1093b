"""The command ``meshwright train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from planner.cli.options import OptionalFile
from planner.cli.output import emit_json, emit_table, progress
from planner.cluster.detect import usable_cores
from planner.errors import StrategyError

if TYPE_CHECKING:
    from policies.train import TrainConfig

__all__ = ["TrainCommand", "require_learning"]

#: What is learned: the only world so far.
World = Annotated[
    Literal["job-stream"], tyro.conf.Positional, tyro.conf.arg(metavar="WORLD")
]


def require_learning() -> None:
    """Refuse before long work where the packages that learn are not installed.

    Raises:
        StrategyError: With the command that installs them.
    """
    try:
        import gymnasium  # noqa: F401
        import sb3_contrib  # noqa: F401
        import torch_geometric  # noqa: F401
    except ImportError as error:
        raise StrategyError(
            f"{error.name} is not installed; learning needs pip install "
            f"'meshwright[learn]'"
        ) from error


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a policy of one's own; called again with the same --out, it goes on."""

    world: World
    """What it is to decide: job-stream, which jobs run how on a shared cluster."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """Of the run: settings, checkpoints, TensorBoard's files, and the policy."""
    config: OptionalFile = None
    """Settings that differ from those of the policy that is shipped, as JSON."""
    workers: int = 0
    """Processes; as many as there are cores if 0. The policy does not depend on it."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and say how the policy does on the validation streams."""
        require_learning()
        from policies.train import TrainConfig, read_config

        if self.workers < 0:
            raise StrategyError(f"workers={self.workers}; give 0 or more processes")
        config = TrainConfig() if self.config is None else read_config(self.config)
        gains = self._train(config)
        if self.json:
            emit_json({"policy": f"{self.out}/policy", "gains": gains})
            return
        rows = [(law, f"{100 * gain:.1f} %") for law, gain in gains.items()]
        emit_table(("law", "less blocking than the best constant"), rows)

    def _train(self, config: TrainConfig) -> dict[str, float]:
        from policies.train import train

        best: tuple[float, ...] = ()
        workers = self.workers or max(1, int(usable_cores()))
        bars: dict[str, Any] = {}

        def watch(stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
            nonlocal best
            if sum(gains) > sum(best, start=-1e9):
                best = gains
            if stage not in bars:
                bars[stage] = progress(of, stage)
            bars[stage].update(done - bars[stage].n)
            bars[stage].set_postfix(gain=f"{100 * sum(gains) / len(gains):.1f} %")

        try:
            train(config, self.out, workers=workers, watch=watch)
        finally:
            for bar in bars.values():
                bar.close()
        return dict(zip(config.laws, best, strict=True))
