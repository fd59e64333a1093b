"""Mappings of text, and the files that a config names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from planner.errors import PlanFileError
from planner.reading import parse_json, read_text
from planner.yaml_reading import parse_yaml

__all__ = ["read_beside", "read_mapping"]

#: A string, or a comment as hjson has them, which DeepSpeed reads.
_TOKENS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_COMMA = re.compile(r'("(?:\\.|[^"\\])*")|,(?=\s*[}\]])', re.DOTALL)


def read_mapping(text: str, where: str) -> dict[str, Any]:
    """A mapping of JSON, with comments and last commas, or of YAML.

    JSON comes first, as its errors say more.

    Raises:
        PlanFileError: If it is neither, or no mapping.
    """
    if text.lstrip()[:2] in ("//", "/*"):
        text = _bare(text)
    if text.lstrip()[:1] == "{":
        data = _json(text, where)
    else:
        data = parse_yaml(text, where, "config")
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise PlanFileError(f"{where}: not a mapping of keys to values")
    return data


def _json(text: str, where: str) -> Any:
    bare = _bare(text)
    try:
        return parse_json(bare, where, "config")
    except PlanFileError:
        # Braces open YAML, too.
        try:
            return parse_yaml(text, where, "config")
        except PlanFileError:
            pass
        raise


def _bare(text: str) -> str:
    """JSON without comments and last commas; strings stay as they are."""

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0][0] == '"' else " "

    return _COMMA.sub(lambda match: match[1] or "", _TOKENS.sub(kept, text))


def read_beside(name: str, where: str, what: str) -> dict[str, Any]:
    """A mapping of a file that a config names.

    Args:
        name: Its path, relative to the config's folder or one above it, as people
            start training from the root of a repository.
        where: Path of the config.
        what: Kind of the file, for messages.

    Raises:
        PlanFileError: If it is not there, or no mapping.
    """
    folder = Path(where).absolute().parent
    for above in (folder, *folder.parents):
        path = above / name
        if path.is_file():
            return read_mapping(read_text(path, what), str(path))
    raise PlanFileError(
        f"{where} names the {what} {name}, which is neither in {folder} nor above it; "
        f"put it there, or write its keys into the config"
    )
