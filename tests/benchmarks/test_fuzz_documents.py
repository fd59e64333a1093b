"""Documents from outside: only clean errors, whatever was done to them.

Readers run in a process of their own, under limits of time and memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_documents import KINDS, mutate
from benchmarks.fuzz_documents.mutations import mutate_bytes
from planner.capture import load_model, read_profile
from planner.cluster import Cluster
from planner.errors import (
    CaptureError,
    ClusterError,
    MeshwrightError,
    PlanFileError,
    StrategyError,
)
from planner.imports import Wanted, import_text
from planner.reading import MOST_DEEP, MOST_VALUES, parse_json, read_bytes
from planner.schema import Plan, Strategy
from planner.schema.cluster import ClusterDocument
from planner.targets.layers import layer_stem, layers_of_stages
from planner.yaml_reading import parse_yaml

#: Reads files whose names come one a line, under limits; answers one line each.
_READER = """
import pathlib, sys
from benchmarks.fuzz_documents import judge, prepare
kind = sys.argv[1]
prepare(kind, pathlib.Path(sys.argv[2]))
print("ready", flush=True)
for line in sys.stdin:
    outcome, why = judge(kind, pathlib.Path(line.rstrip("\\n")))
    print(outcome, ascii(why[-600:]), flush=True)
