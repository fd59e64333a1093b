"""A planning problem as a document: model, machines, batch, objective."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from envs.partition.graphs import GraphStore, process_store
from planner.cluster import Cluster
from planner.cluster.read import named_types
from planner.errors import PlanFileError, UnknownNameError
from planner.graph import ModelGraph
from planner.request import PlanOptions, make_request
from planner.schema import Precision
from planner.schema.base import Document, write_atomically
from planner.schema.cluster import ClusterDocument
from planner.search import Objective, Request

__all__ = ["World", "load_worlds", "save_worlds"]


def _spoken(value: Any) -> str:
    return "name" if isinstance(value, str) else "fields"


_Reference = Annotated[
    Annotated[str, Field(min_length=1), Tag("name")]
    | Annotated[dict[str, Any], Tag("fields")],
    Discriminator(_spoken),
]
_Machines = Annotated[
    Annotated[str, Field(min_length=1), Tag("name")]
    | Annotated[ClusterDocument, Tag("fields")],
    Discriminator(_spoken),
]


class World(Document):
    """A request to a partitioner, as a document.

    Attributes:
        name: For display, and for pairing results.
        kind: Kind of worlds that it was drawn from.
        model: A reference for :func:`planner.api.read_model`: ``llama3-8b``,
            ``hf:PATH``, the path of a PipeDream profile, or the fields of a
            transformers config (``{"model_type": "llama", "hidden_size": 1024}``),
            with which a world needs no other file.
        seq_len: Tokens per sample; None for the model's own.
        cluster: A document, or a name (``dgx-h100:4``). A document may give
            ``device_types`` by name.
        global_batch: Samples per step.
        objective: Quantity to be minimised.
        memory_fraction: Share of each device's memory that may be filled.
        precision: Dtypes of training.
        devices: As for :func:`planner.api.plan`.
        target: As for :func:`planner.api.plan`.
        seed: Seed of everything random in the search.
    """

    KIND: ClassVar[str] = "world"

    name: Annotated[str, Field(min_length=1)]
    kind: str = "custom"
    model: _Reference
    seq_len: Annotated[int, Field(ge=1)] | None = None
    cluster: _Machines
    global_batch: Annotated[int, Field(ge=1)]
    objective: Objective = "throughput"
    memory_fraction: Annotated[float, Field(gt=0, le=1)] = 0.9
    precision: Precision = Precision()
    devices: Literal["all", "any"] = "all"
    target: Literal["meshwright", "any"] = "meshwright"
    seed: Annotated[int, Field(ge=0)] = 0

    @field_validator("model")
    @classmethod
    def _has_type(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(value, str) or isinstance(value.get("model_type"), str):
            return value
        raise ValueError(
            "a model given by its fields has a model_type, such as 'llama'"
        )

    @field_validator("cluster", mode="before")
    @classmethod
    def _known_types(cls, value: Any) -> Any:
        try:
            return named_types(value)
        except UnknownNameError as error:
            raise ValueError(str(error)) from error

    def machines(self) -> Cluster:
        """Read the cluster.

        Raises:
            ClusterError: If it is described wrongly.
            UnknownNameError: If no cluster has that name.
        """
        if isinstance(self.cluster, str):
            return Cluster.parse(self.cluster)
        return Cluster.from_document(self.cluster)

    def read(self, graphs: GraphStore | None = None) -> tuple[ModelGraph, Cluster]:
        """Read the model and the cluster.

        Args:
            graphs: Store of model graphs; that of the process if None.

        Raises:
            CaptureError: If the model cannot be read.
            ClusterError: If the cluster is described wrongly.
            UnknownNameError: If there is no model or cluster of that name.
        """
        machines = self.machines()
        store = process_store() if graphs is None else graphs
        dtype = self.precision.activation_dtype
        return store.graph(self.model, seq_len=self.seq_len, dtype=dtype), machines

    def request(self, graphs: GraphStore | None = None) -> Request:
        """Make the request that :func:`planner.api.plan` gives to its partitioners.

        Strategies are ranked by the predicted time alone (``risk="none"``).

        Raises:
            NoFeasiblePlanError: If every device is occupied.
            MeshwrightError: As :meth:`read`.
        """
        graph, machines = self.read(graphs)
        return make_request(graph, machines, self.options())

    def options(self) -> PlanOptions:
        """Options of :func:`planner.api.plan`, which :meth:`request` is made with."""
        return PlanOptions(
            global_batch=self.global_batch,
            objective=self.objective,
            target=self.target,
            devices=self.devices,
            precision=self.precision,
            memory_fraction=self.memory_fraction,
            risk="none",
            seed=self.seed,
        )


def save_worlds(worlds: Iterable[World], path: str | os.PathLike[str]) -> None:
    """Write worlds to one JSON file, one world a line, atomically.

    Raises:
        PlanFileError: If the file cannot be written.
    """
    lines = ",\n".join(
        json.dumps(world.to_data(), separators=(",", ":"), allow_nan=False)
        for world in worlds
    )
    write_atomically(path, f'{{"worlds": [\n{lines}\n]}}\n'.encode())


def load_worlds(path: str | os.PathLike[str]) -> list[World]:
    """Read worlds: ``{"worlds": […]}``, a bare list, or a single world.

    A world without a name is called ``world-`` and its place in the file, from 0.

    Raises:
        PlanFileError: If the file cannot be read or is not JSON, or a world is
            malformed; names the world and the field.
    """
    where = os.fspath(path)
    try:
        data = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise PlanFileError(f"cannot read worlds {where}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanFileError(
            f"{where}: not a whole JSON document ({' '.join(str(error).split())}); "
            f"was it cut off, or is it not a file of worlds?"
        ) from error
    return [_world(entry, index, where) for index, entry in _entries(data, where)]


def _entries(data: Any, where: str) -> list[tuple[int, Any]]:
    if isinstance(data, dict) and "worlds" in data:
        unknown = sorted(set(data) - {"worlds"})
        if unknown:
            raise PlanFileError(
                f"{where}: field {unknown[0]}: unknown beside worlds; remove it"
            )
        data = data["worlds"]
    elif isinstance(data, dict):
        data = [data]
    if not isinstance(data, list):
        raise PlanFileError(
            f"{where}: worlds are a list, this is {type(data).__name__}; write "
            f'{{"worlds": [...]}}'
        )
    if not data:
        raise PlanFileError(f"{where}: the list of worlds is empty; write at least one")
    return list(enumerate(data))


def _world(entry: Any, index: int, where: str) -> World:
    title = f"{where}: world {index}"
    if isinstance(entry, dict):
        entry = {"name": f"world-{index}", **entry}
        title = f"{title} ({entry['name']!r})"
    return World.from_data(entry, where=title)
