"""Convolutions that ranks compute on shards of samples, and their prices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import nn

from executors.dryrun import dry_run
from planner import plan, predict
from planner.capture import InputShape, capture, load_model
from planner.capture.volumes import CosmoFlow, UNet3d
from planner.errors import NoFeasiblePlanError
from planner.graph import ModelGraph
from planner.schema import Plan
from planner.schema.halo import Window, best_split, halo_values, split_violation

CUBE = {"volume": ((1, 4, 32, 32, 32), "float32")}
SCAN = {"volume": ((1, 1, 32, 32, 32), "float32")}
IMAGE = {"x": ((2, 3, 16, 16), "float32")}


@cache
def graph_of(kind: str) -> ModelGraph:
    """A small model of volumes."""
    if kind == "unet3d":
        return capture(UNet3d(width=4), SCAN, dtype="float32", name=kind)
    model = CosmoFlow(32, width=4, dense=(64, 16))
    return capture(model, CUBE, dtype="float32", name=kind)


def test_convolutions_are_divided_up_to_the_first_dense_layer() -> None:
    graph = graph_of("cosmoflow")
    assert graph.spatial_sizes == (32, 32, 32)
    assert graph.whole_sample is None
    assert [layer.sizes[0] for layer in graph.spatial] == [32, 32, 16, 16, 8, 8]
    assert [layer.channels for layer in graph.spatial] == [4, 4, 4, 8, 8, 16]
    # Backward returns no halo to inputs.
    assert [layer.trained for layer in graph.spatial] == [False, *[True] * 5]
    first = graph.spatial[0].windows
    assert first == (Window(kernel=3, before=1, behind=1),) * 3
    whole = {block.layer: block.whole for block in graph.blocks}
    assert whole == {
        **{f"blocks.{index}": False for index in range(3)},
        "dense.0": True,
        "dense.1": True,
        "head": True,
    }
    gathered = {b.layer: b.sample_bytes for b in graph.blocks if b.sample_bytes}
    assert gathered == {"dense.0": 16 * 4**3 * 4}


def test_all_of_a_u_net_is_divided() -> None:
    graph = graph_of("unet3d")
    assert not any(block.whole for block in graph.blocks)
    assert len(graph.spatial) == 21


def _conv() -> nn.Module:
    return nn.Conv2d(3, 8, 3, padding=1)


WHOLE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no convolution": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 4)),
        "it has no convolutions",
    ),
    "group norm": (
        lambda: nn.Sequential(_conv(), nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3)),
        "convolves what was made of whole samples",
    ),
    "no padding": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()),
        "is a convolution that shards cannot make",
    ),
    "dropout": (
        lambda: nn.Sequential(_conv(), nn.Dropout(0.5)),
        "draws random numbers",
    ),
    "mostly dense": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(512, 512), nn.Linear(512, 9)
        ),
        "of its FLOPs, the rest needs whole samples",
    ),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_models_that_shards_do_not_serve_say_why(kind: str) -> None:
    build, reason = WHOLE[kind]
    graph = capture(build(), {"input": IMAGE["x"]}, dtype="float32")
    assert graph.spatial == ()
    assert graph.spatial_sizes == ()
    assert reason in str(graph.whole_sample)


def test_the_split_with_the_fewest_halos_is_taken() -> None:
    layers = graph_of("cosmoflow").spatial
    assert best_split(layers, 2) == (2, 1, 1)
    assert best_split(layers, 8) == (2, 2, 2)
    # Four shards of 4 values have a whole pooling window each, eight of 1 have none.
    assert best_split(layers, 64) == (4, 4, 4)
    assert best_split(layers, 128) is None
    assert "cp=3 as 3 x 1 x 1" in split_violation(layers, 3)
    cube = [Window(kernel=3, before=1, behind=1)] * 3
    # Two faces of 4 x 8 x 8, then two of (2 + 2) x 8 x 8 with one neighbour each.
    assert halo_values(cube, (8, 8, 8), (2, 2, 1)) == 4 * 8 + 6 * 8


def _planned(name: str, batch: int, **pin: Any) -> Plan:
    made: Plan = plan(name, "dgx-h100", global_batch=batch, pin=pin, seed=0)
    return made


def test_samples_are_divided_where_there_are_fewer_than_devices() -> None:
    found = _planned("cosmoflow-512", 4)
    assert found.strategy.context_algorithm == "halo"
    assert found.strategy.spatial == (2, 2, 2)
    assert found.model.spatial_sizes == (512, 512, 512)
    assert not found.not_runnable
    whole = _planned("cosmoflow-512", 4, cp=1)
    assert found.prediction.step_time_s < whole.prediction.step_time_s
    # Shards hold an eighth of what a device would of as many samples.
    one = predict("cosmoflow-512", "dgx-h100", {"microbatch_size": 4}, global_batch=4)
    held = [p.prediction.memory[0].activations_bytes for p in (found, one)]
    assert held[0] < held[1] / 8 * 1.15


def test_samples_stay_whole_where_there_are_as_many_as_devices() -> None:
    assert _planned("cosmoflow-128", 8).strategy.mesh.cp == 1


def test_splits_that_do_not_serve_are_refused_with_the_layer() -> None:
    with pytest.raises(NoFeasiblePlanError, match="pp=2; shards of samples go with"):
        plan("cosmoflow-32", "dgx-h100", global_batch=1, pin={"cp": 4, "pp": 2})
    model = CosmoFlow(32, width=4, dense=(64, 16))
    with pytest.raises(NoFeasiblePlanError, match="use a split that divides"):
        plan(
            model,
            "dgx-h100:16",
            example_inputs=CUBE,
            global_batch=1,
            pin={"cp": 128},
        )


@pytest.mark.parametrize("kind", ["cosmoflow", "unet3d"])
def test_predicted_traffic_is_that_of_a_dry_run(kind: str) -> None:
    name = f"{kind}-32"
    found = _planned(name, 1, cp=4, recompute="none")
    ran = dry_run(found, load_model(name).build, 0)
    assert ran.failure is None
    counted: dict[str, float] = {}
    for call in ran.collectives:
        counted[call.kind] = counted.get(call.kind, 0) + call.bytes
    told = found.prediction.collective_bytes
    # Every rank of 2 x 2 shards has as many neighbours.
    assert found.strategy.spatial == (2, 2)
    assert told["send"] == counted["send"]
    # What batch norms gather beside is a mean and a variance a channel.
    assert told["all_gather"] == pytest.approx(counted["all_gather"], rel=0.02)


@pytest.mark.parametrize("zero", [1, 2])
def test_predicted_memory_lets_go_of_weights_before_gradients_are_copied(
    zero: int,
) -> None:
    # All but a twentieth of the weights are one dense layer's.
    found = plan("cosmoflow-32", "local:2", global_batch=1, pin={"zero_stage": zero})
    assert found.strategy.precision.compute == "bfloat16"
    ran = dry_run(found, load_model("cosmoflow-32").build, 0)
    assert ran.failure is None
    told = found.prediction.memory[0].total_bytes
    assert told == pytest.approx(sum(ran.memory_bytes.values()), rel=0.03)


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["cosmoflow", "unet3d"])
def test_shards_hold_their_part_of_the_activations(
    kind: str, dtype: str, ways: int
) -> None:
    def built() -> nn.Module:
        if kind == "unet3d":
            return UNet3d(width=4)
        return CosmoFlow(64, dense=(64, 16))

    channels = 1 if kind == "unet3d" else 4
    sample: dict[str, Any] = {"volume": ((1, channels, 64, 64, 64), "float32")}
    if kind == "unet3d":
        # Scores of voxels alone would be gathered for a loss that is not told.
        sample["labels"] = InputShape(shape=(1, 64, 64, 64), dtype="int64", high=3)
    graph = capture(built(), sample, dtype="float32")
    held = []
    for cp in (1, ways):
        strategy = {
            "mesh": {"cp": cp},
            "precision": {"compute": dtype},
            "stages": [{"rank": 0, "modules": graph.unit_names}],
        }
        if cp > 1:
            strategy |= {"context_algorithm": "halo", "spatial": [2, 2][: cp // 2]}
        made = predict(graph, "dgx-h100", strategy, global_batch=1)
        ran = dry_run(made, built, 0)
        assert ran.failure is None
        held.append(ran.memory_bytes["activations"])
    assert held[1] <= 1.15 * held[0] / ways
