"""Hypothesis strategies for valid documents of every kind."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args, get_origin

from hypothesis import strategies as st
from pydantic import ValidationError

from planner.admission import admit, reschedule
from planner.schema import (
    Alternative,
    ClusterReference,
    Communication,
    Federation,
    FederationPrediction,
    InputSpec,
    Member,
    Mesh,
    ModelReference,
    Optimizer,
    Overlap,
    Plan,
    Precision,
    Prediction,
    Provenance,
    Stage,
    StageMemory,
    Strategy,
    TensorSharding,
    Workload,
)
from planner.schema.admission import (
    AdmissionDecision,
    ClusterState,
    OccupiedDevices,
)
from planner.schema.checkpoint import CheckpointRecord, FileRecord
from planner.schema.cluster import (
    PEAK_DTYPES,
    ClusterDocument,
    DeviceType,
    HostGroup,
    Level,
    Link,
    Matrices,
    MeasuredCollective,
)
from planner.schema.elastic import (
    ElasticJobs,
    ElasticModel,
    ElasticPieces,
    ElasticRecord,
)
from planner.schema.federation import Formation
from planner.schema.measurement import MeasuredPhase, Measurement, Traffic
from planner.schema.methods import (
    Method,
    MethodDocument,
    MethodValue,
    methods,
    slots,
)
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.optimizers import OPTIMIZERS
from planner.schema.probe import (
    MatmulPoint,
    MeasuredLink,
    ProbeDocument,
    ProbeEnvironment,
)
from planner.schema.schedules import schedule_names, schedule_spec
from planner.schema.strategy_parts import Collective, SumAlgorithm
from planner.schema.stream import (
    StreamCluster,
    StreamJobs,
    StreamModel,
    StreamPlan,
    StreamRecord,
)
from planner.schema.verification import RankVerification, Verification, VerifiedPhase
from planner.schema.violations import batch_norm_violation
from tests.admission.small import request, running, state, table

__all__ = [
    "admissions",
    "checkpoints",
    "cluster_states",
    "clusters",
    "elastic_records",
    "federations",
    "job_requests",
    "measurements",
    "plans",
    "probes",
    "strategies",
    "stream_records",
    "throughput_tables",
    "verifications",
]

#: Text that JSON must escape, too, but no lone surrogates: they are not Unicode.
names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
amounts = st.floats(0, 1e18, allow_nan=False)
positives = st.floats(1e-9, 1e18, allow_nan=False, allow_infinity=False)
counts = st.integers(1, 4)


def _table(values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(names, values, max_size=3)


def _rows(
    values: st.SearchStrategy[Any], **sizes: int
) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(values, **sizes).map(tuple)


meshes = st.builds(Mesh, pp=counts, dp_replicate=counts, dp_shard=counts, tp=counts)
factors = st.floats(0, 0.99)
shared: dict[str, Any] = {
    "learning_rate": st.floats(1e-9, 1.0),
    "weight_decay": st.none() | st.floats(0, 1.0),
    "state_dtype": st.sampled_from(["float32", "bfloat16"]),
}
optimizers = st.one_of(
    st.builds(
        Optimizer,
        name=st.sampled_from([n for n, kind in OPTIMIZERS.items() if kind.betas]),
        betas=st.none() | st.tuples(factors, factors),
        **shared,
    ),
    st.builds(
        Optimizer,
        name=st.sampled_from([n for n, kind in OPTIMIZERS.items() if kind.momentum]),
        momentum=factors,
        **shared,
    ),
)
precisions = st.builds(
    Precision,
    parameter=st.sampled_from(["float32", "bfloat16"]),
    compute=st.sampled_from(["float32", "bfloat16", "float16", "float8"]),
    reduce=st.sampled_from(["float32", "bfloat16"]),
)
shardings = st.builds(
    TensorSharding,
    patterns=_table(st.sampled_from(["colwise", "rowwise", "vocab"])),
    sequence_parallel=st.booleans(),
)


overlaps = st.builds(
    Overlap,
    forward_prefetch=st.none() | st.integers(1, 64),
    backward_prefetch=st.none() | st.integers(1, 64),
    bucket_bytes=st.none() | st.integers(1024, 2**40),
)

communications = st.builds(
    Communication,
    boundary=st.sampled_from(["direct", "scattered"]),
    replicas=st.builds(
        Collective,
        algorithm=st.sampled_from(get_args(SumAlgorithm)),
        order=st.sampled_from([(), (1, 0), (0, 2, 1)]),
        parts=st.sampled_from([(), (0.25, 0.75)]),
        domains=st.sampled_from([(), ((0, 0, 1, 1),)]),
        pieces=st.integers(1, 8),
    ),
)


def _other_values(document: type[MethodDocument], name: str) -> list[Any]:
    """Some values of a setting that are not its default."""
    info = document.model_fields[name]
    kind, default = info.annotation, info.default
    if get_origin(kind) is Literal:
        found: list[Any] = list(get_args(kind))
    elif kind is bool:
        found = [True, False]
    elif kind is float or float in get_args(kind):
        found = [0.5, 0.25]
    elif get_origin(kind) is tuple:
        # Numbers of copies, of which there are two at least.
        found = [(1,), (0,)]
    elif type(None) in get_args(kind):
        found = [12, 16]
    else:
        assert kind is int, f"{document.__name__}.{name}: {kind}, draw it here"
        found = [default * 2, default * 3] if default else [1, 2, 8, 16]
    return [value for value in found if value != default]


def _with_setting(method: Method, name: str) -> list[MethodValue]:
    """Documents with other values of a setting, alone or beside those of a preset."""
    document, found = method.document, []
    assert document is not None
    for value in _other_values(document, name):
        for base in (document(), *method.presets.values()):
            try:
                found.append(document.model_validate(base.model_dump() | {name: value}))
                break
            except ValidationError:
                continue
    assert found, f"no drawn value of {method.kind}.{name} goes with any preset"
    return found[:2]


def variants(method: Method) -> list[MethodValue]:
    """The defaults, and a document for each other value of each setting."""
    if method.document is None:
        return [method.kind]
    return [
        method.document(),
        *(value for name in method.settings for value in _with_setting(method, name)),
    ]


def _values(slot: str) -> st.SearchStrategy[MethodValue]:
    """Anything that may fill a slot."""
    return st.sampled_from([v for one in methods(slot) for v in variants(one)])


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Any legal document, with and without stages and device ranges."""
    mesh = draw(meshes)
    schedule = draw(st.sampled_from(schedule_names()))
    virtual = draw(counts)
    fields: dict[str, Any] = {"mesh": mesh, "schedule": schedule}
    bare = Strategy(mesh=mesh, schedule=schedule, virtual_stages=virtual)
    if draw(st.booleans()) and (not schedule_spec(schedule).folded or virtual == 2):
        fields["stages"] = tuple(
            Stage(
                rank=bare.rank_of_stage(index),
                modules=draw(_rows(names, max_size=3)),
                recompute=draw(st.sampled_from(["none", "selective", "full"])),
            )
            for index in range(mesh.pp * virtual)
        )
    if draw(st.booleans()):
        first = draw(st.integers(0, 1000))
        split = draw(st.integers(1, mesh.num_devices))
        end = first + mesh.num_devices
        parts = ((first, first + split), (first + split, end))
        fields["device_ranges"] = tuple(part for part in parts if part[0] < part[1])
    return Strategy(
        **fields,
        virtual_stages=virtual,
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        microbatch_size=draw(counts),
        num_microbatches=draw(counts),
        sharding=draw(shardings),
        precision=draw(precisions),
        optimizer=draw(optimizers),
        grad_clip_norm=draw(st.none() | positives),
        overlap=draw(overlaps),
        communication=draw(communications),
        compile=draw(st.booleans()),
        **{slot: draw(_values(slot)) for slot in slots()},
        semantics=draw(st.sampled_from(["exact", "approximate"])),
    )


