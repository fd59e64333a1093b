"""YAML from outside, within the limits of :mod:`planner.reading`."""

from __future__ import annotations

from typing import Any

import yaml

from planner.errors import MeshwrightError, PlanFileError
from planner.reading import MOST_CHARACTERS, MOST_DEEP, MOST_VALUES, require_modest

__all__ = ["parse_yaml"]

#: Largest text, and most values in it: YAML takes some fifty times as long as JSON.
_MOST_CHARACTERS, _MOST_WRITTEN = 2 * 10**6, 150_000

#: The one in C is ten times as fast, where there is one.
_Loader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def parse_yaml(
    text: str,
    where: str,
    what: str = "document",
    *,
    error: type[MeshwrightError] = PlanFileError,
) -> Any:
    """Parse YAML within the limits; a key that is given twice is refused.

    Args:
        text: One document of YAML.
        where: Name of the file, for messages.
        what: Its kind, for messages: ``"cluster"``.
        error: Class of what is raised.

    Raises:
        MeshwrightError: If it is not YAML, or beyond a limit. References to anchors
            count as what they stand for.
    """
    if len(text) > _MOST_CHARACTERS:
        raise error(
            f"{where}: {len(text):,} characters of YAML, at most {_MOST_CHARACTERS:,} "
            f"are read; write large files as JSON"
        )
    try:
        _check_events(text, where, what, error)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_nodes(node, where, what, error)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    except MeshwrightError:
        raise
    except yaml.YAMLError as problem:
        mark = getattr(problem, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        reason = getattr(problem, "problem", None) or "it cannot be parsed"
        raise error(
            f"{where}: not YAML{line}: {' '.join(str(reason).split())}; check "
            f"indentation and brackets there"
        ) from problem
    except (ValueError, TypeError, OverflowError, AttributeError) as problem:
        # A scalar that looks like a date or a number, and is none.
        reason = " ".join(str(problem).split())[:200]
        raise error(
            f"{where}: not YAML: {reason}; put texts that look like numbers in quotes"
        ) from problem
    require_modest(data, where, what, error=error)
    return data


def _check_events(
    text: str, where: str, what: str, error: type[MeshwrightError]
) -> None:
    """Refuse what is nested too deeply for the loader, before it recurses."""
    depth = 0
    for count, event in enumerate(yaml.parse(text, Loader=_Loader)):
        if count > _MOST_WRITTEN:
            raise error(
                f"{where}: more than {_MOST_WRITTEN:,} values and brackets of YAML; "
                f"write large files as JSON"
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MOST_DEEP:
                raise error(
                    f"{where}: nested too deeply; a {what} has at most {MOST_DEEP} "
                    f"levels"
                )
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        elif isinstance(event, yaml.ScalarEvent) and len(event.value) > MOST_CHARACTERS:
            raise error(
                f"{where}: a text has {len(event.value):,} characters "
                f"({event.value[:40]}…), at most {MOST_CHARACTERS:,} are read"
            )


def _check_nodes(
    root: yaml.Node, where: str, what: str, error: type[MeshwrightError]
) -> None:
    """Refuse keys given twice, and anchors that stand for too much or themselves."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1
        if id(node) in sizes:
            return sizes[id(node)]
        if id(node) in open_nodes:
            line = node.start_mark.line + 1
            raise error(f"{where}: the anchor of line {line} holds itself")
        open_nodes.add(id(node))
        total = 1
        if isinstance(node, yaml.MappingNode):
            _check_keys(node, where, error)
            total += sum(size(value) + size(key) for key, value in node.value)
        else:
            total += sum(size(part) for part in node.value)
        open_nodes.remove(id(node))
        sizes[id(node)] = total
        return total

    try:
        total = size(root)
    except RecursionError:
        raise error(
            f"{where}: anchors nested too deeply; write the values out"
        ) from None
    if total > MOST_VALUES:
        raise error(
            f"{where}: more than {MOST_VALUES:,} values, references to anchors written "
            f"out; a {what} has fewer"
        )


def _check_keys(
    node: yaml.MappingNode, where: str, error: type[MeshwrightError]
) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
            continue
        if key.value in seen:
            raise error(
                f"{where}: line {key.start_mark.line + 1}: key {key.value[:60]!r} is "
                f"given twice in one mapping; keep one"
            )
        seen.add(key.value)
