"""A federation: unlike machines that train one model, each by a plan of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from planner.schema.base import Document
from planner.schema.methods.local_steps import LocalSteps
from planner.schema.plan import Plan
from planner.schema.plan_parts import ClusterReference
from planner.units import format_bytes, format_count, format_seconds

__all__ = [
    "Federation",
    "FederationPrediction",
    "Formation",
    "Member",
    "assign_owners",
    "rings_of",
]

Seconds = Annotated[float, Field(ge=0)]
Bytes = Annotated[float, Field(ge=0)]
DeviceId = Annotated[int, Field(ge=0)]
#: Settings of local steps that the exchange of a federation has one value of.
_PLAIN = {
    "fragments": (1, "all weights are exchanged at once"),
    "delay": (0, "members wait for the exchange"),
    "mix": (0.0, "members are equal after the exchange"),
    "top": (0, "all entries are exchanged"),
    "warm_up_steps": (0, "members never average gradients"),
    "offload": (False, "the outer optimizer's state lies beside the weights"),
}


class Member(Document):
    """Some devices of the fleet that train as one, and the plan by which they do.

    Attributes:
        name: For people.
        devices: Ids in the fleet, ascending; device i of the plan's cluster is the
            i-th of them.
        plan: Exact training of the member's share of the global batch.
    """

    name: str
    devices: Annotated[tuple[DeviceId, ...], Field(min_length=1)]
    plan: Plan

    @model_validator(mode="after")
    def _devices_are_the_plans(self) -> Member:
        if any(a >= b for a, b in zip(self.devices, self.devices[1:], strict=False)):
            raise ValueError(
                f"devices of member {self.name!r} are {list(self.devices)}; list each "
                f"once, in ascending order"
            )
        have, want = len(self.devices), self.plan.cluster.num_devices
        if have != want:
            raise ValueError(
                f"member {self.name!r} lists {have} devices, its plan is for {want}; "
                f"give one fleet id for each"
            )
        return self

    @model_validator(mode="after")
    def _trains_as_one(self) -> Member:
        method = self.plan.strategy.synchronisation
        if method.apart:
            raise ValueError(
                f"member {self.name!r} has synchronisation={method}, whose copies "
                f"differ between exchanges of their own; a member is exact inside: "
                f"plan it with synchronisation=all_reduce"
            )
        return self

    @property
    def processes(self) -> tuple[int, ...]:
        """Fleet id of each rank of its plan, in the order of ranks."""
        return tuple(self.devices[i] for i in self.plan.strategy.device_ids())


class FederationPrediction(Document):
    """Time and traffic that are predicted for a federation.

    Attributes:
        step_time_s: A mean step: the slowest member's, and the exchange's share.
        member_step_times_s: Step of each member alone.
        exchange_time_s: One exchange, all rings at once.
        exchange_bytes: Most that a device of each member sends in an exchange.
        samples_per_s: Global batch over step time.
    """

    step_time_s: Seconds
    member_step_times_s: tuple[Seconds, ...]
    exchange_time_s: Seconds
    exchange_bytes: tuple[Bytes, ...]
    samples_per_s: Annotated[float, Field(ge=0)]

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of a step for which each member waits for the slowest."""
        slowest = max(self.member_step_times_s)
        return tuple(
            1 - t / slowest if slowest else 0.0 for t in self.member_step_times_s
        )


class Formation(Document):
    """Search that divided a fleet into members; nothing in it depends on the clock.

    Attributes:
        method: ``segments``: parts of orders of the hosts, by a dynamic program;
            ``given``: by who asked.
        seed: Of everything random.
        divisions: Divisions that were planned exactly.
        segments: Parts of the fleet that were priced by closed forms.
        others: Other divisions: devices of each member, in words, and a mean step.
    """

    meshwright_version: str
    method: Literal["segments", "given"]
    seed: int = 0
    divisions: Annotated[int, Field(ge=0)] = 0
    segments: Annotated[int, Field(ge=0)] = 0
    others: tuple[tuple[str, Seconds], ...] = ()


