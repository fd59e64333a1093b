"""Published plans beside the planner's: feasible, priced right, and beaten by what?

python -m benchmarks.best_practice [CONFIGURATIONS.csv] [--only TEXT] [--json]

Each row of ``best_practice/configurations.csv`` (see docs/data.md) is a configuration
that its makers chose, ran and timed. The published plan is priced under its own recipe;
then ``plan()`` answers the same request under that recipe, and says what its pick leans
on. A pick much faster than what practitioners run is more likely an error of the price.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.tables import aligned, piped
from planner.api import plan_graph
from planner.cluster import Cluster
from planner.cost import CostModel
from planner.cost.constants import Calibration
from planner.errors import MeshwrightError
from planner.graph import ModelGraph
from planner.measurements.catalogues import frameworks
from planner.measurements.framework_names import year_of
from planner.measurements.model_configs import graph_of
from planner.measurements.model_shapes import shape_of
from planner.measurements.points import parse_point
from planner.measurements.store import shipped
from planner.request import PlanOptions, make_request
from planner.schema import Precision
from planner.schema.schedules import schedule_spec
from planner.search.refine import candidates_of_row
from planner.space import RECOMPUTE_NAMES
from planner.units import format_bytes

__all__ = ["Answer", "Configuration", "answer", "published_row", "read_configurations"]

#: Share by which a predicted step may miss the measured one, and by which a pick may
#: be faster than the published plan: the goals.
TIME_GOAL, PICK_GOAL = 0.15, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A row: what was trained, on what, how, and how long a step took.

    Attributes:
        title: Model, devices and what is particular, for people.
        source: Publication.
        cluster: Name of a preset.
        global_batch: Samples of a step.
        seq: Tokens of a sample.
        dtype: Compute dtype.
        published: Degrees and knobs, ``pp=8 shard=2 tp=4 …``.
        measured_s: Seconds of a step.
        recipe: Framework whose constants price it.
    """

    title: str
    source: str
    cluster: str
    global_batch: int
    seq: int
    dtype: str
    published: str
    measured_s: float
    recipe: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Verdict of the planner on a configuration.

    Attributes:
        title: Of the configuration.
        recipe: Framework whose constants price it.
        fits: Whether the published plan keeps to the memory that a plan may fill.
        peak_bytes: Predicted of the published plan's fullest device.
        limit_bytes: What a plan may fill of it.
        device_bytes: What it has.
        measured_s, predicted_s: Of the published plan.
        pick: Label of the planner's own plan.
        pick_s: Its predicted step.
        planning_s: Time of planning.
    """

    title: str
    recipe: str
    fits: bool
    peak_bytes: float
    limit_bytes: float
    device_bytes: float
    measured_s: float
    predicted_s: float
    pick: str
    pick_s: float
    planning_s: float

    @property
    def error(self) -> float:
        """Relative error of the predicted step, signed."""
        return self.predicted_s / self.measured_s - 1

    @property
    def gain(self) -> float:
        """Share of the published plan's predicted step that the pick saves."""
        return 1 - self.pick_s / self.predicted_s


def read_configurations(path: Path) -> list[Configuration]:
    """Read the rows of a file.

    Args:
        path: CSV with the columns config, source, cluster, global_batch, seq, dtype,
            published, measured_s, own_recipe.
    """
    with path.open(encoding="utf-8", newline="") as file:
        return [
            Configuration(
                title=row["config"],
                source=row["source"],
                cluster=row["cluster"],
                global_batch=int(row["global_batch"]),
                seq=int(row["seq"]),
                dtype=row["dtype"],
                published=row["published"],
                measured_s=float(row["measured_s"]),
                recipe=row["own_recipe"],
            )
            for row in csv.DictReader(file)
        ]


def _graph(configuration: Configuration) -> ModelGraph:
    """Capture the model that the title begins with."""
    model = re.split(r"\s\d+x", configuration.title)[0]
    cells = {"point_id": "1", "model": model, "gpu": "H100", "n_gpus": "1"}
    cells |= {"seq": str(configuration.seq), "metric": "step_time_s", "value": "1"}
    return graph_of(shape_of(parse_point(cells, configuration.title)))


#: Columns of a strategy table by the names of the file.
_COLUMNS = {
    "pp": "pp",
    "rep": "dp_replicate",
    "shard": "dp_shard",
    "cp": "cp",
    "tp": "tp",
    "ep": "ep",
    "zero": "zero_stage",
    "mb": "microbatch_size",
    "v": "virtual_stages",
}


def published_row(configuration: Configuration) -> dict[str, int]:
    """Return the published plan as a row of :class:`planner.space.StrategyTable`."""
    words = dict(word.split("=") for word in configuration.published.split())
    row = dict.fromkeys(_COLUMNS.values(), 1) | {"zero_stage": 0}
    row |= {name: int(words[word]) for word, name in _COLUMNS.items() if word in words}
    replicas = row["dp_replicate"] * row["dp_shard"]
    schedule = words.get("sched", "1F1B")
    if row["virtual_stages"] > 1:
        schedule = words.get("sched", "Interleaved1F1B")
    row["num_microbatches"] = configuration.global_batch // (
        replicas * row["microbatch_size"]
    )
    row["schedule"] = schedule_spec(schedule).code
    row["recompute"] = RECOMPUTE_NAMES.index(words.get("rec", "none"))
    row["sequence_parallel"] = int(row["tp"] > 1 and words.get("sp") != "False")
    return row


