"""The parts of a plan: model, cluster, workload, prediction, provenance."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from planner.schema.base import Count, Document
from planner.schema.fused_kernels import KernelKind

__all__ = [
    "Alternative",
    "AssumedKernels",
    "Certificate",
    "ClusterReference",
    "Contender",
    "Efficiency",
    "InputSpec",
    "ModelReference",
    "OtherDevices",
    "OtherRegime",
    "Prediction",
    "Provenance",
    "StageMemory",
    "Workload",
]

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(ge=0)]
#: Tokens, samples, values: nothing is made for each.
Size = Annotated[int, Field(ge=1, le=2**40)]


class ModelReference(Document):
    """Model that the plan is for, and how to build it again.

    Attributes:
        name: For people.
        ref: ``llama3-8b``, ``hf:PATH`` or ``module:factory``; None for a module that
            was passed as an object. The last is only followed when a user names it
            on the command line: a plan never makes Meshwright import code.
        parameters: Number of scalars, tied ones once.
        tensors: Number of distinct parameter tensors.
        fingerprint: Of names and shapes, see
            :func:`planner.schema.base.fingerprint_parameters`.
        tied: Groups of parameter FQNs that are one tensor.
        attention: Whether every attention of the model is causal, or every one full;
            None if it has none, several kinds, or masks of its own.
        whole_stream: Why sequence parallelism cannot divide what flows from layer to
            layer, a clause; None if it can.
        mixing: Patterns of the layers between which tokens see each other; with
            sequence parallelism tp must split all of them.
        batch_norm_values: Fewest values a channel that a batch norm takes its
            statistics of in one sample; None without batch norms.
        spatial_sizes: Sizes of a sample along the dimensions that convolutions go
            over; empty unless ranks can have shards of it.
        experts: Experts of a layer; 0 without.
    """

    name: str
    ref: str | None = None
    parameters: Annotated[int, Field(ge=0)]
    tensors: Annotated[int, Field(ge=0)]
    fingerprint: str
    tied: tuple[tuple[str, ...], ...] = ()
    attention: Literal["causal", "full"] | None = None
    whole_stream: str | None = (
        "nothing is known of how the model's tokens meet (model.whole_stream)"
    )
    mixing: tuple[str, ...] = ()
    batch_norm_values: Size | None = None
    spatial_sizes: Annotated[tuple[Size, ...], Field(max_length=3)] = ()
    experts: Annotated[int, Field(ge=0)] = 0


class ClusterReference(Document):
    """Devices that the plan is for.

    Attributes:
        ref: What names it on a command line, ``dgx-h100:4`` or a file; None for one
            that was built in Python.
        device_types: Device type name to number of devices in the cluster.
        hosts: Runs of equal hosts in order: (how many, devices in each).
        host_types: Runs of hosts whose devices are of one type, in order: (how many
            hosts, name of the type). Empty where all devices are of one type.
        aggregating: Names of network levels whose switches add up what hosts send.
        fingerprint: Of the cluster document.
    """

    name: str
    ref: str | None = None
    num_devices: Count
    device_types: dict[str, Count]
    hosts: tuple[tuple[Count, Count], ...] = ()
    host_types: tuple[tuple[Count, str], ...] = ()
    aggregating: tuple[str, ...] = ()
    fingerprint: str

    @model_validator(mode="after")
    def _hosts_hold_all(self) -> ClusterReference:
        held = sum(count * devices for count, devices in self.hosts)
        if self.hosts and held != self.num_devices:
            raise ValueError(
                f"hosts hold {held} devices, num_devices is {self.num_devices}"
            )
        return self

    @model_validator(mode="after")
    def _types_of_all_hosts(self) -> ClusterReference:
        if not self.host_types:
            return self
        have = sum(count for count, _ in self.host_types)
        want = sum(count for count, _ in self.hosts)
        if have != want:
            raise ValueError(
                f"host_types name the type of {have} hosts, the cluster has {want}; "
                f"give each host one type, or leave host_types empty"
            )
        unknown = sorted({kind for _, kind in self.host_types} - set(self.device_types))
        if unknown:
            raise ValueError(
                f"host_types name {unknown[0]!r}, which is not in device_types "
                f"({', '.join(self.device_types)})"
            )
        return self


class InputSpec(Document):
    """One input of the model's forward: shape of ONE sample, without the batch dim.

    ``high`` bounds synthetic integers: values are drawn from [0, high). A sample fills
    ``rows`` rows of dim 0: the patches of its pictures, for example. Integers that
    decide sizes are ``values`` of every sample, in order as (value, times); others, of
    value None, are drawn, as is what follows.
    """

    name: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    dtype: str
    high: Size | None = None
    rows: Size = 1
    values: tuple[tuple[int | None, Size], ...] = ()


class Workload(Document):
    """Batch, inputs and loss of one step.

    Attributes:
        global_batch: Samples per optimizer step, over all devices.
        seq_len: Tokens per sample; None for models without a sequence.
        inputs: Keyword arguments of the model's forward.
        loss: How a scalar is made from the model's output: ``cross_entropy`` of
            logits and labels, ``model`` when forward returns a loss, ``mean_square``
            for any other output.
        label_shift: By how many tokens a label is ahead of the output that it is
            compared with: 1 for causal language models, 0 for masked ones, for
            encoder-decoders and for classes of tokens.
        own_loss: Values that the loss of ``model`` is a mean over: ``tokens``, labels
            of ``ignore_index`` left out; or ``coupled`` if it compares samples with
            each other, or the model does. None if it is not known.
        ignore_index: Label that the loss of ``model`` leaves out.
    """

    global_batch: Size
    seq_len: Size | None = None
    inputs: tuple[InputSpec, ...] = ()
    loss: Literal["cross_entropy", "model", "mean_square"] = "cross_entropy"
    label_shift: Literal[0, 1] = 1
    own_loss: Literal["tokens", "coupled"] | None = None
    ignore_index: int = -100

    @property
    def images_per_sample(self) -> int:
        """Pictures, or recordings, that a sample has beside its text; 0 without."""
        media = {spec.name for spec in self.inputs} & {"pixel_values", "input_features"}
        if not media:
            return 0
        tokens = [spec.values for spec in self.inputs if spec.name == "input_ids"]
        marked = sum(v is not None for runs in tokens for v, _ in runs)
        return max(1, marked // len(media))


class StageMemory(Document):
    """Peak memory of the devices that hold one pp rank, by category, in bytes.

    ``offloaded_bytes`` are beside the total: each device's, in its host's memory.
    """

    rank: Annotated[int, Field(ge=0)]
    device_type: str
    parameters_bytes: Bytes
    gradients_bytes: Bytes
    optimizer_bytes: Bytes
    activations_bytes: Bytes
    buffers_bytes: Bytes
    reserve_bytes: Bytes
    limit_bytes: Annotated[float, Field(gt=0)]
    offloaded_bytes: Bytes = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all categories."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.buffers_bytes
            + self.reserve_bytes
        )


class Efficiency(Document):
    """Progress of a sample by an inexact method, beside one of exact training.

    Attributes:
        eta: Samples of exact training over those of the method to the same loss.
        gap: Final quality that is lost, in ``measure``; negative where some is won.
        measure: Such as ``percent of perplexity``, or ``accuracy points``.
        basis: ``own`` evidence of who asks, ``published``, or ``smoke``: it was seen
            to train on a small task, which says nothing of a large one.
        source: Task, and where the figures are from.
    """

    eta: Annotated[float, Field(gt=0, le=1)]
    gap: float
    measure: str
    basis: Literal["own", "published", "smoke"]
    source: str


class OtherRegime(Document):
    """Another way of training that was considered, and why it was not chosen.

    Attributes:
        method: Its name as a pin, or ``exact``.
        label: Its best strategy; empty if it has none.
        efficiency: Evidence for it; None of exact training.
        step_time_s: Of that strategy.
        break_even: Efficiency from which on the inexact one of the two plans, this and
            the chosen, takes less time to the same loss.
        reason: In words.
    """

    method: str
    label: str = ""
    efficiency: Efficiency | None = None
    step_time_s: Seconds | None = None
    break_even: Rate | None = None
    reason: str


class OtherDevices(Document):
    """Another set of devices that was planned for, beside that of the plan.

    Attributes:
        devices: Device type name to number of devices.
        compute: Dtype of products.
        label: Best strategy there; empty if none was found.
        step_time_s: Of that strategy.
        reason: Comparison with the plan, in words.
    """

    devices: dict[str, Count]
    compute: str
    label: str = ""
    step_time_s: Seconds | None = None
    reason: str


class Prediction(Document):
    """Time, memory and traffic that the cost model predicts for a strategy.

    Attributes:
        step_time_s: One optimizer step.
        breakdown_s: Parts of the step on its critical path; they sum to it.
        memory: Peak, one entry a pp rank.
        link_bytes: Bytes that one device sends per step, by axis.
        collective_bytes: Payload of one step's calls on the busiest device, by kind
            (``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
            ``send``), each call counted at its larger side.
        samples_per_s: Global batch over step time.
        tokens_per_s: The same in tokens; None without a sequence.
        model_flops_utilization: Model FLOPs (no recomputation) over peak; in [0, 1].
        step_time_interval_s: Ends between which 80 % of measured steps are expected,
            after runs that the constants were not fitted to; None where no published
            run is like the devices.
        leans_on: What the step time rests on that no measured run of the recipe has,
            in words, with how much wider it makes the interval.
        efficiency: Progress of a sample beside one of exact training; None where steps
            are exact, and where nothing is known.
        host_memory_bytes: CPU memory that the fullest host needs, at most, for its
            devices' weights and optimizer states while a checkpoint is written in the
            background, and for states that stay there. What processes, libraries and
            data take is not counted. None in plans made before this was kept.
        host_memory_limit_bytes: All that this host has; None where it is not known.
        fidelity: ``simulated`` if the event simulator had the last word.
        calibration: Where the cluster's numbers are from: ``datasheet``, or a probe's
            name. Fitted constants on top of them are in the provenance.
    """

    step_time_s: Seconds
    breakdown_s: dict[str, Seconds]
    memory: Annotated[tuple[StageMemory, ...], Field(min_length=1)]
    link_bytes: dict[str, Bytes] = Field(default_factory=dict)
    collective_bytes: dict[str, Bytes] = Field(default_factory=dict)
    samples_per_s: Rate
    tokens_per_s: Rate | None = None
    model_flops_utilization: Rate | None = None
    step_time_interval_s: tuple[Seconds, Seconds] | None = None
    leans_on: tuple[str, ...] = ()
    efficiency: Efficiency | None = None
    host_memory_bytes: Bytes | None = None
    host_memory_limit_bytes: Bytes | None = None
    fidelity: Literal["analytic", "simulated"]
    calibration: str = "datasheet"

    @property
    def peak_memory_bytes(self) -> float:
        """Memory of the fullest device."""
        return max(entry.total_bytes for entry in self.memory)


class Alternative(Document):
    """Another strategy that was priced, and why it was not chosen.

    Attributes:
        label: What it is.
        family: Its kinds of parallelism; of each family the best one is kept.
    """

    label: str
    family: str = ""
    step_time_s: Seconds
    peak_memory_bytes: Bytes
    reason: str


class Contender(Document):
    """One partitioner's best.

    Attributes:
        partitioner: Its registered name.
        step_time_s: Of its best strategy; None if it found none that fits.
        label: That strategy's.
        evaluations: Strategies it priced, by fidelity.
        checkpoint: Hash of a learned partitioner's weights.
        share: Part of a race's budget that it used, 0 to 1; None outside of a race.
        best_after: Simulations of all contenders of a race when it last had the best
            plan of all; None if it never had.
    """

    partitioner: str
    step_time_s: float | None = None
    label: str | None = None
    evaluations: dict[str, int] = Field(default_factory=dict)
    checkpoint: str | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    best_after: Size | None = None


class Certificate(Document):
    """Result of training a small twin of a plan, beside plain training.

    Attributes:
        verdict: ``right``: losses and weights are equal; ``wrong``: they differ;
            ``late``, ``crashed`` or ``hung``: it cannot be trained so; ``unknown``: it
            was not tried.
        reason: Why it is not ``right``.
        model: The small model.
        strategy: Label of the twin's strategy.
        steps: Steps that were compared.
    """

    KIND: ClassVar[str] = "certificate"

    verdict: Literal["right", "wrong", "late", "crashed", "hung", "unknown"]
    reason: str | None = None
    model: str = ""
    strategy: str = ""
    steps: int = 0


class AssumedKernels(Document):
    """Fused kernels that a plan is priced with, which its model was not read with.

    Attributes:
        modules: Kind of kernel, see :data:`planner.schema.fused_kernels.FUSED_KERNELS`,
            to the number of places in which it stands in for the model's code; empty if
            none was recognised.
        captured_step_time_s: Predicted for the plan's strategy with the code as it was
            read; None where it was not priced.
        captured_lack_bytes: Memory that the fullest device then lacks; 0 if it fits.
    """

    modules: dict[KernelKind, Count] = Field(default_factory=dict)
    captured_step_time_s: Seconds | None = None
    captured_lack_bytes: Bytes | None = None


class Provenance(Document):
    """Where a plan came from. Nothing in here depends on the clock.

    Attributes:
        partitioner: Registered name of the partitioner whose strategy was chosen.
        target: Within whose limits it was planned: ``meshwright``, ``any``, or a
            launcher; None in plans that were made before this was kept. What is
            trained with (dtypes, optimizer, clipping) stands in the strategy.
        evaluations: Strategies priced, by fidelity.
        risk: Quantile of the step time by which strategies were ranked; 0.5 for the
            predicted time itself, None where nothing is known of its spread.
        recipe: Framework whose constants priced it; None in plans that were made before
            this was kept.
        time_budget_s: Seconds that were given; None for as long as it takes.
        contenders: What each partitioner that was asked got.
        regimes: Ways of training that were considered beside the one that was chosen.
        idle: Free devices that the plan leaves idle, by type.
        device_sets: Sets of devices that were planned for beside the one that was
            chosen.
        assumptions: What was guessed while reading the model.
        checkpoint: Hash of a learned partitioner's weights.
        calibration: Name of the fitted constants that priced it; None if what the
            cluster's document says did.
        kernels: Fused kernels that were assumed; None if the model's code was priced as
            it is.
    """

    meshwright_version: str
    partitioner: str
    target: str | None = None
    objective: str
    seed: int
    evaluation_budget: int | None = None
    time_budget_s: float | None = None
    contenders: tuple[Contender, ...] = ()
    evaluations: dict[str, int]
    memory_fraction: float
    risk: float | None = None
    recipe: str | None = None
    pinned: dict[str, bool | int | str] = Field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    regimes: tuple[OtherRegime, ...] = ()
    idle: dict[str, Count] = Field(default_factory=dict)
    device_sets: tuple[OtherDevices, ...] = ()
    assumptions: tuple[str, ...] = ()
    bound_by: str = ""
    checkpoint: str | None = None
    calibration: str | None = None
    kernels: AssumedKernels | None = None
