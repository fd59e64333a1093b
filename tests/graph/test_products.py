"""Products of unlike dtypes, where a plan casts all weights to one, are refused."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.errors import CaptureError


class _Block(nn.Module):
    """A gate in a dtype of its own, and a layer."""

    def __init__(self, inner: torch.dtype | None, gate: torch.dtype) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(8, 8), nn.Linear(8, 8, dtype=gate)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate(x.to(self.inner or self.gate.weight.dtype))
        return self.layer(x) * gate.to(x.dtype)


class _Scaled(nn.Module):
    """A layer behind a buffer, which mixed precision does not cast."""

    def __init__(self, *, cast: bool) -> None:
        super().__init__()
        self.layer, self.cast = nn.Linear(8, 8), cast
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.get_buffer("scale")
        return self.layer(x * (scale.to(x.dtype) if self.cast else scale))


class _Row(nn.Module):
    """Such layers in a row."""

    def __init__(self, *, cast: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Scaled(cast=cast) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Model(nn.Module):
    """Blocks, then a head, which may be in a dtype of its own, too."""

    def __init__(
        self,
        *,
        inner: torch.dtype | None = None,
        gate: torch.dtype = torch.float32,
        head: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block(inner, gate) for _ in range(3))
        self.head, self.cast = nn.Linear(8, 8, dtype=head), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.to(self.cast or x.dtype)).float()


def _read(model: nn.Module, dtype: str) -> tuple[str, ...]:
    return capture(model, {"x": torch.randn(4, 3, 8)}, dtype=dtype).assumptions


_F32, _F64, _B16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(
    ("model", "dtype", "said"),
    [
        (_Model(head=_F64), "float32", "head multiplies float32 by float64"),
        (
            _Model(inner=_B16, gate=_B16),
            "float32",
            "layers.0.gate multiplies bfloat16 by float32",
        ),
        (
            _Model(inner=_F32),
            "bfloat16",
            "layers.0.gate multiplies bfloat16 by float32",
        ),
        (
            _Row(cast=False),
            "bfloat16",
            "layers.0.layer multiplies bfloat16 by float32",
        ),
    ],
    ids=["float64 head", "bfloat16 gates", "float32 in a unit", "buffer"],
)
def test_casts_by_hand_are_refused_when_the_model_is_read(
    model: nn.Module, dtype: str, said: str
) -> None:
    rule = f"all weights of a plan have one dtype, here {dtype}"
    remedy = "cast to the dtype of the weight, x.to(self.weight.dtype)"
    with pytest.raises(CaptureError, match=f"{said}.*{rule}.*{re.escape(remedy)}"):
        _read(model, dtype)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        # What enters a unit is cast there.
        (_Model(head=_F64), "bfloat16"),
        (_Model(gate=_B16), "float32"),
        (_Model(gate=_B16), "bfloat16"),
        (_Model(inner=_F32), "float32"),
        (_Row(cast=True), "bfloat16"),
        (_Row(cast=False).double(), "float32"),
    ],
    ids=[
        "float64 before a unit",
        "bfloat16",
        "bfloat16 in bfloat16",
        "float32",
        "buffer",
        "float64",
    ],
)
def test_models_that_run_with_weights_of_one_dtype_are_read(
    model: nn.Module, dtype: str
) -> None:
    narrowed = any("float64, which" in text for text in _read(model, dtype))
    assert narrowed == any(one.dtype == _F64 for one in model.parameters())


def test_weights_that_lose_precision_are_told() -> None:
    told = _read(_Model(gate=_F64), "float32")
    assert (
        "layers.0.gate.weight and 5 more parameters are float64, which plans keep in "
        "float32"
    ) in told
