"""Random changes of documents."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import re
from typing import Any

import yaml

from benchmarks.fuzz_documents.kinds import KINDS

__all__ = ["mutate", "mutate_bytes"]

#: Values that readers forget: ranges without end, no numbers, other types, odd texts.
_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**20, 2**31, 3 * 10**9, 2**63 - 1, 2**63, 2**64, 10**40),
    *(0.0, -0.5, 1.5, 1e9, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "auto", "none", "NaN", "1e999", "\x00", "\ud800", "\n"),
    *(
        "hf:/dev/zero",
        "hf:~nobody",
        "../" * 40,
        "x" * 20_000,
        "é" * 300,
        "*",
        "9" * 5000,
    ),
    *(
        "9" * 5000,
        [],
        {},
        [[]],
        [None],
        {"": 1},
        {"a": {"a": {"a": 1}}},
        [0] * 300,
        "[" * 200,
    ),
)
_BROKEN: tuple[bytes, ...] = (
    *(b"[" * 50_000, b'{"a":' * 5_000, b"\xff\xfe", b"\x00" * 8, b"\xed\xa0\x80"),
    *(b"&a [*a]", b"*x", b"!!python/object:os.system x", b"!!binary x", b"? ? ?"),
    *(b"NaN", b"1e999", b"9" * 5_000, b"-0", b"0x" + b"f" * 200, b"1:59:59", b"\t"),
    *(b"- " * 3_000, b"2020-13-45", b"<<: {a: 1}", b'"\\ud800"', b"'", b'"', b"\\"),
    *(b"--", b"=", b",", b";", b"\r", b"\xc2\x85", b" -- ", b"%", b"(t|)*4000" * 9),
)
#: The one in C is ten times as fast, where there is one.
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_LAUGHS = b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 10))
    for i in range(12)
)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Containers, each with a key of its own, of everything in a document."""
    found: list[tuple[Any, Any]] = []
    queue = [data]
    while queue:
        part = queue.pop()
        keys = part if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], dict | list):
                queue.append(part[key])
    return found


def _change_data(data: Any, rng: random.Random) -> None:
    """Change one place of a parsed document."""
    places = _places(data)
    if not places:
        return
    part, key = rng.choice(places)
    how = rng.randrange(8)
    if how < 4:
        part[key] = copy.deepcopy(rng.choice(_VALUES))
    elif how == 4:
        del part[key]
    elif how == 5 and isinstance(part, dict):
        part[str(rng.choice(_VALUES))] = copy.deepcopy(part[key])
    elif how == 6 and isinstance(part[key], int | float):
        part[key] = part[key] * rng.choice((-1, 0, 2, 0.5, 1000, 10**9))
    else:
        other, name = rng.choice(places)
        # A copy: a document holds no part of itself.
        part[key] = copy.deepcopy(other[name])


def _change_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Change some bytes of a text."""
    at = rng.randrange(len(raw) + 1)
    end = min(len(raw), at + rng.choice((1, 2, 8, 64)))
    how = rng.randrange(7)
    if how == 0:
        return raw[:at]
    if how == 1:
        return raw[:at] + raw[end:]
    if how == 2:
        return raw[:at] + raw[at:end] * rng.choice((2, 3, 100)) + raw[end:]
    if how == 3:
        return raw[:at] + rng.choice(_BROKEN) + raw[rng.choice((at, end)) :]
    if how == 4:
        return raw[:at] + bytes(rng.randbytes(rng.choice((1, 4)))) + raw[end:]
    numbers = list(_NUMBER.finditer(raw))
    if how == 5 and numbers:
        match = rng.choice(numbers)
        value = str(rng.choice(_VALUES)).encode(errors="replace")
        return raw[: match.start()] + value + raw[match.end() :]
    lines = raw.splitlines(keepends=True) or [b""]
    chosen = rng.randrange(len(lines))
    return b"".join([*lines[: chosen + 1], lines[chosen], *lines[chosen + 1 :]])


def mutate(text: str, kind: str, rng: random.Random) -> bytes:
    """Return a real document after a few changes.

    Args:
        text: The document.
        kind: A name of :data:`KINDS`.
        rng: Draws the changes.
    """
    return mutate_bytes(text.encode(), kind, rng)


def mutate_bytes(raw: bytes, kind: str, rng: random.Random) -> bytes:
    """Return a document after a few changes; one that is broken, changed as bytes.

    Args:
        raw: As for :func:`mutate`, and so are the others.
        kind: A name of :data:`KINDS`.
        rng: Draws the changes.
    """
    suffix = KINDS[kind].suffix
    changes = rng.choice((1, 1, 2, 4))
    if suffix in {".json", ".yaml"} and rng.random() < 0.8:
        data = copy.deepcopy(_parsed(raw, suffix))
        if isinstance(data, dict | list):
            for _ in range(changes):
                _change_data(data, rng)
            raw, changes = _written(data, suffix), int(rng.random() < 0.1)
    if suffix == ".yaml" and rng.random() < 0.02:
        return b"a: &a [x,x,x,x]\n" + _LAUGHS + raw
    for _ in range(changes):
        raw = _change_bytes(raw, rng)
    return raw


@functools.lru_cache(16)
def _parsed(raw: bytes, suffix: str) -> Any:
    """Content of a document; None if it is broken."""
    from planner.errors import MeshwrightError
    from planner.reading import parse_json
    from planner.yaml_reading import parse_yaml

    try:
        if suffix == ".json":
            return parse_json(raw, "", plain=False)
        return parse_yaml(raw.decode(), "")
    except (MeshwrightError, UnicodeDecodeError):
        return None


def _written(data: Any, suffix: str) -> bytes:
    text = json.dumps(data)
    # JSON is YAML too, but for its escapes of half characters.
    if suffix == ".json" or "\\ud8" in text:
        return text.encode()
    return yaml.dump(data, Dumper=_Dumper, default_flow_style=False).encode()
