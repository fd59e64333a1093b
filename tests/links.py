"""Links that stay inside: between Markdown files, and between pages of the built site.

    python -m tests.links site

prints every dead one of a site and exits with 1. Nothing is fetched.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["dead_links", "dead_site_links", "main", "missing_names", "slugs"]

#: Packages whose public names must be on the site.
PUBLIC = (
    "executors",
    "planner.cluster",
    "planner.errors",
    "planner.export",
    "planner.report",
    "planner.schema",
    "planner.search",
    "planner.targets",
)
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1\s*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_CODE = re.compile(r"`[^`\n]*`")
_HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


@cache
def slugs(page: Path) -> frozenset[str]:
    """Anchors that a page's headings get where Markdown is shown (GitHub, MyST)."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in _HEADING.findall(text):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        kept = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        count = 0
        while (slug := f"{kept}-{count}" if count else kept) in found:
            count += 1
        found.add(slug)
    return frozenset(found)


def dead_links(page: Path) -> list[str]:
    """Links of a Markdown file to files or headings that are not there."""
    text = _CODE.sub("", _FENCE.sub("", page.read_text(encoding="utf-8")))
    dead = []
    for target in _LINK.findall(text):
        parts = urlsplit(target)
        if parts.scheme or parts.netloc:
            continue
        other = page.parent / unquote(parts.path) if parts.path else page
        if not other.exists():
            dead.append(f"{page.name}: {target}: there is no such file")
        elif other.is_dir():
            # A site has no page for a folder.
            dead.append(f"{page.name}: {target}: a folder; link a file of it")
        elif not parts.fragment or other.suffix != ".md":
            continue
        elif unquote(parts.fragment) not in slugs(other.resolve()):
            dead.append(f"{page.name}: {target}: there is no such heading")
    return dead


class _Page(HTMLParser):
    """Anchors of a page and its links."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []

    def handle_starttag(
        self, tag: str, attrs: Sequence[tuple[str, str | None]]
    ) -> None:
        for name, value in attrs:
            if name in {"id", "name"} and value:
                self.ids.add(value)
            elif name in {"href", "src"} and value and tag != "base":
                self.links.append(value)


def _read(site: Path) -> dict[Path, _Page]:
    pages = {}
    for path in sorted(site.rglob("*.html")):
        pages[path.resolve()] = page = _Page()
        page.feed(path.read_text(encoding="utf-8"))
    return pages


def dead_site_links(site: Path) -> list[str]:
    """Links of a built site to files or anchors that are not there."""
    pages = _read(site)
    return [
        f"{path.relative_to(site.resolve())}: {link}"
        for path, page in pages.items()
        for link in sorted(set(page.links))
        if not _leads_somewhere(path, link, pages)
    ]


def _leads_somewhere(path: Path, link: str, pages: Mapping[Path, _Page]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return True
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not target.is_file():
        return False
    fragment = unquote(parts.fragment)
    return not fragment or target not in pages or fragment in pages[target].ids


def missing_names(site: Path) -> Iterator[str]:
    """Public names of the packages that no page of the site describes."""
    known = {one for page in _read(site / "reference").values() for one in page.ids}
    for package in PUBLIC:
        for name in importlib.import_module(package).__all__:
            if f"{package}.{name}" not in known:
                yield f"{package}.{name} is not in the reference"


def main(arguments: Sequence[str]) -> int:
    """Check the one site given; exit code 1 if anything is wrong with it."""
    if len(arguments) != 1 or not (Path(arguments[0]) / "index.html").is_file():
        sys.stderr.write("usage: python -m tests.links SITE, a folder of HTML\n")
        return 1
    site = Path(arguments[0])
    wrong = [*dead_site_links(site), *missing_names(site)]
    for one in wrong:
        sys.stderr.write(f"{one}\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
