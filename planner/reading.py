"""Files from outside: read within limits, before anything is made of them.

A file is looked at before it is opened and counted before it is parsed, so that neither
a device, nor a list of a billion brackets, nor a text that repeats itself by reference
takes more time or memory than its limits allow.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
import stat
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from planner.errors import MeshwrightError, PlanFileError

__all__ = [
    "MOST_BYTES",
    "MOST_CHARACTERS",
    "MOST_DEEP",
    "MOST_NAME",
    "MOST_VALUES",
    "parse_json",
    "read_bytes",
    "read_table",
    "read_text",
    "require_modest",
]

#: Largest file. A cluster of a thousand devices with all its links is two thirds.
MOST_BYTES = 64 * 10**6
#: Most values in a document.
MOST_VALUES = 2_500_000
#: Deepest nesting of lists and objects.
MOST_DEEP = 64
#: Longest text in a document.
MOST_CHARACTERS = 10_000
#: Longest name of a field, and most fields of one object.
MOST_NAME, MOST_FIELDS = 1_000, 20_000
#: Whole numbers are below this in size: seeds have up to 128 bits.
MOST_INTEGER = 2**128


def read_bytes(
    path: str | os.PathLike[str],
    what: str = "file",
    *,
    pipe: bool = False,
    most: int = MOST_BYTES,
    error: type[MeshwrightError] = PlanFileError,
) -> bytes:
    """Read a whole file, if it is one and not too large.

    Args:
        path: The file.
        what: Its name in messages: ``"plan"``.
        pipe: True if it may be a pipe, which a user named and waits for.
        most: Largest size in bytes.
        error: Class of what is raised.

    Raises:
        MeshwrightError: If it cannot be read, is a folder or a device, or is too large.
    """
    where = os.fspath(path)
    try:
        kind = Path(path).stat().st_mode
        if not (stat.S_ISREG(kind) or (pipe and stat.S_ISFIFO(kind))):
            raise error(f"cannot read {what} {where}: it is {_kind(kind)}; give a file")
        with Path(path).open("rb") as stream:
            data = stream.read(most + 1)
    except OSError as problem:
        raise error(f"cannot read {what} {where}: {problem.strerror}") from problem
    except ValueError as problem:
        if isinstance(problem, MeshwrightError):
            raise
        # A name with a zero byte.
        raise error(f"cannot read {what} {where!r}: {problem}") from problem
    if len(data) > most:
        raise error(
            f"cannot read {what} {where}: it has more than {most / 1e6:g} MB, the most "
            f"that is read; is it the right file?"
        )
    return data


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a pipe",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


def read_text(
    path: str | os.PathLike[str],
    what: str = "file",
    *,
    pipe: bool = False,
    most: int = MOST_BYTES,
    error: type[MeshwrightError] = PlanFileError,
) -> str:
    """Read a whole file as UTF-8, with or without a byte-order mark.

    Args:
        path: As for :func:`read_bytes`, and so are the others.
        what: Its name in messages.
        pipe: True if it may be a pipe.
        most: Largest size in bytes.
        error: Class of what is raised.

    Raises:
        MeshwrightError: As :func:`read_bytes`, or if it is not UTF-8.
    """
    data = read_bytes(path, what, pipe=pipe, most=most, error=error)
    return _decoded(data, path, what, error)


def _decoded(
    data: bytes,
    path: str | os.PathLike[str],
    what: str,
    error: type[MeshwrightError],
) -> str:
    try:
        # As opening a file as text does: line ends of other systems count as one.
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(
            f"cannot read {what} {os.fspath(path)}: byte {problem.start} is not UTF-8 "
            f"text; save it as UTF-8"
        ) from problem
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_table(
    path: str | os.PathLike[str],
    what: str = "table",
    needed: Sequence[str] = (),
    *,
    error: type[MeshwrightError] = PlanFileError,
) -> tuple[list[str], list[tuple[str, dict[str, str]]]]:
    """Read a CSV file, gzipped if its name ends with ``.gz``.

    Args:
        path: As for :func:`read_bytes`, and so are ``what`` and ``error``.
        what: Its name in messages.
        needed: Columns that it must have.
        error: Class of what is raised.

    Returns:
        The names of the columns; and of each line, its place for messages, and its
        values. Values that a line does not have are empty.

    Raises:
        MeshwrightError: As :func:`read_text`, or if it is not gzipped, not CSV, or
            without a column.
    """
    data = read_bytes(path, what, error=error)
    if os.fspath(path).endswith(".gz"):
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
                data = stream.read(MOST_BYTES + 1)
        except (OSError, EOFError, zlib.error) as problem:
            raise error(
                f"cannot read {what} {os.fspath(path)}: {str(problem).lower()}; give a "
                f"whole gzipped file, or one whose name does not end with .gz"
            ) from problem
        if len(data) > MOST_BYTES:
            raise error(
                f"cannot read {what} {os.fspath(path)}: it has more than "
                f"{MOST_BYTES / 1e6:g} MB unpacked, the most that is read; is it the "
                f"right file?"
            )
    reader = csv.DictReader(_decoded(data, path, what, error).splitlines())
    try:
        heads = list(reader.fieldnames or ())
        missing = [name for name in needed if name not in heads]
        if missing:
            raise error(
                f"{os.fspath(path)} has no column {', '.join(missing)}, only "
                f"{', '.join(heads) or 'nothing'}; give it"
            )
        return heads, [
            (
                f"{os.fspath(path)}, line {reader.line_num}",
                {name: row[name] or "" for name in heads},
            )
            for row in reader
        ]
    except csv.Error as problem:
        raise error(
            f"{os.fspath(path)}, line {reader.line_num}: {problem}; give a CSV file "
            f"with commas between its columns"
        ) from problem


def parse_json(
    text: str | bytes,
    where: str,
    what: str = "document",
    *,
    plain: bool = True,
    error: type[MeshwrightError] = PlanFileError,
) -> Any:
    """Parse JSON within the limits; a key that is given twice is refused.

    Args:
        text: The JSON.
        where: Name of the file, for messages.
        what: Its kind, for messages: ``"plan"``.
        plain: False to let pass what JSON does not have: NaN, the infinities, objects.
        error: Class of what is raised.

    Raises:
        MeshwrightError: If it is not JSON, or beyond a limit.
    """
    # Counted in the text: each value but the first follows one of these.
    raw = text.encode(errors="replace") if isinstance(text, str) else text
    count = sum(map(raw.count, (b",", b"[", b"{")))
    if count > 2 * MOST_VALUES:
        raise error(_too_many(where, what))
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as problem:
        raise error(
            f"{where}: not a whole JSON document ({_json_problem(problem)}); "
            f"was it cut off, or is it not a {what}?"
        ) from problem
    require_modest(data, where, what, plain=plain, error=error)
    return data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"field {key[:60]!r} is given twice in one object")
            seen.add(key)
    return found


def _json_problem(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno} column {error.colno}: {error.msg}"
    if isinstance(error, UnicodeDecodeError):
        return f"byte {error.start} is not UTF-8 text"
    if isinstance(error, RecursionError):
        return f"nested too deeply, more than {MOST_DEEP} levels"
    # Python converts no number of more than 4,300 digits.
    text = str(error)
    return "a number has too many digits" if "digits" in text else text


def _too_many(where: str, what: str) -> str:
    return f"{where}: more than {MOST_VALUES:,} values; a {what} has fewer"


def require_modest(
    data: Any,
    where: str,
    what: str = "document",
    *,
    plain: bool = True,
    error: type[MeshwrightError] = PlanFileError,
) -> None:
    """Refuse parsed values that are beyond a limit, or that JSON does not have.

    Args:
        data: Parsed JSON or YAML. What occurs at several places counts at each.
        where: Name of the file, for messages.
        what: Its kind, for messages.
        plain: False to let pass what JSON does not have: NaN, the infinities, objects.
        error: Class of what is raised.

    Raises:
        MeshwrightError: Naming the first value that is wrong, and the limit.
    """
    level: list[Any] = [data]
    count = 0
    for depth in range(MOST_DEEP + 2):
        if not level:
            return
        count += len(level)
        if count > MOST_VALUES:
            raise error(_too_many(where, what))
        if depth > MOST_DEEP:
            raise error(
                f"{where}: nested too deeply; a {what} has at most {MOST_DEEP} levels"
            )
        inner: list[Any] = []
        for value in level:
            kind = type(value)
            # Most values of large documents.
            if kind is float and (not plain or math.isfinite(value)):
                continue
            if kind is list or kind is tuple:
                inner.extend(value)
            elif kind is dict:
                _check_names(value, where, error)
                inner.extend(value.values())
            else:
                problem = _problem(value, plain)
                if problem is not None:
                    raise error(f"{where}: {problem}")
            if len(inner) > MOST_VALUES:
                raise error(_too_many(where, what))
        level = inner


def _check_names(
    found: dict[Any, Any], where: str, error: type[MeshwrightError]
) -> None:
    if len(found) > MOST_FIELDS:
        raise error(
            f"{where}: an object has {len(found):,} fields, at most {MOST_FIELDS:,} "
            f"are read"
        )
    for name in found:
        if not isinstance(name, str):
            raise error(
                f"{where}: the name of a field is {_shown(name)}, which is no text; "
                f"put it in quotes"
            )
        if len(name) > MOST_NAME:
            raise error(
                f"{where}: the name of a field has {len(name):,} characters "
                f"({name[:40]}…), at most {MOST_NAME:,} are read"
            )
        if not name.isascii() and _has_surrogate(name):
            raise error(f"{where}: {_half(name)}")


def _problem(value: Any, plain: bool) -> str | None:
    """Fault of a value that is neither a list nor an object; None without one."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            return (
                f"a text has {len(value):,} characters ({value[:40]}…), at most "
                f"{MOST_CHARACTERS:,} are read"
            )
        return _half(value) if not value.isascii() and _has_surrogate(value) else None
    if isinstance(value, int):
        if -MOST_INTEGER <= value < MOST_INTEGER:
            return None
        return "a whole number has more than 128 bits; give a smaller one"
    if isinstance(value, float):
        if not plain or math.isfinite(value):
            return None
        return f"{value} is no finite number; give one"
    if not plain:
        return None
    return (
        f"{_shown(value)} is of type {type(value).__name__}; give a text (in quotes), "
        f"a number, true, false or null"
    )


def _shown(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "…"
    return text if len(text) <= 60 else f"{text[:60]}…"


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _half(text: str) -> str:
    shown = text[:40].encode("ascii", "backslashreplace").decode()
    return f"the text {shown!r} holds half a character (a lone surrogate); remove it"
