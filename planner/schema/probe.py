"""The probe document: what was measured on a live process group."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from planner.schema.base import Document
from planner.schema.cluster import MeasuredCollective

__all__ = ["MatmulPoint", "MeasuredLink", "ProbeDocument", "ProbeEnvironment"]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Latency = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class MatmulPoint(Document):
    """Time of one square matrix product.

    Attributes:
        dtype: torch name.
        size: n of the n x n factors; 2 n**3 FLOPs.
        alone_s: While no other rank computes, slowest rank.
        together_s: While all ranks do, mean over ranks.
    """

    dtype: str
    size: Count
    alone_s: Positive
    together_s: Positive


class MeasuredLink(Document):
    """Time of one message between neighbouring ranks: alpha + size / bandwidth.

    Attributes:
        scope: ``host`` inside one machine, ``network`` between two.
        alpha_s: Of an empty message.
        bandwidth_bytes_per_s: While all neighbours send, per rank and direction.
    """

    scope: Literal["host", "network"]
    alpha_s: Latency
    bandwidth_bytes_per_s: Positive


class ProbeEnvironment(Document):
    """Where it was measured.

    Attributes:
        torch_version: ``2.13.0+cpu``.
        host_hashes: Short hash of each host's name, in order of host index.
        usable_cores: CPU cores that the first host's processes may use.
        threads_per_rank: torch threads of each rank.
        date: As the caller gave it.
    """

    torch_version: str
    host_hashes: tuple[str, ...]
    usable_cores: Annotated[float, Field(gt=0)]
    threads_per_rank: Count
    date: str


class ProbeDocument(Document):
    """A measured process group, enough to make a cluster of.

    Attributes:
        document: Tells a probe from a cluster in a file.
        device_name: Type name of the ranks' devices.
        host_of_rank: Host index of each rank.
        compute_slots: Ranks of one host that compute at full rate at the same time.
        peak_flops_per_s: dtype to the rate that ever larger products approach, alone.
        half_efficiency_flops: FLOPs of a product that reaches half of that.
        kernel_overhead_s: Time of an op that does next to nothing.
        memory_bytes: What each process can allocate.
        memory_bandwidth_bytes_per_s: Reads plus writes, alone.
        links: Point to point.
        collectives: By kind and group size.
        elapsed_s: How long the probe took.
    """

    SCHEMA_VERSION: ClassVar[int] = 1
    KIND: ClassVar[str] = "probe"

    schema_version: Literal[1] = 1
    document: Literal["probe"] = "probe"
    name: str
    backend: Literal["gloo", "nccl", "rccl"]
    device_name: str
    host_of_rank: tuple[Annotated[int, Field(ge=0)], ...]
    compute_slots: Positive
    peak_flops_per_s: dict[str, Positive]
    half_efficiency_flops: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    kernel_overhead_s: Latency
    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    matmul: tuple[MatmulPoint, ...] = ()
    links: tuple[MeasuredLink, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    environment: ProbeEnvironment
    seed: int = 0
    elapsed_s: Latency = 0.0

    @model_validator(mode="after")
    def _ranks_have_hosts(self) -> ProbeDocument:
        hosts = self.host_of_rank
        if not hosts or list(hosts) != sorted(hosts) or hosts[0] != 0:
            raise ValueError(
                "host_of_rank must start at 0 and ascend: number ranks host by host"
            )
        if len(hosts) > 1 and not self.links:
            raise ValueError(f"{len(hosts)} ranks but no links were measured")
        return self

    @property
    def world_size(self) -> int:
        """Ranks that took part."""
        return len(self.host_of_rank)
