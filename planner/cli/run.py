"""The command ``meshwright run``."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import Signals
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from planner.cli.options import (
    OptionalDtype,
    OptionalFile,
    OptionalInt,
    OtherModelName,
    OutFile,
    model_of_plan,
)
from planner.cli.output import (
    emit_json,
    emit_table,
    emit_text,
    note,
    progress,
    tell_of_run,
)
from planner.cli.run_federation import load_plan, run_federation
from planner.errors import (
    CaptureError,
    ExecutionError,
    FingerprintError,
    RankFailedError,
    StoppedError,
)
from planner.schema import ClusterReference, Federation, Plan
from planner.schema.base import require_writable
from planner.schema.violations import comparison_violation

if TYPE_CHECKING:
    from planner.report.measured import Row

__all__ = [
    "RunCommand",
    "check_cluster",
    "check_machine",
    "on_one_host",
]

_LOG = logging.getLogger(__name__)

OptionalFolder = Annotated[
    str | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")
]


OptionalSource = Annotated[
    str | None, tyro.conf.arg(metavar="PATH", help_behavior_hint="")
]


def _read_resume(words: list[str]) -> bool | str:
    """``--resume`` alone, or with the name of a checkpoint.

    Raises:
        ValueError: If the words are no name: tyro says so and stops.
    """
    if not words:
        return True
    if len(words) > 1 or not words[0].startswith("step-"):
        raise ValueError(
            f"--resume {' '.join(words)}: name one checkpoint, step-000100, or none "
            f"for the latest; PLAN comes before it"
        )
    return words[0]


Resume = Annotated[
    bool | str | None,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="[STEP]",
        instance_from_str=_read_resume,
        is_instance=lambda value: value is None or isinstance(value, bool | str),
        str_from_instance=lambda value: [value] if isinstance(value, str) else [],
    ),
    tyro.conf.arg(help_behavior_hint=""),
]

OptionalAddress = Annotated[
    str | None, tyro.conf.arg(metavar="HOST:PORT|local", help_behavior_hint="")
]
SbatchOptions = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="OPTION",
        help="For --on slurm: an option of sbatch without its dashes, such as "
        "partition=gpu or time=2:00:00. May be given several times.",
    ),
]

OptionalProject = Annotated[
    str | None, tyro.conf.arg(metavar="PROJECT", help_behavior_hint="")
]
OptionalSteps = Annotated[
    str | None, tyro.conf.arg(metavar="FIRST:LAST", help_behavior_hint="")
]
KeepLast = Annotated[
    int, tyro.conf.arg(name="keep-last", aliases=("--keep-checkpoints",))
]
StopSignal = Annotated[
    tuple[str, ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(
        metavar="NAME",
        help="A signal besides TERM, such as USR1, upon which the run saves a "
        "checkpoint behind the running step and ends with exit code 75. May be given "
        "several times; needs --checkpoint-dir.",
    ),
]

#: Hint for errors that need more than one line.
_MORE = "; MESHWRIGHT_LOG=INFO shows the traceback"


@dataclass(frozen=True, kw_only=True)
class RunCommand:
    """Train by a plan: in local processes, as one rank under torchrun, or elsewhere."""

    plan: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN")]
    """A plan file, or that of a federation."""
    on: Literal["local", "ray", "slurm"] = "local"
    """Train in local processes, on a Ray cluster, or in a job submitted to SLURM."""
    steps: int = 10
    """Optimizer steps."""
    model: OtherModelName = None
    data: OptionalFile = None
    """Token ids: a one-dimensional integer .npy file, or .bin of uint16 or uint32 as
    nanoGPT and Megatron-LM write; or a folder that Dataset.save_to_disk of datasets
    wrote. Synthetic tokens by default."""
    eval_data: OptionalFile = None
    """Tokens like --data, of which the mean loss is computed at the end."""
    evaluate_every: OptionalInt = None
    """Steps between further evaluations."""
    document_separator: OptionalInt = None
    """Id of the token that ends a document, where rows of tokens hold several:
    positions begin anew in each, and none sees another."""
    lr_schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after the warm-up: the plan's, or falling to zero; wsd is constant
    until the last fifth of the steps."""
    warm_up_steps: int = 0
    """Steps in which the learning rate rises to the plan's."""
    seed: int = 0
    """Seed of weights and data order."""
    measure: bool = False
    """Compare predicted with measured: step time, memory, bytes on the wire."""
    measurement: OutFile = None
    """File for the measurement as JSON; implies --measure."""
    check_first_step: bool = False
    """Before training, compare loss and gradient norms of the first step with those of
    the whole model in one process; end with an error if they differ by more than
    rounding, or if the model does not fit into one process."""
    check_replicas_every: OptionalInt = None
    """Steps between checks that copies of the weights on several ranks are equal; they
    are checked at each checkpoint and at the end in any case."""
    checkpoint_dir: OptionalFolder = None
    """Folder for checkpoints."""
    checkpoint_every: OptionalInt = None
    """Steps between checkpoints; by default one is written at the end."""
    resume: Resume = None
    """Resume from the latest checkpoint, if there is one, or from a named one."""
    init_from: OptionalSource = None
    """Weights to begin with: a safetensors file, or the folder of a model from
    transformers. A run that is resumed goes on from its checkpoint."""
    allow_missing_weights: bool = False
    """Begin at random with parameters that --init-from lacks, such as a new head."""
    save_hf: OptionalFolder = None
    """New folder for the weights at the end, which transformers loads."""
    save_dtype: OptionalDtype = None
    """Numbers of --save-hf; by default those of the parameters."""
    last_weights: bool = False
    """Evaluate and save the last weights, although the plan keeps an average of them
    (--ema of plan), of which evaluations and --save-hf are otherwise."""
    keep_checkpoints: KeepLast = 2
    """Number of latest checkpoints to keep."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest evaluation loss, and save one after each
    evaluation that is the best so far; the file best names it."""
    background_checkpoints: bool = False
    """Write checkpoints while training goes on."""
    log: OptionalFile = None
    """File for loss, gradient norm, learning rate, tokens/s, step time, MFU and memory
    of each step as JSON lines, beside the plan's predictions."""
    tensorboard: OptionalFolder = None
    """Folder for the same, for TensorBoard."""
    wandb: OptionalProject = None
    """Project of Weights & Biases for the same."""
    profile: OptionalSteps = None
    """Steps to trace with torch's profiler, first and last, counted from 1: 5:8."""
    profile_dir: str = "profile"
    """Folder for the traces, one file a rank; open them at ui.perfetto.dev."""
    on_nonfinite: Literal["stop", "skip", "continue"] = "stop"
    """When a loss or gradient is not finite: end with exit code 3; or leave the step
    out, with weights and optimizer as they were; or take it."""
    signal: StopSignal = ()
    rank_timeout_s: float = 60.0
    """Seconds without a new rank at the start, or a sign of life from one later, after
    which all ranks end and name those that are missing."""
    max_restarts: int = 0
    """How often each copy that fails is started again, to join the others, where the
    plan or the federation says on_failure=continue."""
    allow_remote_code: bool = False
    """Run Python code that came with the hf:PATH named by --model; read it first."""
    force: bool = False
    """Run even if model or cluster are not the plan's."""
    ray_address: OptionalAddress = None
    """Address of the Ray cluster for --on ray; local starts one here."""
    sbatch: SbatchOptions = ()
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> None:
        """Start the processes (or be one of them), report, clean up."""
        plan = load_plan(self.plan)
        if isinstance(plan, Federation):
            run_federation(
                self, plan, check_cluster=check_cluster, progress=self._progress()
            )
            return
        if plan.workload.loss == "mean_square" and os.environ.get("RANK", "0") == "0":
            note(
                "the model returns no loss: training minimises the mean square of its "
                "output, which is of use for measuring alone"
            )
        arguments = {
            "plan": str(Path(self.plan).absolute()),
            "model": self._model(plan),
            "data": str(Path(self.data).absolute()) if self.data else None,
            "steps": self.steps,
            "seed": self.seed,
            "measure": self.measure or self.measurement is not None,
            "check_first_step": self.check_first_step,
            "check_replicas_every": self.check_replicas_every,
            "allow_remote_code": self.allow_remote_code,
            "force": self.force,
            "rank_timeout_s": self.rank_timeout_s,
            **self.checkpoints(),
            **self.weights(),
            **self.evaluation(),
            **self.loop(),
            "document_separator": self.document_separator,
            "lr_schedule": self.lr_schedule,
            "warm_up_steps": self.warm_up_steps,
        }
        self._check(plan)
        tell_of_run(plan)
        if self.on != "local":
            self._elsewhere(plan, arguments)
            return
        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if not self.force and (not launched or on_one_host()):
            check_machine(plan)
        if not launched:
            self._report(plan, self._launch(plan, arguments))
            return
        result = _train_as_rank(arguments)
        if os.environ["RANK"] == "0":
            self._report(plan, result)
        else:
            self._require_not_stopped(result)

    def checkpoints(self) -> dict[str, Any]:
        """Options of checkpoints as :func:`executors.run` takes them.

        Raises:
            ExecutionError: If they contradict each other.
        """
        folder = self.checkpoint_dir
        wanted = {
            "--resume": bool(self.resume),
            "--checkpoint-every": self.checkpoint_every is not None,
            "--keep-best": self.keep_best,
            "--signal": bool(self.signal),
        }
        asked = next((flag for flag, given in wanted.items() if given), None)
        if folder is None and asked is not None:
            raise ExecutionError(f"{asked} needs a folder; add --checkpoint-dir")
        for flag, value in (
            ("--checkpoint-every", self.checkpoint_every),
            ("--keep-last", self.keep_checkpoints),
            ("--check-replicas-every", self.check_replicas_every),
        ):
            if value is not None and value < 1:
                raise ExecutionError(f"{flag} {value}; give a number of at least 1")
        return {
            "checkpoint_dir": str(Path(folder).absolute()) if folder else None,
            "checkpoint_every": self.checkpoint_every,
            "resume": self.resume or False,
            "keep_checkpoints": self.keep_checkpoints,
            "keep_best": self.keep_best,
            "background_checkpoints": self.background_checkpoints,
        }

    def loop(self) -> dict[str, Any]:
        """Options of logs, traces and early ends as the ranks take them.

        Raises:
            ExecutionError: If one is wrong, or a library is not installed.
        """
        from executors.loop import make_logger, signal_numbers
        from executors.loop.profiling import steps_to_profile

        loggers = {
            name: target if name == "wandb" else str(Path(target).absolute())
            for name, target in (
                ("json", self.log),
                ("tensorboard", self.tensorboard),
                ("wandb", self.wandb),
            )
            if target is not None
        }
        if self.on == "local":
            # Elsewhere libraries are those of other machines.
            for name, target in loggers.items():
                make_logger(name, target)
        if self.profile is not None:
            steps_to_profile(self.profile)
        signal_numbers(self.signal)
        return {
            "loggers": loggers,
            "profile": self.profile,
            "profile_dir": str(Path(self.profile_dir).absolute()),
            "on_nonfinite": self.on_nonfinite,
            "signal": list(self.signal),
        }

    def evaluation(self) -> dict[str, Any]:
        """Options of evaluation as the ranks take them.

        Raises:
            ExecutionError: If they contradict each other.
        """
        every = self.evaluate_every
        if every is not None and (self.eval_data is None or every < 1):
            raise ExecutionError(
                f"--evaluate-every {every}; give a number of at least 1, and "
                f"--eval-data"
            )
        if self.keep_best and every is None:
            raise ExecutionError(
                "--keep-best compares evaluations during the run; add --eval-data and "
                "--evaluate-every"
            )
        file = self.eval_data
        return {
            "eval_data": str(Path(file).absolute()) if file else None,
            "evaluate_every": every,
        }

    def weights(self) -> dict[str, Any]:
        """Options of weights as :func:`executors.run` takes them.

        Raises:
            ExecutionError: If they contradict each other, files cannot be read, or
                the folder to be written exists.
        """
        source, folder = self.init_from, self.save_hf
        if self.allow_missing_weights and source is None:
            raise ExecutionError(
                "--allow-missing-weights without --init-from; name weights to begin "
                "with"
            )
        if self.save_dtype is not None and folder is None:
            raise ExecutionError(
                f"--save-dtype {self.save_dtype} without --save-hf; name a folder"
            )
        if self.on == "local":
            # Elsewhere the files are on other machines.
            if source is not None:
                from executors.weights.files import WeightFiles

                WeightFiles(Path(source))
            if folder is not None and Path(folder).exists():
                raise ExecutionError(
                    f"--save-hf {folder} exists; name a new folder for weights"
                )
        return {
            "init_from": str(Path(source).absolute()) if source else None,
            "allow_missing_weights": self.allow_missing_weights,
            "save_hf": str(Path(folder).absolute()) if folder else None,
            "save_dtype": self.save_dtype,
            "last_weights": self.last_weights,
        }

    def _model(self, plan: Plan) -> str:
        """Return the model's reference; to code only if the command line names it.

        Raises:
            PlanFileError: If the plan has none, or it is one to code.
            CaptureError: If code may run, and no model is named.
        """
        ref = model_of_plan(plan, self.plan, self.model)
        if self.allow_remote_code and self.model is None:
            raise CaptureError(
                f"--allow-remote-code without --model; name whose code may run: "
                f"--model {ref}"
            )
        return ref

    def _check(self, plan: Plan) -> None:
        """Refuse mistakes that are known before a process is started."""
        for flag, given, place in (
            ("--ray-address", self.ray_address is not None, "ray"),
            ("--sbatch", bool(self.sbatch), "slurm"),
        ):
            if given and self.on != place:
                raise ExecutionError(
                    f"{flag} is for --on {place}; add that, or drop it"
                )
        if self.steps < 1:
            raise ExecutionError(f"--steps {self.steps}; a run has at least 1 step")
        violation = comparison_violation(plan.strategy)
        if self.check_first_step and violation is not None:
            raise ExecutionError(violation)
        self._check_failures(plan)
        if not self.rank_timeout_s > 0:
            raise ExecutionError(
                f"--rank-timeout-s {self.rank_timeout_s:g}; give a number above 0"
            )
        if plan.not_runnable:
            raise ExecutionError(f"this plan cannot be run: {plan.not_runnable[0]}")
        if self.measurement is not None:
            require_writable(self.measurement)
        for file in (self.data, self.eval_data):
            if file is not None:
                from executors.data import require_data

                require_data(file, plan.workload)
        from executors.learning_rates import learning_rate

        learning_rate(
            self.lr_schedule, steps=self.steps, warm_up_steps=self.warm_up_steps
        )

    def _check_failures(self, plan: Plan) -> None:
        """Refuse options that do not go with what the plan says of failures.

        Raises:
            ExecutionError: If there are some.
        """
        continues = self._on_failure(plan) == "continue"
        if self.max_restarts < 0:
            raise ExecutionError(
                f"--max-restarts {self.max_restarts}; give a number of at least 0"
            )
        if self.max_restarts and not continues:
            raise ExecutionError(
                f"--max-restarts {self.max_restarts}, but the plan stops when a rank "
                f"fails; plan with --pin synchronisation=local_steps:on_failure="
                f"continue, or drop it"
            )
        if continues and self.on != "local":
            raise ExecutionError(
                f"--on {self.on} ends all ranks when one fails, but the plan says "
                f"on_failure=continue; use --on local, or on_failure=stop"
            )

    def _elsewhere(self, plan: Plan, arguments: dict[str, Any]) -> None:
        """Train on Ray, or have SLURM do it."""
        if self.on == "slurm":
            from planner.cli.on_slurm import run_words, sbatch_options, submit

            words = run_words(arguments)
            if self.measurement is not None:
                words += ["--measurement", str(Path(self.measurement).absolute())]
            if self.json:
                words.append("--json")
            options = sbatch_options(self.sbatch)
            job = submit(plan, arguments["plan"], words, options)
            if self.json:
                emit_json(asdict(job))
            else:
                emit_text(f"submitted job {job.job}: {job.script}")
            return
        from planner.cli.on_ray import train_on_ray

        with self._progress() as heard:
            result = train_on_ray(
                plan, arguments, address=self.ray_address, on_message=heard
            )
        self._report(plan, result)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[int, Any], None]]:
        """Show steps; yields a function to call with each message of a rank."""
        often = max(1, self.steps // 10)
        with progress(self.steps, "step") as bar:

            def heard(_: int, message: Any) -> None:
                if "loss" not in message:
                    return
                step = message["step"] + 1
                if step <= bar.n:
                    # Of a copy that is behind another.
                    return
                bar.set_postfix_str(f"loss {message['loss']:.4f}")
                bar.update(step - bar.n)
                if not sys.stderr.isatty() and step % often == 0:
                    note(f"step {step} of {self.steps}: loss {message['loss']:.4f}")

            yield heard

    def _launch(self, plan: Plan, arguments: dict[str, Any]) -> dict[str, Any]:
        from executors import launch

        processes = plan.strategy.mesh.num_devices
        note(f"starting {processes} processes: {plan.strategy.label()}")
        with self._progress() as heard:
            try:
                results = launch(
                    "planner.cli.rank:train_rank",
                    arguments,
                    processes=processes,
                    on_message=heard,
                    on_failure=self._on_failure(plan),
                    max_restarts=self.max_restarts,
                    passed_on=self._passed_on(),
                )
            except RankFailedError as error:
                told = hasattr(error, "__notes__")
                raise RankFailedError(f"{error}{_MORE if told else ''}") from error
        # Of copies that go on without others, the first that was there to the end.
        done = [dict(result) for result in results if result is not None]
        return min(done, key=_first_step)

    def _passed_on(self) -> tuple[Signals, ...]:
        """Signals that ranks answer by a checkpoint."""
        from executors.loop import signal_numbers

        if self.checkpoint_dir is None:
            return ()
        return signal_numbers(("TERM", *self.signal))

    def _require_not_stopped(self, result: dict[str, Any]) -> None:
        """End with an exit code of its own if a signal ended the run.

        Raises:
            StoppedError: If one did.
        """
        reason = result.get("stopped")
        if reason in Signals.__members__:
            done = result.get("first_step", 0) + len(result["losses"])
            raise StoppedError(
                f"stopped by {reason} after step {done} of {self.steps}, saved in "
                f"{self.checkpoint_dir}; go on with --resume"
            )

    def _on_failure(self, plan: Plan) -> Literal["stop", "continue"]:
        return "continue" if plan.strategy.synchronisation.fewest_copies else "stop"

    def _report(self, plan: Plan, result: dict[str, Any]) -> None:
        from planner.report.measured import compare

        measured = result.get("measurement")
        if self.measurement is not None and measured is not None:
            from planner.schema.measurement import Measurement

            Measurement.from_data(measured).save(self.measurement)
            note(f"wrote {self.measurement}")
        rows = compare(plan, measured) if measured is not None else []
        if self.json:
            emit_json({**result, "comparison": [row.to_dict() for row in rows]})
        else:
            self._report_text(plan, result, rows)
        self._require_not_stopped(result)

    def _report_text(
        self, plan: Plan, result: dict[str, Any], rows: Sequence[Row]
    ) -> None:
        """Write losses, evaluations and the comparison with the prediction."""
        checked = result.get("first_step_check")
        if checked is not None:
            note(
                "first step as in one process: "
                "loss {loss:.6g} ({whole_loss:.6g}), "
                "gradient norm {grad_norm:.6g} ({whole_grad_norm:.6g})".format(
                    **checked
                )
            )
        losses = result["losses"]
        first = result.get("first_step", 0)
        if not losses:
            emit_text(f"nothing to do: {first} of {self.steps} steps were done before")
            return
        if first:
            note(f"resumed after step {first}")
        emit_text(
            f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps on "
            f"{plan.strategy.mesh.num_devices} processes ({plan.strategy.label()})"
        )
        if result.get("skipped_steps"):
            skipped = ", ".join(str(step + 1) for step in result["skipped_steps"])
            emit_text(f"left out, because they were not finite: steps {skipped}")
        reason = result.get("stopped")
        if reason is not None and reason not in Signals.__members__:
            emit_text(f"stopped after step {first + len(losses)}: {reason}")
        for step, loss in result.get("evaluations", ()):
            emit_text(f"evaluation after step {step}: loss {loss:.4f}")
        if rows:
            emit_table(
                ("", "predicted", "measured", "ratio"),
                [row.cells() for row in rows],
                numbers=True,
            )


def _first_step(result: dict[str, Any]) -> int:
    return int(result.get("first_step", 0))


def _train_as_rank(arguments: dict[str, Any]) -> dict[str, Any]:
    """Be the rank that torchrun has started.

    Raises:
        MeshwrightError: The first of ours among the causes of what was raised.
        RankFailedError: If none is; with the root cause.
    """
    from executors.exception_chain import explain, own_error
    from planner.cli.rank import train_rank

    try:
        return train_rank(arguments, lambda _: None)
    except Exception as error:
        who = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
        _LOG.info("%s:", who, exc_info=True)
        own = own_error(error)
        if own is not None:
            raise own from None
        said = ": ".join(filter(None, (type(error).__name__, explain(error))))
        raise RankFailedError(f"{who} raised {said}{_MORE}") from error


def on_one_host() -> bool:
    """Return True if torchrun says that it started all ranks here."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]


def check_machine(plan: Plan) -> None:
    """Refuse a plan that is for another machine.

    Raises:
        FingerprintError: With the differences, and what to do.
    """
    check_cluster(plan.cluster)


def check_cluster(cluster: ClusterReference) -> None:
    """Refuse a cluster that is not this machine; see :func:`check_machine`."""
    from planner.cluster import Cluster

    here = Cluster.detect()
    if here.num_devices != cluster.num_devices and "gloo" in {
        device.backend for device in here.device_types
    }:
        # Any number of processes can be started on CPU cores.
        here = Cluster.detect(processes=cluster.num_devices)
    if here.fingerprint == cluster.fingerprint:
        return
    found = here.reference()
    differences = [
        f"{name} {ours} in the plan, {theirs} here"
        for name, ours, theirs in (
            (
                "devices",
                _devices(cluster.device_types),
                _devices(found.device_types),
            ),
            ("hosts", _hosts(cluster.hosts), _hosts(found.hosts)),
        )
        if ours != theirs
    ]
    raise FingerprintError(
        f"the plan is for {cluster.name}, not for this machine: "
        f"{', '.join(differences) or 'their networks differ'}; plan for local, use "
        f"torchrun on those machines, or --force to run all the same"
    )


def _devices(kinds: dict[str, int]) -> str:
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _hosts(runs: tuple[tuple[int, int], ...]) -> str:
    return " + ".join(f"{count} of {devices} devices" for count, devices in runs)
