"""How docs/ becomes a site: ``make docs`` writes it to site/, warnings are errors.

Sphinx with MyST and furo, because all three are released steadily, a link or an anchor
that leads nowhere is a warning there, and docstrings here are reStructuredText.
mkdocs has had no release since 2024 and its Material theme gets no more features;
Zensical, which is to follow it, is young (0.1) and has no strict build to rely on.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sphinx.pycode import ModuleAnalyzer

from planner import __version__

project = "Meshwright"
author = "the Meshwright authors"
project_copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# Pages are read where the code is, too: plain Markdown, with the anchors made there.
myst_heading_anchors = 4
# Tables of figures are written by benchmarks, with small headings under a large one.
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_title = f"Meshwright {__version__}"
html_show_sphinx = False
html_copy_source = False
pygments_style = "default"

# Docstrings: Google style with sections of our own.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = ["Source", "Shapes"]

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True


_ROOT = Path(__file__).parents[1]
#: Copies of pages that lie beside what they describe, outside of this folder.
_BESIDE = Path(__file__).parent / "beside"
_OUTSIDE = re.compile(r"\]\((?:\.\./)+((?:examples|policies)/[\w/.-]+)/README\.md\)")


def _bring_in(app: Any, page: str, source: list[str]) -> None:
    """Links to those pages lead to their copies, so that the site is whole.

    Pages that the index does not name come last in it.
    """
    if page == "index":
        here = Path(__file__).parent
        found = (path.relative_to(here) for path in here.rglob("*.md"))
        pages = sorted(
            path.with_suffix("").as_posix()
            for path in found
            if len(path.parts) == 1 or f"\n{path.parts[0]}/" not in source[0]
        )
        listed = source[0].splitlines()
        more = "\n".join(one for one in pages if one not in {*listed, "index"})
        if more:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: More\n\n{more}\n```\n"
    up = "../" * page.count("/")
    source[0] = _OUTSIDE.sub(
        lambda found: f"]({up}beside/{_flat(found[1])}.md)", source[0]
    )


def _flat(folder: str) -> str:
    return folder.replace("/", "-")


def _copy_outside() -> None:
    _BESIDE.mkdir(exist_ok=True)
    for page in _ROOT.glob("docs/**/*.md"):
        for folder in _OUTSIDE.findall(page.read_text(encoding="utf-8")):
            text = (_ROOT / folder / "README.md").read_text(encoding="utf-8")
            (_BESIDE / f"{_flat(folder)}.md").write_text(text, encoding="utf-8")


def _skip(
    app: Any, what: str, name: str, thing: Any, skip: bool, _: Any
) -> bool | None:
    """Leaves out what pydantic puts into every document."""
    return True if name == "model_config" else None


def _comment(
    app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """A constant is described by the ``#:`` comment where it is defined."""
    package, _, constant = name.rpartition(".")
    if what != "data":
        return
    lines.clear()  # what autodoc has found is the docstring of its type
    for home in sorted(_ROOT.joinpath(*package.split(".")).glob("*.py")):
        comments = ModuleAnalyzer.for_module(f"{package}.{home.stem}").find_attr_docs()
        if ("", constant) in comments:
            lines[:] = comments["", constant]
            return


def _shorten(
    app: Any, what: str, name: str, thing: Any, options: Any, given: str, result: str
) -> tuple[str, str]:
    """Signatures without the limits of their fields, which the tables have."""
    while given and (start := given.find("Annotated[")) >= 0:
        first = comma = start + len("Annotated[")
        depth, end = 1, first
        while depth:
            depth += {"[": 1, "(": 1, "]": -1, ")": -1}.get(given[end], 0)
            if given[end] == "," and depth == 1 and comma == first:
                comma = end
            end += 1
        given = given[:start] + given[first:comma] + given[end:]
    return given, result


def setup(app: Any) -> None:
    """Called by Sphinx."""
    _copy_outside()
    app.connect("source-read", _bring_in)
    app.connect("autodoc-skip-member", _skip)
    app.connect("autodoc-process-docstring", _comment)
    app.connect("autodoc-process-signature", _shorten)
