"""Records as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import PlanFileError
from planner.schema.stream import StreamRecord
from policies.recording import label_record, record_name, weights_id, write_records
from policies.saved import shipped_folder
from tests.schema.test_stream import GOOD


@pytest.fixture
def record() -> StreamRecord:
    return label_record(
        StreamRecord.from_data(GOOD), policy="para_min", offered_load=1.5, seed=7
    )


def test_a_name_says_stream_seed_and_policy(record: StreamRecord) -> None:
    assert record_name(record) == "load1.5-7-para_min.json"
    assert record_name(label_record(record, policy="x", law="A")) == "A-7-x.json"
    learned = label_record(record, policy="learned+lookahead", weights="ab12")
    assert record_name(learned) == "load1.5-7-learned+lookahead-ab12.json"
    hostile = label_record(record, policy="../$(rm -rf ~)\n", law='"x";')
    assert record_name(hostile) == "_x__-7-..___rm_-rf____.json"
    bare = StreamRecord.from_data(GOOD)
    assert record_name(bare) == "stream-policy.json"


def test_records_are_written_all_or_none(record: StreamRecord, tmp_path: Path) -> None:
    other = label_record(record, policy="para_max")
    folder = tmp_path / "run"
    written = write_records([record, other], folder)
    assert [Path(path).name for path in written] == [
        "load1.5-7-para_min.json",
        "load1.5-7-para_max.json",
    ]
    assert StreamRecord.load(written[0]).to_json() == record.to_json()
    # The same again is no other content; a further policy joins.
    write_records([record], folder)
    third = label_record(record, policy="zz")
    (folder / "load1.5-7-para_max.json").write_text("{}")
    with pytest.raises(PlanFileError, match="exists with other content"):
        write_records([third, other], folder)
    assert not (folder / "load1.5-7-zz.json").exists()
    write_records([third, other], folder, force=True)
    assert StreamRecord.load(folder / "load1.5-7-para_max.json").policy == "para_max"
    assert sorted(path.name for path in folder.iterdir()) == [
        "load1.5-7-para_max.json",
        "load1.5-7-para_min.json",
        "load1.5-7-zz.json",
    ]


def test_what_cannot_be_written_is_refused(
    record: StreamRecord, tmp_path: Path
) -> None:
    with pytest.raises(PlanFileError, match=r"two records would be load1.5-7-para_min"):
        write_records([record, record], tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(PlanFileError, match="is not a folder"):
        write_records([record], file)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_weights_have_a_name(tmp_path: Path) -> None:
    name = weights_id(shipped_folder("job_stream"))
    assert len(name) == 12
    assert name != weights_id(shipped_folder("job_stream_world"))
    with pytest.raises(PlanFileError, match="cannot be read"):
        weights_id(tmp_path)
