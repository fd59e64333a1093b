"""Fixed policies: their rules, and the golden figures through the environment."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.ramp.arrivals import ArrivalLaw, BetaLaw
from envs.ramp.jobs import RampJobs, RampTables
from envs.ramp.replay_env import RampReplayEnv
from envs.ramp.vector import RampVecEnv
from planner.errors import StrategyError, UnknownNameError
from policies.baselines import (
    Constant,
    MinFeasible,
    ParaMax,
    ParaMin,
    RandomDegree,
    best_constant,
    make_baseline,
)

_FOLDER = Path(os.environ.get("MESHWRIGHT_DATA", "none")) / "pacml"


def _obs(beta: float, model: int = 0) -> dict[str, np.ndarray]:
    return {
        "job": np.array([beta, 0, 0, 0], dtype=np.float32),
        "job_graph": np.array([model], dtype=np.float32),
    }


def _mask(*degrees: int) -> np.ndarray:
    return np.array([True, *(d in degrees for d in (1, 2, 4, 6, 8, 16))])


def test_each_takes_the_degree_that_its_rule_says(tables: RampTables) -> None:
    every = _mask(1, 2, 4, 6, 8, 16)
    actions = {1: 1, 2: 2, 4: 3, 6: 4, 8: 5, 16: 6}
    assert ParaMax(tables).predict(_obs(0.5), every) == 6
    assert ParaMax(tables).predict(_obs(0.5), _mask()) == 0
    assert Constant(tables, 4).predict(_obs(0.5), every) == 3
    assert Constant(tables, 4).predict(_obs(0.5), _mask(2, 8)) == 0
    for hundredths in range(10, 101):
        beta = hundredths / 100
        least = math.ceil(1 / beta)
        enough = [d for d in actions if d >= least]
        assert ParaMin(tables).predict(_obs(beta), every) == actions[enough[0]]
        # One over the degree is not enough: messages take time.
        in_time = [d for d in actions if (d == 1 and beta == 1) or d * beta > 1 + 1e-9]
        expected = actions[in_time[0]] if in_time else 0
        assert MinFeasible(tables).predict(_obs(beta, 1), every) == expected
    # Where enough is not to be had, as much as is.
    assert ParaMin(tables).predict(_obs(0.1), _mask(1, 2, 6)) == 4
    assert MinFeasible(tables).predict(_obs(0.1, 1), _mask(1, 2, 6)) == 0


def test_batches_are_decided_row_by_row(tables: RampTables) -> None:
    generator = np.random.default_rng(0)
    beta = generator.uniform(0.1, 1, 40).astype(np.float32)
    obs = {
        "job": np.stack([beta] * 4, axis=1),
        "job_graph": generator.integers(0, 5, (40, 1)).astype(np.float32),
    }
    masks = generator.random((40, 7)) < 0.5
    masks[:, 0] = True
    for name in ("para_max", "para_min", "min_feasible", "constant_8"):
        policy = make_baseline(name, tables)
        batch = policy.predict(obs, masks)
        assert batch.shape == (40,)
        for row in range(40):
            alone = {key: part[row] for key, part in obs.items()}
            assert policy.predict(alone, masks[row]) == batch[row]
            assert masks[row, batch[row]]


def test_random_degrees_are_as_likely_and_repeat(tables: RampTables) -> None:
    masks = np.tile(_mask(1, 4, 8), (6000, 1))
    obs = {"job": np.full((6000, 4), 0.5), "job_graph": np.zeros((6000, 1))}
    drawn = RandomDegree(tables, 1).predict(obs, masks)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == [1, 3, 5]
    assert np.abs(counts - 2000).max() < 5 * np.sqrt(6000 * 2 / 9)
    assert (drawn == RandomDegree(tables, 1).predict(obs, masks)).all()
    assert (drawn != RandomDegree(tables, 2).predict(obs, masks)).any()
    assert RandomDegree(tables).predict(_obs(0.5), _mask()) == 0


@pytest.mark.skipif(
    not (_FOLDER / "golden.csv").is_file(), reason="MESHWRIGHT_DATA has no pacml"
)
@pytest.mark.parametrize("seed", ["1"])
def test_golden_figures_come_out_of_observations(jobs: RampJobs, seed: str) -> None:
    with (_FOLDER / "golden.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["seed"] == seed]
    assert len(rows) > 20
    for law in "AD":
        trace = _FOLDER / f"arrivals_{law}_{seed}.csv"
        for row in (row for row in rows if row["beta"] == law):
            env = RampReplayEnv(jobs=jobs, trace=trace, mask="benchmark", observe=False)
            policy = make_baseline(row["policy"], env.tables)
            obs, _ = env.reset()
            ended = False
            while not ended:
                action = policy.predict(obs, env.action_masks())
                obs, _, ended, _, info = env.step(np.int64(action))
            assert info["summary"]["blocked"] == int(row["blocked"]), row["policy"]
            expected = float(row["mean_jct_s"])
            assert info["summary"]["mean_jct_s"] == pytest.approx(expected, rel=1e-9)


def test_the_best_constant_is_the_best(jobs: RampJobs, tables: RampTables) -> None:
    loose = ArrivalLaw(beta=BetaLaw(values=(0.7,)))
    tight = ArrivalLaw(beta=BetaLaw(values=(0.15,)))
    found = [best_constant(jobs, law, (0, 1), tables, 1e5) for law in (loose, tight)]
    assert found[0].degree <= 4
    assert found[1].degree >= 8
    many = RampVecEnv(2, jobs=jobs, law=loose, horizon_s=1e5, mask="benchmark")
    rates = {}
    for degree in jobs.degrees:
        many.seed(11)
        obs, done = many.reset(), np.zeros(2, dtype=bool)
        policy = Constant(tables, degree)
        while not done.any():
            obs, _, done, infos = many.step(policy.predict(obs, many.action_masks()))
        rates[degree] = np.mean([i["summary"]["blocking_rate"] for i in infos])
    assert rates[found[0].degree] <= min(rates.values()) + 0.02
    with pytest.raises(StrategyError, match="seeds is empty"):
        best_constant(jobs, loose, (), tables)


def test_names_that_are_no_policy(tables: RampTables) -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'para_min'"):
        make_baseline("para_mim", tables)
    with pytest.raises(StrategyError, match="degree 10 has no block"):
        make_baseline("constant_10", tables)
    with pytest.raises(UnknownNameError, match="constant_x"):
        make_baseline("constant_x", tables)


def test_baselines_load_nothing_that_learns() -> None:
    code = (
        "import policies.ramp.lookahead, sys; print('stable_baselines3' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "False"
