"""Sources of data: a rank reads its part, in an order that ranks do not change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from executors.checkpoints.data_state import read_states, write_states
from executors.data import (
    BatchPart,
    DataSource,
    Part,
    Samples,
    evaluation_batches,
    open_source,
    open_tokens,
)
from executors.data.prefetch import Prefetched
from planner.errors import ExecutionError
from planner.schema import InputSpec, Workload

pytestmark = [
    # torchdata asks torch for a function that torch says is deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

LENGTH, BATCH, VOCAB, COUNT = 6, 8, 50, 29


def workload(batch: int = BATCH, vocabulary: int = VOCAB) -> Workload:
    tokens = InputSpec(
        name="input_ids", shape=(LENGTH,), dtype="int64", high=vocabulary
    )
    return Workload(global_batch=batch, seq_len=LENGTH, inputs=(tokens,))


ROWS = torch.randint(VOCAB, (COUNT, LENGTH), generator=torch.Generator().manual_seed(0))


class Rows(Dataset[Any]):
    """Remembers which samples were read."""

    def __init__(self, count: int = COUNT) -> None:
        self.count, self.read = count, list[int]()

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {"input_ids": ROWS[index]}


class Stream(IterableDataset[Any]):
    """Rows one after the other, as lists."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter({"input_ids": row.tolist()} for row in ROWS[: self.count])


