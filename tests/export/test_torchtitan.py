"""torchtitan: recipes and TOML files."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from planner.errors import ExportError
from planner.export import export, export_files
from planner.schema import Optimizer, Plan, Precision, Strategy
from planner.targets import Case, get_target
from tests.export.framework_plans import framework_plans, sharding
from tests.export.golden_files import check_golden
from tests.export.plans import HOSTILE, LLAMA, PLANS, make_plan, named

TARGETS = ("torchtitan", "torchtitan-0.2")
OURS = framework_plans(2)


def _toml(plan: Plan) -> dict[str, Any]:
    return tomllib.loads(export_files(plan, "torchtitan-0.2")["torchtitan.toml"])


def _keywords(plan: Plan) -> Mapping[str, Any]:
    """Literal keywords of all calls in the recipe."""
    tree = ast.parse(export_files(plan, "torchtitan")["meshwright_recipe.py"])
    found: dict[str, Any] = {}
    for call in ast.walk(tree):
        for keyword in call.keywords if isinstance(call, ast.Call) else ():
            try:
                found[str(keyword.arg)] = ast.literal_eval(keyword.value)
            except ValueError:
                found[str(keyword.arg)] = ast.unparse(keyword.value)
    return found


def _why(plan: Plan, target: str = "torchtitan") -> str:
    with pytest.raises(ExportError) as error:
        export_files(plan, target)
    return str(error.value)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["dense", "experts", "zero3"])
def test_golden_files(target: str, name: str) -> None:
    check_golden(OURS[name], target, name)


@pytest.mark.parametrize("target", TARGETS)
def test_the_plan_lies_beside(target: str, tmp_path: Path) -> None:
    export(OURS["dense"], target, tmp_path)
    assert Plan.load(tmp_path / "plan.json") == OURS["dense"]
    subprocess.run(["sh", "-n", str(tmp_path / "run.sh")], check=True)


@pytest.mark.parametrize("target", TARGETS)
def test_hostile_names_stay_comments(target: str, tmp_path: Path) -> None:
    name = HOSTILE + '\x7f"""\n[model]\nname = "x"\u2028\ud800'
    files = export_files(named(OURS["zero3"], name.replace("\ud800", "")), target)
    plain = export_files(OURS["zero3"], target)
    for path in set(files) - {"plan.json"}:
        bare = [line for line in files[path].splitlines() if not line.startswith("#")]
        same = [line for line in plain[path].splitlines() if not line.startswith("#")]
        assert bare[1:] == same[1:], path
        (tmp_path / path).write_text(files[path])
    if target == "torchtitan":
        compile(files["meshwright_recipe.py"], "recipe", "exec")
    else:
        assert tomllib.loads(files["torchtitan.toml"])["model"]["name"] == "llama3"
    subprocess.run(["sh", "-n", str(tmp_path / "run.sh")], check=True)
    subprocess.run(["bash", "-n", str(tmp_path / "run.sh")], check=True)


def test_uneven_stages_in_names_of_each_release() -> None:
    parts = _keywords(OURS["dense"])["module_fqns_per_model_part"]
    assert [len(part) for part in parts] == [8, 9, 9, 9]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"]
    assert parts[-1][-2:] == ["norm", "lm_head"]
    older = _toml(OURS["dense"])["parallelism"]["module_fqns_per_model_part"]
    assert older[-1][-2:] == ["norm", "output"]
    assert older[1:-1] == parts[1:-1]


@pytest.mark.parametrize(("name", "local"), [("dense", 16), ("zero3", 1)])
def test_a_pipeline_takes_its_microbatches_at_once(name: str, local: int) -> None:
    said = _toml(OURS[name])["training"]
    assert said["local_batch_size"] == local
    assert said["global_batch_size"] == OURS[name].workload.global_batch


