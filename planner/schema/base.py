"""Base of every document that crosses a boundary: strict, frozen, stable bytes.

Its leaves have dotted names, so that nothing lists them by hand; its bytes have short
hashes, by which a plan recognises its model and its cluster.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import reprlib
import stat
import tempfile
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema

from planner.errors import PlanFileError
from planner.reading import parse_json, read_bytes, require_modest

__all__ = [
    "MOST_DEVICES",
    "AnyFloat",
    "Count",
    "Document",
    "fingerprint_bytes",
    "fingerprint_parameters",
    "first_problem",
    "hooked_parameter",
    "leaf_defaults",
    "leaf_of",
    "parameter_violation",
    "require_writable",
    "spell_non_finite",
    "write_atomically",
]

#: Most devices of a cluster or of a mesh.
MOST_DEVICES = 2**20
#: A number of things that are gone through one by one: devices, stages, microbatches.
Count = Annotated[int, Field(ge=1, le=MOST_DEVICES)]

#: A measured number that may have diverged; NaN and the infinities are strings in JSON.
AnyFloat = Annotated[
    float,
    Field(allow_inf_nan=True),
    WithJsonSchema(
        {"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
    ),
]


#: Shows what was given; what does not fit is longer than a message has room for.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 70
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = 20


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse a place that :func:`write_atomically` could not write, before long work.

    Raises:
        PlanFileError: If the path is a folder, or its folder is missing or read-only.
    """
    target = Path(path)
    folder = target.parent
    if target.is_dir():
        _raise_unwritable(target, "it is a folder; name a file in it")
    if not folder.is_dir():
        _raise_unwritable(target, f"{folder} is not a folder; create it first")
    if not os.access(target if _is_device(target) else folder, os.W_OK):
        _raise_unwritable(target, f"{folder} is read-only; choose another path")


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file whole or not at all: a temporary neighbour, then a rename.

    A link stays a link and its target is replaced; a pipe or a device (``/dev/null``)
    is written to, because renaming over it would take it away.

    Raises:
        PlanFileError: If the place cannot be written.
    """
    require_writable(path)
    target = Path(path)
    try:
        if _is_device(target):
            target.write_bytes(data)
        else:
            _replace(target.resolve(), data)
    except OSError as error:
        raise PlanFileError(
            f"cannot write {target}: {error.strerror}; choose another path"
        ) from error


def _raise_unwritable(target: Path, reason: str) -> NoReturn:
    raise PlanFileError(f"cannot write {target}: {reason}")


def _is_device(target: Path) -> bool:
    """True if the path is there but neither a file nor a folder."""
    return target.exists() and not target.is_file() and not target.is_dir()


def _replace(target: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        Path(name).chmod(_mode(target))
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink()
        raise


def _mode(target: Path) -> int:
    """Permissions that the file has, or that a new one would be given."""
    if target.exists():
        return stat.S_IMODE(target.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


def _stop_early(schema: Any) -> None:
    """Let each list and tuple of a schema of pydantic stop at its first error."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _stop_early(part)
    elif isinstance(schema, dict):
        if schema.get("type") in ("list", "tuple"):
            schema["fail_fast"] = True
        for part in schema.values():
            _stop_early(part)


