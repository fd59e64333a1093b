"""Arrays with one entry for each combination of degrees, which are priced once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from planner.cost.table.rows import number_rows

__all__ = ["KeptColumns"]

Array = NDArray[np.float64]
Index = NDArray[np.int64]

#: Bytes above which everything is forgotten before more is kept.
_MOST_BYTES = 1 << 28


@dataclass(eq=False, slots=True)
class KeptColumns:
    """Results of a pricing function by combination, for searches that ask again.

    Attributes:
        axes: Axis of each array along which combinations lie.
    """

    axes: Mapping[str, int]
    _places: dict[tuple[int, ...], int] = field(default_factory=dict)
    _arrays: dict[str, Array] = field(default_factory=dict)

    def look_up(
        self, columns: tuple[Index, ...], price: Callable[[Index], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """Return the arrays of combinations; price those that are not known.

        Args:
            columns: Degrees of each combination. Shape [C] each.
            price: Arrays of combinations, given by their indices; entries must not
                depend on the other combinations.

        Returns:
            Arrays with C entries along their axes.
        """
        first, which = number_rows(*columns)
        keys = list(zip(*(column[first].tolist() for column in columns), strict=True))
        known = self._places
        if any(key not in known for key in keys):
            if sum(one.nbytes for one in self._arrays.values()) > _MOST_BYTES:
                known.clear()
                self._arrays.clear()
            new = [index for index, key in enumerate(keys) if key not in known]
            self._add(price(first[new]))
            places = range(len(known), len(known) + len(new))
            known.update(zip((keys[index] for index in new), places, strict=True))
        chosen = np.array([known[key] for key in keys], dtype=np.int64)[which]
        if len(chosen) == len(known) and (np.diff(chosen) == 1).all():
            return dict(self._arrays)
        return {
            name: array.take(chosen, axis=self.axes[name])
            for name, array in self._arrays.items()
        }

    def _add(self, found: Mapping[str, Array]) -> None:
        for name, array in found.items():
            kept = self._arrays.get(name)
            whole = [array] if kept is None else [kept, array]
            self._arrays[name] = np.concatenate(whole, axis=self.axes[name])
