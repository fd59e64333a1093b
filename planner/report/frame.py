"""What every page of a report is put into: one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from importlib import resources

from planner.report.markup import escape

__all__ = ["asset", "framed_page"]


@cache
def asset(name: str) -> str:
    """A file of ``planner/report/assets``."""
    return (resources.files("planner.report") / "assets" / name).read_text("utf-8")


def framed_page(
    *,
    version: str,
    title: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    header: str,
    main: str,
    footer: str,
    data: str,
) -> str:
    """A whole page.

    Args:
        version: Of the Meshwright that wrote it; text.
        title: Text.
        styles: Assets, one after the other.
        scripts: Assets that share one scope, one after the other.
        header: HTML, as are the next three.
        main: What the page shows.
        footer: Where it comes from.
        data: Blocks of JSON that the scripts read.
    """
    together = "\n".join(asset(name) for name in scripts)
    script = f'"use strict";\n(() => {{\n{together}\n}})();'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "generator": escape(f"Meshwright {version}"),
        "hash": f"sha256-{digest}",
        "title": escape(title),
        "css": "\n".join(asset(name) for name in styles),
        "header": header,
        "main": main,
        "footer": footer,
        "data": data,
        "js": script,
    }
    # One pass, so that nothing that is filled in is looked at again.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], asset("page.html"))
