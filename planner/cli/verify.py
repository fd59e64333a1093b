"""The command ``meshwright verify``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.options import OptionalFloat, OtherModelName, model_of_plan
from planner.cli.output import emit_json, emit_table, note, tell_of_run, working
from planner.errors import ExecutionError
from planner.schema import Plan
from planner.schema.verification import RankVerification, Verification
from planner.units import format_bytes, format_count

__all__ = ["VerifyCommand"]


@dataclass(frozen=True, kw_only=True)
class VerifyCommand:
    """Run one step of a plan as some of its ranks, in one process, without devices."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A plan file."""
    rank: Annotated[
        tuple[int, ...], tyro.conf.arg(metavar="RANK", help_behavior_hint="")
    ] = ()
    """Ranks to run; by default the first of the first, middle and last pp rank."""
    model: OtherModelName = None
    timeout: OptionalFloat = None
    """Time limit in seconds."""
    force: bool = False
    """Verify even if the model is not the plan's."""
    tolerance: float = 0.1
    """Share of what is found by which a prediction may be off before the command fails.
    Differences below 65,536 bytes are allowed."""
    every_microbatch: bool = False
    """Run every microbatch, even those that repeat the work of another."""
    numerics: bool = False
    """Train a small twin of the plan on processes of this machine instead, and compare
    with plain training."""
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Verify the ranks one after the other, in a process of their own.

        Raises:
            ExecutionError: If a rank would fail, or cannot be verified; if a prediction
                is further off than the tolerance; or if the plan's twin does not train
                as one process does.
        """
        if not self.tolerance >= 0:
            raise ExecutionError(
                f"--tolerance {self.tolerance}; use a share of what is found, such as "
                f"0.1 for 10 %"
            )
        plan = Plan.load(self.plan)
        if plan.not_runnable:
            raise ExecutionError(f"this plan cannot be run: {plan.not_runnable[0]}")
        tell_of_run(plan)
        ref = model_of_plan(plan, self.plan, self.model)
        if self.numerics:
            self._compare(plan, ref)
            return
        found = self._verify(plan, ref, self._ranks(plan))
        result = Verification.of(plan, found)
        self._report(result)
        for rank in found:
            if rank.failure is not None:
                raise ExecutionError(
                    f"rank {rank.rank} of {result.world_size} would fail: "
                    f"{rank.failure}; MESHWRIGHT_LOG=INFO shows the traceback"
                )
        self._require_agreement(result)

    def _require_agreement(self, result: Verification) -> None:
        off = [each for each in result.deviations if each.beyond(self.tolerance)]
        for each in off:
            note(
                f"{each.name}: predicted {format_bytes(each.predicted)}, found "
                f"{format_bytes(each.found)}; more than {self.tolerance:.0%} off"
            )
        if off:
            raise ExecutionError(
                f"{len(off)} of {len(result.deviations)} predictions are more than "
                f"{self.tolerance:.0%} off, first {off[0].name}; trust what was found, "
                f"or allow more with --tolerance"
            )

    def _compare(self, plan: Plan, ref: str) -> None:
        """Train the plan's twin, print what it showed."""
        from planner.certificate import Certifier

        with working("training a small twin"), Certifier(ref) as certifier:
            found = certifier.certify(plan, kept=False)
        if found.verdict != "right":
            raise ExecutionError(f"not certified ({found.verdict}): {found.reason}")
        if self.json:
            emit_json(found.to_data())
        else:
            emit_table(
                ("", "certified"),
                [
                    ("twin", found.strategy),
                    ("model", found.model),
                    ("steps equal to plain training", f"{found.steps}"),
                ],
            )

    def _ranks(self, plan: Plan) -> tuple[int, ...]:
        """Return the given ranks, or one of the first, middle and last stage."""
        mesh = plan.strategy.mesh
        for rank in self.rank:
            if not 0 <= rank < mesh.num_devices:
                raise ExecutionError(
                    f"--rank {rank}; the plan has ranks 0 to {mesh.num_devices - 1}"
                )
        places = sorted({0, mesh.pp // 2, mesh.pp - 1})
        chosen = self.rank or (place * mesh.stride("pp") for place in places)
        return tuple(dict.fromkeys(chosen))

    def _verify(
        self, plan: Plan, ref: str, ranks: tuple[int, ...]
    ) -> tuple[RankVerification, ...]:
        from executors import launch

        world = plan.strategy.mesh.num_devices
        listed = ", ".join(str(rank) for rank in ranks)
        which = f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"
        note(f"verifying {which} of {world:,} ({plan.strategy.label()})")
        arguments = {
            "plan": plan.to_json(),
            "model": ref,
            "ranks": list(ranks),
            "force": self.force,
            "every_microbatch": self.every_microbatch,
        }
        with working(which):
            (answer,) = launch(
                "planner.cli.rank:verify_ranks",
                arguments,
                processes=1,
                on_message=lambda _, rank: note(f"rank {rank} is done"),
                timeout_s=self.timeout,
            )
        return tuple(RankVerification.from_data(each) for each in answer)

    def _report(self, result: Verification) -> None:
        for assumption in result.assumptions:
            note(f"assumed {assumption}")
        if self.json:
            data = result.to_data()
            for shown, each in zip(data["deviations"], result.deviations, strict=True):
                shown["ratio"] = each.ratio
            emit_json(data)
        else:
            _print(result)


def _print(result: Verification) -> None:
    for rank in result.ranks:
        if rank.failure is not None:
            continue
        rows = [
            (name, "", "", format_bytes(size))
            for name, size in rank.memory_bytes.items()
        ]
        kinds = [("", rank.collectives)]
        # The totals are means; each kind of step sends other things.
        kinds += [
            (f", {phase.share:.1%} of steps: {phase.name}", phase.collectives)
            for phase in rank.phases
        ]
        rows += [
            (
                f"{each.kind}{suffix}",
                str(each.group_size),
                f"{each.count:,}",
                format_bytes(each.bytes),
            )
            for suffix, collectives in kinds
            for each in collectives
        ]
        rows.append(("FLOPs", "", "", format_count(rank.flops)))
        run = f"{rank.microbatches_run} of {rank.microbatches}"
        rows.append(("microbatches run", "", run, ""))
        name = f"rank {rank.rank}, pp rank {rank.pp_rank}"
        emit_table((name, "ranks", "calls", ""), rows, numbers=True)
    if result.deviations:
        emit_table(
            ("", "predicted", "found", "ratio"),
            [
                (
                    each.name,
                    format_bytes(each.predicted),
                    format_bytes(each.found),
                    "" if each.ratio is None else f"{each.ratio:.2f}",
                )
                for each in result.deviations
            ],
            numbers=True,
        )
