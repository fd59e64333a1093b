"""The published JSON Schemas are those of the code, and say the same as the code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.schema.pages import schema_pages
from planner.schema.publish import (
    DOCUMENTS,
    main,
    page_texts,
    publish,
    schema_text,
)
from tests.plans import gpt2_plan
from tests.schema.documents import (
    admissions,
    checkpoints,
    cluster_states,
    clusters,
    elastic_records,
    federations,
    job_requests,
    measurements,
    plans,
    probes,
    strategies,
    stream_records,
    throughput_tables,
    verifications,
)

PUBLISHED = Path(__file__).parents[2] / "docs" / "schema"
MADE = {
    "admission": admissions(),
    "checkpoint": checkpoints,
    "cluster": clusters(),
    "cluster-state": cluster_states(),
    "elastic": elastic_records(),
    "federation": federations(),
    "job": job_requests,
    "measurement": measurements,
    "plan": plans(),
    "probe": probes,
    "strategy": strategies(),
    "stream": stream_records(),
    "throughputs": throughput_tables,
    "verification": verifications,
}


def _validator(name: str) -> Any:
    schema = json.loads((PUBLISHED / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_published_schema_is_that_of_the_code(name: str) -> None:
    published = (PUBLISHED / f"{name}.schema.json").read_text()
    assert published == schema_text(DOCUMENTS[name]), (
        "run python -m planner.schema.publish docs/schema"
    )


def test_nothing_else_is_published() -> None:
    names = {path.name for path in PUBLISHED.iterdir()}
    assert names == {f"{name}.schema.json" for name in DOCUMENTS} | {
        f"{name}.md" for name in page_texts()
    }


@pytest.mark.parametrize("name", ["index", *DOCUMENTS])
def test_the_published_page_is_that_of_the_schema(name: str) -> None:
    published = (PUBLISHED / f"{name}.md").read_text()
    assert published == page_texts()[name], (
        "run python -m planner.schema.publish docs/schema"
    )


def test_pages_say_what_schemas_say() -> None:
    part = {
        "description": "A ``part``.\n\nAttributes:\n    size: Of :class:`It`, at\n"
        "        most | three.",
        "properties": {
            "named": {"type": "object", "additionalProperties": {"type": "string"}},
            "size": {"type": "integer", "minimum": 1, "exclusiveMaximum": 4},
        },
        "required": ["size"],
        "title": "Part",
    }
    whole = {
        "$defs": {"Part": part},
        "properties": {"part": {"anyOf": [{"$ref": "#/$defs/Part"}, {"type": "null"}]}},
        "title": "Whole",
    }
    other = {**whole, "title": "Other", "description": "Another."}
    pages = schema_pages({"strategy": {**whole, "description": "All."}, "z": other})
    assert "| `part` | [Part](#part) or null | optional |  |" in pages["strategy"]
    assert (
        "## Part\n\nA `part`.\n\n"
        "| field | type | default | meaning |\n|---|---|---|---|\n"
        "| `size` | integer ≥ 1 and < 4 | required | Of `It`, at most \\| three. |\n"
        "| `named` | name to string | empty |  |\n"
    ) in pages["strategy"]
    assert "[Part](strategy.md#part) or null" in pages["z"]
    assert "## Part" not in pages["z"]
    assert "| [z](z.md) | [z.schema.json](z.schema.json) | Another. |" in pages["index"]


@pytest.mark.parametrize("name", DOCUMENTS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_documents_satisfy_their_schema(name: str, data: st.DataObject) -> None:
    document = data.draw(MADE[name])
    assert list(_validator(name).iter_errors(document.to_data())) == []


def test_the_schema_refuses_what_the_code_refuses() -> None:
    validator = _validator("plan")
    good = gpt2_plan().to_data()
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "more": 1})
    assert not validator.is_valid({**good, "schema_version": 2})
    assert not validator.is_valid({k: v for k, v in good.items() if k != "strategy"})


def test_the_command_writes_all_of_them(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "planner.schema.publish", str(tmp_path)], check=True
    )
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_text() for path in PUBLISHED.iterdir()}
    assert [path.name for path in publish(tmp_path)] == [
        *(f"{name}.schema.json" for name in DOCUMENTS),
        *(f"{name}.md" for name in page_texts()),
    ]


def test_the_command_wants_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert capsys.readouterr().err.startswith("usage: ")


def test_pages_tell_the_documents_that_a_field_may_hold() -> None:
    parts = {name: {"title": name, "properties": {}} for name in ("One", "Other")}
    refs = [{"$ref": f"#/$defs/{name}"} for name in parts]
    whole = {
        "title": "Whole",
        "description": "All.",
        "$defs": parts,
        "properties": {"part": {"oneOf": refs}},
    }
    (line,) = (
        line
        for line in schema_pages({"strategy": whole})["strategy"].splitlines()
        if line.startswith("| `part` |")
    )
    assert line == "| `part` | [One](#one) or [Other](#other) | optional |  |"