class Tensors(Stream):
    """The same as tensors."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter({"input_ids": row} for row in ROWS[: self.count])


def token_file(folder: Path) -> str:
    path = folder / "tokens.npy"
    np.save(path, ROWS.flatten().numpy().astype(np.uint16))
    return str(path)


def loader(batch: int = BATCH) -> DataLoader[Any]:
    order = torch.Generator().manual_seed(3)
    return DataLoader(
        Rows(), batch_size=batch, shuffle=True, drop_last=True, generator=order
    )


def stateful(_: Path) -> Any:
    data = pytest.importorskip("torchdata.stateful_dataloader")
    order = torch.Generator().manual_seed(3)
    return data.StatefulDataLoader(
        Rows(), batch_size=BATCH, shuffle=True, drop_last=True, generator=order
    )


def saved_rows(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"input_ids": ROWS.tolist()})
    path = folder / "rows"
    if not path.exists():
        made.save_to_disk(str(path))
    return str(path)


def hugging_face_stream(_: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"input_ids": ROWS.tolist()})
    return made.to_iterable_dataset(num_shards=3)


def shuffled_stream(folder: Path) -> Any:
    return hugging_face_stream(folder).shuffle(seed=5, buffer_size=7)


SOURCES: dict[str, Callable[[Path], Any]] = {
    "tokens": token_file,
    "dataset": lambda _: Rows(),
    "workers": lambda _: Samples(dataset=Rows(), workers=1),
    "in order": lambda _: Samples(dataset=Rows(), shuffle=False),
    "stream": lambda _: Stream(),
    "loader": lambda _: loader(),
    "stateful loader": stateful,
    "saved by datasets": saved_rows,
    "stream of datasets": hugging_face_stream,
    "shuffled stream of datasets": shuffled_stream,
}


def part(index: int, count: int, batch: int = BATCH) -> Part:
    each = batch // count
    return Part(
        start=index * each,
        stop=(index + 1) * each,
        whole=batch,
        index=index,
        count=count,
    )


def opened(kind: str, folder: Path, count: int) -> list[DataSource]:
    """One source a data-parallel coordinate, each of data of its own."""
    return [
        open_source(SOURCES[kind](folder), workload(), part(index, count), seed=4)
        for index in range(count)
    ]


def batches(sources: list[DataSource], steps: range) -> list[list[Any]]:
    """Rows of the global batches, put together of the parts."""
    made = []
    for step in steps:
        found = [source.batch(step) for source in sources]
        assert all(isinstance(one, BatchPart) for one in found)
        assert len({one.shared for one in found}) == 1  # type: ignore[union-attr]
        rows = [one.values["input_ids"] for one in found]  # type: ignore[union-attr]
        assert all(len(one) == BATCH // len(sources) for one in rows)
        made.append(torch.cat(rows).tolist())
    return made


def close(sources: list[DataSource]) -> None:
    for source in sources:
        source.close()


@pytest.mark.parametrize("kind", SOURCES)
def test_the_next_samples_do_not_depend_on_the_number_of_replicas(
    kind: str, tmp_path: Path
) -> None:
    whole = opened(kind, tmp_path, 1)
    # The seventh batch is of the second pass.
    expected = batches(whole, range(7))
    close(whole)
    two = opened(kind, tmp_path, 2)
    assert batches(two, range(4)) == expected[:4]
    states = [json.loads(json.dumps(write_states(one.state_dict()))) for one in two]
    close(two)
    assert states[0] == states[1]
    four = opened(kind, tmp_path, 4)
    for index, source in enumerate(four):
        source.load_state_dict(read_states(states[:1], index, 4))
    assert batches(four, range(4, 7)) == expected[4:]
    close(four)
    assert len({str(batch) for batch in expected}) == 7


@pytest.mark.parametrize("kind", ["dataset", "loader"])
def test_a_rank_reads_its_own_samples_alone(kind: str) -> None:
    given: Any = Rows() if kind == "dataset" else loader()
    rows = given if kind == "dataset" else given.dataset
    source = open_source(given, workload(), part(1, 4))
    for step in range(3):
        source.batch(step)
    assert len(rows.read) == 3 * BATCH // 4


def test_every_sample_comes_once_in_each_pass() -> None:
    rows = Rows(24)
    source = open_source(rows, workload(), part(0, 1), seed=1)
    orders = []
    for _ in range(2):
        rows.read.clear()
        for step in range(3 * len(orders), 3 * len(orders) + 3):
            source.batch(step)
        assert sorted(rows.read) == list(range(24))
        orders.append(list(rows.read))
    assert orders[0] != orders[1]
    other = Rows(24)
    open_source(other, workload(), part(0, 1), seed=2).batch(0)
    assert other.read != orders[0][:BATCH]


def test_a_loader_s_parts_are_what_the_loader_itself_would_give() -> None:
    expected = [batch["input_ids"].tolist() for batch in loader()]
    two = [open_source(loader(), workload(), part(index, 2)) for index in range(2)]
    assert batches(two, range(3)) == expected


def test_token_windows_are_those_of_the_step_and_seed(tmp_path: Path) -> None:
    file = open_tokens(token_file(tmp_path), workload())
    rng = np.random.default_rng([4, 2])
    starts = rng.integers(0, COUNT * LENGTH - LENGTH + 1, BATCH)
    flat = ROWS.flatten().tolist()
    expected = [flat[start : start + LENGTH] for start in starts]
    assert file.batches(4)(2).tolist() == expected
    assert file.batches(4, slice(2, 5))(2).tolist() == expected[2:5]


def test_a_run_with_another_global_batch_goes_on_behind_the_samples_seen() -> None:
    small = open_source(Rows(), workload(), part(0, 1), seed=4)
    for step in range(2):
        small.batch(step)
    state = small.state_dict()
    large = open_source(Rows(), workload(16), part(0, 1, 16), seed=4)
    large.load_state_dict(state)
    found = large.batch(2)
    assert isinstance(found, BatchPart)
    expected = batches([small], range(2, 4))
    assert found.values["input_ids"].tolist() == expected[0] + expected[1]


@pytest.mark.parametrize(
    ("dtype", "vocabulary"), [("<u2", 50), ("<u4", 100_000), ("<u4", 50)]
)
def test_raw_tokens_are_read_by_the_size_of_the_vocabulary(
    dtype: str, vocabulary: int, tmp_path: Path
) -> None:
    path = tmp_path / "tokens.bin"
    ROWS.flatten().numpy().astype(dtype).tofile(path)
    file = open_tokens(str(path), workload(vocabulary=vocabulary))
    assert file.tokens.tolist() == ROWS.flatten().tolist()


def megatron_index(path: Path, code: int, lengths: list[int]) -> None:
    """Index of one document a sequence, as Megatron-LM writes it."""
    import struct

    head = b"MMIDIDX\x00\x00" + struct.pack(
        "<QBQQ", 1, code, len(lengths), len(lengths) + 1
    )
    pointers = np.cumsum([0, *lengths[:-1]]).astype("<i8")
    documents = np.arange(len(lengths) + 1).astype("<i8")
    sizes = np.array(lengths, "<i4")
    path.write_bytes(head + sizes.tobytes() + pointers.tobytes() + documents.tobytes())


def test_megatron_s_index_says_what_its_tokens_are(tmp_path: Path) -> None:
    path = tmp_path / "corpus.bin"
    ROWS.flatten().numpy().astype("<i4").tofile(path)
    megatron_index(path.with_suffix(".idx"), 4, [LENGTH] * COUNT)
    assert open_tokens(str(path), workload()).tokens.dtype == np.dtype("<i4")
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ExecutionError, match=r"has 688 bytes.*would have 696"):
        open_tokens(str(path), workload())
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00")
    with pytest.raises(ExecutionError, match="not a whole index of Megatron-LM"):
        open_tokens(str(path), workload())


def test_half_a_token_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"\x01" * 101)
    with pytest.raises(ExecutionError, match=r"101 bytes.*cut off"):
        open_tokens(str(path), workload())
    path.write_bytes(b"")
    with pytest.raises(ExecutionError, match=r"0 bytes.*write it again"):
        open_tokens(str(path), workload())


def test_a_token_behind_those_that_were_looked_at_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.data.tokens._CHECKED", LENGTH)
    tokens = np.full(LENGTH * 2, VOCAB)
    tokens[:LENGTH] = 1
    np.save(tmp_path / "tokens.npy", tokens)
    source = open_source(tmp_path / "tokens.npy", workload(), part(0, 1))
    with pytest.raises(ExecutionError, match=r"token 50, the vocabulary is 0 to 49"):
        source.batch(0)
    source.close()


class _Columns(Dataset[Any]):
    """Samples made by a function of their number."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


