"""Models on shards of samples compute what one process computes of whole samples."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from executors.data import Samples, Volumes, open_source
from executors.data.sources import _IndexedSource
from executors.measuring.traffic import CollectiveCounter
from executors.mesh import build_mesh
from executors.strategies.batch_norms import synchronise_batch_norms
from executors.strategies.halo import local_region
from executors.strategies.shards import apply_halo
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.schema import Optimizer, Plan, Precision
from planner.schema.halo import Window, factorisations, halo_values
from tests.distributed.cases import BATCH, build, make_plan
from tests.distributed.compare import distance
from tests.distributed.pool import Pool

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
MAX = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
MEAN = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class Case:
    """A model, the spatial sizes of its samples, and the split of these."""

    build: Callable[[], nn.Module]
    sizes: tuple[int, ...]
    factors: tuple[int, ...]
    batch: int = 2


def _conv(dims: int, kernel: int, **more: Any) -> Case:
    """One convolution; samples of 8 values a dimension."""
    factors = more.pop("factors", (2,))
    size = more.pop("size", 8)

    def build() -> nn.Module:
        given = {"padding": kernel // 2, **more}
        return CONVS[dims - 1](3, 4, kernel, **given)

    return Case(build, (size,) * dims, factors)


def _net(dims: int) -> nn.Module:
    """Convolutions, poolings and norms, then dense layers on whole samples."""
    conv, norm = CONVS[dims - 1], NORMS[dims - 1]
    return nn.Sequential(
        conv(3, 4, 3, padding=1),
        norm(4),
        nn.LeakyReLU(0.3),
        MAX[dims - 1](2),
        conv(4, 6, 5, padding=2, bias=False),
        nn.ReLU(inplace=True),
        MEAN[dims - 1](3, 1, 1),
        nn.Flatten(),
        nn.Linear(6 * 4**dims, 5),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 2),
    )


class _Skips(nn.Module):
    """An encoder and a decoder with a connection past them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool3d(2)
        self.middle = nn.Conv3d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.out = nn.Conv3d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.down(x))
        second = self.up(torch.relu(self.middle(self.pool(first))))
        joined = torch.cat([first, second], 1) * 0.5
        pooled = joined.mean((2, 3, 4), keepdim=True)
        sizes = list(joined.shape[2:])
        made: torch.Tensor = self.out(joined + pooled) + torch.ones(sizes)
        return made


