"""The table of targets in the documentation, made from their declarations.

``python -m planner.export.table docs/exporters.md`` writes it between its marks.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlanFileError
from planner.export.registry import exporter_names
from planner.targets import FIELDS, Target, get_target

__all__ = ["main", "targets_table", "with_table"]

_START, _END = "<!-- targets: start -->", "<!-- targets: end -->"
#: How clauses begin that tell of a run.
_RAN = ("run ", "trains ", "trained ", "its run section ")
_RUNS = {"meshwright": "Meshwright's executors", "itself": "its own code"}


def targets_table() -> str:
    """A row a target: version, who trains, fields, how it was checked, where it ran."""
    head = (
        "| target | written for | trained by | fields in the files "
        "| left to your script | checked by | run here |"
    )
    rows = [_row(get_target(name)) for name in exporter_names()]
    return "\n".join([head, "|---" * 7 + "|", *rows])


def _row(target: Target) -> str:
    check, ran = _told_apart(target.check)
    cells = (
        f"`{target.name}`",
        f"{target.title} {target.version}",
        _RUNS[target.runs],
        f"{len(target.says)} of {len(FIELDS)}",
        ", ".join(sorted(target.leaves)) or "-",
        check or "-",
        ran or "no",
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _told_apart(check: str) -> tuple[str, str]:
    """Clauses of checks, and clauses of runs."""
    clauses = [clause.strip() for clause in check.split(";")]
    ran = [clause for clause in clauses if clause.startswith(_RAN)]
    rest = [clause for clause in clauses if clause not in ran]
    return "; ".join(rest), "; ".join(ran)


def with_table(text: str, where: str) -> str:
    """A page with the table between its marks made anew.

    Raises:
        PlanFileError: If the page has no marks.
    """
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise PlanFileError(
            f"{where} has no place for the table; add the lines {_START} and {_END}"
        )
    return f"{before}{_START}\n{targets_table()}\n{_END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table into a page.

    Args:
        arguments: The page; of the command line if None.

    Returns:
        0, or 1 if no page is named.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1:
        sys.stderr.write("usage: python -m planner.export.table docs/exporters.md\n")
        return 1
    page = Path(given[0])
    page.write_text(with_table(page.read_text(encoding="utf-8"), given[0]), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