def test_evaluation_data_without_an_end_is_refused() -> None:
    given: Any = lambda step: {"input_ids": ROWS[:BATCH]}  # noqa: E731
    with pytest.raises(ExecutionError, match="eval_data is a function"):
        evaluation_batches(given, workload(), part(0, 1))
    with pytest.raises(ExecutionError, match="eval_data holds no batch"):
        evaluation_batches([], workload(), part(0, 1))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda: Rows(5), "5 samples, fewer than the plan's global_batch=8"),
        (lambda: Stream(3), r"ended twice within a batch.*global_batch=8"),
        (lambda: Stream(0), "the stream gave no sample"),
        (lambda: loader(4), r"gives 4 samples.*global_batch=8.*batch_size=8"),
        (lambda: Samples(dataset=Stream(), workers=2), "workers=2 with a stream"),
        (lambda: Samples(dataset=Rows(), workers=-1), "workers=-1"),
        (lambda: Samples(dataset=object()), "neither a length nor __iter__"),
        (lambda: _Columns(lambda n: ROWS[n]), "gives Tensor, not a mapping"),
        (lambda: _Columns(lambda n: {"a": "text"}), r"'a' of a sample is str"),
        (
            lambda: _Columns(lambda n: {"a": torch.zeros(n + 1)}),
            r"'a' has samples of shapes \(\d+,\) to \(\d+,\).*collate_fn",
        ),
        (
            lambda: _Columns(lambda n: {"a": 1} | ({"b": 2} if n % 2 else {})),
            r"samples have a and a, b|samples have a, b and a",
        ),
        (
            lambda: Samples(dataset=Rows(), collate_fn=lambda _: [1]),
            "the batch of step 0 has list",
        ),
        (
            lambda: Samples(dataset=Rows(), collate_fn=lambda _: {"a": 1}),
            "has int as 'a'",
        ),
        (
            lambda: Samples(
                dataset=Rows(), collate_fn=lambda _: {"a": torch.zeros(3, 1)}
            ),
            "3 samples in 'a'",
        ),
    ],
)
def test_bad_data_is_named(given: Callable[[], Any], words: str) -> None:
    with pytest.raises(ExecutionError, match=words):
        open_source(given(), workload(), part(0, 1)).batch(0)