class _Classes(nn.Module):
    """Mean cross entropy of the class of each value."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = [x.shape[0], *x.shape[2:]]
        labels = torch.arange(math.prod(sizes)).view(sizes) % 4
        labels[:, 1] = -100
        scores, weight = self.conv(x), torch.linspace(1, 2, 4, dtype=x.dtype)
        weighed = nn.functional.cross_entropy(scores, labels, weight)
        return nn.functional.cross_entropy(scores, labels) + weighed


CASES: dict[str, Case] = {
    **{f"{d}-D kernel {k}": _conv(d, k) for d in (1, 2, 3) for k in (1, 3, 5)},
    "kernel 3 stride 2": _conv(2, 3, stride=2),
    "kernel 5 stride 2": _conv(1, 5, stride=2, factors=(4,)),
    "kernel 5 stride 4": _conv(1, 5, stride=4),
    "kernel 1 stride 2": _conv(3, 1, stride=2),
    "even kernel": _conv(3, 2, stride=2, padding=0),
    "even kernel, long stride": _conv(2, 2, stride=4, padding=0),
    "even kernel with padding": _conv(2, 4, stride=2, padding=1),
    "same": _conv(2, 5, padding="same", factors=(2, 2)),
    "dilation": _conv(2, 3, padding=2, dilation=2, factors=(2, 2)),
    "groups, no bias": _conv(2, 3, groups=1, bias=False, factors=(4,)),
    "2-D split": _conv(3, 3, factors=(2, 2)),
    "2-D split of 2-D, kernel 5": _conv(2, 5, factors=(2, 2)),
    "second dimension": _conv(3, 3, factors=(1, 4)),
    "3-D split": _conv(3, 3, factors=(2, 2, 2)),
    "wide kernel, one value a shard": _conv(1, 3, factors=(8,)),
    "transposed": Case(
        lambda: nn.ConvTranspose3d(3, 4, 2, stride=2), (4, 4, 4), (2, 2)
    ),
    "max pooling": Case(lambda: nn.MaxPool2d(3, 2, 1), (8, 8), (2, 2)),
    "mean pooling": Case(lambda: nn.AvgPool3d(2), (8, 8, 8), (2,)),
    "padded mean pooling": Case(
        lambda: nn.AvgPool2d(3, 1, 1, count_include_pad=False), (8, 8), (2,)
    ),
    "batch norm": Case(
        lambda: nn.Sequential(nn.BatchNorm3d(3)), (4, 4, 4), (2, 2), batch=1
    ),
    "nearest": Case(lambda: nn.Upsample(scale_factor=2), (4, 4), (2, 2)),
    "linear upsampling": Case(
        lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 4), (2, 2)
    ),
    "circular": _conv(2, 3, padding_mode="circular"),
    "kernel wider than a shard": _conv(1, 5, factors=(8,)),
    "unpadded": _conv(2, 3, padding=0),
    "cross entropy": Case(_Classes, (4, 8), (2, 2)),
    "net 1-D": Case(lambda: _net(1), (8,), (2,)),
    "net 2-D": Case(lambda: _net(2), (8, 8), (2, 2)),
    "net 3-D": Case(lambda: _net(3), (8, 8, 8), (2,)),
    "skips": Case(_Skips, (8, 8, 8), (2, 2)),
}


def _gradients(
    case: Case, ranks: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Loss, gradients and buffers of one step; of a rank, those of all ranks."""
    torch.manual_seed(0)
    model = case.build().double()
    drawn = torch.Generator().manual_seed(1)
    shape = (case.batch, 3, *case.sizes)
    whole = torch.randn(shape, generator=drawn, dtype=torch.float64)
    value = whole
    if ranks > 1:
        plan = make_plan("llama", cp=ranks)
        place = build_mesh(plan.strategy, torch.device("cpu"))
        group = place.group("cp")
        assert group is not None
        synchronise_batch_norms(model, place, ("cp",))
        units = [name for name, _ in model.named_children()]
        inputs = ("input", "x")
        apply_halo(model, units, group, factors=case.factors, inputs=inputs)
        region = local_region(case.sizes, dist.get_rank(), case.factors)
        value = whole[(slice(None), slice(None), *region)].contiguous()
    value = value.clone().requires_grad_()
    with CollectiveCounter() as counter:
        made = model(value)
        sent = {"forward": _sent(counter)}
        weights = torch.arange(made.numel(), dtype=made.dtype).view(made.shape).sin()
        loss = (made * weights).square().sum() + made.sum()
        loss.backward()
    assert value.grad is not None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    if ranks > 1:
        for grad in found.values():
            dist.all_reduce(grad)
        parts = [torch.empty_like(value.grad) for _ in range(ranks)]
        dist.all_gather(parts, value.grad.contiguous())
        together = torch.empty_like(whole)
        for index, part in enumerate(parts):
            region = local_region(case.sizes, index, case.factors)
            together[(slice(None), slice(None), *region)] = part
        found["input"] = together
        found = {name: grad / ranks for name, grad in found.items()}
    else:
        found["input"] = value.grad
    sent["both"] = _sent(counter)
    found |= {n: b.double() for n, b in model.named_buffers()}
    return found | {"made": made.detach(), "loss": loss.detach()}, sent


def _sent(counter: CollectiveCounter) -> float:
    traffic = counter.traffic().get("send")
    return 0 if traffic is None else traffic.bytes


def _on_rank(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    found, counted = _gradients(CASES[name], math.prod(CASES[name].factors))
    return {key: value.tolist() for key, value in found.items()}, counted


@pytest.mark.parametrize("name", CASES)
def test_shards_give_the_gradients_of_whole_samples(pool: Pool, name: str) -> None:
    case = CASES[name]
    wanted, _ = _gradients(case, 1)
    for found, _ in pool.run(_on_rank, math.prod(case.factors), name):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            ours = torch.tensor(found[key], dtype=torch.float64)
            torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-9, msg=key)


def _ints(values: Any) -> list[int]:
    return [int(value) for value in values]


