"""The command ``meshwright train partition``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from planner.cli.learning import RunFolder, processes, require_learning
from planner.cli.options import OptionalFile, OptionalFloat, OptionalInt, SeqLen
from planner.cli.output import emit_json, emit_table, note, progress

if TYPE_CHECKING:
    from policies.partition.settings import PartitionTrainConfig
    from policies.partition.training import WatchedStep

__all__ = ["TrainPartition"]


@dataclass(frozen=True, kw_only=True)
class TrainPartition:
    """Train the network of plan's learned partitioner.

    With your own clusters or models, training begins with the shipped weights.
    """

    out: RunFolder
    config: OptionalFile = None
    """JSON file of settings that differ from those of the shipped weights."""
    clusters: Annotated[tuple[str, ...], tyro.conf.arg(metavar="CLUSTER")] = ()
    """Your clusters: names as for plan, or files."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="MODEL")] = ()
    """Your models: names or hf:PATH, as for plan."""
    seq_len: SeqLen = None
    start: Annotated[
        str | None, tyro.conf.arg(metavar="new|shipped|FOLDER", help_behavior_hint="")
    ] = None
    """Initial weights; by default shipped with clusters or models, else new."""
    steps: OptionalInt = None
    """Steps of training."""
    minutes: OptionalFloat = None
    """Limit of the time, if it comes first."""
    workers: int = 0
    """Processes; 0 for one a core. All but one prepare worlds; without a limit of
    minutes, the weights do not depend on it."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Train, and print the result on the validation worlds."""
        require_learning()
        workers = processes(self.workers)
        config = self._settings()
        from policies.partition.training import train_partition

        with _Bar(config.steps) as bar:
            made = train_partition(config, self.out, watch=bar.tell, workers=workers)
        found = made.notes["validated_on"]
        if self.json:
            emit_json({"policy": f"{self.out}/policy", **made.notes})
            return
        note(f"wrote {self.out}/policy")
        emit_table(("validated on", str(found["worlds"]), "worlds"), _rows(found))

    def _settings(self) -> PartitionTrainConfig:
        """Read the settings of the file, overridden by the command line."""
        from policies.partition.settings import PartitionTrainConfig
        from policies.run_folder import read_settings

        config = PartitionTrainConfig()
        if self.config is not None:
            config = read_settings(self.config, config)
        given: dict[str, Any] = {
            "clusters": self.clusters or None,
            "models": self.models or None,
            "seq_len": self.seq_len,
            "start": self.start,
            "steps": self.steps,
            "minutes": self.minutes,
        }
        changed = {name: v for name, v in given.items() if v is not None}
        return replace(config, **changed)


def _rows(found: dict[str, Any]) -> list[tuple[str, str, str]]:
    rows = [
        (f"best of the first {count} meshes", f"{100 * regret:.1f} %", "over the best")
        for count, regret in (
            (name.rpartition("_")[2], value)
            for name, value in found.items()
            if name.startswith("regret_at_")
        )
    ]
    for name, title in (
        ("orders_mean", "an order of the hosts"),
        ("orders_best", "the best of ten orders"),
    ):
        saved = -100 * found[name]
        rows.append((title, f"{saved:+.1f} %", "against the plain orders"))
    return rows


class _Bar:
    """A progress bar of a training run."""

    def __init__(self, steps: int) -> None:
        self._bar = progress(steps, "step")

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def tell(self, one: WatchedStep) -> None:
        """Show a step."""
        self._bar.update(one.step - self._bar.n)
        if one.judged is not None:
            found = one.judged
            self._bar.set_postfix(
                regret=f"{found.regret[2]:.3f}",
                orders=f"{found.reward:+.3f}",
                best=one.best,
            )
