"""The folder of checkpoints, options, names of tensors: without any process."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from executors.checkpoints.checkpoint import CheckpointOptions
from executors.checkpoints.dcp import SavedTensor, _unpickle, read_saved
from executors.checkpoints.folder import CheckpointFolder, damage, inspect_file
from executors.checkpoints.snapshot import Inventory, counter_device, difference
from planner.errors import ExecutionError, PlanFileError
from planner.schema import Mesh
from planner.schema.checkpoint import CheckpointRecord


def _record(step: int) -> CheckpointRecord:
    return CheckpointRecord(
        step=step,
        model_name="tiny",
        model_fingerprint="0123456789abcdef",
        plan_label="dp_shard2",
        mesh=Mesh(dp_shard=2),
        optimizer="SGD",
        seed=0,
    )


def _publish(folder: CheckpointFolder, step: int, keep: int = 2) -> None:
    written = folder.unfinished(step)
    written.mkdir(parents=True)
    (written / "part").write_bytes(b"tensors %d" % step)
    folder.publish(_record(step), {"part": inspect_file(written / "part")}, keep)


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "kept")


@pytest.mark.parametrize("keep", [1, 2, 3, 9])
def test_the_last_ones_are_kept(folder: CheckpointFolder, keep: int) -> None:
    for count, step in enumerate((10, 20, 30, 40), 1):
        _publish(folder, step, keep)
        assert folder.steps() == [10, 20, 30, 40][max(0, count - keep) : count]
        assert folder.choose(True) == f"step-{step:06d}"
    left = {entry.name for entry in folder.path.iterdir()}
    assert left == {"latest", *(folder.of(step).name for step in folder.steps())}


def test_half_a_checkpoint_is_none(folder: CheckpointFolder) -> None:
    assert folder.choose(True) is None
    _publish(folder, 10)
    folder.unfinished(20).mkdir()
    (folder.unfinished(20) / "part").write_bytes(b"half")
    assert folder.choose(True) == "step-000010"
    assert sorted(e.name for e in folder.path.iterdir()) == ["latest", "step-000010"]


def test_where_to_begin_is_checked(folder: CheckpointFolder) -> None:
    with pytest.raises(ExecutionError, match="no step-000010; there is no other"):
        folder.choose("step-000010")
    _publish(folder, 10)
    _publish(folder, 20)
    assert folder.choose("step-000010") == "step-000010"
    with pytest.raises(ExecutionError, match=r"of another run, up to step-000020"):
        folder.choose(False)
    with pytest.raises(ExecutionError, match=r"no step-000015; .*--resume step-000020"):
        folder.choose("step-000015")
    (folder.path / "latest").write_bytes(b"\xff\x00")
    with pytest.raises(ExecutionError, match=r"latest names no checkpoint but"):
        folder.choose(True)
    (folder.path / "latest").unlink()
    assert folder.choose(True) == "step-000020"


def test_what_follows_the_one_gone_back_to_is_set_aside(
    folder: CheckpointFolder,
) -> None:
    for step in (10, 20, 30):
        _publish(folder, step, keep=3)
    folder.settle(10)
    assert folder.steps() == [10]
    assert (folder.path / "step-000030.aside" / "part").read_bytes() == b"tensors 30"
    assert folder.choose(True) == "step-000010"
    _publish(folder, 20)
    assert folder.steps() == [10, 20]


@pytest.mark.parametrize("cut", [0, 40])
def test_a_record_that_was_cut_off_names_the_way_back(
    folder: CheckpointFolder, cut: int
) -> None:
    _publish(folder, 10)
    _publish(folder, 20)
    path = folder.of(20) / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ExecutionError) as caught:
        folder.read_record("step-000020")
    assert str(path) in str(caught.value)
    assert str(caught.value).endswith("(--resume step-000010)")
    assert "\n" not in str(caught.value)
    assert folder.read_record("step-000010").step == 10


def test_damage_is_told_from_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "part"
    path.write_bytes(bytes(3_000_000))
    written = inspect_file(path)
    assert (written.bytes, damage(path, written)) == (3_000_000, None)
    path.write_bytes(bytes(2_999_999) + b"\x01")
    assert "its bytes are not those" in (damage(path, written) or "")
    path.write_bytes(bytes(2_999_999))
    assert "it has 2999999 bytes, 3000000 were" in (damage(path, written) or "")
    path.unlink()
    assert "is missing" in (damage(path, written) or "")


def test_a_record_of_a_newer_meshwright_is_refused() -> None:
    data = json.loads(_record(1).to_json())
    assert CheckpointRecord.from_data(data) == _record(1)
    with pytest.raises(PlanFileError, match="schema_version 2 is newer"):
        CheckpointRecord.from_data(data | {"schema_version": 2})


def test_metadata_cannot_run_code(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(eval))
    with pytest.raises(ExecutionError, match=r"it wants builtins\.eval"):
        read_saved(tmp_path)


class _AsPython3110:
    """Pickles as ``getattr`` of what it is made of, as Python 3.11.0 writes enums."""

    def __init__(self, *parts: object) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return getattr, self.parts


def test_members_of_enumerations_are_read_however_python_wrote_them(
    tmp_path: Path,
) -> None:
    metadata = Metadata(
        {"weight": _AsPython3110(_MEM_FORMAT_ENCODING, "TORCH_PRESERVE_FORMAT")}  # type: ignore[dict-item]
    )
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with (tmp_path / ".metadata").open("rb") as stream:
        read = _unpickle(stream)
    kept: object = read.state_dict_metadata["weight"]
    assert kept is _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


@pytest.mark.parametrize(
    "parts", [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__")]
)
def test_no_other_attribute_is_read(tmp_path: Path, parts: tuple[object, str]) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_AsPython3110(*parts)))
    with pytest.raises(ExecutionError, match="wants the attribute"):
        read_saved(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"every": 0}, "every=0"),
        ({"keep": 0}, "keep=0"),
        ({"resume": "latest"}, "resume='latest' names no checkpoint"),
        ({"resume": "../step-000001"}, "names no checkpoint"),
    ],
)
def test_options_are_checked(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(ExecutionError, match=said):
        CheckpointOptions(folder=tmp_path, **changes)  # type: ignore[arg-type]


def test_a_checkpoint_is_due_every_so_often_and_at_the_end(tmp_path: Path) -> None:
    often = CheckpointOptions(folder=tmp_path, every=3)
    assert [step for step in range(1, 8) if often.due(step, 7)] == [3, 6, 7]
    last = CheckpointOptions(folder=tmp_path)
    assert [step for step in range(1, 8) if last.due(step, 7)] == [7]


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.body.weight
        self.register_buffer("table", torch.zeros(4), persistent=False)


def test_an_inventory_names_a_tied_weight_once_and_skips_what_is_no_state() -> None:
    inventory = Inventory.of(_Model())
    assert list(inventory.shapes) == ["body.weight", "norm.weight", "norm.bias"]
    assert inventory.name("head.weight") == "body.weight"
    assert inventory.name("norm.bias") == "norm.bias"
    assert inventory.buffers == {
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }


def test_the_difference_of_models_is_said_in_a_line() -> None:
    inventory = Inventory.of(_Model())

    def tensor(*shape: int) -> SavedTensor:
        return SavedTensor(shape=shape, dtype=torch.float32)

    saved = {
        f"model.{name}": tensor(*shape) for name, shape in inventory.shapes.items()
    } | {
        "model.norm.running_mean": tensor(4),
        "optimizer.exp_avg.body.weight": tensor(4, 4),
    }
    assert difference(inventory, saved) == ""
    del saved["model.norm.weight"]
    saved |= {"model.body.weight": tensor(8, 4), "model.tail.weight": tensor(1)}
    assert difference(inventory, saved) == (
        "body.weight is [8, 4] there and [4, 4] here; norm.weight is only here "
        "(and 1 more)"
    )


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_fused_optimizers_count_steps_beside_their_weights(
    fused: bool, device: str
) -> None:
    adam = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], fused=fused)
    weight = nn.Parameter(torch.zeros(1, device="meta"))
    assert counter_device(adam, weight).type == device