@pytest.mark.parametrize(("zero", "word"), [(3, "always"), (2, "never")])
def test_zero_is_whether_weights_are_freed(zero: int, word: str) -> None:
    plan = make_plan(mesh={"dp_shard": 8}, zero_stage=zero)
    assert _keywords(plan)["fsdp_reshard_after_forward"] == word
    assert _toml(plan)["parallelism"]["fsdp_reshard_after_forward"] == word


def test_schedules_have_the_names_of_torchs_classes() -> None:
    fields = {"mesh": {"pp": 4, "dp_shard": 2}, "zero_stage": 2}
    for name, torchs in (("1F1B", "1F1B"), ("Eager1F1B", "Interleaved1F1B")):
        plan = make_plan(schedule=name, num_microbatches=8, **fields)
        said = _keywords(plan)["pipeline_parallel_schedule"]
        assert said == torchs
        toml = _toml(plan)["parallelism"]
        assert toml["pipeline_parallel_schedule"] == torchs


def test_what_nobody_gave_is_left_to_torchtitan() -> None:
    data = _toml(OURS["zero3"])
    assert "max_norm" not in data["training"]
    assert set(data["optimizer"]) == {"name", "lr"}
    assert "max_norm" not in _keywords(OURS["zero3"])
    assert _toml(OURS["dense"])["training"]["max_norm"] == 1.0


def test_states_in_bfloat16_are_another_implementation() -> None:
    plan = make_plan(
        mesh={"dp_shard": 8}, zero_stage=3, optimizer=Optimizer(state_dtype="bfloat16")
    )
    assert _keywords(plan)["implementation"] == "fused_opt_states_bf16"
    assert "optimizer.state_dtype=bfloat16" in _why(plan, "torchtitan-0.2")


def test_a_model_unknown_to_torchtitan_must_be_named() -> None:
    model = PLANS["zero3"].model.model_copy(update={"ref": "hf:/my/model"})
    plan = PLANS["zero3"].model_copy(update={"model": model})
    files = export_files(plan, "torchtitan")
    assert '"TORCHTITAN_BASE", ""' in files["meshwright_recipe.py"]
    assert "Set TORCHTITAN_BASE" in files["run.sh"]
    said = _toml(plan)["model"]
    assert said == {"name": "set --model.name", "flavor": "set --model.flavor"}


_SHARDED = {"mesh": {"dp_shard": 8}, "zero_stage": 3}
_REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero 1": ({"mesh": {"dp_shard": 8}, "zero_stage": 1}, "zero_stage=1"),
    "zero 3 and split backward": (
        {
            "mesh": {"pp": 4, "dp_shard": 2},
            "zero_stage": 3,
            "schedule": "ZBVZeroBubble",
            "virtual_stages": 2,
        },
        "weight gradients after FSDP",
    ),
    "ulysses": (
        {"mesh": {"dp_shard": 4, "cp": 2}, "zero_stage": 3},
        "context_algorithm=all_to_all",
    ),
    "ep and tp of whole sequences": (
        {"mesh": {"dp_shard": 4, "tp": 2, "ep": 4}, "zero_stage": 3},
        "use sequence_parallel=true",
    ),
    "sgd": ({**_SHARDED, "optimizer": Optimizer(name="SGD")}, "optimizer.name=SGD"),
    "float8": (
        {**_SHARDED, "precision": Precision(compute="float8")},
        "precision.compute=float8",
    ),
    "float16": (
        {**_SHARDED, "precision": Precision(compute="float16")},
        "precision.compute=float16",
    ),
    "reduce": (
        {**_SHARDED, "precision": Precision(reduce="bfloat16")},
        "precision.reduce=bfloat16",
    ),
    "states": (
        {**_SHARDED, "precision": Precision(parameter="bfloat16")},
        "optimizer.state_dtype=float32",
    ),
    "compression": (
        {
            "mesh": {"dp_replicate": 8},
            "gradient_compression": "bfloat16",
            "semantics": "approximate",
        },
        "gradient_compression=bfloat16",
    ),
    "prefetch": ({**_SHARDED, "overlap": {"forward_prefetch": 2}}, "forward_prefetch"),
    "buckets": (
        {"mesh": {"dp_replicate": 8}, "overlap": {"bucket_bytes": 4096}},
        "overlap.bucket_bytes=4096",
    ),
    "needed": (
        {
            "mesh": {"dp_replicate": 8},
            "communication": {"replicas": {"algorithm": "ring"}, "buckets": "needed"},
        },
        "communication.buckets=needed",
    ),
    "order": (
        {**_SHARDED, "device_ranges": ((4, 8), (0, 4))},
        "device_ranges=[[4, 8], [0, 4]]",
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", _REFUSED)
def test_what_it_has_no_word_for_is_refused(case: str, target: str) -> None:
    fields, told = _REFUSED[case]
    message = _why(make_plan(**fields), target)
    assert told in message
    assert "; use" in message or "; plan again" in message


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"mesh": {"dp_replicate": 4, "tp": 2}, "sharding": sharding()},
            "mesh.dp_replicate=4",
        ),
        (
            {"mesh": {"dp_shard": 4, "tp": 2}, "zero_stage": 3},
            "sharding.sequence_parallel=False",
        ),
        ({"mesh": {"pp": 8}, "schedule": "1F1B"}, "without FSDP it computes"),
    ],
)
def test_what_only_the_later_release_says(fields: dict[str, Any], told: str) -> None:
    plan = make_plan(**fields)
    assert export_files(plan, "torchtitan")
    assert told in _why(plan, "torchtitan-0.2")


