"""What every document that crosses a boundary shares: strict, frozen, stable bytes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from planner.errors import PlanFileError

__all__ = ["Document", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all: a temporary neighbour, then a rename.

    Raises:
        PlanFileError: If the folder does not exist or cannot be written.
    """
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise PlanFileError(
            f"cannot write {target}: {error.strerror}; create the folder "
            f"{target.parent} or choose another path"
        ) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Document(BaseModel):
    """Base of all documents: unknown fields are refused, values cannot change.

    A top-level document sets ``schema_version`` and ``kind``; nested parts do not.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    #: Newest version that this code reads; 0 for parts that are never a file.
    SCHEMA_VERSION: ClassVar[int] = 0
    #: What the file is called in messages: "plan", "cluster" …
    KIND: ClassVar[str] = "document"

    def canonical_bytes(self) -> bytes:
        """UTF-8 JSON with keys sorted and no spaces: equal documents, equal bytes."""
        data = self.model_dump(mode="json")
        text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
        return text.encode()

    def to_json(self) -> str:
        """Indented JSON with keys in their declared order, for files and people."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = "<text>") -> Self:
        """Read a document; every way in which it can be wrong is one line.

        Args:
            text: JSON.
            where: What to call the text in messages, usually the path.
        Raises:
            PlanFileError: If the text is not JSON, is truncated, is of a newer
                schema, or a field is missing, unknown or of the wrong type.
        """
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            line = getattr(error, "lineno", 1)
            raise PlanFileError(
                f"{where}: not a whole JSON document (line {line}: {error}); "
                f"was it cut off, or is it not a {cls.KIND}?"
            ) from error
        return cls.from_data(data, where=where)

    @classmethod
    def from_data(cls, data: Any, *, where: str = "<data>") -> Self:
        """Validate parsed JSON or YAML; see :meth:`from_json`."""
        if not isinstance(data, dict):
            raise PlanFileError(
                f"{where}: a {cls.KIND} is a JSON object, this is {type(data).__name__}"
            )
        _check_version(cls, data, where)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise PlanFileError(f"{where}: {_first_problem(error)}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a document from a file.

        Raises:
            PlanFileError: As :meth:`from_json`, or if the file cannot be read.
        """
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise PlanFileError(
                f"cannot read {cls.KIND} {os.fspath(path)}: {error.strerror}"
            ) from error
        return cls.from_json(text, where=os.fspath(path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document, atomically.

        Raises:
            PlanFileError: If the place cannot be written.
        """
        write_atomically(path, self.to_json().encode())


def _check_version(cls: type[Document], data: dict[str, Any], where: str) -> None:
    if not cls.SCHEMA_VERSION:
        return
    version = data.get("schema_version")
    if isinstance(version, int) and version > cls.SCHEMA_VERSION:
        raise PlanFileError(
            f"{where}: schema_version {version} is newer than {cls.SCHEMA_VERSION}, "
            f"the newest this Meshwright reads; upgrade meshwright"
        )


def _first_problem(error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    field = ".".join(str(part) for part in first["loc"]) or "document"
    message = first["msg"].removeprefix("Value error, ")
    text = f"field {field}: {message[0].lower() + message[1:]}"
    if first["type"] not in {"missing", "extra_forbidden"}:
        shown = repr(first.get("input"))
        if len(shown) <= 60 and shown not in text:
            text += f" (got {shown})"
    more = len(problems) - 1
    return text + (f" (and {more} more)" if more else "")
