"""Clusters from what people type and from files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import yaml

from planner.cluster.cluster import Cluster
from planner.cluster.presets import cluster_names, device_type
from planner.errors import ClusterError, PlanFileError, UnknownNameError
from planner.schema.cluster import ClusterDocument
from planner.schema.probe import ProbeDocument

__all__ = ["named_types", "parse_cluster", "read_cluster"]

_SUFFIXES = (".json", ".yaml", ".yml")


def parse_cluster(text: str) -> Cluster:
    """See :meth:`planner.cluster.Cluster.parse`."""
    spoken = text.strip()
    if spoken.lower().endswith(_SUFFIXES) or os.sep in spoken:
        return read_cluster(spoken)
    name, colon, number = spoken.partition(":")
    if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise ClusterError(
            f"cluster {spoken!r}: {number!r} is not a number of at least 1; "
            f"write for example {name}:4"
        )
    count = int(number) if colon else None
    if name.lower() == "local":
        return Cluster.detect(count)
    if Path(spoken).is_file():
        return read_cluster(spoken)
    try:
        return Cluster.from_preset(name.lower(), count or 1)
    except UnknownNameError as error:
        known = (*cluster_names(), "local")
        raise UnknownNameError("cluster preset", name, known) from error


def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """See :meth:`planner.cluster.Cluster.from_file`."""
    where = os.fspath(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise PlanFileError(f"cannot read cluster {where}: {reason}") from error
    if where.lower().endswith((".yaml", ".yml")):
        data = _yaml(text, where)
    else:
        data = _json(text, where)
    if isinstance(data, dict) and data.get("document") == "probe":
        return Cluster.from_probe(ProbeDocument.from_data(data, where=where), ref=where)
    document = ClusterDocument.from_data(named_types(data), where=where)
    return Cluster.from_document(document, ref=where)


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanFileError(
            f"{where}: not a whole JSON document (line {error.lineno}: {error.msg}); "
            f"was it cut off, or is it not a cluster?"
        ) from error


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" (line {mark.line + 1})" if mark else ""
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise PlanFileError(
            f"{where}: not YAML{line}: {problem}; check indentation and brackets there"
        ) from error


def named_types(data: Any) -> Any:
    """A device type may be given by the name of a known one: ``[h100]``."""
    if not isinstance(data, dict) or not isinstance(data.get("device_types"), list):
        return data
    types = [
        device_type(entry).model_dump() if isinstance(entry, str) else entry
        for entry in data["device_types"]
    ]
    return {**data, "device_types": types}
