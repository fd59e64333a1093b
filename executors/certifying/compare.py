"""Training by a plan, on forked processes, beside the same training in one.

The ranks are forked from the process that calls, which must not have computed
gradients on a GPU: torch's autograd does not survive a fork then. What is compared is
what training leaves: losses, and how far each parameter moved from where it began, by
plain gradient descent, because methods that normalise gradients would hide one that is
several times too large.
"""

from __future__ import annotations

import copy
import gc
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from executors.building import lower_stages
from executors.data import synthetic_batch
from executors.exception_chain import explain, own_error
from executors.losses import LossFunction
from executors.mesh import build_mesh
from executors.names import tied_parameters
from executors.optimizers import build_optimizer, hidden_matrices
from executors.pipelines.stages import LoweredStage
from executors.trainer import Trainer
from planner.errors import ExecutionError
from planner.random_draws import DRAWS, BatchDraws
from planner.schema import Plan

__all__ = ["Comparison", "compare_with_whole"]

#: Largest relative difference of a loss, and of a parameter's change, in float32.
LOSS_TOLERANCE, CHANGE_TOLERANCE = 1e-4, 2e-2
#: Changes below this share of the largest parameter's are rounding.
_FLOOR = 1e-3
#: A difference above the tolerance counts if it is more than so many times what weights
#: that differ by rounding make; if that is more than a tenth, nothing is compared.
_TIMES_NOISE, _MOST_NOISE = 4, 0.1
_EPSILON = torch.finfo(torch.float32).eps
#: Rounding of weights, relative.
_NUDGE = 32 * _EPSILON
#: Seconds for which ranks are watched that have not ended in time.
_WATCHED_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Training by a plan beside training in one process.

    Attributes:
        steps: Steps that were compared.
        loss_error: Largest relative difference of a step's loss.
        change_error: Largest difference of a parameter's change over all steps,
            relative to its change in one process.
        parameter: Name of that parameter.
        seconds: Wall time.
        violation: What is wrong; None if nothing is.
        verdict: ``right``; ``wrong`` if training differs; ``late`` if a rank refused
            the plan; ``crashed`` or ``hung`` if one ended so.
    """

    steps: int
    loss_error: float = 0.0
    change_error: float = 0.0
    parameter: str = ""
    seconds: float = 0.0
    violation: str | None = None
    verdict: Literal["right", "wrong", "late", "crashed", "hung"] = "right"


def compare_with_whole(
    plan: Plan, model: nn.Module, *, steps: int = 3, timeout_s: float = 60.0
) -> Comparison:
    """Train a model by a plan, on forked processes, and in one; compare.

    Args:
        plan: Of a model small enough for one process; SGD, in float32.
        model: On the CPU, with values. It is not changed.
        steps: Optimizer steps.
        timeout_s: Time after which the ranks are killed.

    Raises:
        ExecutionError: If training in one process ends in numbers that are not finite,
            or changes nothing, or if ranks still compute when the time is up.
    """
    started = time.perf_counter()
    world = plan.strategy.mesh.num_devices
    with tempfile.TemporaryDirectory(prefix="meshwright-") as folder:
        # Once for all ranks: exporting a model is most of what a rank does.
        lowered = None
        if plan.strategy.mesh.pp > 1:
            try:
                dtype = getattr(torch, plan.strategy.precision.parameter)
                one = copy.deepcopy(model).train().to(dtype)
                lowered = lower_stages(plan, one, torch.device("cpu"))
            except Exception as error:  # whatever a model's code raises
                return _failure(steps, *_reason(error))

        # Ranks are given the numbers that one process draws, which is done before then.
        drawn, whole = BatchDraws(), None
        if _draws(plan, model):
            whole = _train_whole(plan, model, steps, drawn)

        def train(rank: int) -> None:
            _train_as_rank(plan, model, steps, rank, Path(folder), lowered, drawn)

        running = {rank: _fork(train, rank, Path(folder)) for rank in range(world)}
        try:
            whole = whole or _train_whole(plan, model, steps, drawn)
            failure = _wait(running, Path(folder), started + timeout_s)
            if failure is None:
                files = [Path(folder, f"{rank}.pt") for rank in range(world)]
                found = [torch.load(file, mmap=True) for file in files]
                result = _compare(plan, model, whole, found, steps, drawn)
            else:
                result = _failure(steps, *failure)
        finally:
            for process in running.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
    return replace(result, seconds=time.perf_counter() - started)


# -- Processes -------------------------------------------------------------------


def _fork(work: Callable[[int], None], rank: int, folder: Path) -> int:
    """Do work in a forked process; what it says goes to ``RANK.log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(rank)
        code = 0
    except BaseException as error:  # a forked process must never return
        (folder / f"{rank}.error").write_text("\n".join(_reason(error)))
    finally:
        os._exit(code)


