"""Limits of a model are kept wherever a plan is made, read or run."""

from __future__ import annotations

from typing import Any

import pytest

from planner.errors import PlanFileError
from planner.schema import Plan, Strategy, TensorSharding
from planner.schema.limits import batch_norm_limit, stream_limit
from planner.schema.support import unsupported
from tests.distributed.cases import make_plan

ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "layers.*.self_attn.o_proj": "rowwise"
}
MIXING = tuple(f"model.{pattern}" for pattern in ATTENTION)


def _stream(
    patterns: dict[str, Any], *, whole: str | None = None, on: bool = True
) -> str | None:
    sharding = TensorSharding(patterns=patterns, sequence_parallel=on)
    return stream_limit(sharding, whole_stream=whole, mixing=MIXING)


def test_a_stream_is_divided_where_every_mixing_layer_is_split() -> None:
    assert _stream(ATTENTION) is None
    assert _stream({f"model.{p}": style for p, style in ATTENTION.items()}) is None
    assert _stream({"self_attn.*": "colwise"}) is None


@pytest.mark.parametrize("left_out", ATTENTION)
def test_each_mixing_layer_left_whole_is_named(left_out: str) -> None:
    patterns = {p: style for p, style in ATTENTION.items() if p != left_out}
    reason = _stream(patterns)
    assert reason is not None
    assert f"no pattern splits model.{left_out}, " in reason
    assert "add it to sharding.patterns" in reason
    # Not split: dealt out by rows of a table, as an embedding is.
    assert _stream(patterns | {left_out: "vocab"}) == reason
    # Of one layer alone.
    assert _stream(patterns | {left_out.replace("*", "0"): "colwise"}) == reason
    assert _stream(patterns, on=False) is None


def test_a_whole_stream_is_refused_for_its_reason() -> None:
    reason = _stream(ATTENTION, whole="tp leaves h.0.attn whole")
    assert reason is not None
    assert reason.startswith("sequence_parallel, but tp leaves h.0.attn whole, ")
    assert _stream(ATTENTION, whole="tp leaves h.0.attn whole", on=False) is None


@pytest.mark.parametrize(
    ("size", "values", "refused"),
    [(1, None, False), (1, 1, True), (2, 1, False), (1, 2, False), (3, 49, False)],
)
def test_a_variance_takes_two_values(
    size: int, values: int | None, refused: bool
) -> None:
    """Expected message, as torch's batch norm raises it too late."""
    reason = batch_norm_limit(size, values)
    assert (reason is not None) == refused
    if reason:
        assert "microbatch_size=1 leaves a batch norm of the model one value" in reason


def _refused(plan: Plan, **model: Any) -> str:
    """The same words, from a document that is read and from the executors' table."""
    changed = plan.model.model_copy(update=model)
    text = plan.model_copy(update={"model": changed}).to_json()
    with pytest.raises(PlanFileError) as caught:
        Plan.from_json(text)
    facts = ("whole_stream", "mixing", "batch_norm_values")
    (reason,) = unsupported(
        plan.strategy, **{name: getattr(changed, name) for name in facts}
    )
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    return reason


def test_plans_by_hand_are_refused_when_read_and_when_run() -> None:
    parallel = make_plan("llama", tp=2, sequence_parallel=True)
    Plan.from_json(parallel.to_json())
    assert "h.0 whole" in _refused(parallel, whole_stream="tp leaves h.0 whole")
    assert "model.layers.*.conv" in _refused(parallel, mixing=("model.layers.*.conv",))
    small = make_plan("llama", num_microbatches=16)
    Plan.from_json(small.to_json())
    assert "no variance" in _refused(small, batch_norm_values=1)


def test_a_plan_that_says_nothing_of_the_stream_does_not_divide_it() -> None:
    """Written before plans knew, or by someone who does not: not trained wrongly."""
    plan = make_plan("llama", tp=2, sequence_parallel=True)
    data = plan.model_dump(mode="json")
    del data["model"]["whole_stream"]
    with pytest.raises(PlanFileError, match=r"nothing is known .*switch it off"):
        Plan.from_data(data, where="plan.json")
    data["strategy"]["sharding"]["sequence_parallel"] = False
    Plan.from_data(data, where="plan.json")


def test_what_strategies_say_without_a_model_is_as_before() -> None:
    assert unsupported(Strategy(microbatch_size=1)) == ()