"""

#: Kinds that are read without torch or a search; make fuzz does all of them.
_QUICK = ("cluster", "cluster YAML", "measurement", "accelerate", "DeepSpeed")


@pytest.mark.parametrize("kind", [*_QUICK, "Megatron", "job trace"])
def test_mutated_documents_end_in_clean_errors(kind: str, tmp_path: Path) -> None:
    originals = KINDS[kind].seeds()
    path = tmp_path / f"mutation{KINDS[kind].suffix}"
    with subprocess.Popen(
        [sys.executable, "-c", _READER, kind, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"

        @settings(
            max_examples=25,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(originals), st.integers(0, 2**32))
        def check(text: str, number: int) -> None:
            assert reader.stdin is not None
            assert reader.stdout is not None
            path.write_bytes(mutate(text, kind, random.Random(number)))
            reader.stdin.write(f"{path}\n")
            reader.stdin.flush()
            answer = reader.stdout.readline()
            assert answer.split(" ")[0] in {"clean", "accepted"}, answer

        check()
        reader.stdin.close()


@given(st.binary(max_size=40), st.sampled_from(["cluster", "cluster YAML"]))
def test_broken_documents_are_mutated_as_bytes(raw: bytes, kind: str) -> None:
    changed = {mutate_bytes(raw, kind, random.Random(seed)) for seed in range(20)}
    assert len(changed) > 1


_LAUGHS = "a: &a [x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 10)}]\n"
    for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (_LAUGHS, "values, references to anchors written out"),
        (_LAUGHS.replace("[", "{<<: [").replace("]", "]}"), "not YAML|written out"),
        ("a: &a [*a]", "holds itself"),
        ("[" * 50_000, "nested too deeply"),
        ("- " * 50_000, "nested too deeply"),
        ("a: [" + "0," * 200_000 + "]", "write large files as JSON"),
        ("a: 1\na: 2", "line 2: key 'a' is given twice"),
        ("a: .nan", "nan is no finite number"),
        ("a: 2020-13-45", "put texts that look like numbers in quotes"),
        ("a: 2020-12-25", "of type date"),
        ("5: a", "the name of a field is 5"),
        ("a: 0x" + "f" * 200, "more than 128 bits"),
        ("a: " + "x" * 20_000, "a text has 20,000 characters"),
        ("? " * 300, "nested too deeply|not YAML"),
    ],
)
def test_yaml_beyond_a_limit(text: str, match: str) -> None:
    with pytest.raises(PlanFileError, match=match):
        parse_yaml(text, "f.yaml")


def test_anchors_within_the_limits_are_read() -> None:
    text = "a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}"
    assert parse_yaml(text, "f") == {
        "a": {"x": 1},
        "b": {"x": 1},
        "c": {"x": 1, "y": 2},
    }


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 50_000, "nested too deeply"),
        ("[" * (MOST_DEEP + 2) + "]" * (MOST_DEEP + 2), "nested too deeply"),
        ("[" + "0," * (2 * MOST_VALUES) + "0]", "more than 2,500,000 values"),
        ('{"a": 1, "a": 2}', "field 'a' is given twice"),
        ('{"a": NaN}', "nan is no finite number"),
        ('{"a": 1e999}', "inf is no finite number"),
        ('{"a": ' + "9" * 5_000 + "}", "too many digits"),
        ('{"a": ' + "9" * 50 + "}", "more than 128 bits"),
        (r'{"a": "\ud800"}', "a lone surrogate"),
        (r'{"\udc00": 1}', "a lone surrogate"),
        (json.dumps({"x" * 2_000: 1}), "the name of a field has 2,000 characters"),
        (json.dumps({str(i): 1 for i in range(30_000)}), "30,000 fields"),
        (b"\xff{}", "not UTF-8|not a whole JSON"),
    ],
)
def test_json_beyond_a_limit(text: str | bytes, match: str) -> None:
    with pytest.raises(PlanFileError, match=match):
        parse_json(text, "f.json")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"mesh": {"dp_replicate": 3 * 10**9}}, "must be at most 1048576"),
        ({"mesh": {"dp_shard": 2**11, "tp": 2**11}}, "at most 1,048,576"),
        ({"num_microbatches": 10**9}, "must be at most 1048576"),
        ({"mesh": {"pp": 64}, "num_microbatches": 2**20}, "turns of a stage"),
        ({"mesh": {"pp": 2**14}}, "16,384 stages"),
        (
            {"microbatch_size": 2**20, "num_microbatches": 2**20, "mesh": {"tp": 2}}
            | {"mesh": {"dp_shard": 2**10}},
            "samples a step",
        ),
        ({"device_ranges": [[0, 2**60]]}, "device_ranges name"),
    ],
)
def test_ranges_are_bounded_before_they_are_gone_through(
    fields: dict[str, object], match: str
) -> None:
    with pytest.raises(PlanFileError, match=match):
        Strategy.from_data(fields)


@pytest.mark.parametrize("name", ["dgx-h100:99999999999", "local:3000000000"])
def test_clusters_by_name_are_bounded(name: str) -> None:
    with pytest.raises(ClusterError, match=r"1048576|1,048,576"):
        Cluster.parse(name)


def test_clusters_are_bounded_before_they_are_gone_through() -> None:
    data = json.loads(KINDS["cluster"].seeds()[0])
    data["hosts"][0]["count"] = 2**18
    with pytest.raises(PlanFileError, match="at most 1,048,576"):
        ClusterDocument.from_data(data)


def test_a_million_wrong_entries_are_one_line() -> None:
    with pytest.raises(PlanFileError) as caught:
        Strategy.from_data({"stages": ["x"] * 10**6})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("lr", ["NaN", '"nan"', "-1", "1e999", '"1e999"'])
def test_numbers_of_deepspeed_that_are_none(lr: str) -> None:
    text = (
        '{"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": %s}}}'
    )
    with pytest.raises(MeshwrightError):
        import_text("deepspeed", text % lr, Wanted(world_size=8), "ds.json")


@pytest.mark.parametrize(
    "arguments",
    [
        "--tensor-model-parallel-size 0",
        "--tensor-model-parallel-size -8",
        "--lr nan",
        "--num-distributed-optimizer-instances 0",
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout t*"
        + "9" * 5_000,
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout "
        "((((t*999)*999)*999)*999)*99",
        f"--pipeline-model-parallel-size 4 --num-layers {2**63} "
        "--num-layers-per-virtual-pipeline-stage 4",
        "--pipeline-model-parallel-size 8 --num-layers 80000000 "
        "--num-virtual-stages-per-pipeline-rank 1000000",
    ],
)
def test_numbers_of_megatron_that_are_none(arguments: str) -> None:
    text = f"--micro-batch-size 1 {arguments}"
    with pytest.raises(StrategyError):
        import_text("megatron", text, Wanted(world_size=8), "args.txt")


def test_a_layer_of_five_thousand_digits_is_no_layer() -> None:
    data = json.loads(KINDS["plan"].seeds()[0])["strategy"]
    strategy = Strategy.from_data(data)
    assert layers_of_stages(strategy)
    stem = layer_stem(strategy)
    data["stages"][0]["modules"].append(f"{stem}.{'9' * 5_000}")
    assert layers_of_stages(Strategy.from_data(data)) is None


def test_a_device_without_memory_is_refused() -> None:
    data = json.loads(KINDS["plan"].seeds()[0])
    data["prediction"]["memory"][0]["limit_bytes"] = 0
    with pytest.raises(PlanFileError, match="limit_bytes: must be above"):
        Plan.from_data(data)


@pytest.mark.parametrize("ref", ["hf:/dev/zero", "hf:~no-such-user/x", "hf:a\0b"])
def test_a_reference_to_no_file_is_not_opened(ref: str) -> None:
    with pytest.raises(CaptureError):
        load_model(ref)


def test_pipes_and_devices_are_no_documents(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CaptureError, match="it is a pipe"):
        load_model(f"hf:{pipe}")
    with pytest.raises(
        PlanFileError, match=r"^cannot read plan /dev/zero: it is a device"
    ):
        Plan.load("/dev/zero")
    large = tmp_path / "large.json"
    with large.open("wb") as stream:
        stream.truncate(10**9)
    with pytest.raises(PlanFileError, match="more than 64 MB"):
        read_bytes(large, "plan")


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layer": 10**9},
        {"num_labels": 10**9},
        {"n_embd": 2**60},
        {"n_layer": [10**9]},
    ],
)
def test_configs_are_bounded_before_they_are_built(
    fields: dict[str, object], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **fields}))
    with pytest.raises(CaptureError, match="is read"):
        load_model(f"hf:{path}")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("node1 --", "9" * 5_000 + " --"),
        ("1024.000", "1e308"),
        ("[64.0; 32.0]", "[1e308; 1e308]"),
    ],
)
def test_profiles_with_numbers_beyond_a_limit(
    before: str, after: str, tmp_path: Path
) -> None:
    path = tmp_path / "graph.txt"
    path.write_text(KINDS["PipeDream"].seeds()[0].replace(before, after))
    with pytest.raises(CaptureError):
        read_profile(path)
