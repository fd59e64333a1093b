"""Fits of kernels: they recover constants, and ship what their tables give."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from planner.calibration.kernels import KINDS
from planner.calibration.kernels.case import KernelCase
from planner.calibration.kernels.fit import errors_of, fit_constants
from planner.calibration.kernels.rows import kernel_folder
from planner.errors import CalibrationError
from planner.measurements.kernels import fitted_constants_of

_TABLES = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "kernels"

needs_tables = pytest.mark.skipif(
    not _TABLES.is_dir(),
    reason="MESHWRIGHT_DATA has no kernels",
)

#: Most that the mean error on held-out rows may be, by kind and variant; what the
#: shipped constants give is in docs/kernels.md.
_BOUNDS = {
    ("products", "bfloat16"): 0.09,
    ("products", "float8"): 0.09,
    ("products", "float8_block128"): 0.15,
    ("products", "nvfp4"): 0.12,
    ("attention", "causal"): 0.12,
    ("attention", "full"): 0.08,
    ("attention", "latent"): 0.09,
    ("experts", "bfloat16"): 0.16,
    ("experts", "float8"): 0.19,
    ("experts", "float8_block128"): 0.1,
    ("dispatch", "dispatch"): 0.06,
    ("dispatch", "combine"): 0.08,
    ("dispatch", "dispatch_hosts"): 0.04,
    ("dispatch", "combine_hosts"): 0.04,
    ("dispatch", "dispatch_rack"): 0.1,
    ("dispatch", "combine_rack"): 0.1,
    ("collectives", "all_reduce"): 0.1,
    ("collectives", "all_gather"): 0.1,
    ("collectives", "reduce_scatter"): 0.11,
    ("collectives", "all_to_all"): 0.1,
}


def test_fits_recover_the_constants_of_their_form() -> None:
    size = np.geomspace(1, 1e6, 200)
    noise = np.exp(np.random.RandomState(0).normal(0, 0.02, 200))
    measured = (3e-6 + size / 2e11) * noise
    # Rows that are far off are not to bend the fit.
    measured[::20] *= 3

    found = fit_constants(
        lambda c: c["launch_s"] + size / c["rate"],
        measured,
        {"launch_s": (1e-6, 0.0, 1e-4), "rate": (1e11, 1e9, 1e13)},
    )
    assert found["launch_s"] == pytest.approx(3e-6, rel=0.02)
    assert found["rate"] == pytest.approx(2e11, rel=0.02)


def test_errors_are_shares_of_what_was_measured() -> None:
    found = errors_of(
        np.array([1.1, 0.8, 3.0]), np.array([1.0, 1.0, 3.0]), np.array([1, 0, 1], bool)
    )
    assert found.mean == pytest.approx(0.1)
    assert found.median == pytest.approx(0.1)
    assert found.training == pytest.approx(0.05)
    assert found.bias == pytest.approx(np.log(1.1 * 0.8) / 3)


def test_missing_tables_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHWRIGHT_DATA", str(tmp_path))
    with pytest.raises(CalibrationError, match=r"no kernels/gemm\.csv\.gz"):
        kernel_folder()


@needs_tables
@pytest.mark.parametrize("kind", KINDS)
def test_shipped_constants_predict_rows_that_no_fit_saw(kind: str) -> None:
    for case in KINDS[kind]():
        _check(case)


def _check(case: KernelCase) -> None:
    shipped = fitted_constants_of(case.device, case.kind, case.variant)
    held = case.rows.at(case.rows.held_out)
    values = {name: shipped["constants"][name] for name in case.bounds}
    found = errors_of(case.predict(values, held), held.seconds)
    where = f"{case.device} {case.variant}"
    assert found.mean < _BOUNDS[case.kind, case.variant], where
    assert found.mean == pytest.approx(shipped["held_out_error"], abs=5e-4), where
    assert shipped["rows"] == len(case.rows) - len(held)
