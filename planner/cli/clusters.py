"""``meshwright clusters``"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from planner.cli.output import emit_json, emit_table

__all__ = ["ClustersCommand"]


@dataclass(frozen=True, kw_only=True)
class ClustersCommand:
    """List the cluster presets, or show one cluster."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """A preset with a node count, local, or a file: shown in detail."""
    json: bool = False
    """Print as JSON; a single cluster as its document, ready to be edited."""

    def run(self) -> None:
        """Print."""
        from planner.cluster import Cluster, cluster_names

        if self.name is not None:
            cluster = Cluster.parse(self.name)
            if self.json:
                emit_json(cluster.document.model_dump(mode="json"))
                return
            emit_table("", ("", ""), list(cluster.describe().items()))
            return
        names = cluster_names()
        if self.json:
            emit_json(list(names))
            return
        emit_table("", ("preset",), [(name,) for name in names])
