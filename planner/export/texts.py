"""Names that every launcher takes, and YAML as people write it.

Only these names, numbers, and words of the schema get into scripts and YAML: a shell
never reads the name of a model.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["label_name", "run_name", "yaml_text"]


def label_name(text: str, longest: int = 63) -> str:
    """An RFC 1123 label (also RFC 1035) from any text.

    Lower-case letters, digits and single dashes; it starts with a letter and does not
    end with a dash. Texts may share a label.

    Args:
        text: Anything.
        longest: Characters that it may have.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"x-{plain}"
    return plain[:longest].strip("-")


def run_name(plan: Plan) -> str:
    """Name of a run of a plan: a label of at most 38 characters.

    Its end is a hash of the plan, so that two plans for a model can be queued together.
    """
    digest = hashlib.sha256(plan.canonical_bytes()).hexdigest()[:6]
    return f"meshwright-{label_name(plan.model.name, 20)}-{digest}"


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
