"""Prices of every preset of what keeps copies together."""

from __future__ import annotations

import pytest

from planner import predict
from planner.schema.methods import method_names, method_of, read_method
from tests.plans import gpt2_graph


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", method_names("synchronisation"))
def test_no_part_of_memory_is_less_than_nothing(name: str, compute: str) -> None:
    """Where executors refuse a combination, too: others may run it."""
    value = read_method("synchronisation", name)
    inexact = method_of("synchronisation", value).inexact is not None
    made = predict(
        gpt2_graph(),
        "dgx-a100:1",
        {
            "mesh": {"dp_replicate": 8},
            "microbatch_size": 8,
            "synchronisation": value,
            "precision": {"compute": compute},
            "semantics": "approximate" if inexact else "exact",
        },
    )
    (memory,) = made.prediction.memory
    assert memory.parameters_bytes > 0
    assert memory.gradients_bytes >= 0
    assert memory.optimizer_bytes > 0
    assert memory.total_bytes > memory.activations_bytes
