"""A training loop of one's own: steps, evaluation, optimizers, rates, checkpoints."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from executors import build_model, learning_rate, prepare, run
from executors.data import synthetic_batch
from planner.errors import MeshwrightError
from planner.schema import Optimizer, Plan, Precision
from tests.distributed.cases import build, gpt2, make_plan
from tests.distributed.pool import Pool

SGD = Optimizer(name="SGD", learning_rate=0.1)
PIPELINE = {"pp": 2, "schedule": "1F1B", "num_microbatches": 4}
ZBV = {"pp": 2, "virtual_stages": 2, "schedule": "ZBVZeroBubble", "num_microbatches": 4}
ZERO3 = {"dp_shard": 2, "zero_stage": 3}
LOCAL = {
    "dp_replicate": 2,
    "synchronisation": {"kind": "local_steps", "period": 2},
    "semantics": "approximate",
}
MESHES = [
    ZERO3 | {"tp": 2, "loss_parallel": True},
    PIPELINE | {"dp_replicate": 2},
    ZBV,
    {"cp": 2, "dp_shard": 2, "zero_stage": 1},
]


def nadam(named: Any) -> torch.optim.Optimizer:
    """Two groups, one of them without weight decay."""
    plain = [p for _, p in named if p.ndim < 2]
    matrices = [p for _, p in named if p.ndim >= 2]
    groups = [{"params": plain, "weight_decay": 0.0}, {"params": matrices}]
    return torch.optim.NAdam(
        [g for g in groups if g["params"]], lr=0.01, weight_decay=0.1
    )


def loop(plan_json: str, options: dict[str, Any]) -> Any:
    """Losses, evaluations and rates of a loop; or what it was refused for."""
    plan = Plan.from_json(plan_json)
    steps, every = options["steps"], options.get("evaluate_every")
    own = options.get("own", False)
    losses, evaluations, rates = [], [], []
    try:
        with prepare(
            plan,
            lambda: build(plan.model.name),
            optimizer=nadam if own else None,
            scheduler=learning_rate("cosine", steps=8, warm_up_steps=2)
            if own
            else None,
        ) as training:
            if "load" in options:
                training.load(options["load"])
            for step in range(training.done, steps):
                rates.append(training.optimizer.param_groups[0]["lr"])
                losses.append(training.step(synthetic_batch(plan.workload, step)).loss)
                if every and not (step + 1) % every:
                    batch = synthetic_batch(plan.workload, 1000)
                    evaluations.append(training.evaluate(batch))
            if "save" in options:
                training.save(options["save"])
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    return losses, evaluations, rates


def saved_after_evaluating(plan_json: str, folder: str) -> Any:
    """Losses with evaluations, saves and loads between, and without."""
    plan = Plan.from_json(plan_json)
    held_out = synthetic_batch(plan.workload, 1000)

    def batch(step: int) -> dict[str, torch.Tensor]:
        return synthetic_batch(plan.workload, step)

    def build_it() -> torch.nn.Module:
        return build(plan.model.name)

    rates = learning_rate("linear", steps=6)
    with prepare(plan, build_it, scheduler=rates) as training:
        plain = [training.step(batch(step)).loss for step in range(4)]
    with prepare(plan, build_it, scheduler=rates) as training:
        training.step(batch(0))
        training.evaluate(held_out)
        training.save(f"{folder}/a", keep=5)
        training.step(batch(1))
        training.evaluate(held_out)
        training.save(f"{folder}/b")
        training.save(f"{folder}/a", keep=5)
        training.step(batch(2))
        training.save(f"{folder}/a", keep=5)
        # Back by two steps, to the first of three.
        training.evaluate(held_out)
        first = training.load(f"{folder}/a", "step-000001")
        again = [training.step(batch(step)).loss for step in range(first, 4)]
        training.evaluate(held_out)
        training.save_hf(f"{folder}/hf")
    return plain, first, again


def ran(plan_json: str, steps: int) -> list[float]:
    """Losses of ``run`` on the same batches."""
    plan = Plan.from_json(plan_json)
    data = partial(synthetic_batch, plan.workload)
    return list(run(plan, lambda: build(plan.model.name), data, steps=steps).losses)


def ask(pool: Pool, plan: Plan, **options: Any) -> Any:
    """Answer of process 0; all must have the same."""
    world = plan.strategy.mesh.num_devices
    answers = pool.run(loop, world, plan.to_json(), options)
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def whole(steps: int) -> tuple[list[float], float]:
    """Losses of training in one process by torch alone, and an evaluation."""
    from executors import build_model

    plan = make_plan("llama", optimizer=SGD, **ZERO3)
    model = build_model(lambda: build("llama"))
    optimizer = nadam(list(model.named_parameters()))
    scheduler = learning_rate("cosine", steps=8, warm_up_steps=2)(optimizer)

    def loss(step: int) -> torch.Tensor:
        tokens = synthetic_batch(plan.workload, step)["input_ids"]
        found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return found

    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        value = loss(step)
        value.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(value.detach()))
    with torch.no_grad():
        return losses, float(loss(1000))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_loop_trains_as_run_does_and_evaluates_the_whole_model(
    pool: Pool, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", optimizer=SGD, **mesh)
    plain, _, _ = ask(pool, plan, steps=3)
    world = plan.strategy.mesh.num_devices
    assert plain == pool.run(ran, world, plan.to_json(), 3)[0]
    # Evaluation changes nothing, and repeats itself.
    losses, evaluations, _ = ask(pool, plan, steps=3, evaluate_every=1)
    assert losses == plain
    assert len(set(evaluations)) == 3


@pytest.mark.parametrize("mesh", MESHES)
def test_an_optimizer_of_ones_own_follows_its_schedule(
    pool: Pool, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", optimizer=SGD, **mesh)
    losses, evaluations, rates = ask(pool, plan, steps=4, evaluate_every=4, own=True)
    wanted, evaluated = whole(4)
    assert losses == pytest.approx(wanted, rel=2e-4)
    assert evaluations == pytest.approx([evaluated], rel=2e-4)
    # A warm-up of two steps, then half a cosine to zero at the eighth.
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.00904508], rel=1e-5)


@pytest.mark.parametrize("mesh", [MESHES[0], MESHES[1]])
def test_a_loop_goes_on_where_it_was_saved(
    pool: Pool, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", optimizer=SGD, **mesh)
    through, _, rates = ask(pool, plan, steps=4, own=True)
    ask(pool, plan, steps=2, own=True, save=str(tmp_path))
    again, _, later = ask(pool, plan, steps=4, own=True, load=str(tmp_path))
    assert again == through[2:]
    assert later == rates[2:]


@pytest.mark.parametrize(
    "mesh",
    [
        {"dp_shard": 2, "zero_stage": 1},
        {"dp_shard": 2, "zero_stage": 2, "precision": Precision(compute="bfloat16")},
        PIPELINE,
    ],
)
def test_evaluating_saving_and_going_back_leave_no_trace(
    pool: Pool, tmp_path: Path, mesh: dict[str, Any]
) -> None:
    plan = make_plan("llama", optimizer=SGD, **mesh)
    found = pool.run(saved_after_evaluating, 2, plan.to_json(), str(tmp_path))
    for plain, first, again in found:
        assert first == 1
        assert again == plain[1:]
    kept = {path.name for path in (tmp_path / "a").glob("step-*")}
    assert kept == {"step-000001", "step-000002.aside", "step-000003.aside"}
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def dropped(plan_json: str) -> list[float]:
    """Evaluations of a GPT-2 that drops half of its activations."""
    plan = Plan.from_json(plan_json)
    batch = synthetic_batch(plan.workload, 0)
    with prepare(plan, lambda: gpt2(dropout=0.5), seed=3) as training:
        return [training.evaluate(batch) for _ in range(2)]


@pytest.mark.parametrize("mesh", [PIPELINE, ZERO3])
def test_nothing_is_dropped_in_an_evaluation(pool: Pool, mesh: dict[str, Any]) -> None:
    from executors import build_model

    plan = make_plan("gpt2", optimizer=SGD, **mesh)
    whole = build_model(lambda: gpt2(dropout=0.5), 3).eval()
    tokens = synthetic_batch(plan.workload, 0)["input_ids"]
    with torch.no_grad():
        wanted = float(whole(input_ids=tokens, labels=tokens).loss)
    found = pool.run(dropped, 2, plan.to_json())[0]
    assert found == pytest.approx([wanted, wanted], rel=1e-5)


def test_a_batch_of_another_size_is_refused(pool: Pool) -> None:
    plan = make_plan("llama", optimizer=SGD, **ZERO3)
    answers = pool.run(of_another_size, 2, plan.to_json())
    assert all("the plan trains global_batch=" in said for said in answers)


def of_another_size(plan_json: str) -> str:
    """Reason for which a batch of five samples is refused."""
    plan = Plan.from_json(plan_json)
    batch = synthetic_batch(plan.workload, 0, samples=5)
    with prepare(plan, lambda: build(plan.model.name)) as training:
        try:
            training.step(batch)
        except MeshwrightError as error:
            return str(error)
    return ""


def test_a_loop_refuses_what_it_cannot_do(pool: Pool, tmp_path: Path) -> None:
    plan = make_plan("llama", optimizer=SGD, **LOCAL)
    kind, said = ask(pool, plan, steps=3, save=str(tmp_path))
    assert kind == "ExecutionError"
    assert "steps=3" in said or "every 2 steps" in said
    other = make_plan("llama", optimizer=SGD, **ZERO3)
    ask(pool, other, steps=1, save=str(tmp_path))
    _, said = ask(pool, other, steps=1, save=str(tmp_path))
    assert "holds checkpoints of another run" in said
    _, said = ask(pool, other, steps=2, own=True, load=str(tmp_path))
    assert "holds states of SGD" in said


def smoothed(scores: torch.Tensor, batch: Any) -> torch.Tensor:
    """Cross-entropy of a class a sample, with weights that come with the batch."""
    losses = torch.nn.functional.cross_entropy(
        scores[:, -1], batch["classes"], reduction="none", label_smoothing=0.1
    )
    return losses * batch["weights"]


def contrastive(scores: torch.Tensor, batch: Any) -> torch.Tensor:
    """Samples compared with each other."""
    rows = scores.flatten(1)
    return (rows @ rows.T).mean()


def weighted_batch(plan: Plan, step: int) -> dict[str, torch.Tensor]:
    size = plan.workload.global_batch
    generator = torch.Generator().manual_seed(step)
    return {
        **synthetic_batch(plan.workload, step),
        "classes": torch.randint(96, (size,), generator=generator),
        "weights": torch.rand(size, generator=generator),
    }


def own_losses(plan_json: str, name: str) -> Any:
    plan = Plan.from_json(plan_json)
    try:
        with prepare(
            plan, lambda: build(plan.model.name), loss=globals()[name]
        ) as training:
            batches = [weighted_batch(plan, step) for step in range(3)]
            losses = [training.step(batch).loss for batch in batches]
            return [*losses, training.evaluate(batches[0])]
    except MeshwrightError as error:
        return str(error)


def by_torch(steps: int) -> list[float]:
    """The same without a plan."""
    plan = make_plan("llama", optimizer=SGD)
    model = build_model(lambda: build("llama"), 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        batch = weighted_batch(plan, step)
        optimizer.zero_grad()
        loss = smoothed(model(input_ids=batch["input_ids"]).logits, batch).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    batch = weighted_batch(plan, 0)
    with torch.no_grad():
        last = smoothed(model(input_ids=batch["input_ids"]).logits, batch).mean()
    return [*losses, last.item()]


@pytest.mark.parametrize(
    "strategy",
    [
        {"dp_replicate": 2, "num_microbatches": 2},
        ZERO3 | {"tp": 2},
        PIPELINE | {"dp_replicate": 2},
        ZBV,
    ],
    ids=["dp", "zero3-tp", "pp-dp", "zbv"],
)
def test_a_loss_of_ones_own_is_the_same_on_every_mesh(
    pool: Pool, strategy: dict[str, Any]
) -> None:
    plan = make_plan("llama", optimizer=SGD, **strategy)
    wanted = by_torch(3)
    world = plan.strategy.mesh.num_devices
    for found in pool.run(own_losses, world, plan.to_json(), "smoothed"):
        assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("strategy", "name", "message"),
    [
        ({"cp": 2}, "smoothed", "cp=2 divides each sample"),
        ({"tp": 2, "loss_parallel": True}, "smoothed", "tp divides the scores"),
        ({"dp_replicate": 2}, "contrastive", "it is no mean over samples, and the"),
    ],
)
def test_a_loss_of_ones_own_is_refused_where_it_would_be_another(
    pool: Pool, strategy: dict[str, Any], name: str, message: str
) -> None:
    plan = make_plan("llama", optimizer=SGD, **strategy)
    assert any(
        message in found for found in pool.run(own_losses, 2, plan.to_json(), name)
    )
