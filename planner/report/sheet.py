"""Figures of a plan on one sheet, for a column of a paper: matplotlib's PNG or SVG."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from planner.errors import PlanFileError
from planner.report.data import ReportData

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    _Draw: TypeAlias = Callable[[Axes, ReportData], None]

__all__ = [
    "draw_sheet",
    "figure_sheet",
    "require_matplotlib",
    "saved_sheet",
    "sheet_of_one",
    "sheet_style",
]

#: A column of a paper of two columns, in inches.
_WIDTH = 3.5
#: Around everything, left of most panels, and above each for its title.
_EDGE, _LEFT, _TITLE = 0.06, 0.42, 0.3
_STYLE: dict[str, Any] = {
    # Comes with matplotlib, so that figures are the same everywhere.
    "font.family": ["DejaVu Sans"],
    "font.size": 6.5,
    "axes.labelsize": 6.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.labelsize": 6.5,
    "ytick.labelsize": 6.5,
    "legend.fontsize": 6.5,
    "legend.frameon": False,
    "legend.handlelength": 1.0,
    "legend.handleheight": 0.8,
    "legend.columnspacing": 1.2,
    "legend.labelspacing": 0.3,
    "legend.borderaxespad": 0.0,
    "hatch.linewidth": 0.5,
    # Names of models may hold dollar signs.
    "text.parse_math": False,
    "svg.hashsalt": "meshwright",
    "svg.fonttype": "path",
}


def require_matplotlib() -> None:
    """Refuse figures where they cannot be drawn.

    Raises:
        PlanFileError: With the command that installs what is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise PlanFileError(
            f"{error.name} is not installed; figures need pip install "
            f"'meshwright[figures]'"
        ) from error


def figure_sheet(report: ReportData, form: Literal["png", "svg"]) -> bytes:
    """Timeline, memory against limits, breakdown and pareto, one below the other.

    The same report gives the same bytes, with the same matplotlib.

    Args:
        report: Of one plan; panels that cannot be drawn say why.
        form: Of the file; PNG has 300 dots an inch.

    Raises:
        PlanFileError: If matplotlib is not installed.
    """
    return saved_sheet(draw_sheet(report), form)


def saved_sheet(figure: Figure, form: Literal["png", "svg"]) -> bytes:
    """A figure as a file; the same figure gives the same bytes.

    Args:
        figure: Drawn under :func:`sheet_style`.
        form: Of the file; PNG has 300 dots an inch.
    """
    stream = io.BytesIO()
    metadata = {"Software": None} if form == "png" else {"Date": None}
    with sheet_style():
        figure.savefig(stream, format=form, dpi=300, metadata=metadata)
    return stream.getvalue()


def draw_sheet(report: ReportData) -> Figure:
    """The sheet as a figure of matplotlib's, to be changed further.

    Args:
        report: Of one plan.

    Raises:
        PlanFileError: If matplotlib is not installed.
    """
    require_matplotlib()
    with sheet_style():
        return _figure(report)


@contextlib.contextmanager
def sheet_style() -> Iterator[None]:
    """Matplotlib's settings, whatever somebody's matplotlibrc says."""
    import matplotlib as mpl

    with mpl.rc_context():
        mpl.rcdefaults()
        cast(Any, mpl.rcParams).update(_STYLE)
        yield


def _panels(report: ReportData) -> list[tuple[str, float, float, float, _Draw]]:
    """Of each panel: title, height, room below and left in inches, what draws it."""
    from planner.report import panels

    timed = report.timeline is not None
    rows = len(report.memory)
    # Three entries of a legend stand side by side.
    line, below = 0.13, panels.BELOW_IN
    return [
        (
            "Timeline of a step, by pp rank",
            min(max(0.19 * rows, 0.5), 2.4) if timed else 0.6,
            below + 3 * line if timed else 0.0,
            _LEFT,
            panels.draw_timeline,
        ),
        (
            "Peak memory of a device, by pp rank",
            min(max(0.17 * rows, 0.4), 2.0),
            below + 3 * line,
            _LEFT,
            panels.draw_memory,
        ),
        (
            "Where the time goes, on the critical path",
            max(0.15 * len(report.breakdown), 0.3),
            0.08,
            # Names of parts are long.
            1.6,
            panels.draw_breakdown,
        ),
        (
            "Strategies: time, memory, devices",
            1.6,
            below + 2.6 * line,
            _LEFT,
            panels.draw_pareto,
        ),
    ]


def _figure(report: ReportData) -> Figure:
    from matplotlib.figure import Figure

    from planner.report.panels import drawable

    head = report.header
    lines = textwrap.wrap(drawable(f"{head.model} on {head.cluster}"), 48)[:2]
    lines += textwrap.wrap(drawable(head.label), 48)[:2]
    panels = _panels(report)
    top = 0.06 + 0.13 * len(lines)
    tall = top + sum(_TITLE + high + below for _, high, below, _, _ in panels)
    figure = Figure(figsize=(_WIDTH, tall))
    edge = _EDGE / _WIDTH
    figure.text(edge, 1 - 0.05 / tall, "\n".join(lines), va="top", fontsize=7.5)
    for title, high, below, left, draw in panels:
        top += _TITLE
        figure.text(
            edge, 1 - (top - 0.07) / tall, title, fontsize=7.5, fontweight="bold"
        )
        wide = _WIDTH - left - _EDGE - 0.12
        place = (left / _WIDTH, 1 - (top + high) / tall, wide / _WIDTH, high / tall)
        draw(figure.add_axes(place), report)
        top += high + below
    return figure


def sheet_of_one(reports: Sequence[ReportData], form: Literal["png", "svg"]) -> bytes:
    """The sheet of the only plan.

    Raises:
        PlanFileError: If there are two.
    """
    if len(reports) != 1:
        raise PlanFileError(
            f"a sheet of figures is of one plan, not of {len(reports)}; name one"
        )
    return figure_sheet(reports[0], form)