def choices(samples: list[Any]) -> dict[str, torch.Tensor]:
    """Three rows of choices a sample, one after the other, and one label."""
    rows = [
        torch.stack([one["input_ids"] + choice for choice in range(3)])
        for one in samples
    ]
    labels = torch.stack([one["input_ids"][0] for one in samples])
    return {"input_ids": labels[:, None].expand(-1, LENGTH), "choices": torch.cat(rows)}


def of_choices(index: int) -> Part:
    spec = InputSpec(name="choices", shape=(LENGTH,), dtype="int64", rows=3)
    return replace(part(index, 2), inputs=(*workload().inputs, spec))


@pytest.mark.parametrize("kind", ["loader", "samples", "stream"])
def test_a_rank_reads_all_rows_of_its_samples(kind: str) -> None:
    def opened() -> Any:
        if kind == "loader":
            return DataLoader(Rows(), batch_size=BATCH, collate_fn=choices)
        data = Rows() if kind == "samples" else Tensors()
        return Samples(dataset=data, collate_fn=choices, shuffle=False)

    found = [
        open_source(opened(), workload(), of_choices(index)).batch(0).values  # type: ignore[union-attr]
        for index in range(2)
    ]
    whole = choices([{"input_ids": row} for row in ROWS[:BATCH]])
    for name, value in whole.items():
        assert torch.equal(torch.cat([one[name] for one in found]), value)
    with pytest.raises(ExecutionError, match=r"12 samples in 'choices'"):
        open_source(opened(), workload(), part(0, 2)).batch(0)


def pairs(samples: list[Any]) -> dict[str, torch.Tensor]:
    rows = [row for one in samples for row in (one["input_ids"], one["input_ids"] + 1)]
    return {"input_ids": torch.stack(rows)}


