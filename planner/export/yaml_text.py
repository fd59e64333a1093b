"""YAML as people write it: keys in order, scripts as blocks of lines."""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["yaml_text"]


class _Dumper(yaml.SafeDumper):
    """No anchors, and texts of several lines as literal blocks."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write equal values out, each time."""
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        """Indent lists below their key, as people do."""
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(*documents: Any, header: str = "") -> str:
    """Documents as one YAML file; names that YAML would misread are quoted.

    Args:
        documents: Plain values: mappings, lists, texts, numbers.
        header: Lines of a comment to begin with, without ``#``.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in header.splitlines())
    bodies = [
        yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=88)
        for value in documents
    ]
    return head + "---\n".join(bodies)
