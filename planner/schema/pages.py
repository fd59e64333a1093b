"""JSON Schemas as Markdown tables, for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["schema_pages"]

_Schema = Mapping[str, Any]

_INDEX = "index"
#: The page of a part that several documents have is that of the first of these.
_FIRST = ("strategy", "cluster", "plan")
_NOTE = "<!-- written by python -m planner.schema.publish docs/schema -->\n"
_ROLE = re.compile(r":\w+:`~?([^`]+)`")
_ENTRY = re.compile(r"^ {4}(\w+): (.*)$")
#: Limits of a schema as one would write them.
_LIMITS = {
    "minimum": "≥",
    "exclusiveMinimum": ">",
    "maximum": "≤",
    "exclusiveMaximum": "<",
}


def schema_pages(schemas: Mapping[str, _Schema]) -> dict[str, str]:
    """One page a document and one that lists them.

    Args:
        schemas: Document's name to its JSON Schema (draft 2020-12, as pydantic makes
            it), parts under ``$defs``.
    Returns:
        File name without ``.md`` to Markdown.
    """
    owners: dict[str, str] = {}
    first = [name for name in _FIRST if name in schemas]
    for page in [*first, *(name for name in schemas if name not in first)]:
        schema = schemas[page]
        for part in (schema["title"], *schema.get("$defs", {})):
            owners.setdefault(part, page)
    pages = {page: _page(page, schema, owners) for page, schema in schemas.items()}
    return {_INDEX: _index(schemas), **pages}


def _index(schemas: Mapping[str, _Schema]) -> str:
    rows = [
        f"| [{name}]({name}.md) | [{name}.schema.json]({name}.schema.json) "
        f"| {_cell(_parts(schema)[0].splitlines()[0])} |"
        for name, schema in schemas.items()
    ]
    head = ["| document | JSON Schema | what it is |", "|---|---|---|"]
    return f"# Documents\n\n{_NOTE}\n" + "\n".join([*head, *rows]) + "\n"


def _page(page: str, schema: _Schema, owners: Mapping[str, str]) -> str:
    lines = [f"# {schema['title']}", "", _NOTE]
    lines += [f"JSON Schema: [{page}.schema.json]({page}.schema.json).", ""]
    lines += _section(page, schema, owners)
    for name, part in sorted(schema.get("$defs", {}).items()):
        if owners[name] == page and name != schema["title"]:
            lines += [f"## {name}", "", *_section(page, part, owners)]
    return "\n".join(lines)


def _section(page: str, schema: _Schema, owners: Mapping[str, str]) -> Iterator[str]:
    """Lines that describe one object."""
    text, meanings = _parts(schema)
    if text:
        yield from (text, "")
    fields = schema.get("properties", {})
    if not fields:
        return
    yield from ("| field | type | default | meaning |", "|---|---|---|---|")
    required = schema.get("required", ())
    # What must be given comes first; sorting keeps the order otherwise.
    for name, value in sorted(fields.items(), key=lambda item: item[0] not in required):
        default = "required" if name in required else _default(value)
        meaning = _cell(meanings.get(name, value.get("description", "")))
        yield f"| `{name}` | {_type(page, value, owners)} | {default} | {meaning} |"
    yield ""


def _parts(schema: _Schema) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and that of each field under ``Attributes``."""
    text, _, attributes = schema.get("description", "").partition("\nAttributes:\n")
    meanings: dict[str, str] = {}
    name = ""
    for line in attributes.splitlines():
        if entry := _ENTRY.match(line):
            name = entry[1]
            meanings[name] = entry[2]
        elif name and line.startswith(" " * 8):
            meanings[name] += " " + line.strip()
        elif line.strip():
            name = ""
    return _plain(text.strip()), {key: _plain(one) for key, one in meanings.items()}


def _plain(text: str) -> str:
    """Docstrings are reStructuredText; of it they use roles and literals."""
    return _ROLE.sub(r"`\1`", text).replace("``", "`")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(schema: _Schema) -> str:
    if "default" not in schema:
        # Made anew for each document, which a schema cannot say.
        return "empty" if schema.get("type") in {"array", "object"} else "optional"
    value = schema["default"]
    # A part with all its defaults is found on its own table.
    if isinstance(value, dict) and value:
        return "its defaults"
    return f"`{_cell(json.dumps(value, ensure_ascii=False))}`"


def _type(page: str, schema: _Schema, owners: Mapping[str, str]) -> str:
    """A type in words, parts as links."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        home = owners[name]
        anchor = f"#{name.lower()}"
        if home != page:
            # A document's own heading is the top of its page.
            anchor = f"{home}.md" if name.lower() == home else f"{home}.md{anchor}"
        return f"[{name}]({anchor})"
    for union in ("anyOf", "oneOf"):
        if union in schema:
            return " or ".join(_type(page, one, owners) for one in schema[union])
    if "const" in schema:
        return f"`{json.dumps(schema['const'])}`"
    if "enum" in schema:
        return ", ".join(f"`{json.dumps(one)}`" for one in schema["enum"])
    if "prefixItems" in schema:
        parts = (_type(page, one, owners) for one in schema["prefixItems"])
        return f"[{', '.join(parts)}]"
    if schema.get("type") == "array":
        return f"list of {_type(page, schema.get('items', {}), owners)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"name to {_type(page, schema['additionalProperties'], owners)}"
    limits = [
        f" {sign} {schema[key]}" for key, sign in _LIMITS.items() if key in schema
    ]
    return f"{schema.get('type', 'anything')}{' and'.join(limits)}"
