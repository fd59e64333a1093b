"""Write records of episodes: one file for each stream and policy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from planner.errors import PlanFileError
from planner.export.registry import write_folder
from planner.schema.base import fingerprint_bytes
from planner.schema.elastic import ElasticRecord
from planner.schema.stream import StreamRecord

__all__ = [
    "label_record",
    "record_name",
    "require_folder",
    "weights_id",
    "write_records",
]


def label_record(
    record: StreamRecord,
    *,
    policy: str,
    weights: str | None = None,
    law: str | None = None,
    offered_load: float | None = None,
    seed: int | None = None,
) -> StreamRecord:
    """Add to a record what its world does not know; None changes nothing.

    Args:
        record: Record of an episode.
        policy: Name of the policy.
        weights: Result of :func:`weights_id`.
        law: Law of the arrivals.
        offered_load: Work offered over what the cluster can do.
        seed: Seed of the arrivals.
    """
    told = {
        "policy": policy,
        "weights": weights,
        "law": law,
        "offered_load": offered_load,
        "seed": seed,
    }
    return record.model_copy(update={k: v for k, v in told.items() if v is not None})


def weights_id(folder: str | os.PathLike[str]) -> str:
    """Return a name of weights that depends on their bytes.

    Args:
        folder: Has ``policy.safetensors``.

    Raises:
        PlanFileError: If the file cannot be read.
    """
    path = Path(folder) / "policy.safetensors"
    try:
        return fingerprint_bytes(path.read_bytes())[:12]
    except OSError as error:
        raise PlanFileError(
            f"weights {path} cannot be read ({error.strerror}); give a folder that "
            f"training wrote"
        ) from error


def record_name(record: StreamRecord | ElasticRecord) -> str:
    """Return the file name: stream, seed, policy, and its weights if any."""
    weights: str | None = None
    if isinstance(record, ElasticRecord):
        load = record.trace_load
        stream = record.trace + ("" if load is None else f"-load{load:g}")
    else:
        load, weights = record.offered_load, record.weights
        stream = record.law or ("stream" if load is None else f"load{load:g}")
    seed = None if record.seed is None else f"{record.seed}"
    parts = (stream, seed, record.policy or "policy", weights)
    told = "-".join(part for part in parts if part is not None)
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', told)[:200]}.json"


def require_folder(folder: str | os.PathLike[str]) -> None:
    """Refuse a folder for records before long work.

    Raises:
        PlanFileError: If it exists and is not a folder.
    """
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise PlanFileError(f"{path} is not a folder; name one for the records")


def write_records(
    records: Iterable[StreamRecord | ElasticRecord],
    folder: str | os.PathLike[str],
    *,
    force: bool = False,
) -> tuple[str, ...]:
    """Write records into a folder; all or none.

    Args:
        records: Records of different streams or policies.
        folder: Made if it does not exist; read by ``meshwright report``.
        force: Overwrite files of the same names with other contents.
    Returns:
        Paths written, in order.

    Raises:
        PlanFileError: If two records have one name, a file of the same name has other
            contents, or the folder cannot be written. Nothing is written then.
    """
    require_folder(folder)
    files: dict[str, str] = {}
    for record in records:
        name = record_name(record)
        if name in files:
            raise PlanFileError(
                f"two records would be {name}; give them other policies, laws or seeds"
            )
        files[name] = record.to_json()
    return write_folder(files, folder, force=force)
