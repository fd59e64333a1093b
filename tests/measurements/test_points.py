from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import CalibrationError
from planner.measurements.points import Point, parse_points, read_points
from tests.measurements.rows import point

HEADER = "point_id,model,gpu,n_gpus,metric,value"
ROW = "1,gpt,A100,8,iter_time_s,1.5"


def _read(*lines: str) -> tuple[Point, ...]:
    return parse_points([f"{line}\n" for line in lines], "runs.csv")


def _with(name: str, value: str) -> tuple[str, str]:
    return f"{HEADER},{name}", f"{ROW},{value}"


def test_six_columns_are_enough() -> None:
    (made,) = _read(HEADER, ROW)
    assert (made.point_id, made.model, made.gpu) == ("1", "gpt", "A100")
    assert (made.n_gpus, made.value) == (8, 1.5)
    assert made.tp is None
    assert made.source == made.recompute == ""
    assert not made.complete


@pytest.mark.parametrize("text", ["", " ", "n/a", "NA", "-", "None", "nan"])
def test_what_is_not_known_is_none(text: str) -> None:
    (made,) = _read(*_with("tp", text))
    assert made.tp is None


@pytest.mark.parametrize("name", ["tp", "pp", "microbatch", "global_batch"])
def test_complete_rows_have_a_plan(name: str) -> None:
    assert point().complete
    # The model's name may say what it looks like.
    assert point(layers=None, hidden=None, heads=None, seq=None).complete
    assert not point(**{name: None}).complete
    assert point(dp=None, zero=None, recompute="", schedule="").complete


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp", "two"),
        ("tp", "0"),
        ("tp", "1.5"),
        ("tp", "inf"),
        ("zero", "-1"),
        ("params", "7B"),
        ("microbatch", "-4"),
    ],
)
def test_a_wrong_value_is_named_with_line_and_column(name: str, value: str) -> None:
    header, row = _with(name, value)
    with pytest.raises(CalibrationError, match="line 3") as caught:
        _read(header, f"{ROW},", row)
    assert f"{name}={value!r}" in str(caught.value)
    assert "runs.csv" in str(caught.value)


def test_zero_stage_0_is_a_stage() -> None:
    (made,) = _read(*_with("zero", "0"))
    assert made.zero == 0


@pytest.mark.parametrize("name", HEADER.split(","))
def test_needed_columns(name: str) -> None:
    names = HEADER.split(",")
    place = names.index(name)
    header = [n for n in names if n != name]
    row = [cell for i, cell in enumerate(ROW.split(",")) if i != place]
    with pytest.raises(CalibrationError, match=f"no column '{name}'"):
        _read(",".join(header), ",".join(row))
    empty = ROW.split(",")
    empty[place] = ""
    with pytest.raises(CalibrationError, match=f"line 2: {name} is empty"):
        _read(HEADER, ",".join(empty))


@pytest.mark.parametrize("row", [f"{ROW},more", "1,gpt,A100,8"])
def test_rows_of_another_width_than_the_header(row: str) -> None:
    with pytest.raises(CalibrationError, match=r"line 2: \d fields, the header"):
        _read(HEADER, row)


def test_files_are_read_with_a_mark_of_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f"{HEADER}\n{ROW}\n", encoding="utf-8-sig")
    (made,) = read_points(path)
    assert made.value == 1.5


def test_a_quoted_field_may_span_lines(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text(f'{HEADER},notes\n{ROW},"one,\ntwo"\n', encoding="utf-8")
    (made,) = read_points(path)
    assert made.notes == "one,\ntwo"


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "runs.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CalibrationError, match=r"cannot read measurements .*runs\.csv"):
        read_points(path)


def test_an_empty_file_lacks_its_columns() -> None:
    with pytest.raises(CalibrationError, match="no column"):
        _read()