class Federation(Document):
    """A plan of plans: members train apart, and exchange their weights every few steps.

    Attributes:
        cluster: The fleet.
        members: Those that train; no device is in two.
        global_batch: Samples of a step over all members.
        exchange: How often weights are exchanged, and what becomes of the mean.
        weighting: Whether a member counts in the mean by its ``samples``, or all count
            ``equal``.
        left_out: Fleet ids of free devices that no member has.
        prediction: Time and traffic.
        formation: Search that found the members.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "federation"

    schema_version: Literal[1] = 1
    kind: Literal["federation"] = "federation"
    cluster: ClusterReference
    members: Annotated[tuple[Member, ...], Field(min_length=1)]
    global_batch: Annotated[int, Field(ge=1, le=2**40)]
    exchange: LocalSteps = LocalSteps()
    weighting: Literal["samples", "equal"] = "samples"
    left_out: tuple[DeviceId, ...] = ()
    prediction: FederationPrediction
    formation: Formation

    @model_validator(mode="after")
    def _devices_are_the_fleets(self) -> Federation:
        owner: dict[int, str] = {}
        for member in self.members:
            if list(owner.values()).count(member.name):
                raise ValueError(
                    f"two members are called {member.name!r}; give each its own name"
                )
            for device in member.devices:
                if device in owner:
                    raise ValueError(
                        f"device {device} is in members {owner[device]!r} and "
                        f"{member.name!r}; a device trains in one: take it out of the "
                        f"other and plan that again"
                    )
                owner[device] = member.name
        count = self.cluster.num_devices
        for device in (*owner, *self.left_out):
            if device >= count:
                raise ValueError(
                    f"device {device} is not in the fleet, which has devices 0 to "
                    f"{count - 1}"
                )
        both = sorted(set(self.left_out) & set(owner))
        if both:
            raise ValueError(
                f"device {both[0]} is left out and in member {owner[both[0]]!r}; "
                f"take it out of one"
            )
        return self

    @model_validator(mode="after")
    def _members_train_one_model(self) -> Federation:
        first, *others = self.members
        want = _common(first)
        for member in others:
            for field, value in _common(member).items():
                if value != want[field]:
                    raise ValueError(
                        f"member {member.name!r} has {field}={_shown(value)}, "
                        f"{first.name!r} has {_shown(want[field])}; members may differ "
                        f"in their devices, batch and strategy alone: plan one again"
                    )
        return self

    @model_validator(mode="after")
    def _members_share_the_batch(self) -> Federation:
        have = sum(member.plan.workload.global_batch for member in self.members)
        if have != self.global_batch:
            raise ValueError(
                f"members train {have} samples a step, global_batch says "
                f"{self.global_batch}; members divide it: give {have}, or plan one "
                f"for {self.global_batch - have:+d} samples"
            )
        return self

    @model_validator(mode="after")
    def _exchange_is_whole(self) -> Federation:
        for field, (value, rule) in _PLAIN.items():
            found = getattr(self.exchange, field)
            if found != value:
                raise ValueError(
                    f"exchange has {field}={found}, but in a federation {rule}; use "
                    f"{field}={value}"
                )
        if self.exchange.fewest_copies > len(self.members):
            raise ValueError(
                f"exchange has min_replicas={self.exchange.min_replicas} with "
                f"{len(self.members)} members; use {len(self.members)} or fewer"
            )
        return self

    @model_validator(mode="after")
    def _prediction_has_all(self) -> Federation:
        for field in ("member_step_times_s", "exchange_bytes"):
            found = len(getattr(self.prediction, field))
            if found != len(self.members):
                raise ValueError(
                    f"prediction.{field} has {found} entries for {len(self.members)} "
                    f"members; give one each, in order"
                )
        return self

    @property
    def first_samples(self) -> tuple[int, ...]:
        """Place of each member's first sample in the global batch."""
        sizes = (member.plan.workload.global_batch for member in self.members)
        return tuple(accumulate(sizes, initial=0))[:-1]

    @property
    def processes(self) -> tuple[tuple[int, int], ...]:
        """Member, and process inside it, of each process of a run.

        Processes are in the order of their devices in the fleet, which is that of
        hosts; so are those of one member.
        """
        found = sorted(
            (device, index)
            for index, member in enumerate(self.members)
            for device in member.processes
        )
        counted = [0] * len(self.members)
        places = []
        for _, index in found:
            places.append((index, counted[index]))
            counted[index] += 1
        return tuple(places)

    def shares(self, present: Sequence[int]) -> dict[int, float]:
        """Weight of each member that is present in the mean; they sum to 1.

        Args:
            present: Numbers of members.
        """
        if self.weighting == "equal":
            return dict.fromkeys(present, 1 / len(present))
        sizes = {i: self.members[i].plan.workload.global_batch for i in present}
        return {i: size / sum(sizes.values()) for i, size in sizes.items()}

    def summary(self) -> str:
        """Return a few lines for readers: who trains what, and how long it takes."""
        return _summary(self)

    def explain(self) -> str:
        """Return the summary, what bounds each member, and other divisions."""
        lines = [self.summary(), ""]
        lines += [
            f"{member.name}: {member.plan.provenance.bound_by}"
            for member in self.members
            if member.plan.provenance.bound_by
        ]
        slow = self.prediction.step_time_s
        if self.formation.others:
            lines += ["", "other divisions of the devices:"]
        for words, seconds in self.formation.others:
            more = f", {seconds / slow - 1:.1%} longer" if slow else ""
            lines.append(f"  {words}: {format_seconds(seconds)}{more}")
        if self.formation.segments:
            lines.append(
                f"{self.formation.segments:,} parts of the fleet were priced, "
                f"{self.formation.divisions} divisions planned"
            )
        if len(self.members) > 1:
            lines.append(
                "members train apart between exchanges: the model is not that of exact "
                "training, the more so the longer the period"
            )
        return "\n".join(lines)


