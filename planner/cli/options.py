"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from planner.errors import CaptureError, PlanFileError, StrategyError
from planner.schema import Optimizer, Plan, Precision
from planner.schema.optimizers import OPTIMIZERS, OptimizerName

if TYPE_CHECKING:
    from planner.graph import ModelGraph

__all__ = [
    "CalibrationName",
    "ClusterName",
    "ImagesPerSample",
    "KernelsOption",
    "ModelName",
    "OptionalDtype",
    "OptionalFile",
    "OptionalFloat",
    "OptionalInt",
    "OptionalPair",
    "OtherModelName",
    "OutFile",
    "SeqLen",
    "TrainingOptions",
    "model_of_plan",
    "name_model",
    "parse_pins",
]

ModelName = Annotated[
    str,
    tyro.conf.arg(
        metavar="MODEL",
        help="A built-in name (meshwright models lists them), hf:PATH of a "
        "transformers config or its folder, a PipeDream graph.txt, or module:factory "
        "of your own code.",
    ),
]
OtherModelName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="MODEL",
        help="The model to build, if not the one that the plan names. A "
        "module:factory reference is only followed when it is named here.",
        help_behavior_hint="",
    ),
]
ClusterName = Annotated[
    str,
    tyro.conf.arg(
        metavar="CLUSTER",
        help="A preset with a node count such as dgx-h100:4 (meshwright clusters lists "
        "them), local:4 for processes of this machine, or a cluster or probe file.",
    ),
]
CalibrationName = Annotated[
    str,
    tyro.conf.arg(
        metavar="FILE|shipped|none",
        help="Fitted constants of GPUs: a file that meshwright calibrate wrote, the "
        "shipped ones, or none. CPUs and probed devices have their own.",
    ),
]
KernelsOption = Annotated[
    Literal["as-is", "fused"],
    tyro.conf.arg(
        help="Kernels to price: those of the model's code as it is read, or the fused "
        "ones that stand in for eager attention, token by token scans and loops over "
        "experts once they are installed.",
    ),
]
ImagesPerSample = Annotated[
    int,
    tyro.conf.arg(
        metavar="INT",
        help="Pictures, or recordings, of each sample of a model that reads any beside "
        "its text; 0 for text alone.",
    ),
]
SeqLen = Annotated[
    int | None,
    tyro.conf.arg(
        metavar="INT",
        help="Tokens per sample; the model's own by default.",
        help_behavior_hint="",
    ),
]
OutFile = Annotated[
    str | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")
]
OptionalFile = Annotated[
    str | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")
]
OptionalInt = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
OptionalDtype = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    tyro.conf.arg(metavar="DTYPE", help_behavior_hint=""),
]
OptionalFloat = Annotated[
    float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")
]
OptionalPair = Annotated[
    tuple[float, float] | None,
    tyro.conf.arg(metavar="FLOAT FLOAT", help_behavior_hint=""),
]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Settings of training that decide memory beside the strategy."""

    dtype: Annotated[
        Literal["bfloat16", "float32", "float16", "float8"] | None,
        tyro.conf.arg(
            metavar="{bfloat16,float32,float16,float8}", help_behavior_hint=""
        ),
    ] = None
    """Data type of products; by default bfloat16, and where a device has none the
    fastest of float32 on all devices, bfloat16 on those that have it, and float16, in
    which the loss is scaled."""
    parameter_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of weights and optimizer states."""
    optimizer: OptimizerName = "AdamW"
    """Optimizer; it decides how many states each parameter has."""
    learning_rate: Annotated[float, tyro.conf.arg(metavar="RATE")] = 3e-4
    """Learning rate of the optimizer."""
    weight_decay: OptionalFloat = None
    """Weight decay; none by default, a launcher's own in exports."""
    betas: OptionalPair = None
    """Factors of Adam and its kin; by default torch's, or a launcher's in exports."""
    ema: OptionalFloat = None
    """Share that each step keeps of an average of the weights; none by default."""
    grad_clip_norm: OptionalFloat = None
    """Largest norm of the gradients; by default none, or a launcher's in exports."""

    def precision(self, cluster: str | None = None) -> Precision:
        """Return the precision that the planner takes.

        Args:
            cluster: Devices on which the default depends.

        Raises:
            ClusterError: If it cannot be read.
            StrategyError: If a device has no bfloat16 and it is asked for.
        """
        from planner.cluster import Cluster
        from planner.request import default_precision

        given = Precision(
            parameter=self.parameter_dtype,
            compute=self.dtype or "bfloat16",
            reduce="float32",
        )
        if cluster is None:
            return given
        machines = Cluster.parse(cluster)
        found, why = default_precision(machines, given if self.dtype else None)
        return given.model_copy(update={"compute": found.compute}) if why else given

    @property
    def any_dtype(self) -> bool:
        """True if no dtype was asked for, so that the planner may choose."""
        return self.dtype is None and self.parameter_dtype == "float32"

    def build_optimizer(self) -> Optimizer:
        """Return the optimizer; its states have the dtype of the weights.

        Raises:
            StrategyError: If a number is outside of its range, or has no effect.
        """
        for flag, value in (
            ("--learning-rate", self.learning_rate),
            ("--grad-clip-norm", self.grad_clip_norm),
        ):
            if value is not None and not 0 < value < float("inf"):
                raise StrategyError(f"{flag} {value} is not a number above 0")
        if not 0 <= (self.weight_decay or 0.0) < float("inf"):
            raise StrategyError(f"--weight-decay {self.weight_decay} is below 0")
        shown = " ".join(map(str, self.betas or ()))
        if not all(0 <= beta < 1 for beta in self.betas or ()):
            raise StrategyError(f"--betas {shown} are not numbers from 0 to below 1")
        if self.betas and OPTIMIZERS[self.optimizer].betas is None:
            raise StrategyError(
                f"--betas {shown} with --optimizer {self.optimizer}, which takes none; "
                f"leave them out"
            )
        if self.ema is not None and not 0 < self.ema < 1:
            raise StrategyError(
                f"--ema {self.ema} is not above 0 and below 1; give a share such as "
                f"0.999"
            )
        return Optimizer(
            name=self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            betas=self.betas,
            state_dtype=self.parameter_dtype,
            ema=self.ema,
        )


