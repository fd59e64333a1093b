"""Contract of the registry of methods: each record is held to what rooms ask of it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

from executors.dryrun import dry_runs
from executors.strategies.narrow import find_groups
from planner import predict
from planner.cost import CostModel
from planner.errors import NoFeasiblePlanError, StrategyError
from planner.graph.neurons import only_chains, only_neurons
from planner.plugins import load_object
from planner.schema import AXES, Mesh, Optimizer, Plan, Precision, Stage, Strategy
from planner.schema.base import leaf_defaults
from planner.schema.composition import FEATURES
from planner.schema.describe import facts, paragraph
from planner.schema.methods import (
    Method,
    MethodValue,
    limit_violations,
    method_names,
    method_of,
    methods,
    methods_of,
    read_method,
    slots,
    words_of,
)
from planner.schema.methods.block_subnetworks import BlockSubnetworks
from planner.schema.methods.masked import Masked
from planner.schema.methods.method import Asynchrony
from planner.schema.verification import Verification
from planner.schema.violations import Case, executor_violations
from planner.space import Regime, build_strategy, normalize_pins, read_pins
from planner.targets import Case as TargetCase
from planner.targets import get_target, target_names
from tests.cost.made import device, hosts, row, setting_for, uniform_graph
from tests.distributed.cases import build
from tests.distributed.planned import graph_of, planned
from tests.plans import gpt2_plan
from tests.schema.documents import variants

ROOT = Path(__file__).parents[2]
PLAIN = Precision(compute="float32")
ALL = [pytest.param(one, id=f"{one.slot}-{one.kind}") for one in methods()]
CHOSEN = [one for one in ALL if not one.values[0].default]
LEARNINGS = [one for one in ALL if one.values[0].slot == "learning"]
SYNCHRONISATIONS = [one for one in ALL if one.values[0].slot == "synchronisation"]


def default_value(method: Method) -> MethodValue:
    return method.kind if method.document is None else method.document()


def strategy_of(method: Method, value: MethodValue, **fields: Any) -> Strategy:
    """A strategy with a method, on eight copies or two stages unless told."""
    semantics = "approximate" if method.inexact else "exact"
    common = {"precision": PLAIN, "semantics": semantics, method.slot: value}
    if method.slot == "learning":
        mesh = Mesh(pp=fields.pop("pp", 2))
        stages = (Stage(rank=rank, modules=(str(rank),)) for rank in range(mesh.pp))
        return Strategy(mesh=mesh, stages=tuple(stages), **common | fields)
    if not isinstance(value, Asynchrony):
        mesh = Mesh(dp_replicate=fields.pop("dp_replicate", 8))
        return Strategy(mesh=mesh, **common | fields)
    mesh, kind = Mesh(pp=fields.pop("pp", 2)), value.wanted_recompute or "none"
    stages = tuple(
        Stage(rank=rank, modules=(f"layers.{rank}",), recompute=kind)
        for rank in range(mesh.pp)
    )
    piped = {
        "schedule": "1F1B" if mesh.pp > 1 else "GPipe",
        "num_microbatches": 2,
        "stages": stages,
        "optimizer": Optimizer(name="SGD"),
    }
    return Strategy(mesh=mesh, **common | piped | fields)


def alone(method: Method, value: MethodValue) -> tuple[Strategy, str]:
    """A strategy of one device with a method, and how it is told."""
    staged = isinstance(value, Asynchrony) or method.slot == "learning"
    axis = "pp" if staged else "dp_replicate"
    return strategy_of(method, value, **{axis: 1}), f"{axis}=1"


# -- What a record names exists ------------------------------------------------------


@pytest.mark.parametrize("method", ALL)
def test_price_executor_page_and_acceptance_test_exist(method: Method) -> None:
    assert callable(load_object(method.prices))
    assert method.runs is not None
    assert callable(load_object(method.runs))
    page = (ROOT / "docs" / method.page).read_text()
    assert f"`{method.kind}`" in page or f"={method.kind}`" in page
    assert set(method.settings) <= set(re.findall(r"`(\w+)`", page))
    assert (ROOT / method.test).is_file()
    assert method.source


@pytest.mark.parametrize("method", SYNCHRONISATIONS)
def test_names_follow_from_the_method(method: Method) -> None:
    assert method.document is not None
    name = "".join(word.title() for word in method.kind.split("_"))
    assert method.document.__name__ == name
    assert method.document.__module__ == f"planner.schema.methods.{method.kind}"
    assert method.prices == f"planner.cost.replicas.{method.kind}:{name}Pricing"
    assert method.runs == f"executors.replicas.{method.kind}:{name}Replicas"
    assert method.page == f"methods/{method.kind.replace('_', '-')}.md"


@pytest.mark.parametrize(
    "method", [one for one in CHOSEN if one.values[0].slot == "asynchrony"]
)
def test_names_of_ways_to_run_pipelines_follow_likewise(method: Method) -> None:
    assert method.document is not None
    name = method.document.__name__
    assert name == method.kind.title()
    assert method.prices == f"planner.cost.pipelines.{method.kind}:{name}Pricing"
    assert method.runs == f"executors.replicas.{method.kind}:{name}Replicas"


@pytest.mark.parametrize("method", LEARNINGS)
def test_names_follow_from_the_rule(method: Method) -> None:
    assert method.document is not None
    name = "".join(word.title() for word in method.kind.split("_"))
    assert method.document.__name__ == name
    assert method.document.__module__ == f"planner.schema.methods.{method.kind}"
    assert method.prices == f"planner.cost.learning.{method.kind}:{name}Pricing"
    assert method.runs == f"executors.learning.{method.kind}:{name}Step"
    assert method.page == f"methods/{method.kind.replace('_', '-')}.md"


def test_the_index_of_pages_takes_all_of_them() -> None:
    index = (ROOT / "docs" / "methods.md").read_text()
    assert "\nmethods/*\n" in index
    pages = {path.name for path in (ROOT / "docs" / "methods").iterdir()}
    assert pages == {method.page.removeprefix("methods/") for method in methods()}


def test_every_slot_is_a_field_of_strategies_regimes_and_pins() -> None:
    defaults = leaf_defaults(Strategy)
    for slot in slots():
        first, *others = methods(slot)
        assert first.default
        assert not any(one.default for one in others)
        assert defaults[slot] == default_value(first)
        assert getattr(Regime(), slot) == defaults[slot]
        assert first.inexact is None
    found = {one.slot: value for one, value in methods_of(Strategy())}
    assert found == {slot: defaults[slot] for slot in slots()}


def test_features_of_methods_are_rows_of_the_composition_table() -> None:
    for method in methods():
        feature = method.feature
        if feature is None:
            continue
        assert feature in FEATURES
        value = feature.fields[method.slot]
        assert method_of(method.slot, value) is method
        assert (feature.fields.get("semantics") == "approximate") == bool(
            method.inexact
        )


# -- Pins ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ALL)
def test_pins_and_presets_are_read_back(method: Method) -> None:
    for value in [*variants(method), *method.presets.values()]:
        pins = read_pins({method.slot: value})
        assert read_pins(pins) == pins == {method.slot: str(value)}
        assert normalize_pins(pins) == {}
        regime = Regime.from_pins(pins)
        assert getattr(regime, method.slot) == value
        assert regime.semantics == ("approximate" if method.inexact else "exact")
    for name, value in method.presets.items():
        assert read_method(method.slot, name) == value
    assert {method.kind, *method.presets} <= set(method_names(method.slot))
    if not method.settings:
        with pytest.raises(StrategyError, match="has no settings"):
            read_method(method.slot, f"{method.kind}:period=2")


# -- Consent, limits, descriptions ---------------------------------------------------


@pytest.mark.parametrize("method", ALL)
def test_inexact_methods_want_consent(method: Method) -> None:
    for value in variants(method):
        asked = strategy_of(method, value, semantics="exact")
        found = [
            r for r in executor_violations(asked) if r.startswith(f"{method.slot}=")
        ]
        assert len(found) == bool(method.inexact)
        for reason in found:
            assert reason.endswith(f"; {method.inexact}, say semantics=approximate")
        assert not executor_violations(strategy_of(method, value))


@pytest.mark.parametrize("method", CHOSEN)
def test_each_setting_shows_in_label_summary_and_verdicts(method: Method) -> None:
    made = gpt2_plan()
    labels, told = {made.strategy.label()}, {str(facts(made))}
    values = variants(method)
    for value in values:
        update = {method.slot: value}
        strategy = made.strategy.model_copy(update=update)
        labels.add(strategy.label())
        assert str(value) in strategy.label().split()
        changed = made.model_copy(update={"strategy": strategy})
        told.add(str(facts(changed)))
        assert words_of(method, value) in paragraph(changed)
        for name in target_names():
            target = get_target(name)
            case = TargetCase(strategy=strategy, placed=False, layers=False)
            fields = {violation.field for violation in target.violations(case)}
            expressible = target.says | target.leaves
            assert (method.slot in fields) == (method.slot not in expressible), name
    assert len(labels) == len(told) == len(values) + 1


@pytest.mark.parametrize("target", ["torchtitan", "megatron", "deepspeed"])
@pytest.mark.parametrize("method", CHOSEN)
def test_frameworks_have_no_words_for_methods_yet(method: Method, target: str) -> None:
    declared = get_target(target)
    assert method.slot not in declared.says | declared.leaves


# -- Prices --------------------------------------------------------------------------


@pytest.mark.parametrize("method", ALL)
def test_one_copy_is_plain_training_or_refused(method: Method) -> None:
    """With one copy nothing is left of a method, whatever its settings.

    Steps that compute some of the neurons alone do so on one copy, too.
    """
    graph, cluster = uniform_graph(4), hosts((1, 1, device()))
    costs = []
    for value in variants(method):
        regime = Regime(**{method.slot: value})
        single, told = alone(method, value)
        if limit_violations(Case(strategy=single)):
            with pytest.raises(StrategyError, match=told):
                predict(graph, cluster, single)
            continue
        strategy = build_strategy(
            row(),
            unit_names=graph.unit_names,
            bounds=[0, 4],
            precision=PLAIN,
            regime=regime,
        )
        setting = setting_for(graph, cluster, precision=PLAIN, regime=regime)
        narrow = not isinstance(value, str) and len(getattr(value, "widths", ())) > 1
        costs.append((narrow, CostModel(setting).cost(strategy)))
    plain = CostModel(setting_for(graph, cluster, precision=PLAIN)).cost(
        build_strategy(
            row(), unit_names=graph.unit_names, bounds=[0, 4], precision=PLAIN
        )
    )
    for narrow, cost in costs:
        parts, others = dict(cost.breakdown_s), dict(plain.breakdown_s)
        if narrow:
            assert 0 < parts.pop("compute") < others.pop("compute")
        assert parts == others
        assert cost.memory.total == pytest.approx(plain.memory.total)
        assert cost.link_bytes == plain.link_bytes == {}


def _dry_run(made: Plan) -> Verification:
    found = dry_runs(made, lambda: build(made.model.name), [0])
    assert not any(rank.failure for rank in found)
    return Verification.of(made, found)


def _weight_bytes(made: Plan) -> tuple[float, float]:
    """Bytes of the weights of one of two copies, and of those of them that are divided.

    Each has half of the neurons, or passes blocks on, or not all steps exchange those
    outside of a core, which no step does where one copy alone trains them.
    """
    value, weights = made.strategy.synchronisation, 4.0 * made.model.parameters
    if isinstance(value, Masked):
        model = build("tiny-llama")
        outside = sum(
            model.get_parameter(part.name).nbytes
            * (1 - value.core_neurons(group.neurons) / group.neurons)
            for group in find_groups(model, made.strategy.sharding)
            for part in group.parameters
        )
        return (weights - outside, 0.0) if value.weak_replicas else (weights, outside)
    if isinstance(value, BlockSubnetworks):
        layers = build("tiny-llama").get_submodule("model.layers")
        blocks = 4.0 * sum(p.numel() for p in layers.parameters())
        passed = blocks / 4 * value.passed(2, 4)
        return weights - blocks + passed, passed
    if getattr(value, "sharded", False):
        model = build("tiny-llama")
        first, last = (
            sum(
                parameter.nbytes
                for unit in stage.modules
                for parameter in model.get_submodule(unit).parameters()
            )
            for stage in made.strategy.run_stages
        )
        # The other copy owns the first stage; the last one's weights go once.
        return weights, 2.0 * first + last
    if not value.splits:
        return weights, 0.0
    graph = graph_of(made.model.name)
    parameters = (only_chains if value.chains else only_neurons)(graph).parameters
    divided = sum(4.0 * p.numel / 2 for p in parameters if p.style != "none")
    return weights - divided, divided


@pytest.mark.parametrize(
    "inside", [{}, {"dp_shard": 2, "zero_stage": 3}, {"tp": 2}], ids=str
)
@pytest.mark.parametrize("method", SYNCHRONISATIONS)
def test_expected_traffic_is_priced_and_counted(
    method: Method, inside: dict[str, int]
) -> None:
    one = {"dp_replicate": 2, "num_microbatches": 1, "recompute": "none"}
    pins = one | inside
    for value in variants(method)[: 1 if inside else None]:
        degrees = {axis: inside[axis] for axis in AXES if axis in inside}
        bare = Strategy(mesh=Mesh(dp_replicate=2, **degrees), **{method.slot: value})
        chosen = {**pins, method.slot: value}
        if limit_violations(Case(strategy=bare)):
            with pytest.raises(NoFeasiblePlanError, match=method.slot):
                planned("tiny-llama", **chosen)
            continue
        # A gate and an up projection feed one layer, which is no chain.
        chains = getattr(value, "chains", False)
        name = "tiny-gpt2" if chains else "tiny-llama"
        made = planned(name, optimizer=Optimizer(), **chosen)
        assert getattr(made.strategy, method.slot) == value
        found = {
            each.name: each
            for each in _dry_run(made).deviations
            if each.name.startswith(("all-reduce", "all-gather", "all-to-all", "send"))
        }
        assert found
        for each in found.values():
            # A step's loss is summed up, too: four bytes.
            assert each.predicted == pytest.approx(each.found, abs=8), each.name
        if inside:
            continue
        weights, divided = _weight_bytes(made)
        expected = value.expected_traffic(  # type: ignore[union-attr]
            gradients=weights, weights=weights, divided=divided
        )
        for kind, size in expected.items():
            predicted = made.prediction.collective_bytes.get(kind, 0.0)
            assert predicted == pytest.approx(size)
            assert kind.replace("_", "-") in {n.partition(",")[0] for n in found}
        assert sum(value.phases.values()) == pytest.approx(1.0)  # type: ignore[union-attr]


# -- The seam ------------------------------------------------------------------------

#: Names that plain words of the language, or a file format, share with a method.
_COMMON_WORDS = {"none", "bfloat16", "float16", "topk", "masked", "pipedream"}


def _words_of_code(path: Path) -> set[str]:
    """Names, imported modules and texts of a module, docstrings left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    # A setting may have the name of another method.
    settings = {
        id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found |= {node.id} if id(node) not in settings else set()
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").rpartition(".")[2])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if id(node) not in docstrings else set()
    return found


@pytest.mark.parametrize("method", CHOSEN)
def test_no_other_file_names_a_method(method: Method) -> None:
    """A method is its own files: rooms look it up, and know no names."""
    names = {method.kind, *method.presets} - _COMMON_WORDS
    if method.document is not None:
        names.add(method.document.__name__)
    assert method.runs is not None
    own = {
        f"planner/schema/methods/{method.kind}.py",
        f"planner/schema/methods/{method.slot}.py",
        *(
            place.partition(":")[0].replace(".", "/") + ".py"
            for place in (method.prices, method.runs)
        ),
    }
    # Another way to run it.
    own.add(f"executors/replicas/sharded_{method.kind}.py")
    # The exchange between members of a federation is local steps, by definition.
    if method.kind == "local_steps":
        own |= {
            *("planner/schema/federation.py", "planner/federations.py"),
            *("planner/cost/federation.py", "planner/cli/federate.py"),
            "executors/federation/run.py",
        }
    for room in ("planner", "executors", "envs", "policies"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if str(path.relative_to(ROOT)) not in own:
                assert not _words_of_code(path) & names, path
