"""The commands ``meshwright train job-stream`` and ``train job-stream-world``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from planner.cli.learning import RunFolder, processes, require_learning
from planner.cli.options import OptionalFile
from planner.cli.output import emit_json, emit_table, progress

__all__ = ["TrainJobStream", "TrainJobStreamWorld"]


@dataclass(frozen=True, kw_only=True)
class TrainJobStream:
    """Train a policy of the job stream on the benchmark's cluster."""

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from those of the shipped policy."""
    workers: int = 0
    """Processes; 0 for one a core. The policy does not depend on it."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and print the gains on the validation streams."""
        require_learning()
        workers = processes(self.workers)
        from policies.ramp.training import TrainConfig, train
        from policies.run_folder import read_settings

        config = TrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        with _Watched(config.laws) as watched:
            train(config, self.out, workers=workers, watch=watched.tell)
        watched.report(self.out, as_json=self.json)


@dataclass(frozen=True, kw_only=True)
class TrainJobStreamWorld:
    """Train a policy of the job stream on any cluster."""

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from those of the shipped policy."""
    workers: int = 0
    """Processes; 0 for one a core. The policy does not depend on it."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and print the gains on the validation streams."""
        require_learning()
        workers = processes(self.workers)
        from policies.run_folder import read_settings
        from policies.stream.training import StreamTrainConfig, train_stream

        config = StreamTrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        names = tuple(
            f"{case.world.cluster}, {len(case.world.models)} jobs, "
            + (f"{case.world.max_waiting} may wait, " if case.world.max_waiting else "")
            + f"load {case.load:g}"
            for case in config.cases
        )
        last = config.improvement.last is not None
        with _Watched(names, last=last) as watched:
            train_stream(config, self.out, workers=workers, watch=watched.tell)
        watched.report(self.out, as_json=self.json)


class _Watched:
    """Progress bars of a training run, and the gains of the policy it returns.

    Args:
        names: Names of the validation cases.
        last: Whether the last network is returned instead of the best.
    """

    def __init__(self, names: tuple[str, ...], *, last: bool = False) -> None:
        self._names, self._last = names, last
        self._best: tuple[float, ...] = ()
        self._bars: dict[str, Any] = {}

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        for bar in self._bars.values():
            bar.close()

    def tell(self, stage: str, done: int, of: int, gains: tuple[float, ...]) -> None:
        """Show a round or an evaluation."""
        if self._last or not self._best or sum(gains) > sum(self._best):
            self._best = gains
        if stage not in self._bars:
            self._bars[stage] = progress(of, stage)
        bar = self._bars[stage]
        bar.update(done - bar.n)
        bar.set_postfix(gain=f"{100 * sum(gains) / len(gains):.1f} %")

    def report(self, out: str, *, as_json: bool) -> None:
        """Print the gains of the returned network."""
        gains = dict(zip(self._names, self._best, strict=True))
        if as_json:
            emit_json({"policy": f"{out}/policy", "gains": gains})
            return
        rows = [(name, f"{100 * gain:.1f} %") for name, gain in gains.items()]
        emit_table(("validated on", "less blocking than the best baseline"), rows)