def name_model(
    model: str,
    *,
    seq_len: int | None,
    dtype: str,
    allow_remote_code: bool,
    images_per_sample: int = 1,
) -> str | ModelGraph:
    """Return a model's name, or its graph where more is asked than a name says.

    Args:
        model: Name as on the command line.
        seq_len: Tokens per sample.
        dtype: Data type of matrix products.
        allow_remote_code: Allow code that comes with a ``hf:`` folder to run.
        images_per_sample: Pictures, or recordings, of each sample.
    Raises:
        CaptureError: If code is allowed that no model could bring, or the model cannot
            be read.
    """
    if not allow_remote_code and images_per_sample == 1:
        return model
    if allow_remote_code and not model.startswith("hf:"):
        raise CaptureError(
            f"--allow-remote-code with model {model!r}; only a hf:PATH brings code of "
            f"its own, leave the flag out"
        )
    from planner.capture import capture, load_model

    loaded = load_model(
        model,
        seq_len=seq_len,
        allow_remote_code=allow_remote_code,
        images_per_sample=images_per_sample,
    )
    return capture(loaded, dtype="bfloat16" if dtype == "float8" else dtype)


def model_of_plan(plan: Plan, file: str, named: str | None) -> str:
    """Return the reference of a plan's model; to code only if a user named it.

    Args:
        plan: The plan.
        file: Its file, for messages.
        named: ``--model``, if given.

    Raises:
        PlanFileError: If the plan has none, or it is one to code.
    """
    ref = named or plan.model.ref
    if ref is None:
        raise PlanFileError(
            f"{file} has no reference to the model {plan.model.name}; name it with "
            f"--model (llama3-8b, hf:PATH or module:factory)"
        )
    if ref.endswith(".txt"):
        what = "--model names" if named else f"{file} was made from"
        raise PlanFileError(
            f"{what} the profile {ref}, and no model can be built from a profile; name "
            f"another with --model"
        )
    if named is None and not ref.startswith("hf:") and ":" in ref:
        raise PlanFileError(
            f"{file} would import code ({ref}); if you trust it, name it yourself: "
            f"--model {ref}"
        )
    return ref


def parse_pins(texts: Sequence[str]) -> dict[str, Any]:
    """``tp=8`` and ``schedule=1F1B`` as a mapping; whole numbers as such.

    Raises:
        StrategyError: If a text has no ``=``, or a knob is pinned twice.
    """
    pins: dict[str, Any] = {}
    for text in texts:
        knob, _, value = (part.strip() for part in text.partition("="))
        if not knob or not value:
            raise StrategyError(f"--pin {text!r} is not KNOB=VALUE, for example tp=8")
        knob = knob.replace("-", "_")
        if knob in pins:
            raise StrategyError(f"--pin {knob} is given twice; give it once")
        pins[knob] = int(value) if value.isascii() and value.isdigit() else value
    return pins