class Document(BaseModel):
    """Base of all documents: unknown fields are refused, values cannot change.

    A top-level document sets ``schema_version`` and ``kind``; nested parts do not.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="strings"
    )

    #: Newest version that this code reads; 0 for parts that are never a file.
    SCHEMA_VERSION: ClassVar[int] = 0
    #: What the file is called in messages: "plan", "cluster" …
    KIND: ClassVar[str] = "document"
    #: Fields that depend on the clock, left out of :meth:`canonical_bytes`.
    CLOCK_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Stop at the first wrong entry of a list: a million errors fill memory."""
        schema = handler(source)
        _stop_early(schema)
        return schema

    def to_data(self) -> dict[str, Any]:
        """Return JSON values; NaN and the infinities, where allowed, as strings."""
        data: dict[str, Any] = spell_non_finite(self.model_dump(mode="json"))
        return data

    def canonical_bytes(self) -> bytes:
        """UTF-8 JSON with keys sorted and no spaces: equal documents, equal bytes."""
        data = self.model_dump(mode="json", exclude=set(self.CLOCK_FIELDS))
        write = partial(
            json.dumps, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        try:
            return write(data).encode()
        except ValueError:
            # It holds a NaN or an infinity. Few do, and looking for them is slow.
            return write(spell_non_finite(data)).encode()

    def to_json(self) -> str:
        """Indented JSON with keys in their declared order, for files and people."""
        return json.dumps(self.to_data(), indent=2, allow_nan=False) + "\n"

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
        data = parse_json(text, where, cls.KIND, plain=False)
        return cls._of_modest(data, where)

    @classmethod
    def from_data(cls, data: Any, *, where: str = "<data>") -> Self:
        """Validate parsed JSON or YAML; see :meth:`from_json`."""
        require_modest(data, where, cls.KIND, plain=False)
        return cls._of_modest(data, where)

    @classmethod
    def _of_modest(cls, data: Any, where: str) -> Self:
        if not isinstance(data, dict):
            raise PlanFileError(
                f"{where}: a {cls.KIND} is an object with fields, this is "
                f"{type(data).__name__}"
            )
        _check_version(cls, data, where)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            problem = first_problem(error, cls.KIND)
            raise PlanFileError(f"{where}: {problem}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a document from a file.

        Raises:
            PlanFileError: As :meth:`from_json`, or if the file cannot be read.
        """
        text = read_bytes(path, cls.KIND, pipe=True)
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


def spell_non_finite(value: Any) -> Any:
    """JSON values with NaN and the infinities as strings that documents read back."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {key: spell_non_finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [spell_non_finite(part) for part in value]
    return value


#: Words of pydantic, and what people say; in this order.
_WORDS = (
    (re.compile(r", unable to (parse|interpret) \w+ as an? [\w ]+"), ""),
    (re.compile(r"(?i)^input should be a valid integer"), "must be a whole number"),
    (re.compile(r"(?i)^input should be a valid number"), "must be a number"),
    (re.compile(r"(?i)^input should be a valid boolean"), "must be true or false"),
    (re.compile(r"(?i)^input should be a valid string"), "must be a text"),
    (re.compile(r"(?i)^input should be a valid (tuple|list)"), "must be a list"),
    (
        re.compile(r"(?i)^input should be (a valid dictionary.*|an object)"),
        "must be a mapping of fields to values",
    ),
    (re.compile(r"(?i)^input should be greater than or equal to"), "must be at least"),
    (re.compile(r"(?i)^input should be less than or equal to"), "must be at most"),
    (re.compile(r"(?i)^input should be greater than"), "must be above"),
    (re.compile(r"(?i)^input should be less than"), "must be below"),
    (re.compile(r"(?i)^input should be"), "must be"),
    (re.compile(r"(?i)^extra inputs are not permitted"), "is not known"),
    (re.compile(r"(?i)^field required"), "is missing"),
)


def _own_words(message: str) -> str:
    for pattern, words in _WORDS:
        message = pattern.sub(words, message)
    return message[:1].lower() + message[1:]


def first_problem(error: ValidationError, kind: str) -> str:
    """One line: which field, what is wrong, what was given, how many more there are."""
    problems = error.errors(include_url=False, include_context=False)
    first = problems[0]
    field = ".".join(str(part) for part in first["loc"])
    message = _own_words(first["msg"].removeprefix("Value error, "))
    text = f"field {field}: {message}" if field else f"{kind}: {message}"
    if first["type"] not in {"missing", "extra_forbidden"}:
        shown = _SHORT.repr(first.get("input"))
        if len(shown) <= 60 and shown not in text:
            text += f" (got {shown})"
    more = len(problems) - 1
    # A field's name is part of the file and may hold anything.
    return " ".join(text.split()) + (f" (and {more} more)" if more else "")


def leaf_defaults(
    document: type[BaseModel], *, whole: Collection[str] = (), prefix: str = ""
) -> dict[str, Any]:
    """Default of every leaf of a document, ``mesh.pp`` for one.

    Args:
        document: Class whose fields all have defaults.
        whole: Dotted names of parts that count as one leaf.
        prefix: Of the names.
    """
    found: dict[str, Any] = {}
    for name, field in document.model_fields.items():
        path, kind = prefix + name, field.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        if nested and path not in whole:
            found |= leaf_defaults(kind, whole=whole, prefix=f"{path}.")  # type: ignore[arg-type]
        else:
            found[path] = field.get_default(call_default_factory=True)
    return found


def leaf_of(document: BaseModel, name: str) -> Any:
    """Value of a leaf.

    Raises:
        AttributeError: If there is no such leaf.
    """
    value: Any = document
    for part in name.split("."):
        value = getattr(value, part)
    return value


def fingerprint_bytes(data: bytes) -> str:
    """First 16 hex digits of SHA-256: enough to tell documents apart."""
    return hashlib.sha256(data).hexdigest()[:16]


def fingerprint_parameters(shapes: Iterable[tuple[str, Iterable[int]]]) -> str:
    """Hash parameter names and shapes, leaving out dtype and order.

    The dtype is left out because a plan for bf16 training also fits the fp32 module
    that it starts from.

    Args:
        shapes: (FQN, shape) of every distinct parameter, as
            ``module.named_parameters()`` gives them (tied ones once).
    """
    lines = sorted(f"{name}:{','.join(map(str, shape))}" for name, shape in shapes)
    return fingerprint_bytes("\n".join(lines).encode())


def parameter_violation(parameters: Iterable[tuple[str, Any]]) -> str | None:
    """Why no plan trains a model, by one of its parameters.

    Args:
        parameters: As ``module.named_parameters()`` gives them.

    Returns:
        The parameter, the rule and the remedy; None if all can be trained.
    """
    for name, parameter in parameters:
        if hasattr(parameter, "cls_to_become"):
            return (
                f"{name} has no shape yet, as those of lazy modules before their "
                f"first forward; call the module once on a batch before it is planned"
            )
        if parameter.is_complex():
            return (
                f"{name} is {str(parameter.dtype).removeprefix('torch.')}: no strategy "
                f"trains complex parameters; keep two real numbers for each, and use "
                f"torch.view_as_complex in forward"
            )
    return None


def hooked_parameter(parameters: Iterable[tuple[str, Any]]) -> str | None:
    """Name the first parameter with a hook on its gradient; None if none has one.

    Args:
        parameters: As ``module.named_parameters()`` gives them.
    """
    for name, one in parameters:
        if one._backward_hooks or one._post_accumulate_grad_hooks:
            return name
    return None