@st.composite
def _stage_memory(draw: st.DrawFn, rank: int) -> StageMemory:
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    fields = {f"{part}_bytes": draw(amounts) for part in (*parts, "reserve")}
    fields["limit_bytes"] = draw(positives)
    return StageMemory(rank=rank, device_type=draw(names), **fields)


def _stream(draw: st.DrawFn, divided: bool) -> dict[str, Any]:
    """Obstacles to dividing the stream: none where it is divided."""
    if divided:
        return {"whole_stream": None}
    return {
        "whole_stream": draw(st.none() | names),
        "mixing": draw(_rows(names, max_size=2)),
    }


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Parts that agree with each other, everything else free."""
    strategy = draw(strategies())
    last = max(strategy.device_ids())
    prediction = Prediction(
        step_time_s=draw(amounts),
        breakdown_s=draw(_table(amounts)),
        memory=tuple(draw(_stage_memory(rank)) for rank in range(strategy.mesh.pp)),
        link_bytes=draw(_table(amounts)),
        collective_bytes=draw(_table(amounts)),
        samples_per_s=draw(amounts),
        tokens_per_s=draw(st.none() | amounts),
        model_flops_utilization=draw(st.none() | st.floats(0, 1)),
        fidelity=draw(st.sampled_from(["analytic", "simulated"])),
    )
    alternatives = st.builds(
        Alternative,
        label=names,
        step_time_s=amounts,
        peak_memory_bytes=amounts,
        reason=names,
    )
    provenance = Provenance(
        meshwright_version=draw(names),
        partitioner=draw(names),
        objective=draw(names),
        seed=draw(st.integers()),
        evaluations=draw(_table(st.integers(0, 10**9))),
        memory_fraction=draw(st.floats(0, 1)),
        pinned=draw(_table(st.integers() | st.booleans() | names)),
        alternatives=draw(_rows(alternatives, max_size=2)),
        assumptions=draw(_rows(names, max_size=2)),
        calibration=draw(st.none() | names),
        target=draw(st.none() | names),
    )
    kinds = draw(_table(st.integers(1, 100)))
    hosts = draw(st.sampled_from([(), ((1, last + 1),), ((last + 1, 1),)]))
    types = [(), *(((hosts[0][0], kind),) for kind in kinds if hosts)]
    return Plan(
        model=ModelReference(
            name=draw(names),
            ref=draw(st.none() | names),
            parameters=draw(st.integers(0, 10**13)),
            tensors=draw(st.integers(0, 10**5)),
            fingerprint=draw(names),
            tied=draw(_rows(_rows(names, max_size=2), max_size=2)),
            **_stream(draw, strategy.sharding.sequence_parallel),
            experts=draw(st.integers(0, 256)),
            batch_norm_values=None
            if batch_norm_violation(strategy, 2)
            else draw(st.none() | st.integers(2, 9)),
        ),
        cluster=ClusterReference(
            name=draw(names),
            ref=draw(st.none() | names),
            num_devices=last + 1,
            device_types=kinds,
            hosts=hosts,
            host_types=draw(st.sampled_from(types)),
            fingerprint=draw(names),
        ),
        workload=Workload(
            global_batch=strategy.global_batch,
            seq_len=draw(st.none() | counts),
            inputs=draw(
                _rows(
                    st.builds(
                        InputSpec,
                        name=names,
                        shape=_rows(st.integers(0, 9), max_size=3),
                        dtype=st.sampled_from(["int64", "float32"]),
                        high=st.none() | counts,
                    ),
                    max_size=2,
                )
            ),
            loss=draw(st.sampled_from(["cross_entropy", "model", "mean_square"])),
            own_loss=draw(st.sampled_from([None, "tokens", "coupled"])),
            ignore_index=draw(st.sampled_from([-100, -1, 0])),
            label_shift=draw(st.sampled_from([0, 1])),
        ),
        strategy=strategy,
        prediction=prediction,
        provenance=provenance,
        not_runnable=draw(_rows(names, max_size=2)),
        timing_s=draw(_table(amounts)),
    )


@st.composite
def federations(draw: st.DrawFn) -> Federation:
    """Members with one plan on devices side by side, everything else free."""
    drawn = draw(plans())
    exact = {"synchronisation": Strategy().synchronisation}
    strategy = drawn.strategy.model_copy(update=exact)
    plan = drawn.model_copy(update={"strategy": strategy})
    count, size = draw(counts), plan.cluster.num_devices
    return Federation(
        cluster=plan.cluster.model_copy(
            update={"num_devices": count * size + 1, "hosts": (), "host_types": ()}
        ),
        members=tuple(
            Member(
                name=str(index),
                devices=tuple(range(index * size, (index + 1) * size)),
                plan=plan,
            )
            for index in range(count)
        ),
        global_batch=count * plan.workload.global_batch,
        exchange=LocalSteps(period=draw(counts)),
        weighting=draw(st.sampled_from(["samples", "equal"])),
        left_out=draw(st.sampled_from([(), (count * size,)])),
        prediction=FederationPrediction(
            step_time_s=draw(amounts),
            member_step_times_s=tuple(draw(amounts) for _ in range(count)),
            exchange_time_s=draw(amounts),
            exchange_bytes=tuple(draw(amounts) for _ in range(count)),
            samples_per_s=draw(amounts),
        ),
        formation=Formation(
            meshwright_version=draw(names),
            method=draw(st.sampled_from(["segments", "given"])),
            others=draw(_rows(st.tuples(names, amounts), max_size=2)),
        ),
    )


links = st.builds(
    Link,
    bandwidth_bytes_per_s=positives,
    latency_s=amounts,
    name=names,
    mesh=st.booleans(),
)
devices = st.builds(
    DeviceType,
    name=names,
    peak_flops_per_s=st.dictionaries(
        st.sampled_from(PEAK_DTYPES), positives, min_size=1
    ),
    memory_bytes=positives,
    memory_bandwidth_bytes_per_s=positives,
    matmul_efficiency=st.floats(0.01, 1),
    backend=st.sampled_from(["nccl", "gloo", "rccl"]),
    measured=st.booleans(),
    source=names,
)
collectives = st.builds(
    MeasuredCollective,
    kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    group_size=st.integers(2, 64),
    alpha_s=amounts,
    bandwidth_bytes_per_s=positives,
)


@st.composite
def clusters(draw: st.DrawFn) -> ClusterDocument:
    """Hierarchical and matrix clusters, mixed devices, some of them taken."""
    types = draw(st.lists(devices, min_size=1, max_size=2, unique_by=lambda d: d.name))
    groups = st.builds(
        HostGroup,
        name=names,
        count=counts,
        devices_per_host=counts,
        device=st.sampled_from([device.name for device in types]),
        link=links,
        compute_slots=st.none() | positives,
        nic=st.none() | links,
    )
    hosts = tuple(draw(st.lists(groups, min_size=1, max_size=3)))
    size = sum(group.count * group.devices_per_host for group in hosts)
    start = draw(st.integers(0, size - 1))
    fields: dict[str, Any] = {
        "name": draw(names),
        "device_types": tuple(types),
        "hosts": hosts,
        "occupied": draw(st.sampled_from([(), ((start, size),)])),
        "collectives": tuple(draw(st.lists(collectives, max_size=2))),
        "source": draw(names),
    }
    if draw(st.booleans()):
        row = st.lists(st.none() | positives, min_size=size, max_size=size)
        square = st.lists(row, min_size=size, max_size=size)
        matrix = draw(square.map(lambda rows: tuple(tuple(row) for row in rows)))
        both = Matrices(bandwidth_bytes_per_s=matrix, latency_s=matrix)
        return ClusterDocument(**fields, topology="matrix", matrices=both)
    levels = (Level(name=draw(names), link=draw(links)),)
    return ClusterDocument(**fields, levels=levels)


shares = st.floats(0, 1, exclude_min=True)
traffic = st.builds(
    Traffic, count=st.integers(0, 10**9), bytes=st.integers(0, 10**15) | amounts
)
measurements = st.builds(
    Measurement,
    plan_label=names,
    model_name=names,
    model_fingerprint=names,
    step_times_s=_rows(amounts, min_size=1, max_size=3),
    warm_up_steps=st.integers(0, 5),
    median_step_time_s=amounts,
    peak_memory_bytes=_rows(st.integers(0, 10**15), max_size=3),
    collectives=_rows(_table(traffic), max_size=3),
    phases=_rows(
        st.builds(
            MeasuredPhase,
            name=names,
            share=shares,
            peak_memory_bytes=_rows(st.integers(0, 10**15), max_size=2),
            collectives=_rows(_table(traffic), max_size=2),
        ),
        max_size=2,
    ),
    losses=_rows(st.floats(allow_nan=False), max_size=3),
    environment=_table(names),
)
probes = st.builds(
    ProbeDocument,
    name=names,
    backend=st.sampled_from(["gloo", "nccl", "rccl"]),
    device_name=names,
    host_of_rank=st.sampled_from([(0,), (0, 0), (0, 0, 1)]),
    compute_slots=positives,
    peak_flops_per_s=st.dictionaries(names, positives, max_size=2),
    half_efficiency_flops=amounts,
    kernel_overhead_s=amounts,
    memory_bytes=positives,
    memory_bandwidth_bytes_per_s=positives,
    matmul=_rows(
        st.builds(
            MatmulPoint,
            dtype=names,
            size=counts,
            alone_s=positives,
            together_s=positives,
        ),
        max_size=2,
    ),
    links=_rows(
        st.builds(
            MeasuredLink,
            scope=st.sampled_from(["host", "network"]),
            alpha_s=amounts,
            bandwidth_bytes_per_s=positives,
        ),
        min_size=1,
        max_size=2,
    ),
    collectives=_rows(collectives, max_size=2),
    environment=st.builds(
        ProbeEnvironment,
        torch_version=names,
        host_hashes=_rows(names, max_size=2),
        usable_cores=positives,
        threads_per_rank=counts,
        date=names,
    ),
    seed=st.integers(),
    elapsed_s=amounts,
)
checkpoints = st.builds(
    CheckpointRecord,
    step=st.integers(0, 10**9),
    model_name=names,
    model_fingerprint=names,
    plan_label=names,
    mesh=st.just(Mesh(pp=2)),
    optimizer=names,
    seed=st.integers(0, 10**6),
    files=_table(
        st.builds(
            FileRecord, bytes=st.integers(0, 10**12), crc32=st.integers(0, 2**32 - 1)
        )
    ),
    environment=_table(names),
)
verifications = st.builds(
    Verification,
    plan_label=names,
    world_size=counts,
    deviations=st.just(()),
    assumptions=_rows(names, max_size=2),
    ranks=_rows(
        st.builds(
            RankVerification,
            rank=st.integers(0, 4095),
            pp_rank=st.integers(0, 63),
            memory_bytes=_table(st.integers(0, 10**15)),
            phases=_rows(
                st.builds(
                    VerifiedPhase,
                    name=names,
                    share=shares,
                    memory_bytes=_table(st.integers(0, 10**15)),
                    collectives=st.just(()),
                ),
                max_size=2,
            ),
            flops=st.integers(0, 10**18),
            microbatches=st.integers(0, 4096),
            microbatches_run=st.integers(0, 4096),
            failure=st.none() | names,
        ),
        min_size=1,
        max_size=3,
    ),
)


@st.composite
def stream_records(draw: st.DrawFn) -> StreamRecord:
    """Jobs of all outcomes on a few devices, one of them taken."""
    models = st.builds(
        StreamModel, name=names, sequential_s=positives, demand_bytes=amounts
    )
    rows = [
        _stream_row(draw, number, outcome)
        for number, outcome in enumerate(draw(st.lists(st.sampled_from(_WAYS))))
    ]
    ran = any(row["plan"] == 0 for row in rows)
    plan = st.builds(
        StreamPlan, model=st.just(0), label=names, degree=counts, alone_s=positives
    )
    return StreamRecord(
        world=draw(st.sampled_from(["job-stream", "job-stream-world"])),
        cluster=StreamCluster(name=draw(names), hosts=((2, 4),), occupied=((7, 7),)),
        law=draw(st.none() | names),
        offered_load=draw(st.none() | positives),
        seed=draw(st.none() | st.integers(0, 10**6)),
        policy=draw(st.none() | names),
        weights=draw(st.none() | names),
        horizon_s=len(rows) + 1.0,
        interval_s=1.0,
        blocked=("refused", "no_room", "late"),
        models=(draw(models),),
        plans=(draw(plan),) if ran else (),
        device_sets=(((0, 2), (5, 6)),) if ran else (),
        jobs=StreamJobs(
            **{name: [row[name] for row in rows] for name in StreamJobs.model_fields}
        ),
        summary=draw(st.sampled_from([{}, {"arrived": len(rows)}, {"mean": math.inf}])),
    )


#: Outcome of a job, and whether it ran.
_WAYS = (
    ("met", True),
    ("late", True),
    ("late", False),
    ("refused", False),
    ("no_room", False),
    ("unfinished", True),
    ("undecided", False),
)


def _stream_row(draw: st.DrawFn, number: int, way: tuple[str, bool]) -> dict[str, Any]:
    outcome, ran = way
    ended = ran and outcome != "unfinished"
    decided = None if outcome == "undecided" else number + 0.25
    return {
        "arrival_s": float(number),
        "model": 0,
        "beta": draw(positives),
        "size": draw(positives),
        "asked": draw(st.integers(0, 8)),
        "decided_s": decided,
        "start_s": decided if ran else None,
        "end_s": number + 0.5 if ended else None,
        "plan": 0 if ran else -1,
        "devices": 0 if ran else -1,
        "done": draw(st.floats(0, 1)),
        "outcome": outcome,
    }


@st.composite
def elastic_records(draw: st.DrawFn) -> ElasticRecord:
    """Jobs of all outcomes, of which some run on one device or two, one at a time."""
    ways = draw(st.lists(st.sampled_from(_ELASTIC_WAYS), max_size=6))
    ran = [job for job, (*_, end) in enumerate(ways) if end is not None]
    degree = draw(st.integers(1, 2))
    pieces = {
        "job": ran,
        "kind": [0 for _ in ran],
        "degree": [degree for _ in ran],
        "hosts": [1 for _ in ran],
        "start_s": [job + 0.25 for job in ran],
        "end_s": [job + ways[job][2] for job in ran],
        "stall_s": draw(st.lists(positives, min_size=len(ran), max_size=len(ran))),
        "change": ["started" for _ in ran],
        "failed": draw(st.lists(st.booleans(), min_size=len(ran), max_size=len(ran))),
    }
    jobs = {
        "name": [f"{job}{draw(names)}" for job in range(len(ways))],
        "model": [0 for _ in ways],
        "submit_s": list(range(len(ways))),
        "deadline_s": [job + 0.75 for job in range(len(ways))],
        "iterations": [draw(positives) for _ in ways],
        "answer": [answer for _, answer, _ in ways],
        "told_s": [None if way[1] == "none" else at for at, way in enumerate(ways)],
        "end_s": [
            None if end is None else job + end for job, (*_, end) in enumerate(ways)
        ],
        "outcome": [outcome for outcome, *_ in ways],
    }
    return ElasticRecord(
        trace=draw(names),
        source=draw(names),
        policy=draw(st.none() | names),
        trace_load=draw(st.none() | positives),
        seed=draw(st.none() | st.integers(0, 10**6)),
        end_s=len(ways) + 1.0,
        kinds=("gpu",),
        degrees=(1, 2),
        models=(ElasticModel(name=draw(names), rates=((1.0, draw(amounts)),)),),
        devices=((0.0, (2,)),),
        summary=draw(st.sampled_from([{}, {"jobs": len(ways)}, {"mean": math.inf}])),
        jobs=ElasticJobs(**jobs),
        pieces=ElasticPieces(**pieces),
    )


#: Outcome of a job, its answer, and its end after its submission.
_ELASTIC_WAYS = (
    ("met", "promised", 0.5),
    ("met", "none", 0.75),
    ("late", "promised", 0.9),
    ("late", "none", None),
    ("declined", "declined", None),
    ("open", "promised", None),
)

_job_names = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,8}[a-z0-9])?", fullmatch=True)
_sizes = st.floats(1, 1e3)
#: Jobs of the model and the devices that tests.admission.small has.
job_requests = st.builds(
    lambda name, size, slack, **more: request(
        name, size, slack and size + slack, **more
    ),
    _job_names,
    _sizes,
    st.none() | _sizes,
    elastic=st.booleans(),
    max_degree=st.none() | st.integers(1, 8),
    checkpoint_bytes=st.none() | amounts,
    # No process can be given a NUL character.
    command=st.lists(names.map(lambda word: word.replace("\0", "")), max_size=2),
)
throughput_tables = st.builds(table, spread=st.none() | st.floats(0.1, 1))


@st.composite
def cluster_states(draw: st.DrawFn) -> ClusterState:
    """A job that runs, and devices of somebody else."""
    until = draw(st.none() | _sizes)
    other = OccupiedDevices(name="other", devices={"h1": 2}, until_s=until)
    job = running("running", draw(_sizes), draw(st.none() | _sizes), h0=2)
    occupied = (other,) if draw(st.booleans()) else ()
    found = state(job, hosts=2, occupied=occupied, throughputs=draw(throughput_tables))
    # Half of them have the reservations of a decision.
    kept = reschedule(found).schedule if draw(st.booleans()) else ()
    return found.model_copy(update={"reservations": kept})


@st.composite
def admissions(draw: st.DrawFn) -> AdmissionDecision:
    """Decisions on a job beside one that runs."""
    job = draw(job_requests.filter(lambda job: job.name != "running"))
    return admit(job, draw(cluster_states()))
