"""Rows that stand for meshes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planner.search.device_order.screening import few_rows
from planner.search.expert import ladder
from tests.cost.made import device, hosts, request_for, uniform_graph


@pytest.mark.parametrize("seq_len", [1024, 1001, None])
def test_tensor_parallelism_has_rows_whatever_divides_the_sequence(
    seq_len: int | None,
) -> None:
    graph = uniform_graph(4, seq_len=seq_len)
    request = request_for(graph, hosts((1, 2, device())), 8)
    rows = few_rows(request, np.array([(1, 1, 1, 1, 2, 1)]))
    assert set(rows.tp) == {2}
    assert set(rows.sequence_parallel) == {int(seq_len == 1024)}


@pytest.mark.parametrize(
    ("changes", "mesh", "size"),
    [
        ({"batch_norm_values": 64}, (1, 1, 2, 1, 1, 1), 13),
        ({"config": {"own_loss": "coupled"}}, (1, 1, 1, 1, 2, 1), 26),
    ],
)
def test_models_of_whole_batches_have_rows(
    changes: dict[str, Any], mesh: tuple[int, ...], size: int
) -> None:
    """26 samples on two devices are no 1 or 4 samples a microbatch."""
    graph = replace(uniform_graph(4), **changes)
    request = request_for(graph, hosts((1, 2, device())), 26)
    rows = few_rows(request, np.array([mesh]))
    assert set(zip(rows.microbatch_size, rows.num_microbatches, strict=True)) == {
        (size, 1)
    }
    rungs = ladder(request, 2)
    assert rungs is not None
    assert (26, 1) in set(
        zip(
            rungs.microbatch_size * rungs.dp_replicate * rungs.dp_shard,
            rungs.num_microbatches,
            strict=True,
        )
    )