def test_a_sample_of_a_loader_may_be_several_of_the_plan() -> None:
    def read(index: int, microbatch: int, collate_fn: Any = pairs) -> torch.Tensor:
        data = DataLoader(Rows(), batch_size=BATCH // 2, collate_fn=collate_fn)
        own = replace(part(index, 2), microbatch=microbatch, inputs=workload().inputs)
        found = open_source(data, workload(), own).batch(0)
        return found.values["input_ids"]  # type: ignore[union-attr]

    whole = pairs([{"input_ids": row} for row in ROWS[: BATCH // 2]])["input_ids"]
    assert torch.equal(torch.cat([read(index, 2) for index in range(2)]), whole)
    with pytest.raises(ExecutionError, match=r"which would be 2 .*=1 would cut"):
        read(0, 1)
    with pytest.raises(ExecutionError, match=r"gives 4 samples, the plan trains .*=8"):
        read(0, 2, None)


def test_a_sampler_that_divides_batches_again_is_refused() -> None:
    from torch.utils.data import DistributedSampler

    rows = Rows()
    sampler: Any = DistributedSampler(rows, num_replicas=2, rank=0)
    data: Any = DataLoader(rows, batch_size=BATCH, sampler=sampler)
    with pytest.raises(ExecutionError, match=r"DistributedSampler.*leave sampler= out"):
        open_source(data, workload(), part(0, 2))


def test_a_checkpoint_of_other_data_is_refused(tmp_path: Path) -> None:
    state = open_source(Rows(), workload(), part(0, 1)).state_dict()
    fewer = open_source(Rows(28), workload(), part(0, 1))
    with pytest.raises(ExecutionError, match=r"28 samples, at the checkpoint it had"):
        fewer.load_state_dict(state)
    tokens = open_source(token_file(tmp_path), workload(), part(0, 1))
    with pytest.raises(ExecutionError, match=r"kind 'samples'.*given 'tokens'"):
        tokens.load_state_dict(state)
    with pytest.raises(ExecutionError, match=r"2 replicas.*this plan has 3"):
        read_states([{"a": 1}, {"a": 2}], 0, 3)


def test_states_keep_their_kinds() -> None:
    state = {
        "rng": torch.arange(3, dtype=torch.uint8),
        "array": np.arange(4.0),
        "pair": (1, [2.5, None]),
        "by number": {0: b"ab", 1: {"x": True}},
    }
    (found,) = [read_states([json.loads(json.dumps(write_states(state)))], 0, 1)]
    assert torch.equal(found.pop("rng"), state.pop("rng"))  # type: ignore[call-overload]
    assert (found.pop("array") == state.pop("array")).all()  # type: ignore[attr-defined]
    assert found == state
    with pytest.raises(ExecutionError, match="holds a object"):
        write_states({"a": object()})


def test_a_folder_without_its_library_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    with pytest.raises(ExecutionError, match=r"Is a directory.*save_to_disk"):
        open_source(str(tmp_path), workload(), part(0, 1))
    (tmp_path / "state.json").touch()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ExecutionError, match="pip install datasets"):
        open_source(str(tmp_path), workload(), part(0, 1))


def test_a_saved_dataset_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = Path(saved_rows(tmp_path))
    (rows,) = path.glob("*.arrow")
    rows.write_bytes(rows.read_bytes()[:200])
    with pytest.raises(ExecutionError, match=r"cannot read .*save_to_disk wrote"):
        open_source(str(path), workload(), part(0, 1))


def test_text_columns_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict(
        {"input_ids": ROWS.tolist(), "text": ["a"] * COUNT}
    )
    with pytest.raises(ExecutionError, match=r"text in 'text'.*remove_columns"):
        open_source(made, workload(), part(0, 1))


class _Counted:
    """A source that says how far it was read, and fails at a step."""

    def __init__(self, fails: int = 100) -> None:
        self.read, self.fails, self.closed = -1, fails, False

    def batch(self, step: int) -> BatchPart:
        if step == self.fails:
            raise ExecutionError("the data ended")
        self.read = step
        return BatchPart(values={"x": torch.full((1,), step)})

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.read + 1}

    def load_state_dict(self, state: Any) -> None:
        self.read = state["step"] - 1

    def close(self) -> None:
        self.closed = True


def test_positions_are_of_batches_that_were_given_not_of_those_read_ahead() -> None:
    counted = _Counted()
    source = Prefetched(counted, depth=3)
    for step in (0, 1, 2, 7):
        found = source.batch(step)
        assert isinstance(found, BatchPart)
        assert int(found.values["x"]) == step
        assert source.state_dict() == {"step": step + 1}
    while counted.read < 9:
        pass
    assert source.state_dict() == {"step": 8}
    source.close()
    assert counted.closed


def test_an_error_of_the_thread_is_raised_where_its_batch_is_asked_for() -> None:
    source = Prefetched(_Counted(fails=2))
    assert [source.batch(step) for step in range(2)]
    with pytest.raises(ExecutionError, match="the data ended"):
        source.batch(2)
    source.close()


def test_evaluation_reads_from_the_beginning_in_order(tmp_path: Path) -> None:
    for given in (token_file(tmp_path), Rows()):
        parts = [
            evaluation_batches(given, workload(), part(index, 2)) for index in range(2)
        ]
        assert [len(one) for one in parts] == [3, 3]
        rows = [
            torch.cat([one[n].values["input_ids"] for one in parts])  # type: ignore[union-attr]
            for n in range(3)
        ]
        assert torch.cat(rows).tolist() == ROWS[: 3 * BATCH].tolist()


def test_uneven_shares_make_up_the_batch(tmp_path: Path) -> None:
    """Members of a federation have shares of their own size."""
    for kind in ("tokens", "dataset", "stream", "loader"):
        (whole,) = opened(kind, tmp_path, 1)
        parts = [
            open_source(
                SOURCES[kind](tmp_path),
                workload(),
                Part(start=start, stop=stop, whole=BATCH),
                seed=4,
            )
            for start, stop in ((0, 1), (1, 6), (6, 8))
        ]
        for step in range(4):
            found = [source.batch(step) for source in (whole, *parts)]
            expected, *rows = (one.values["input_ids"] for one in found)  # type: ignore[union-attr]
            assert [len(one) for one in rows] == [1, 5, 2]
            assert torch.equal(torch.cat(rows), expected)
        close([whole, *parts])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["tokens", "dataset", "loader"])
def test_batches_for_a_gpu_are_in_pinned_memory(kind: str, tmp_path: Path) -> None:
    given = SOURCES[kind](tmp_path)
    source = open_source(given, workload(), part(0, 2), pin_memory=True)
    found = source.batch(0)
    assert isinstance(found, BatchPart)
    assert found.values["input_ids"].is_pinned()
    source.close()
