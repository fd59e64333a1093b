"""The command ``meshwright clusters``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from planner.cli.output import emit_json, emit_table
from planner.errors import MeshwrightError

if TYPE_CHECKING:
    from planner.cluster import Cluster

__all__ = ["ClustersCommand"]


@dataclass(frozen=True, kw_only=True)
class ClustersCommand:
    """List the cluster presets, or show one cluster."""

    name: Annotated[
        str | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="CLUSTER", help_behavior_hint=""),
    ] = None
    """Shown in detail: a preset with a node count, local, or a file."""
    json: bool = False
    """Print as JSON; a single cluster as its document, ready to be edited."""

    def run(self) -> None:
        """Print."""
        from planner.cluster import Cluster, cluster_names

        if self.name is not None:
            cluster = Cluster.parse(self.name)
            if self.json:
                emit_json(cluster.document.to_data())
            else:
                emit_table(("", ""), list(cluster.describe().items()))
            return
        names = cluster_names()
        if self.json:
            emit_json(list(names))
            return
        emit_table(("preset", "one unit is"), [(name, _unit(name)) for name in names])


def _unit(name: str) -> str:
    """Devices of a preset's smallest cluster; why not, if its data is missing."""
    from planner.cluster import Cluster

    try:
        cluster: Cluster = Cluster.from_preset(name)
    except MeshwrightError as error:
        return f"not available: {error}"
    kinds = cluster.reference().device_types
    return " + ".join(f"{count} x {kind}" for kind, count in kinds.items())
