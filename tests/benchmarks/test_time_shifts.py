"""Streams whose jobs choose when in a step they send."""

from __future__ import annotations

import numpy as np

from benchmarks.time_shifts import WAYS, best_shift, play
from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from policies.baselines import make_baseline

PLACE = {"cluster": "dgx-a100:4", "seeds": (1,), "intervals": 20.0}


def test_the_action_with_the_least_stretch_is_found() -> None:
    env = JobStreamEnv(
        law=StreamLaw(load=1.5), bursts="chosen", shifts=4, observe=False
    )
    policy = make_baseline("constant_16", env.tables)
    obs, _ = env.reset(seed=1)
    for _ in range(40):
        action = int(policy.predict(obs, env.action_masks()))
        best = best_shift(env, action)
        if action:
            one, other = env.shapes[action - 1], env.shapes[best - 1]
            assert (one.hosts, one.per_host) == (other.hosts, other.per_host)
            stretch = env.session.options.stretch
            assert stretch[best - 1] <= stretch[action - 1]
        else:
            assert best == 0
        obs, *_ = env.step(np.int64(best))


def test_every_way_is_played() -> None:
    found = {way: play(load=1.0, way=way, **PLACE) for way in WAYS}
    assert all(0 <= rate <= 1 < devices for rate, devices in found.values())