COUNTED = ("1-D kernel 5", "kernel 3 stride 2", "2-D split", "3-D split", "dilation")


@pytest.mark.parametrize("name", COUNTED)
def test_halos_take_the_bytes_of_their_formula(pool: Pool, name: str) -> None:
    case = CASES[name]
    conv = case.build()
    assert isinstance(conv, nn.modules.conv._ConvNd)
    rows = zip(
        conv.kernel_size, conv.stride, _ints(conv.padding), conv.dilation, strict=True
    )
    windows = [
        Window(kernel=k, stride=s, before=p, behind=p, dilation=d)
        for k, s, p, d in rows
    ]
    ranks = math.prod(case.factors)
    answers = pool.run(_on_rank, ranks, name)
    for rank, (_, sent) in enumerate(answers):
        values = halo_values(windows, case.sizes, case.factors, rank)
        assert sent["forward"] == values * case.batch * 3 * 8
    # What goes one way in forward comes back in backward.
    forward = sum(sent["forward"] for _, sent in answers)
    assert sum(sent["both"] for _, sent in answers) == 2 * forward > 0
    most = max(halo_values(windows, case.sizes, case.factors, r) for r in range(ranks))
    assert most <= halo_values(windows, case.sizes, case.factors)


class _Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0]


class _Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Squared.apply(x)  # type: ignore[no-untyped-call]
        return made


class _InPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = x * 2
        made[:, :, 0] = 0
        return made


CASES_REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "dropout": (lambda: nn.Sequential(nn.Dropout(0.1)), "other numbers than one"),
    "custom function": (_Custom, "its gradient would be wrong"),
    "in place": (_InPlace, "would change a copy"),
}


def _refused(name: str) -> str:
    ranks = dist.get_world_size()
    model = CASES_REFUSED[name][0]()
    place = build_mesh(make_plan("llama", cp=ranks).strategy, torch.device("cpu"))
    group = place.group("cp")
    assert group is not None
    apply_halo(model, (), group, factors=(ranks,), inputs=("input", "x"))
    try:
        model(torch.zeros(1, 1, 4, 4, requires_grad=True))
    except ExecutionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CASES_REFUSED)
def test_code_that_shards_would_make_wrong_is_refused(pool: Pool, name: str) -> None:
    for said in pool.run(_refused, 2, name):
        assert CASES_REFUSED[name][1] in said
        assert "cp=1" in said


def test_regions_cover_a_sample_once() -> None:
    seen = torch.zeros(4, 6)
    for index in range(6):
        seen[local_region((4, 6), index, (2, 3))] += 1
    assert (seen == 1).all()
    with pytest.raises(ExecutionError, match="a split that divides 6"):
        local_region((6, 4), 0, (4,))


def test_windows_say_why_shards_cannot_make_them() -> None:
    same = Window(kernel=5, before=2, behind=2)
    assert same.violation(16, 4) is None
    assert "use fewer shards than 16" in str(same.violation(16, 16))
    assert "each shard must hold" in str(same.violation(16, 3))
    assert "use an odd kernel" in str(Window(kernel=2).violation(16, 2))
    assert factorisations(4, 2) == ((4, 1), (2, 2), (1, 4))


TRAINED: dict[str, dict[str, Any]] = {
    "replicas": {"model": "cosmoflow", "cp": 2, "spatial": (2,)},
    "two dimensions": {"model": "cosmoflow", "cp": 4, "spatial": (2, 2)},
    "data parallel": {
        "model": "cosmoflow",
        "cp": 2,
        "spatial": (2,),
        "dp_replicate": 2,
        "num_microbatches": 2,
    },
    "zero3": {
        "model": "cosmoflow",
        "cp": 2,
        "spatial": (1, 2),
        "dp_shard": 2,
        "zero_stage": 3,
    },
    "zero3 recompute": {
        "model": "unet3d",
        "cp": 2,
        "spatial": (2,),
        "zero_stage": 3,
        "recompute": "full",
    },
    "selective": {
        "model": "unet3d",
        "cp": 2,
        "spatial": (2,),
        "zero_stage": 1,
        "recompute": "selective",
    },
    "batch norms": {"model": "unet3d", "cp": 2, "spatial": (2,), "dp_replicate": 2},
    "images": {"model": "resnet", "cp": 2, "spatial": (2,), "dp_shard": 2},
    "clipped": {
        "model": "cosmoflow",
        "cp": 2,
        "spatial": (2,),
        "zero_stage": 2,
        "grad_clip_norm": 0.01,
    },
}


