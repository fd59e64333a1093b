"""Years in the names of sources."""

from __future__ import annotations

import pytest

from planner.calibration.years import year_of


@pytest.mark.parametrize(
    ("source", "year"),
    [
        ("Korthikanti 2022 Table 5", 2022),
        ("a README (2023-2024)", 2024),
        ("vTrain (MICRO24) data/ground_truth_multi.csv", 2024),
        ("Alpa OSDI22 artifact", 2022),
        ("somebody, EuroSys '24", 2024),
        ("somebody, NeurIPS 22", 2022),
        ("Megatron-LM SC21 Table 2", 2021),
        ("somebody, SC '21", 2021),
        ("somebody, PVLDB23", 2023),
        ("arXiv:2401.10241", 2024),
        ("arXiv 2401.10241v2", 2024),
    ],
)
def test_a_year_in_full_of_a_conference_or_of_arxiv(source: str, year: int) -> None:
    assert year_of(source) == year


@pytest.mark.parametrize(
    "source",
    [
        "2048 GPUs",
        "2024 GPUs",
        "2024 x A100",
        "cluster 32",
        "SC 32 GPUs",
        "micro 16 sweep",
        "fast-20 run",
        "container 26.04",
        "a blog",
    ],
)
def test_numbers_that_are_no_years(source: str) -> None:
    assert year_of(source) is None