def _reason(error: BaseException) -> tuple[str, str]:
    """Verdict on a rank that raised an error, and the error."""
    own = own_error(error)
    if own is not None:
        return "late", str(own)
    return "crashed", f"{type(error).__name__}: {explain(error)}"


def _failure(steps: int, verdict: str, violation: str) -> Comparison:
    return Comparison(steps=steps, verdict=verdict, violation=violation)  # type: ignore[arg-type]


def _wait(
    running: dict[int, int], folder: Path, until: float
) -> tuple[str, str] | None:
    """Wait for all, or for the first that fails; return its verdict and reason.

    Args:
        running: Process of each rank; those that end are taken out.
        folder: Where ranks leave their errors.
        until: Time by ``perf_counter`` at which to stop waiting.
    """
    while running:
        for rank, pid in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if not done:
                continue
            del running[rank]
            if status:
                error = folder / f"{rank}.error"
                code = os.waitstatus_to_exitcode(status)
                if not error.exists():
                    return "crashed", f"rank {rank} ended with code {code}"
                verdict, _, text = error.read_text().partition("\n")
                return verdict, text
        if running and time.perf_counter() > until:
            if _are_computing(list(running.values())):
                raise ExecutionError(
                    "training a small model takes longer than is waited for"
                )
            return "hung", f"ranks {', '.join(map(str, running))} wait"
        time.sleep(0.01)
    return None


def _are_computing(pids: Sequence[int]) -> bool:
    """Return True if any of some processes computes, and False where nobody can say.

    Ranks that wait for each other sleep.
    """
    before = [_ticks(pid) for pid in pids]
    time.sleep(_WATCHED_S)
    used = [now - then for now, then in zip(map(_ticks, pids), before, strict=True)]
    return max(used, default=0) > _WATCHED_S * os.sysconf("SC_CLK_TCK") / 10


