"""The command ``meshwright train``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from planner.cli.options import OptionalFile
from planner.cli.output import emit_json, emit_table, progress
from planner.cluster.detect import usable_cores
from planner.errors import StrategyError

__all__ = ["TrainCommand", "require_learning"]

#: What is learned.
World = Annotated[
    Literal["job-stream", "job-stream-world"],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="WORLD"),
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
    """What it is to decide: job-stream, which jobs run how on the cluster of the
    benchmark; job-stream-world, the same on any cluster."""
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
        if self.workers < 0:
            raise StrategyError(f"workers={self.workers}; give 0 or more processes")
        watched = _Watched()
        with watched:
            if self.world == "job-stream":
                self._train_replay(watched)
            else:
                self._train_stream(watched)
        if self.json:
            emit_json({"policy": f"{self.out}/policy", "gains": watched.gains})
            return
        rows = [(name, f"{100 * gain:.1f} %") for name, gain in watched.gains.items()]
        emit_table(("validated on", "less blocking than the best baseline"), rows)

    def _processes(self) -> int:
        return self.workers or max(1, int(usable_cores()))

    def _train_replay(self, watched: _Watched) -> None:
        from policies.train import TrainConfig, read_config, train

        config = TrainConfig() if self.config is None else read_config(self.config)
        watched.names = config.laws
        train(config, self.out, workers=self._processes(), watch=watched.tell)

    def _train_stream(self, watched: _Watched) -> None:
        from policies.stream_train import (
            StreamTrainConfig,
            read_stream_config,
            train_stream,
        )

        config = StreamTrainConfig()
        if self.config is not None:
            config = read_stream_config(self.config)
        watched.names = tuple(
            f"{case.world.cluster}, {len(case.world.models)} jobs, load {case.load:g}"
            for case in config.cases
        )
        watched.last = config.improvement.last is not None
        train_stream(config, self.out, workers=self._processes(), watch=watched.tell)


class _Watched:
    """Progress bars of a training run, and the gains of what it would return."""

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        #: Whether the last network is returned instead of the best.
        self.last = False
        self._best: tuple[float, ...] = ()
        self._bars: dict[str, Any] = {}

    @property
    def gains(self) -> dict[str, float]:
        """Of the network that is returned, by what it was validated on."""
        return dict(zip(self.names, self._best, strict=True))

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def tell(self, stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
        """What a run tells of its rounds and evaluations."""
        if self.last or not self._best or sum(gains) > sum(self._best):
            self._best = gains
        if stage not in self._bars:
            self._bars[stage] = progress(of, stage)
        bar = self._bars[stage]
        bar.update(done - bar.n)
        bar.set_postfix(gain=f"{100 * sum(gains) / len(gains):.1f} %")
