"""Time that pipelines save which are cut along ideals, not along the line of units.

    python -m benchmarks.cuts_along_ideals [--models NAME ...] [--docs docs]

Where the units of a model form no chain (two towers), a stage may hold layers of both:
any chain of ideals (sets of units that hold with each unit all that it reads) is a
pipeline, if values are relayed over every boundary between the stage that makes them
and the last that reads them. It is also a cut of the units in some other topological
order, so that the best chain of ideals is the best cut of the best order.

For each model, machine, pipeline degree and number of microbatches the exhaustive
partitioner plans once. *line* is its best step whose stages follow program order,
*ideals* the best of all that it priced, among them the same rows cut exactly along
ideals (:mod:`planner.search.ideals`). Both are steps of the project's simulator, with
relayed values and memory limits. The figure is the share of the step that ideals save:
with the schedule held at 1F1B, with the best schedule of each, and with the whole
strategy left free, as a plan has it. --docs writes a dated table there.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.tables import cpu_name, piped, report_name
from planner import Cluster
from planner.capture import capture, load_model
from planner.graph import ModelGraph
from planner.request import PlanOptions, make_request
from planner.schema import Strategy
from planner.search.exhaustive import ExhaustivePartitioner
from planner.search.ideals import ideals_of

__all__ = ["MODELS", "Row", "compare", "main"]

MACHINES = ("dgx-a100:1", "a40-pcie:1")


class _ResidualBlock(nn.Module):
    """Two convolutions with group norms and a time embedding, as in DDPM."""

    def __init__(self, inside: int, outside: int, embedding: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, 1, 1)
        )
        self.time = nn.Linear(embedding, outside)
        self.second = nn.Sequential(
            nn.GroupNorm(32, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, 1, 1)
        )
        self.skip = nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(hidden)


class UNet(nn.Module):
    """A U-Net with skip connections, of the size of a diffusion model's."""

    def __init__(
        self, width: int = 256, levels: tuple[int, ...] = (1, 2, 3, 4)
    ) -> None:
        super().__init__()
        embedding = 4 * width
        self.embed = nn.Sequential(
            nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding)
        )
        self.stem = nn.Conv2d(4, width, 3, 1, 1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        held, channels = [width], width
        for level, factor in enumerate(levels):
            for _ in range(3):
                self.down.append(_ResidualBlock(channels, width * factor, embedding))
                channels = width * factor
                held.append(channels)
            if level < len(levels) - 1:
                self.down.append(nn.Conv2d(channels, channels, 3, 2, 1))
                held.append(channels)
        self.middle = _ResidualBlock(channels, channels, embedding)
        for level, factor in reversed(list(enumerate(levels))):
            for _ in range(4 if level < len(levels) else 3):
                given = channels + held.pop()
                self.up.append(_ResidualBlock(given, width * factor, embedding))
                channels = width * factor
            if level:
                self.up.append(nn.Upsample(scale_factor=2.0))
        self.head = nn.Conv2d(channels, 4, 3, 1, 1)

    def forward(self, sample: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        time = self.embed(step)
        x = self.stem(sample)
        held = [x]
        for part in self.down:
            x = part(x, time) if isinstance(part, _ResidualBlock) else part(x)
            held.append(x)
        x = self.middle(x, time)
        for part in self.up:
            if isinstance(part, _ResidualBlock):
                x = part(torch.cat([x, held.pop()], dim=1), time)
            else:
                x = part(x)
        return self.head(x)


def _towers(
    kind: str, vision: Mapping[str, int], text: Mapping[str, int], **more: Any
) -> ModelGraph:
    """An image and a text encoder under a contrastive loss, from transformers."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vision_config=dict(vision), text_config=dict(text), **more
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}Model")(config)
    side = vision["image_size"]
    length = config.text_config.max_position_embeddings
    inputs = {
        "input_ids": ((2, length), "int64"),
        "pixel_values": ((2, 3, side, side), "float32"),
        "return_loss": True,
    }
    return capture(model, inputs)


def _encoder(
    hidden: int, inner: int, layers: int, heads: int, **more: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }


def _unet() -> ModelGraph:
    with torch.device("meta"):
        model = UNet()
    return capture(
        model, {"sample": ((2, 4, 64, 64), "float32"), "step": ((2, 256), "float32")}
    )


#: Models by name, and the global batch they are trained with.
MODELS: dict[str, tuple[Callable[[], ModelGraph], int]] = {
    # Sizes: openai/clip-vit-large-patch14, laion/CLIP-ViT-bigG-14-laion2B-39B-b160k,
    # google/siglip-so400m-patch14-384.
    "clip-l14": (
        lambda: _towers(
            "CLIP",
            _encoder(1024, 4096, 24, 16, patch_size=14, image_size=224),
            _encoder(768, 3072, 12, 12),
            projection_dim=768,
        ),
        1024,
    ),
    "clip-bigg14": (
        lambda: _towers(
            "CLIP",
            _encoder(1664, 8192, 48, 16, patch_size=14, image_size=224),
            _encoder(1280, 5120, 32, 20),
            projection_dim=1280,
        ),
        512,
    ),
    "siglip-so400m": (
        lambda: _towers(
            "Siglip",
            _encoder(1152, 4304, 27, 16, patch_size=14, image_size=384),
            _encoder(1152, 4304, 27, 16),
        ),
        256,
    ),
    "t5-3b": (lambda: capture(load_model("t5-3b", seq_len=512)), 128),
    "whisper-large-v3": (lambda: capture(load_model("whisper-large-v3")), 128),
    "unet": (_unet, 128),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One comparison: seconds of the best steps, and their strategies."""

    model: str
    cluster: str
    pin: dict[str, Any]
    line_s: float
    ideals_s: float
    line: str
    ideals: str

    @property
    def saved(self) -> float:
        """Share of the line's step that ideals save."""
        return 1 - self.ideals_s / self.line_s


def compare(
    graph: ModelGraph, cluster: str, batch: int, pin: dict[str, Any]
) -> Row | None:
    """Plan once; the best step along the line, and the best of all.

    Args:
        graph: The model.
        cluster: Preset.
        batch: Samples of a step.
        pin: Knobs that both have in common.

    Returns:
        None if nothing fits.
    """
    options = PlanOptions(global_batch=batch, pin=pin)
    request = make_request(graph, Cluster.parse(cluster), options)
    found = ExhaustivePartitioner().search(request).candidates
    line = [one for one in found if _units(one.strategy) == graph.unit_names]
    if not line:
        return None
    return Row(
        model=graph.name,
        cluster=cluster,
        pin=pin,
        line_s=line[0].cost.step_time_s,
        ideals_s=found[0].cost.step_time_s,
        line=line[0].strategy.label(),
        ideals=found[0].strategy.label(),
    )


def _units(strategy: Strategy) -> tuple[str, ...]:
    return tuple(name for stage in strategy.stages for name in stage.modules)


def _pins() -> Iterator[dict[str, Any]]:
    """Degrees and microbatches, with and without a schedule; then nothing at all."""
    for pp in (2, 4, 8):
        for many in (8, 16, 32):
            for schedule in ({"schedule": "1F1B"}, {}):
                yield {"pp": pp, "tp": 1, "num_microbatches": many, **schedule}
    yield {}


def _kind(row: Row) -> str:
    return "free" if not row.pin else row.pin.get("schedule", "best schedule")


def _table(name: str, graph: ModelGraph, rows: list[Row]) -> list[list[str]]:
    """A line for each machine: the most saved of each kind, and where."""
    sets = ideals_of(graph)
    ideals = "chain" if sets is None else f"{len(sets.bits):,}"
    lines = []
    for cluster in MACHINES:
        cells = [name, f"{len(graph.units)}, {ideals}", cluster]
        for kind in ("1F1B", "best schedule", "free"):
            some = [r for r in rows if r.cluster == cluster and _kind(r) == kind]
            best = max(some, key=lambda row: row.saved)
            least = min(row.saved for row in some)
            where = "".join(
                f", {short}{best.pin[knob]}"
                for knob, short in (("pp", "pp"), ("num_microbatches", "x"))
                if knob in best.pin and best.saved >= 5e-4
            )
            spread = f"{least:.1%} to " if len(some) > 1 else ""
            cells.append(f"{spread}{best.saved:.1%}{where}")
        lines.append(cells)
    return lines


def main() -> None:
    """Print every comparison, then the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--docs", type=Path, metavar="DIR")
    options = parser.parse_args()
    lines = []
    for name in options.models:
        make, batch = MODELS[name]
        graph, rows = make(), []
        for cluster in MACHINES:
            for pin in _pins():
                row = compare(graph, cluster, batch, pin)
                if row is not None:
                    rows.append(row)
                    pinned = " ".join(f"{k}={v}" for k, v in pin.items()) or "free"
                    print(
                        f"{name:16} {cluster:10} {pinned:46} {row.line_s:.4f} s "
                        f"{row.ideals_s:.4f} s {row.saved:6.2%}  {row.line} | "
                        f"{row.ideals}",
                        flush=True,
                    )
        lines += _table(name, graph, rows)
    head = ["model", "units, ideals", "machine", "1F1B", "best schedule", "free"]
    table = piped([head, *lines])
    print(table)
    if options.docs is not None:
        date = datetime.date.today().isoformat()
        path = options.docs / "results" / report_name("cuts_along_ideals")
        page = _PAGE.format(date=date, cpu=cpu_name(), table=table)
        path.write_text(page, encoding="utf-8")


_PAGE = """# Cuts along ideals

{date}, {cpu}, `python -m benchmarks.cuts_along_ideals --docs docs`. Times are those of
the simulator.

The share of a step that is saved if stages may hold layers of several towers, against
the best step whose stages follow program order: from the least to the most over pp = 2,
4, 8 and 8, 16, 32 microbatches (x), and where the most is. *1F1B* holds the schedule,
*best schedule* takes the best on either side, *free* leaves all to the partitioner.

{table}
"""


if __name__ == "__main__":
    main()
