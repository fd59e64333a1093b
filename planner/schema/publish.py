"""JSON Schemas of all documents, as JSON and as pages for people.

``python -m planner.schema.publish docs/schema`` writes both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from planner.schema.admission import (
    AdmissionDecision,
    ClusterState,
    JobRequest,
    Throughputs,
)
from planner.schema.base import Document, write_atomically
from planner.schema.checkpoint import CheckpointRecord
from planner.schema.cluster import ClusterDocument
from planner.schema.elastic import ElasticRecord
from planner.schema.federation import Federation
from planner.schema.measurement import Measurement
from planner.schema.pages import schema_pages
from planner.schema.plan import Plan
from planner.schema.probe import ProbeDocument
from planner.schema.strategy import Strategy
from planner.schema.stream import StreamRecord
from planner.schema.verification import Verification

__all__ = ["DOCUMENTS", "main", "page_texts", "publish", "schema_text"]

#: File name without ``.schema.json`` to the document it describes.
DOCUMENTS: Mapping[str, type[Document]] = {
    "admission": AdmissionDecision,
    "checkpoint": CheckpointRecord,
    "cluster": ClusterDocument,
    "cluster-state": ClusterState,
    "elastic": ElasticRecord,
    "federation": Federation,
    "job": JobRequest,
    "measurement": Measurement,
    "plan": Plan,
    "probe": ProbeDocument,
    "strategy": Strategy,
    "stream": StreamRecord,
    "throughputs": Throughputs,
    "verification": Verification,
}


def schema_text(document: type[Document]) -> str:
    """The JSON Schema (draft 2020-12) of what a document's file may hold."""
    schema = document.model_json_schema(mode="validation")
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps(head | schema, indent=2, sort_keys=True) + "\n"


def page_texts() -> dict[str, str]:
    """Markdown of the pages: file name without ``.md`` to its text."""
    texts = {name: schema_text(document) for name, document in DOCUMENTS.items()}
    return schema_pages({name: json.loads(text) for name, text in texts.items()})


def publish(folder: str | Path) -> tuple[Path, ...]:
    """Write ``NAME.schema.json`` and ``NAME.md`` of each document, and ``index.md``.

    Raises:
        PlanFileError: If the folder does not exist or cannot be written.
    """
    paths = []
    for name, document in DOCUMENTS.items():
        path = Path(folder) / f"{name}.schema.json"
        write_atomically(path, schema_text(document).encode())
        paths.append(path)
    for name, text in page_texts().items():
        path = Path(folder) / f"{name}.md"
        write_atomically(path, text.encode())
        paths.append(path)
    return tuple(paths)


def main(arguments: Sequence[str]) -> int:
    """Publish into the one folder given; exit code 1 without it."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m planner.schema.publish FOLDER\n")
        return 1
    publish(arguments[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