def _ticks(pid: int) -> int:
    """Return clock ticks that a process computed; 0 where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


# -- The two ways to train -------------------------------------------------------


def _train_as_rank(
    plan: Plan,
    model: nn.Module,
    steps: int,
    rank: int,
    folder: Path,
    lowered: Sequence[LoweredStage] | None,
    drawn: BatchDraws,
) -> None:
    torch.set_num_threads(1)
    # What was there before the fork is not looked through, and its pages not copied.
    gc.freeze()
    store = dist.FileStore(  # type: ignore[attr-defined]
        str(folder / "store"), plan.strategy.mesh.num_devices
    )
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=plan.strategy.mesh.num_devices,
        timeout=timedelta(seconds=60),
    )
    place = build_mesh(plan.strategy, torch.device("cpu"))
    tied = {name: group[0] for group in tied_parameters(model) for name in group}
    trainer = Trainer(plan, model, place, lowered=lowered)
    count = plan.strategy.num_microbatches
    draws = BatchDraws(drawn, _parts(plan))
    first = place.data_index * count
    losses = []
    for step in range(steps):
        batch = synthetic_batch(plan.workload, step)
        draws.begin(step, first)
        hooks = _number_draws(draws, trainer, lowered, step, first) if drawn else []
        with draws if drawn else nullcontext():
            losses.append(trainer.step(batch).loss)
        for hook in hooks:
            hook.remove()
    weights = {}
    for name, parameter in trainer.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[tied.get(name, name)] = whole.detach()
    result = {
        "losses": losses,
        "weights": weights,
        "taken": None if draws.unlike or draws.unlike_on_host else draws.taken,
    }
    torch.save(result, folder / f"{rank}.pt")
    # Nobody may close its connections while another still reads from them.
    dist.barrier()


def _number_draws(
    draws: BatchDraws,
    trainer: Trainer,
    lowered: Sequence[LoweredStage] | None,
    step: int,
    first: int,
) -> list[RemovableHandle]:
    """Tell draws of each microbatch, and of a pipeline's stages, which those are.

    Args:
        draws: Of this rank.
        trainer: Whose modules will run.
        lowered: Stages; None without a pipeline.
        step: Number of the batch.
        first: Number of this rank's first microbatch.
    """
    if lowered is None:
        # A forward for trial puts the generator back, and with it the number.
        inner = trainer.parts[0].inner
        return [
            inner.register_forward_pre_hook(lambda *_: draws.begin_on_host()),
            inner.register_forward_hook(lambda *_: draws.end()),
        ]
    before = list(accumulate((_draws_of(one) for one in lowered), initial=0))
    hooks = []
    for index, part in trainer.parts.items():
        calls = iter(range(first, sys.maxsize))

        def begin(
            *_: Any, calls: Iterator[int] = calls, draw: int = before[index]
        ) -> None:
            draws.begin(step, next(calls), draw)

        hooks.append(part.inner.register_forward_pre_hook(begin))
    return hooks


def _draws_of(stage: LoweredStage) -> int:
    """Count the draws of a stage."""
    return sum(
        getattr(node.target, "_schema", None) is not None
        and node.target._schema.name.removeprefix("aten::") in DRAWS
        for module in stage.module.modules()
        if isinstance(module, fx.GraphModule)
        for node in module.graph.nodes
    )


def _parts(plan: Plan) -> int:
    """Microbatches of a batch."""
    return plan.strategy.num_microbatches * plan.strategy.mesh.data_parallel


def _draws(plan: Plan, model: nn.Module) -> bool:
    """Return True if a forward draws random numbers."""
    batch = synthetic_batch(plan.workload, 0)
    names = {spec.name for spec in plan.workload.inputs}
    with BatchDraws() as draws:
        copy.deepcopy(model).train()(**{n: v for n, v in batch.items() if n in names})
        draws.end()
    return bool(draws)


def _train_whole(
    plan: Plan, model: nn.Module, steps: int, draws: BatchDraws
) -> dict[str, Any]:
    model = copy.deepcopy(model).train()
    workload, strategy = plan.workload, plan.strategy
    optimizer = build_optimizer(
        model.named_parameters(),
        strategy.optimizer,
        hidden_matrices(model, strategy),
    )
    loss = LossFunction(
        kind=workload.loss, data_parallel=1, label_shift=workload.label_shift
    )
    wanted = {spec.name for spec in workload.inputs}
    losses = []
    for step in range(steps):
        batch = synthetic_batch(workload, step)
        loss.prepare(batch, 1)
        inputs = {name: value for name, value in batch.items() if name in wanted}
        optimizer.zero_grad()
        draws.begin(step)
        with draws:
            value = loss(model(**inputs), loss.target(batch))
            draws.end()
            value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(float(value.detach()))
    return {"losses": losses, "weights": dict(model.named_parameters())}


def _relative(gap: float, scale: float) -> float:
    """Return a ratio that sorts: infinite where a number is not one."""
    return gap / max(scale, 1e-30) if math.isfinite(gap) else math.inf


def _compare(
    plan: Plan,
    model: nn.Module,
    whole: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    steps: int,
    drawn: BatchDraws,
) -> Comparison:
    if not all(map(math.isfinite, whole["losses"])):
        raise ExecutionError(
            f"plain training of the small model has losses {whole['losses']}, which "
            f"nothing can be compared with"
        )
    taken = [rank["taken"] for rank in ranks]
    frozen = drawn.on_host and plan.strategy.mesh.pp > 1
    if frozen or None in taken or not drawn.covers(set().union(*taken), _parts(plan)):
        raise ExecutionError(
            "ranks draw other random numbers than one process does, so that nothing "
            "can be compared"
        )
    loss_error = _loss_error(ranks[0]["losses"], whole["losses"])
    errors = _change_errors(model, whole, ranks)
    wrong = {n: e for n, e in errors.items() if not e <= CHANGE_TOLERANCE}
    differs = not loss_error <= LOSS_TOLERANCE
    if wrong or differs:
        # Training may be so sensitive to rounding that any order of sums does this.
        noise, loss_noise = _noise(plan, model, whole, steps)
        wrong = {n: e for n, e in wrong.items() if not e <= _TIMES_NOISE * noise[n]}
        differs = differs and not loss_error <= _TIMES_NOISE * loss_noise
        most = max(*noise.values(), loss_noise)
        if not (wrong or differs) and most > _MOST_NOISE:
            raise ExecutionError(
                f"plain training of the small model differs by {most:.2g} where its "
                f"weights differ by rounding (does it draw random numbers?), so that "
                f"nothing can be compared with it"
            )
    name = max(wrong or errors, key=errors.__getitem__)
    violation = None
    if differs:
        violation = f"losses differ by {loss_error:.2g} of them"
    elif wrong:
        violation = f"changes of {name} differ by {errors[name]:.2g} of them"
    return Comparison(
        steps=steps,
        loss_error=loss_error,
        change_error=errors[name],
        parameter=name,
        violation=violation,
        verdict="wrong" if violation else "right",
    )


def _loss_error(losses: Sequence[float], whole: Sequence[float]) -> float:
    pairs = zip(losses, whole, strict=True)
    return max(_relative(abs(a - b), abs(b)) for a, b in pairs)


def _noise(
    plan: Plan, model: nn.Module, whole: Mapping[str, Any], steps: int
) -> tuple[dict[str, float], float]:
    """Differences that rounding of weights makes to each change, and to losses.

    A unit near the kink of its activation is on or off by rounding alone.
    """
    found: dict[str, float] = {}
    loss_error = 0.0
    before = dict(model.named_parameters())
    for sign in (1, -1):
        nudged = copy.deepcopy(model)
        drawn = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in nudged.parameters():
                nudge = torch.randn(parameter.shape, generator=drawn) * sign * _NUDGE
                parameter.mul_(1 + nudge.to(parameter.dtype))
        other = _train_whole(plan, nudged, steps, BatchDraws())
        begun = dict(nudged.named_parameters())
        with torch.no_grad():
            moved = {
                name: before[name] + weight - begun[name]
                for name, weight in other["weights"].items()
            }
        loss_error = max(loss_error, _loss_error(other["losses"], whole["losses"]))
        errors = _change_errors(model, whole, [{"weights": moved}])
        found = {name: max(e, found.get(name, 0.0)) for name, e in errors.items()}
    return found, loss_error


def _change_errors(
    model: nn.Module, whole: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Largest relative difference of each parameter's change from that in a whole.

    Raises:
        ExecutionError: If the whole changes nothing.
    """
    before = dict(model.named_parameters())
    with torch.no_grad():
        changes = {n: w - before[n] for n, w in whole["weights"].items()}
        largest = max(float(c.abs().max()) for c in changes.values())
        if not 0 < largest < math.inf:
            raise ExecutionError(
                f"plain training of the small model changes parameters by {largest}, "
                f"which nothing can be compared with"
            )
        errors = {}
        for name, change in changes.items():
            scale = max(float(change.abs().max()), _FLOOR * largest)
            found = [one["weights"][name] for one in others if name in one["weights"]]
            # Both ways round a parameter in each step, by half of its last place.
            rounding = len(whole["losses"]) * _EPSILON * float(before[name].abs().max())
            gaps = [float((w - before[name] - change).abs().max()) for w in found]
            gaps = [_relative(max(gap - rounding, 0.0), scale) for gap in gaps]
            errors[name] = max(gaps, default=math.inf)
    return errors
