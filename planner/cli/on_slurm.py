"""``meshwright run --on slurm``: write a batch script and submit it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ExecutionError

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["Submitted", "run_words", "sbatch_options", "submit"]

#: sbatch answers as soon as the controller has the script.
_ANSWER_S = 120.0
_OPTION = re.compile(r"[a-z][a-z0-9-]*(=.*)?", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A submitted job.

    Attributes:
        job: Number that sbatch gave it.
        script: The file that was submitted.
        command: Command that submitted it.
    """

    job: str
    script: str
    command: tuple[str, ...]


def sbatch_options(texts: Sequence[str]) -> tuple[str, ...]:
    """Turn ``partition=gpu`` into ``--partition=gpu``.

    Raises:
        ExecutionError: If a text is no long option of sbatch.
    """
    for text in texts:
        if not _OPTION.fullmatch(text):
            raise ExecutionError(
                f"--sbatch {text!r} is not an option of sbatch; write its long name "
                f"without dashes, for example partition=gpu or exclusive"
            )
    return tuple(f"--{text}" for text in texts)


def run_words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``train_rank`` as words behind ``meshwright run PLAN``."""
    words: list[str] = []
    for name in ("steps", "seed", "model", "data", "rank_timeout_s", "checkpoint_dir"):
        if arguments[name] is not None:
            words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    for name in (
        *("checkpoint_every", "check_replicas_every"),
        *("init_from", "save_hf", "save_dtype", "eval_data", "evaluate_every"),
        "document_separator",
    ):
        if arguments.get(name) is not None:
            words += [f"--{name.replace('_', '-')}", str(arguments[name])]
    if arguments["checkpoint_dir"] is not None:
        words += ["--keep-last", str(arguments["keep_checkpoints"])]
    words += _loop_words(arguments)
    for flag in (
        "measure",
        "check_first_step",
        "background_checkpoints",
        "keep_best",
        "allow_missing_weights",
        "last_weights",
        "allow_remote_code",
        "force",
    ):
        if arguments.get(flag):
            words.append(f"--{flag.replace('_', '-')}")
    if arguments.get("lr_schedule", "constant") != "constant":
        words += ["--lr-schedule", arguments["lr_schedule"]]
    if arguments.get("warm_up_steps"):
        words += ["--warm-up-steps", str(arguments["warm_up_steps"])]
    if arguments["resume"]:
        words.append("--resume")
        if arguments["resume"] is not True:
            words.append(arguments["resume"])
    return words


def _loop_words(arguments: Mapping[str, Any]) -> list[str]:
    """Words of logs, traces and early ends."""
    words: list[str] = []
    flags = {"json": "--log", "tensorboard": "--tensorboard", "wandb": "--wandb"}
    for name, target in arguments.get("loggers", {}).items():
        words += [flags[name], target]
    if arguments.get("profile"):
        words += ["--profile", arguments["profile"]]
        words += ["--profile-dir", arguments["profile_dir"]]
    if arguments.get("on_nonfinite", "stop") != "stop":
        words += ["--on-nonfinite", arguments["on_nonfinite"]]
    for name in arguments.get("signal", ()):
        words += ["--signal", name]
    return words


def submit(
    plan: Plan, plan_file: str, words: Sequence[str], options: Sequence[str]
) -> Submitted:
    """Write the script beside the plan and hand it to sbatch.

    Args:
        plan: A plan that SLURM can express.
        plan_file: Where it is, on every node; the script goes beside it, with the
            ending ``.sbatch``.
        words: For ``meshwright run``.
        options: For sbatch, with their dashes.

    Raises:
        ExportError: If SLURM cannot express the plan.
        PlanFileError: If the script cannot be written.
        ExecutionError: If there is no sbatch, it refuses, or options were given for a
            job of several components.
    """
    from planner.export.registry import require_expressible
    from planner.export.slurm import slurm_script
    from planner.export.torchrun import placed
    from planner.schema import write_atomically
    from planner.targets import get_target

    require_expressible(get_target("slurm"), plan)
    components = len(placed(plan).kinds)
    if options and components > 1:
        raise ExecutionError(
            f"--sbatch {options[0].removeprefix('--')} with hosts of several types: "
            f"the job has {components} components, and sbatch gives options to the "
            f"first alone; set them for all in the environment, such as "
            f"SBATCH_PARTITION=gpu, or in a script of meshwright export --to slurm"
        )
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ExecutionError(
            "sbatch is not on PATH; run this where jobs are submitted, or write the "
            "script with meshwright export --to slurm and take it there"
        )
    script = Path(plan_file).absolute().with_suffix(".sbatch")
    write_atomically(script, slurm_script(plan, plan_file).encode())
    command = (sbatch, "--parsable", *options, str(script), *words)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ExecutionError(
            f"sbatch did not answer within {_ANSWER_S:g} s; see whether SLURM's "
            f"controller runs (sinfo), then: sbatch {script}"
        ) from error
    except OSError as error:
        raise ExecutionError(f"{sbatch} does not start: {error.strerror}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ExecutionError(
            f"sbatch refused {script} (exit {done.returncode}): {said}; give what your "
            f"site needs with --sbatch, for example --sbatch partition=gpu"
        )
    # With several clusters: number;cluster.
    job = done.stdout.strip().partition(";")[0]
    return Submitted(job=job, script=str(script), command=command)