def _as_then(configuration: Configuration) -> Calibration:
    """Shipped constants, with the attention that the framework had in that year."""
    name, known = configuration.recipe, shipped()
    recipe, year = known.recipes[name], year_of(configuration.source) or 0
    for variant in frameworks()[name].variants:
        if variant.year_from <= year <= variant.year_to:
            then = variant.recipe.get("ampere_attention", recipe.ampere_attention)
            recipe = replace(recipe, ampere_attention=then)
    return replace(known, recipes={**known.recipes, name: recipe})


def _options(configuration: Configuration) -> PlanOptions:
    return PlanOptions(
        global_batch=configuration.global_batch,
        recipe=configuration.recipe,
        calibration=_as_then(configuration),
        precision=Precision(
            compute=configuration.dtype,  # type: ignore[arg-type]
            reduce=frameworks()[configuration.recipe].reduce,
        ),
        target="any",
    )


def answer(configuration: Configuration) -> Answer:
    """Price the published plan, and plan the same request.

    Args:
        configuration: A row.
    """
    graph, cluster = _graph(configuration), Cluster.parse(configuration.cluster)
    options = _options(configuration)
    request = make_request(graph, cluster, options)
    row = published_row(configuration)
    devices = int(row["pp"] * row["dp_replicate"] * row["dp_shard"])
    devices *= row["cp"] * row["tp"]
    context = replace(request.context, order=request.context.order[:devices])
    found = candidates_of_row(CostModel(context), row, free_recompute=False)
    cost = min(found, key=lambda one: (not one.cost.fits, one.cost.step_time_s)).cost
    fullest = int((cost.memory.total - cost.limit_bytes).argmax())
    started = time.perf_counter()
    try:
        made = plan_graph(graph, cluster, options)
        pick, pick_s = made.strategy.label(), made.prediction.step_time_s
    except MeshwrightError as error:
        pick, pick_s = f"none: {error}".splitlines()[0], float("nan")
    return Answer(
        title=configuration.title,
        recipe=configuration.recipe,
        fits=bool(cost.fits),
        peak_bytes=float(cost.memory.total[fullest]),
        limit_bytes=float(cost.limit_bytes[fullest]),
        device_bytes=float(cost.limit_bytes[fullest]) / context.memory_fraction,
        measured_s=configuration.measured_s,
        predicted_s=cost.step_time_s,
        pick=pick,
        pick_s=pick_s,
        planning_s=time.perf_counter() - started,
    )


def _lines(answers: Sequence[Answer]) -> list[tuple[str, ...]]:
    heads = ("configuration", "recipe", "fits", "peak", "measured", "predicted")
    lines: list[tuple[str, ...]] = [(*heads, "error", "pick", "its step", "saves")]
    for one in answers:
        memory = f"{format_bytes(one.peak_bytes)} of {format_bytes(one.device_bytes)}"
        times = (f"{one.measured_s:.2f} s", f"{one.predicted_s:.2f} s")
        verdict = "no" if one.peak_bytes > one.device_bytes else "tight"
        cells = (one.title, one.recipe, "yes" if one.fits else verdict, memory, *times)
        pick = (one.pick, f"{one.pick_s:.2f} s", f"{one.gain:.0%}")
        lines.append((*cells, f"{one.error:+.0%}", *pick))
    return lines


def _summary(answers: Sequence[Answer]) -> str:
    within = sum(one.fits for one in answers)
    fits = sum(one.peak_bytes <= one.device_bytes for one in answers)
    near = sum(abs(one.error) <= TIME_GOAL for one in answers)
    calm = sum(one.gain <= PICK_GOAL for one in answers)
    error = statistics.fmean(abs(one.error) for one in answers)
    return (
        f"{fits} of {len(answers)} published plans fit the device, {within} of them "
        f"within the share that plans may fill; {near} within "
        f"{TIME_GOAL:.0%} of measured, {error:.1%} on average; {calm} picks at most "
        f"{PICK_GOAL:.0%} faster than what was published"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--only", default="", help="rows whose title has this text")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    args = parser.parse_args(argv)
    path = args.file
    if path is None:
        folder = os.environ.get("MESHWRIGHT_DATA")
        if not folder:
            parser.error("give a file, or set MESHWRIGHT_DATA; see docs/data.md")
        path = Path(folder) / "best_practice" / "configurations.csv"
    rows = [one for one in read_configurations(path) if args.only in one.title]
    answers = [answer(one) for one in rows]
    if args.json:
        print(json.dumps([asdict(one) for one in answers], indent=1))
    else:
        table = (piped if args.markdown else aligned)(_lines(answers))
        print(table, _summary(answers), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
