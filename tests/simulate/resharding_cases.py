"""Nine cases of resharding between meshes, and what their orders come to.

Meshes, tensors and splits: Zhuang et al. 2023, arXiv 2211.05322, benchmarks n to m of
alpa-projects/alpa at b8078a9. Elements through the busiest host, computed again from
the definitions: lower bound, naive, size-balanced and one message a device.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.schema.resharding import MeshLayout

__all__ = ["CASES", "ReshardingCase"]

_MEBI = 2**20


@dataclass(frozen=True, kw_only=True)
class ReshardingCase:
    """A case; bytes are those of int32."""

    source: MeshLayout
    destination: MeshLayout
    shape: tuple[int, ...]
    unit_tasks: int
    bound_bytes: int
    naive_bytes: int
    balanced_bytes: int
    per_device_bytes: int


def _layout(hosts: int, *split: str) -> MeshLayout:
    return MeshLayout(hosts=hosts, devices_per_host=4, split=split)


def _case(
    source: MeshLayout,
    destination: MeshLayout,
    shape: tuple[int, ...],
    numbers: tuple[int, ...],
) -> ReshardingCase:
    tasks, bound, naive, balanced, per_device = numbers
    return ReshardingCase(
        source=source,
        destination=destination,
        shape=shape,
        unit_tasks=tasks,
        bound_bytes=bound * _MEBI,
        naive_bytes=naive * _MEBI,
        balanced_bytes=balanced * _MEBI,
        per_device_bytes=per_device * _MEBI,
    )


_CUBE = (1024, 1024, 512)
_WHOLE = _layout(2, "", "", "")
_ROWS = _layout(2, "h", "", "")
_COLUMNS = _layout(2, "", "h", "")
_ONE_HOST = _case(_layout(1, "d", "", ""), _WHOLE, _CUBE, (4, 2048, 2048, 2048, 16384))

#: By number; cases 7 and 8 are the same one there. Numbers are unit tasks and MiB.
CASES: dict[int, ReshardingCase] = {
    1: _case(_ROWS, _ROWS, _CUBE, (2, 1024, 1024, 1024, 4096)),
    2: _case(_WHOLE, _ROWS, _CUBE, (2, 1024, 2048, 1024, 4096)),
    3: _case(_COLUMNS, _ROWS, _CUBE, (4, 1024, 1536, 1536, 6144)),
    4: _case(
        _layout(2, "", "hd", ""),
        _layout(2, "hd", "", ""),
        _CUBE,
        (64, 1024, 1920, 1920, 1920),
    ),
    5: _case(_layout(2, "d", "", ""), _ROWS, _CUBE, (4, 1024, 2048, 1536, 6144)),
    6: _case(
        _ROWS,
        _layout(3, "h", "", ""),
        (3072, 1024, 170),
        (4, 1020, 2040, 2040, 8160),
    ),
    7: _ONE_HOST,
    8: _ONE_HOST,
    9: _case(_COLUMNS, _layout(2, "", "", "h"), _CUBE, (4, 1024, 1536, 1536, 6144)),
}
