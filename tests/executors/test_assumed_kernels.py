"""Plans that assume fused kernels run where the model has them, or fits without."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from executors.model_source import require_kernels
from planner.errors import ExecutionError
from planner.schema.fused_kernels import (
    KernelKind,
    describe_assumed,
    kernel_notice,
    kernel_violation,
    kernel_warning,
    kernels_not_run,
)
from planner.schema.plan_parts import AssumedKernels


def _assumed(lack: float | None, *kinds: KernelKind) -> AssumedKernels:
    return AssumedKernels(
        modules=dict.fromkeys(kinds or ("attention",), 3),
        captured_step_time_s=0.25,
        captured_lack_bytes=lack,
    )


def _plan(assumed: AssumedKernels | None) -> Any:
    return SimpleNamespace(provenance=SimpleNamespace(kernels=assumed))


def _model(**config: str) -> nn.Module:
    model = nn.Linear(2, 2)
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    return model


_EAGER = {"_attn_implementation": "eager", "_experts_implementation": "eager"}


def test_a_plan_that_does_not_fit_without_its_kernels_is_refused() -> None:
    plan = _plan(_assumed(3e9))
    with pytest.raises(ExecutionError) as raised:
        require_kernels(plan, _model(**_EAGER))
    text = str(raised.value)
    assert "kernels=fused assumes FlashAttention" in text
    assert "lacks 3 GB" in text
    assert "set attn_implementation to sdpa" in text
    assert "kernels=as-is" in text
    with pytest.raises(ExecutionError, match="FlashAttention"):
        require_kernels(plan, nn.Linear(2, 2))


def test_memory_that_nobody_priced_is_refused() -> None:
    with pytest.raises(ExecutionError, match="is not known"):
        require_kernels(_plan(_assumed(None)), _model(**_EAGER))


def test_a_plan_that_fits_without_runs_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        require_kernels(_plan(_assumed(0.0)), _model(**_EAGER))
    assert "assumes FlashAttention" in caplog.text
    assert "a step takes about 250 ms" in caplog.text


def test_a_model_that_runs_the_kernels_is_not_spoken_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs = _model(_attn_implementation="sdpa", _experts_implementation="grouped_mm")
    with caplog.at_level(logging.WARNING):
        require_kernels(_plan(_assumed(3e9, "attention", "experts")), runs)
        require_kernels(_plan(None), _model(**_EAGER))
        require_kernels(_plan(AssumedKernels()), _model(**_EAGER))
    assert caplog.text == ""


def test_a_scan_is_run_once_both_packages_are_installed() -> None:
    assumed = _assumed(3e9, "scan", "experts")
    config = SimpleNamespace(_experts_implementation="grouped_mm")
    both = {"mamba_ssm", "causal_conv1d"}
    assert kernels_not_run(assumed, config, both.__contains__) == ()
    assert kernels_not_run(assumed, config, {"mamba_ssm"}.__contains__) == ("scan",)
    assert kernels_not_run(assumed, None, both.__contains__) == ("experts",)
    text = kernel_violation(assumed, ("scan",))
    assert text is not None
    assert "install mamba-ssm and causal-conv1d" in text
    assert kernel_warning(assumed, ()) is None


def test_a_run_is_told_of_before_its_model_is_there() -> None:
    text = kernel_notice(_assumed(0.0))
    assert text is not None
    assert text.startswith("the plan assumes FlashAttention; if the model does not run")
    assert "250 ms" in text
    assert kernel_notice(AssumedKernels()) is None
    assert kernel_notice(None) is None


def test_a_description_names_kernels_and_what_provides_them() -> None:
    (first, second) = describe_assumed(_assumed(0.0, "attention", "scan"))
    assert first.startswith("FlashAttention instead of eager attention in 3 modules")
    assert "flash-attn" in first
    assert "mamba-ssm" in second
    assert "none" in describe_assumed(AssumedKernels())[0]
