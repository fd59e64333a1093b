"""Functions that run as tasks of a Ray cluster, as in a pool of processes."""

from __future__ import annotations

from concurrent.futures import wait

import numpy as np
import pytest

ray = pytest.importorskip("ray", reason="ray is not installed")

from policies.ray_pool import RayPool  # noqa: E402  # after the skip

# Ray alone takes seconds to start.
pytestmark = pytest.mark.slow


def test_results_may_be_changed_and_errors_come_back() -> None:
    with RayPool("local") as pool:
        assert pool.cpus >= 1
        found = pool.submit(np.zeros, 1_000_000).result(timeout=60)
        found[0] = 1.0
        assert found.sum() == 1.0
        with pytest.raises(ValueError, match="invalid literal"):
            pool.submit(int, "many").result(timeout=60)
    assert not ray.is_initialized()


def test_a_cluster_that_was_joined_before_goes_on() -> None:
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        with RayPool("auto") as pool:
            assert pool.cpus == 1
            assert pool.submit(sum, [1, 2]).result(timeout=60) == 3
        assert ray.is_initialized()
        waiting = RayPool("auto")
        begun = [waiting.submit(np.zeros, 10) for _ in range(4)]
        waiting.shutdown(cancel_futures=True)
        # Cancelled or finished before, nobody waits for them for ever.
        assert not wait(begun, timeout=60).not_done
    finally:
        ray.shutdown()