def _common(member: Member) -> dict[str, Any]:
    """Everything that members have in common, by name."""
    plan, strategy = member.plan, member.plan.strategy
    return {
        "model": plan.model.fingerprint,
        "workload.seq_len": plan.workload.seq_len,
        "workload.inputs": plan.workload.inputs,
        "workload.loss": plan.workload.loss,
        "workload.label_shift": plan.workload.label_shift,
        "optimizer": strategy.optimizer,
        "precision.parameter": strategy.precision.parameter,
        "grad_clip_norm": strategy.grad_clip_norm,
    }


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _summary(federation: Federation) -> str:
    members, prediction = federation.members, federation.prediction
    model, period = members[0].plan.model, federation.exchange.period
    used = sum(len(member.processes) for member in members)
    noun = "member" if len(members) == 1 else "members"
    lines = [
        f"{model.name} ({format_count(model.parameters)} parameters) on "
        f"{used} of {federation.cluster.num_devices} devices of "
        f"{federation.cluster.name}, {len(members)} {noun}",
        f"step    {format_seconds(prediction.step_time_s)} for "
        f"{federation.global_batch:,} samples "
        f"({prediction.samples_per_s:,.4g} samples/s)",
    ]
    if len(members) > 1:
        seconds = prediction.exchange_time_s
        share = seconds / period / max(prediction.step_time_s, 1e-12)
        lines.append(
            f"exchange every {period} steps: {format_seconds(seconds)}, {share:.1%} of "
            f"the time; a device sends "
            f"{format_bytes(max(prediction.exchange_bytes))} at most"
        )
    rows = zip(members, prediction.member_step_times_s, prediction.idle, strict=True)
    for member, seconds, idle in rows:
        kinds = member.plan.cluster.device_types
        lines.append(
            f"{member.name:<8}"
            + " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
            + f" ({_named(member.devices)}): "
            f"{member.plan.workload.global_batch:,} samples a step in "
            f"{format_seconds(seconds)}, waits {idle:.0%}; "
            f"{member.plan.strategy.label()}"
        )
    if federation.left_out:
        lines.append(
            f"left out: {_named(federation.left_out)}, which would make a step longer"
        )
    return "\n".join(lines)


def _named(devices: Sequence[int]) -> str:
    """``device 7``, ``devices 0-3, 7``."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][-1] + 1:
            runs[-1].append(device)
        else:
            runs.append([device])
    listed = ", ".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs
    )
    return f"device{'s' if len(devices) > 1 else ''} {listed}"


def assign_owners(
    sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Choose which rank of a member exchanges each weight: the least loaded holder.

    Args:
        sizes: Bytes of each weight, in an order that all ranks have.
        holders: Ranks that hold it, or a part of it.

    Returns:
        Rank by name of the weight, in the order of ``sizes``.
    """
    loads: dict[int, int] = {}
    owners = {}
    for name, size in sizes.items():
        rank = min(holders[name], key=lambda one: (loads.get(one, 0), one))
        loads[rank] = loads.get(rank, 0) + size
        owners[name] = rank
    return owners


def rings_of(
    owners: Sequence[Mapping[str, int]],
) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Group weights by who exchanges them: a ring for each distinct tuple of owners.

    Args:
        owners: Rank of each weight, one mapping a member, equal keys in equal order.

    Returns:
        Rank in each member, to the weights of the ring, by the tuples' order.
    """
    rings: dict[tuple[int, ...], list[str]] = {}
    for name in owners[0]:
        rings.setdefault(tuple(one[name] for one in owners), []).append(name)
    return {ring: tuple(rings[ring]) for ring in sorted(rings)}
