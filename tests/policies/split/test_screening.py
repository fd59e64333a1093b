"""Whether an order allows a split below a load."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planner.split import Groups, best_along, group
from policies.split.orders import sample_orders
from policies.split.screening import can_tell, first_below
from policies.split.solver import learned


def test_it_knows_what_the_cut_finds(pool: list[Groups]) -> None:
    """Just above the load of the best cut there is one, at that load there is none."""
    none = 0
    for groups in pool:
        scores = np.zeros((6, len(groups)))
        orders, _ = sample_orders(groups, scores, np.random.default_rng(0))
        loads = []
        for order in orders:
            found = best_along(groups, order)
            none += found is None
            loads.append(np.inf if found is None else found.load_ms)
            at = np.array([order])
            assert first_below(groups, at, loads[-1] * (1 - 1e-9)) == 1
            if found is not None:
                assert first_below(groups, at, loads[-1] * (1 + 1e-9)) == 0
        least = int(np.argmin(loads))
        if np.isfinite(loads[least]) and sorted(loads)[1] > loads[least] * (1 + 1e-6):
            assert first_below(groups, orders, loads[least] * (1 + 1e-9)) == least
    assert none < 6 * len(pool)


def test_more_devices_than_bits_tell_nothing(pool: list[Groups]) -> None:
    task = replace(pool[0].task, accelerators=63)
    groups = group(task)
    orders = np.array(
        [
            next(
                iter(
                    sample_orders(
                        groups, np.zeros((1, len(groups))), np.random.default_rng(0)
                    )[0]
                )
            )
        ]
    )
    assert can_tell(pool[0])
    assert not can_tell(groups)
    assert first_below(groups, orders, 0.0) == 0
    assert learned(task) is not None
    assert best_along(groups, orders[0]) is not None


@pytest.mark.parametrize("cpus", [0, 1, 3])
def test_each_device_is_used_once(pool: list[Groups], cpus: int) -> None:
    """With less and less room the answer stays that of the cut."""
    task = replace(pool[1].task, accelerators=3, cpus=cpus, memory_bytes=1e12)
    groups = group(task)
    order = sample_orders(groups, np.zeros((1, len(groups))), np.random.default_rng(1))[
        0
    ]
    for bound in np.linspace(0.05, 1.2, 24) * task.accelerator_ms.sum():
        found = best_along(groups, order[0], bound)
        assert (first_below(groups, order, bound) == 0) == (found is not None)
