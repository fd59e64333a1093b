"""Units and blocks: contiguous, in program order, named after modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from planner.capture import capture
from planner.graph import ModelGraph
from planner.graph.units import MAX_UNITS
from tests.models.convolutional import ResNet, UNet3d
from tests.models.other import Recommender, Stack


class Flat(nn.Module):
    """Many layers and no list of modules."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth
        for index in range(depth):
            setattr(self, f"layer_{index}", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(self.depth):
            x = getattr(self, f"layer_{index}")(x).relu()
        return x


class Shared(nn.Module):
    """One layer called between two others, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.again = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.again(layer(x))
        return x


def _contiguous(graph: ModelGraph) -> bool:
    return len(set(graph.unit_names)) == len(graph.units)


def test_elements_of_lists_are_units_and_the_rest_stand_beside() -> None:
    depths = (2, 3, 2)
    graph = capture(lambda: ResNet(depths, 16), {"x": ((1, 3, 64, 64), "float32")})
    stages = [f"layer{i}.{j}" for i, n in enumerate(depths, 1) for j in range(n)]
    assert graph.unit_names == ("conv1", "bn1", *stages, "fc")
    assert {b.kind for b in graph.blocks if b.layer.startswith("layer")} == {"conv"}
    assert graph.blocks[-1].kind == "head"


def test_skips_of_a_unet_cross_the_cuts_between() -> None:
    graph = capture(UNet3d, {"x": ((1, 1, 16, 16, 16), "float32")})
    skip = 16 * 16**3 * 2
    assert _contiguous(graph)
    bottom = graph.unit_names.index("down.2")
    assert graph.cut_bytes[bottom] > skip


def test_a_model_without_lists_is_divided_by_its_children() -> None:
    graph = capture(lambda: Flat(5), {"x": ((2, 8), "float32")})
    assert graph.unit_names == tuple(f"layer_{i}" for i in range(5))
    assert list(graph.cut_bytes) == [2 * 8 * 2] * 4


def test_a_long_model_without_lists_has_a_bounded_number_of_units() -> None:
    graph = capture(lambda: Flat(300), {"x": ((2, 8), "float32")})
    assert len(graph.units) == MAX_UNITS
    assert _contiguous(graph)
    assert sum(b.parameter_count for b in graph.blocks) == 300 * 72


def test_a_module_called_again_joins_its_neighbour() -> None:
    graph = capture(Shared, {"x": ((2, 8), "float32")})
    assert _contiguous(graph)
    assert graph.forward_flops == 6 * 2 * 2 * 8 * 8
    assert sum(b.parameter_count for b in graph.blocks) == 4 * 72


def test_a_table_a_feature_is_a_unit() -> None:
    inputs = {"dense": ((8, 13), "float32"), "sparse": ((8, 8, 4), "int64")}
    graph = capture(Recommender, inputs)
    assert [n for n in graph.unit_names if n.startswith("embeddings")] == [
        f"embeddings.{i}" for i in range(8)
    ]
    assert {b.kind for b in graph.blocks if b.layer.startswith("embeddings")} == {
        "embedding"
    }


def test_a_tensor_read_by_several_blocks_crosses_a_cut_once() -> None:
    graph = capture(Stack, {"tokens": ((2, 16), "int64")})
    # The residual stream is read by the norm and by the add of the next block.
    assert set(graph.cut_bytes) == {2 * 16 * 32 * 2}


@pytest.mark.parametrize("repeat", [True, False])
def test_equal_blocks_share_a_signature(repeat: bool) -> None:
    graph = capture(Stack, {"tokens": ((2, 16), "int64")}, repeat=repeat)
    inner = [b.repeat for b in graph.blocks if b.layer.startswith("blocks.")]
    assert len(inner) == 6
    assert len(set(inner)) == 1
    assert graph.blocks[0].repeat not in inner


class _Nested(nn.Module):
    """Lists in a list, and layers of which only the forward is called."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
            for _ in range(3)
        )
        self.direct = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:  # type: ignore[attr-defined]
                x = layer(x)
        for layer in self.direct:
            x = layer.forward(x)
        return x


class _Around(nn.Module):
    """A linear layer whose weight is read by the model, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x @ self.first.weight


class _Entered(nn.Module):
    """A stem of which the model calls a part by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(self.stem[0](x))
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_module_of_which_others_call_a_part_is_no_unit() -> None:
    graph = capture(_Entered(), (torch.zeros(2, 8),), dtype="float32")
    assert "stem" not in graph.unit_names
    assert graph.unit_names[:2] == ("stem.0", "stem.1")


def test_a_module_whose_weight_others_read_is_no_unit() -> None:
    graph = capture(_Around(), (torch.zeros(2, 8),), dtype="float32")
    assert "first" not in graph.unit_names
    assert graph.unit_names[0] == "layers.0"


def test_units_are_modules_that_are_called() -> None:
    graph = capture(_Nested(), (torch.zeros(2, 8),), dtype="float32")
    assert list(graph.unit_names) == [
        *(f"stages.{i}.{j}" for i in range(3) for j in range(2)),
        "direct.0.0",
        "direct.1.0",
    ]


class _Looped(nn.Module):
    """Layers that run several times, or in a row, with an activation in common."""

    def __init__(self, *, order: tuple[int, ...]) -> None:
        super().__init__()
        act = nn.GELU()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), act, nn.Linear(8, 8)) for _ in range(3)
        )
        self.order = order
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = x + self.layers[index](x)
        out: torch.Tensor = self.head(x)
        return out


class _Listed(nn.Module):
    """Two layers in turn, each three times in a list."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList([first, second] * 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x


class _Twins(nn.Module):
    """Layers that run once on each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        for layer in self.layers:
            y = layer(y).relu()
        return x * y


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (_Looped(order=(0, 1, 2)), None),
        (_Looped(order=(0, 0, 1, 2, 2)), None),
        (_Looped(order=(0, 1, 2, 0)), "layers.1 and layers.0 run in turn"),
        (_Listed(), "layers.0 and layers.1 run in turn"),
        (Shared(), "layers.1 and again run in turn"),
        (_Twins(), None),
    ],
    ids=["in a row", "several times in a row", "again", "listed", "between", "twins"],
)
def test_units_that_run_in_turn_are_found(model: nn.Module, said: str | None) -> None:
    names = ("x", "y") if isinstance(model, _Twins) else ("x",)
    graph = capture(model, {name: torch.randn(2, 8) for name in names})
    assert graph.in_turn == said
