"""Rows whose columns contradict each other: both are named, and what to correct."""

from __future__ import annotations

import pytest

from planner.calibration.rows import doubtful_reason
from planner.errors import CalibrationError
from planner.measurements.cases import prepare
from planner.measurements.points import parse_point
from tests.measurements.rows import small

#: A model of experts, of which the row states nothing but the name.
_MIXTRAL = {
    "model": "Mixtral 8x7B",
    "layers": None,
    "hidden": None,
    "heads": None,
    "vocab": None,
    "n_gpus": 16,
    "dp": 16,
}
_PIPELINE = {"pp": 2, "dp": 4}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"dp": 4}, ("dp=4", "n_gpus=8", "tp=1")),
        ({"dp": 8, "tp": 2}, ("dp=8", "n_gpus=8", "tp=2")),
        ({"dp": 4, "tp": None, "pp": None}, ("dp=4", "n_gpus=8")),
        (
            {"global_batch": 72},
            ("global_batch=72", "dp=8", "microbatch=4", "2.25 microbatches"),
        ),
        ({"global_batch": 16}, ("global_batch=16", "microbatch=4", "taken as 1")),
        ({"global_batch": 12, "microbatch": None}, ("global_batch=12", "dp=8")),
        ({"ep": 4}, ("ep=4", "model='GPT'", "no experts")),
        ({**_MIXTRAL, "ep": 16}, ("ep=16", "model='Mixtral 8x7B'", "8 experts")),
        ({"zero": 3, "dp": 1, "tp": 8}, ("zero=3", "dp=1")),
        ({"zero": 3, "notes": "dp_shard=3"}, ("dp_shard=3", "dp=8")),
        ({"params": 7e9}, ("params=7e+09", "layers=4", "hidden=512")),
        (
            {"model": "Llama 3 8B", "heads": 32, "hidden": 4096, "params": 8e9},
            ("params=8e+09", "model='Llama 3 8B'", "layers=4"),
        ),
        ({"model": "GPT 175B"}, ("model='GPT 175B'", "layers=4", "hidden=512")),
        ({"schedule": "interleaved 1f1b"}, ("schedule='interleaved 1f1b'", "pp=1")),
        ({"vp": 4}, ("vp=4", "pp=1")),
        (
            {**_PIPELINE, "vp": 2, "schedule": "gpipe"},
            ("vp=2", "schedule='gpipe'", "GPipe with vp=1"),
        ),
        (
            {**_PIPELINE, "vp": 2, "schedule": "1f1b"},
            ("vp=2", "schedule='1f1b'", "Interleaved1F1B with vp=2"),
        ),
        (
            {**_PIPELINE, "vp": 1, "schedule": "interleaved"},
            ("vp=1", "schedule='interleaved'", "1F1B with vp=1"),
        ),
        (
            {**_PIPELINE, "vp": 2, "schedule": "interleaved vp=4"},
            ("vp=2", "schedule='interleaved vp=4'"),
        ),
        (
            {**_PIPELINE, "vp": 2, "schedule": "interleaved", "global_batch": 48},
            ("vp=2", "global_batch=48", "3 microbatches", "pp=2"),
        ),
        ({**_PIPELINE, "schedule": "none"}, ("schedule='none'", "pp=2", "1F1B")),
        ({"heads": 7}, ("heads=7", "hidden=512")),
        ({"tp": 8, "dp": 1, "heads": 4}, ("tp=8", "heads=4")),
        ({"cp": 8, "dp": 1, "seq": 516}, ("cp=8", "seq=516")),
        ({"precision": "fp8"}, ("precision='fp8'", "gpu='A100-80GB'")),
        (
            {"metric": "peak_mem_gb", "value": 500.0},
            ("value=500", "peak_mem_gb", "gpu='A100-80GB'"),
        ),
        (
            {
                "source": "Alpa intra_ablation",
                "notes": "method=parax.zero_2",
                "recompute": "none",
            },
            ("recompute=none", "source='Alpa intra_ablation'", "recompute=full"),
        ),
    ],
)
def test_priced_and_said(row: dict[str, object], words: tuple[str, ...]) -> None:
    said = [text for text in prepare(small(**row)).why if "correct" in text]
    assert len(said) == 1, said
    assert all(word in said[0] for word in words)


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"dp": None},
        {"global_batch": None},
        {"zero": 1},
        {"schedule": "1f1b"},
        {"schedule": "interleaved 1f1b where pp>1"},
        {**_PIPELINE, "vp": 2, "schedule": "interleaved 1f1b"},
        {**_PIPELINE, "vp": 2, "schedule": ""},
        {**_PIPELINE, "schedule": "interleaved vp=2"},
        {**_PIPELINE, "vp": 2, "schedule": "dualpipe"},
        {"zero": 3, "notes": "dp_shard=4"},
        {"zero": 3, "cp": 8, "dp": 1},
        {"tp": 8, "dp": 1},
        {"params": 39e6},
        {**_MIXTRAL, "ep": 8},
        {"metric": "peak_mem_gb", "value": 79.0},
        {"precision": "fp8", "gpu": "H100"},
    ],
)
def test_rows_that_agree_with_themselves(row: dict[str, object]) -> None:
    assert not [text for text in prepare(small(**row)).why if "correct" in text]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"tp": 3, "dp": None}, ("tp=3", "n_gpus=8")),
        ({"pp": 8, "dp": 1}, ("pp=8", "layers=4")),
        (
            {**_PIPELINE, "vp": 8, "schedule": "interleaved"},
            ("pp=2", "vp=8", "layers=4"),
        ),
        ({"gpu": "16xA100 + 8xV100"}, ("16xA100", "n_gpus=8")),
    ],
)
def test_rows_that_cannot_be_priced(
    row: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(CalibrationError) as caught:
        prepare(small(**row))
    assert all(word in str(caught.value) for word in words)


def test_a_fit_gives_the_same_words_as_a_price() -> None:
    for changes in ({"dp": 4}, {"global_batch": 72}):
        row = small(**changes)
        assert doubtful_reason(row) in prepare(row).why


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"zero": "4"}, "zero='4' is not a whole number from 0 to 3"),
        (
            {"metric": "oom_or_failed", "value": "3"},
            "value='3', but metric='oom_or_failed' is 0 or 1; correct value or metric",
        ),
    ],
)
def test_cells_that_no_row_can_have(cells: dict[str, str], words: str) -> None:
    row = {"point_id": "1", "model": "GPT", "gpu": "A100", "n_gpus": "8"}
    row |= {"metric": "iter_time_s", "value": "1"}
    with pytest.raises(CalibrationError) as caught:
        parse_point({**row, **cells}, "runs.csv, line 2")
    assert words in str(caught.value)