@pytest.mark.parametrize("case", TRAINED)
def test_training_on_shards_is_that_of_one_process(pool: Pool, case: str) -> None:
    given = {"optimizer": Optimizer(name="SGD", learning_rate=1e-3), **TRAINED[case]}
    if given.get("dp_shard", 1) > 1:
        given.setdefault("zero_stage", 3)
    far = distance(pool, given.pop("model"), context_algorithm="halo", **given)
    # Behind the first step rounding turns the sign of a value that a ReLU sees.
    assert max(far.loss, far.first_gradients, far.weights, far.norm) <= 5e-5


def _read(plan_json: str, folder: str) -> tuple[float, float, int]:
    """Losses on arrays of which each rank reads its shards, and on whole samples."""
    plan = Plan.from_json(plan_json)
    place = build_mesh(plan.strategy, torch.device("cpu"))
    trainer = Trainer(plan, build(plan.model.name), place)
    data = Volumes({"volume": f"{folder}/volume.npy"})
    source = open_source(Samples(dataset=data), plan.workload, trainer.part, seed=3)
    assert isinstance(source, _IndexedSource)
    batch = source.batch(0)
    loss = trainer.evaluate(batch)
    numbers = source._numbers(0)
    whole = torch.from_numpy(np.load(f"{folder}/volume.npy")[numbers])
    return loss, trainer.evaluate({"volume": whole}), source._dataset.bytes_read


def test_each_rank_reads_its_shard_of_a_sample(pool: Pool, tmp_path: Path) -> None:
    volumes = np.random.default_rng(0).normal(size=(BATCH, 4, 16, 16, 16))
    np.save(tmp_path / "volume.npy", volumes.astype(np.float32))
    plan = make_plan(
        "cosmoflow", cp=4, spatial=(2, 2), context_algorithm="halo"
    ).to_json()
    for loss, whole, read in pool.run(_read, 4, plan, str(tmp_path)):
        assert loss == pytest.approx(whole, rel=1e-6)
        assert read == volumes.size * 4 / 4


def test_arrays_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "few.npy", np.zeros((2, 3)))
    np.save(tmp_path / "many.npy", np.zeros((3, 3)))
    files = {"x": tmp_path / "few.npy", "y": tmp_path / "many.npy"}
    with pytest.raises(ExecutionError, match="give at least one array, and each as"):
        Volumes(files)
    with pytest.raises(ExecutionError, match="into memory"):
        Volumes({"x": tmp_path / "none.npy"})


def test_parts_of_hdf5_samples_are_read(tmp_path: Path) -> None:
    path = tmp_path / "samples.h5"
    values = np.arange(48, dtype=np.float32).reshape(2, 1, 4, 6)
    with h5py.File(path, "w") as file:
        file["x"] = values
    shards = Volumes({"x": f"{path}:x"}).of_region({"x": (slice(2, 4), slice(0, 6))})
    assert np.array_equal(shards[1]["x"].numpy(), values[1][:, 2:4])
    assert shards.bytes_read == 48
    with pytest.raises(ExecutionError, match="name a dataset of the file"):
        Volumes({"x": f"{path}:y"})


def test_the_library_of_hdf5_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ExecutionError, match="pip install h5py"):
        Volumes({"x": "samples.h5:x"})


def test_bfloat16_is_as_close_as_it_is_without_shards(pool: Pool) -> None:
    precision = Precision(compute="bfloat16")
    optimizer = Optimizer(name="SGD", learning_rate=1e-3)
    far = distance(
        pool,
        "cosmoflow",
        cp=2,
        spatial=(2,),
        context_algorithm="halo",
        zero_stage=3,
        precision=precision,
        optimizer=optimizer,
    )
    plain = distance(
        pool, "cosmoflow", precision=precision, optimizer=optimizer, zero_stage=0
    )
    assert far.loss <= 2 * plain.loss + 2e-3
    assert far.first_gradients <= 2 * plain.first_gradients + 1e-2
