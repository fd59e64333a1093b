"""Published configurations: read, priced, and planned again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.best_practice import Answer, main, published_row, read_configurations
from planner.schema.schedules import schedule_spec

HEAD = "config,source,cluster,global_batch,seq,dtype,published,measured_s,own_recipe\n"
ROWS = (
    'Llama2-7B 8xH100 FSDP,"a page, 2025",dgx-h100:1,16,2048,bfloat16,'
    "shard=8 zero=3 mb=2 rec=full,1.0,torchtitan\n"
    "Llama2-7B 16xH100 TP2 PP4,a paper,dgx-h100:2,64,2048,bfloat16,"
    "pp=4 rep=2 shard=1 tp=2 zero=0 mb=1 v=2 sched=Interleaved1F1B sp=False,2.0,"
    "megatron\n"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "configurations.csv"
    path.write_text(HEAD + ROWS, encoding="utf-8")
    return path


def test_words_become_a_row_of_the_table(file: Path) -> None:
    first, second = (published_row(one) for one in read_configurations(file))
    assert first["dp_shard"] == 8
    assert (first["zero_stage"], first["recompute"]) == (3, 2)
    assert (first["microbatch_size"], first["num_microbatches"]) == (2, 1)
    assert second["schedule"] == schedule_spec("Interleaved1F1B").code
    assert (second["pp"], second["tp"], second["virtual_stages"]) == (4, 2, 2)
    assert (second["dp_replicate"], second["num_microbatches"]) == (2, 32)
    assert second["sequence_parallel"] == 0


@pytest.mark.further
def test_a_configuration_is_priced_and_planned_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(file), "--only", "FSDP", "--json"]) == 0
    (found,) = (Answer(**one) for one in json.loads(capsys.readouterr().out))
    assert found.fits
    assert found.peak_bytes < found.limit_bytes < found.device_bytes
    assert found.error == pytest.approx(found.predicted_s - 1.0)
    assert found.gain == pytest.approx(1 - found.pick_s / found.predicted_s)
