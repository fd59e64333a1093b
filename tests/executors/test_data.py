"""Batches do not depend on how they are divided."""

from __future__ import annotations

import pytest
import torch

from executors.data import (
    global_batches,
    require_size,
    slice_batch,
    synthetic_batch,
    take_samples,
)
from planner.errors import ExecutionError
from planner.schema import InputSpec, Workload

WORKLOAD = Workload(
    global_batch=6,
    inputs=(
        InputSpec(name="ids", shape=(3,), dtype="int64", high=5),
        InputSpec(name="mask", shape=(3,), dtype="bool"),
        InputSpec(name="image", shape=(2, 2), dtype="bfloat16"),
    ),
)


def test_synthetic_batches_follow_the_workload() -> None:
    batch = synthetic_batch(WORKLOAD, 0)
    assert {n: (tuple(v.shape), v.dtype) for n, v in batch.items()} == {
        "ids": ((6, 3), torch.int64),
        "mask": ((6, 3), torch.bool),
        "image": ((6, 2, 2), torch.bfloat16),
    }
    assert 0 <= int(batch["ids"].min()) <= int(batch["ids"].max()) < 5


def test_the_same_step_and_seed_give_the_same_batch_and_no_other_do() -> None:
    first, again = (
        synthetic_batch(WORKLOAD, 3, seed=1),
        synthetic_batch(WORKLOAD, 3, seed=1),
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    for step, seed in ((4, 1), (3, 2)):
        other = synthetic_batch(WORKLOAD, step, seed=seed)
        assert not torch.equal(first["image"], other["image"])


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_slices_make_up_the_batch(count: int) -> None:
    batch = synthetic_batch(WORKLOAD, 0)
    device = torch.device("cpu")
    parts = [slice_batch(batch, index, count, device) for index in range(count)]
    for name, value in batch.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), value)


def test_data_that_gives_nothing_or_too_little_is_refused() -> None:
    with pytest.raises(ExecutionError, match="no batch for step 0"):
        next(global_batches(WORKLOAD, [], 1))
    short = {"ids": torch.zeros(4, 3)}
    with pytest.raises(ExecutionError, match=r"4 samples in 'ids'.*global_batch=6"):
        next(global_batches(WORKLOAD, lambda _: short, 1))


@pytest.mark.parametrize("kind", ["synthetic", "iterable", "function"])
def test_a_run_that_goes_on_sees_the_batches_of_its_steps(kind: str) -> None:
    workload = Workload(
        global_batch=2, inputs=(InputSpec(name="x", shape=(3,), dtype="float32"),)
    )
    made = [synthetic_batch(workload, step) for step in range(3)]
    asked: list[int] = []

    def function(step: int) -> dict[str, torch.Tensor]:
        asked.append(step)
        return made[step % 3]

    data = {"synthetic": None, "iterable": made, "function": function}[kind]
    every = list(global_batches(workload, data, 5))
    asked.clear()
    rest = list(global_batches(workload, data, 5, first=2))
    assert len(rest) == 3
    for ours, expected in zip(rest, every[2:], strict=True):
        assert torch.equal(ours["x"], expected["x"])
    assert asked == ([2, 3, 4] if kind == "function" else [])


def test_synthetic_positions_are_of_one_text_a_row() -> None:
    spec = InputSpec(name="position_ids", shape=(4,), dtype="int64", high=100)
    batch = synthetic_batch(Workload(global_batch=2, inputs=(spec,)), 0)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2


TOKENS, GRID = 9, (1, 2, 3)
PICTURES = Workload(
    global_batch=4,
    inputs=(
        InputSpec(
            name="input_ids",
            shape=(8,),
            dtype="int64",
            high=TOKENS + 1,
            values=((TOKENS, 6), (None, 2)),
        ),
        InputSpec(name="pixel_values", shape=(5,), dtype="float32", rows=6),
        InputSpec(
            name="image_grid_thw",
            shape=(3,),
            dtype="int64",
            high=4,
            values=tuple((size, 1) for size in GRID),
        ),
    ),
)


def test_samples_own_consecutive_rows() -> None:
    batch = synthetic_batch(PICTURES, 0) | {"patch_mask": torch.ones(24)}
    require_size(batch, 4, PICTURES.inputs)
    second = slice_batch(batch, 1, 4, torch.device("cpu"))
    assert torch.equal(second["pixel_values"], batch["pixel_values"][6:12])
    assert torch.equal(second["patch_mask"], batch["patch_mask"][6:12])
    own = take_samples(batch, slice(1, 3), 4)
    assert torch.equal(own["pixel_values"], batch["pixel_values"][6:18])
    assert torch.equal(own["input_ids"], batch["input_ids"][1:3])
    # As many patches, in another form.
    batch["image_grid_thw"][2] = torch.tensor((1, 6, 1))
    require_size(batch, 4, PICTURES.inputs)


@pytest.mark.parametrize(
    ("name", "rows", "told"),
    [
        (
            "pixel_values",
            23,
            r"23 rows in 'pixel_values'.* of 6 rows.*give 24",
        ),
        ("patch_mask", 8, r"8 rows in 'patch_mask'"),
        ("input_ids", 8, r"8 samples in 'input_ids'.*if a sample owns 2 rows, plan"),
    ],
)
def test_rows_that_samples_cannot_share_are_named(
    name: str, rows: int, told: str
) -> None:
    batch = synthetic_batch(PICTURES, 0)
    batch[name] = torch.zeros(rows, 8)
    with pytest.raises(ExecutionError, match=told):
        require_size(batch, 4, PICTURES.inputs)


def test_samples_with_unequal_pictures_of_the_right_sum_are_refused() -> None:
    sizes = synthetic_batch(PICTURES, 0)
    sizes["image_grid_thw"][:2] = torch.tensor([(1, 2, 4), (1, 2, 2)])
    with pytest.raises(ExecutionError, match=r"'image_grid_thw' .* 4 to 8 rows of 'pi"):
        require_size(sizes, 4, PICTURES.inputs)
    tokens = synthetic_batch(PICTURES, 0)
    tokens["input_ids"][:2] = torch.tensor([[TOKENS] * 8, [TOKENS] * 4 + [0] * 4])
    with pytest.raises(ExecutionError, match=r"'input_ids' .* have 4 to 8 tokens 9"):
        require_size(tokens, 4, PICTURES.inputs)
    with pytest.raises(ExecutionError, match="'x' has 5 rows, which 2 parts"):
        slice_batch({"x": torch.zeros(5, 1)}, 0, 2, torch.device("cpu"))
