"""Fused kernels that a plan may assume in place of code that a model was read with.

One record describes each: what it stands in for, what provides it, and what to set.
The patterns that recognise the code are in :mod:`planner.graph.fused_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

from planner.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from planner.schema.plan_parts import AssumedKernels

__all__ = [
    "FUSED_KERNELS",
    "KERNEL_CHOICES",
    "FusedKernel",
    "KernelChoice",
    "KernelKind",
    "describe_assumed",
    "kernel_notice",
    "kernel_violation",
    "kernel_warning",
    "kernels_not_run",
]

#: Kernels that a request is priced with: those of the captured code, or fused ones.
KernelChoice = Literal["as-is", "fused"]
KERNEL_CHOICES: tuple[KernelChoice, ...] = ("as-is", "fused")
KernelKind = Literal["attention", "scan", "experts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """A kernel, and the code that it stands in for.

    Attributes:
        replaces: Code, in words that may follow "instead of".
        kernel: Name of the kernel.
        provider: Packages that provide it.
        packages: Modules that transformers runs the kernel with once they can be
            imported; empty where the model's config decides.
        setting: Attribute of a transformers config that decides, ``eager`` standing for
            the code; empty where packages do.
        remedy: Advice that makes the model run it, in the imperative.
    """

    replaces: str
    kernel: str
    provider: str
    packages: tuple[str, ...] = ()
    setting: str = ""
    remedy: str


#: By kind. Sources: transformers 5, integrations/sdpa_attention.py, integrations/moe.py
#: and models/mamba/modeling_mamba.py.
FUSED_KERNELS: dict[KernelKind, FusedKernel] = {
    "attention": FusedKernel(
        replaces="eager attention",
        kernel="FlashAttention",
        provider="torch (scaled_dot_product_attention) or flash-attn",
        setting="_attn_implementation",
        remedy="set attn_implementation to sdpa in the model's config, or to "
        "flex_attention if it has attention sinks",
    ),
    "scan": FusedKernel(
        replaces="a selective scan token by token",
        kernel="the selective scan kernel",
        provider="mamba-ssm, with causal-conv1d",
        packages=("mamba_ssm", "causal_conv1d"),
        remedy="install mamba-ssm and causal-conv1d where you train",
    ),
    "experts": FusedKernel(
        replaces="a loop over experts",
        kernel="grouped products",
        provider="torch (grouped_mm)",
        setting="_experts_implementation",
        remedy="set experts_implementation to grouped_mm in the model's config",
    ),
}


def describe_assumed(assumed: AssumedKernels) -> tuple[str, ...]:
    """Return a line for each kernel that a plan assumes, with what provides it.

    Args:
        assumed: From a plan's provenance.
    """
    if not assumed.modules:
        return ("none: no code was recognised that a fused kernel replaces",)
    lines = []
    for kind, count in assumed.modules.items():
        known = FUSED_KERNELS[kind]
        lines.append(
            f"{known.kernel} instead of {known.replaces} in {count} modules; "
            f"provided by {known.provider}: {known.remedy}"
        )
    return tuple(lines)


def kernels_not_run(
    assumed: AssumedKernels | None,
    config: object,
    installed: Callable[[str], bool] | None = None,
) -> tuple[KernelKind, ...]:
    """Return the kinds of assumed kernels that a model does not run here.

    Args:
        assumed: From a plan's provenance; None of plans priced as captured.
        config: Of a transformers model; None of others, whose code is as it is.
        installed: Function from a package to whether it can be imported; None to look.
    """
    found = installed or _installed
    missing: list[KernelKind] = []
    for kind in assumed.modules if assumed is not None else ():
        known = FUSED_KERNELS[kind]
        chosen = getattr(config, known.setting, None) if known.setting else None
        runs = all(map(found, known.packages)) if known.packages else False
        if not runs and chosen in (None, "eager"):
            missing.append(kind)
    return tuple(missing)


def _installed(package: str) -> bool:
    return find_spec(package) is not None


def kernel_violation(
    assumed: AssumedKernels | None, missing: Sequence[KernelKind]
) -> str | None:
    """Return why a plan must not be run without kernels that it assumes.

    It may if the memory of the model's own code fits the plan's devices, too.

    Args:
        assumed: From a plan's provenance.
        missing: Of :func:`kernels_not_run`.
    """
    if assumed is None or not missing or assumed.captured_lack_bytes == 0:
        return None
    lack = assumed.captured_lack_bytes
    why = "how much memory it needs without is not known"
    if lack is not None:
        why = f"without, the fullest device lacks {format_bytes(lack)}"
    return (
        f"kernels=fused assumes {_kernels(missing)}, which the model does not run "
        f"here, and {why}; {_remedies(missing)}, or plan with kernels=as-is"
    )


def kernel_warning(
    assumed: AssumedKernels | None, missing: Sequence[KernelKind]
) -> str | None:
    """Return what to tell where a plan runs without kernels that it assumes.

    Args:
        assumed: As for :func:`kernel_violation`, like ``missing``.
    """
    if assumed is None or not missing:
        return None
    step = assumed.captured_step_time_s
    told = "" if step is None else f", and a step takes about {format_seconds(step)}"
    return (
        f"the plan assumes {_kernels(missing)}, which the model does not run here: it "
        f"needs more memory than predicted, which fits{told}; {_remedies(missing)}"
    )


def kernel_notice(assumed: AssumedKernels | None) -> str | None:
    """Return what to tell before a run whose model is not known yet.

    Args:
        assumed: From the plan's provenance.
    """
    missing = kernels_not_run(assumed, None)
    if assumed is None or not missing:
        return None
    step = assumed.captured_step_time_s
    told = "" if step is None else f", and a step takes about {format_seconds(step)}"
    return (
        f"the plan assumes {_kernels(missing)}; if the model does not run that, it "
        f"needs more memory than predicted{told}: {_remedies(missing)}"
    )


def _kernels(kinds: Sequence[KernelKind]) -> str:
    return " and ".join(FUSED_KERNELS[kind].kernel for kind in kinds)


def _remedies(kinds: Sequence[KernelKind]) -> str:
    return ", ".join(FUSED_KERNELS[kind].remedy for kind in kinds)