def test_recomputation_must_be_one() -> None:
    plan = OURS["dense"]
    stages = list(plan.strategy.stages)
    stages[1] = stages[1].model_copy(update={"recompute": "full"})
    strategy = plan.strategy.model_copy(update={"stages": tuple(stages)})
    mixed = plan.model_copy(update={"strategy": strategy})
    assert "stages.recompute=[none, full, none, none]" in _why(mixed)


def _cut(plan: Plan, cut: tuple[str, ...], inside: str, rest: str) -> Strategy:
    """Two stages, the second of which starts inside a layer or with another module."""
    first, *_, last = plan.strategy.stages
    head = tuple(name for name in LLAMA if name not in cut)
    stages = (
        first.model_copy(update={"modules": (*head[:10], inside)}),
        last.model_copy(update={"rank": 1, "modules": (rest, *head[10:])}),
    )
    return plan.strategy.model_copy(update={"stages": stages})


@pytest.mark.parametrize(
    ("inside", "rest"),
    [
        ("model.layers.9.self_attn", "model.layers.9.mlp"),
        ("model.layers.9", "model.adapter"),
    ],
)
def test_stages_are_whole_layers_of_known_modules(inside: str, rest: str) -> None:
    plan = make_plan(mesh={"pp": 2, "tp": 4}, schedule="1F1B", num_microbatches=8)
    strategy = _cut(plan, ("model.layers.9",), inside, rest)
    cut = plan.model_copy(update={"strategy": strategy})
    assert "stages.modules=" in _why(cut)
    target = get_target("torchtitan")
    bare = Case(strategy=strategy, layers=False, placed=False)
    assert target.violations(bare) == ()


def test_tied_weights_stay_on_one_stage() -> None:
    plan = PLANS["uneven"]
    tied = plan.model.model_copy(
        update={"tied": (("lm_head.weight", "model.embed_tokens.weight"),)}
    )
    assert "refuses tied weights" in _why(plan.model_copy(update={"model": tied}))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("tokens", [None, 4097])
def test_sequences_must_divide(target: str, tokens: int | None) -> None:
    plan = OURS["ring"]
    workload = plan.workload.model_copy(update={"seq_len": tokens})
    message = _why(plan.model_copy(update={"workload": workload}), target)
    assert f"workload.seq_len={tokens}" in message
