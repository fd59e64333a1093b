"""Train PPO on a cluster whose jobs can be resized, and compare it with two rules.

    python examples/elastic_ppo.py 100000

The jobs are drawn at random; with MESHWRIGHT_DATA set they are of ElasticFlow's traces,
cluster01 to train on and cluster03 to compare on. Needs ``meshwright[learn]``.
"""

import os
import sys
from pathlib import Path

import numpy as np
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv

from envs.elastic.env import ElasticStreamEnv
from envs.elastic.pools import HostPool
from envs.elastic.session import ElasticConfig
from envs.elastic.throughput import ModelKey, ThroughputTable, elasticflow_throughputs
from envs.elastic.traces import JobTrace, read_trace, window
from policies.elastic.registry import make_rule, play

JOBS, WINDOWS = 60, 16


def drawn(seed: int, source: ThroughputTable, jobs: int = 1000) -> JobTrace:
    """Draw a trace of jobs for one model."""
    random = np.random.default_rng(seed)
    work_s = 3600.0 * random.lognormal(0.0, 1.0, jobs)  # on one device
    submit_s = np.cumsum(random.exponential(300.0, jobs))
    return JobTrace(
        name="drawn",
        job_id=tuple(map(str, range(jobs))),
        submit_s=submit_s,
        deadline_s=submit_s + work_s * random.uniform(0.3, 1.5, jobs),
        iterations=work_s,  # one a second on one device
        model=np.zeros(jobs, dtype=np.int64),
        models=source.models,
        gpus=np.ones(jobs, dtype=np.int64),
        duration_s=np.full(jobs, np.nan),
        kind=("",) * jobs,
    )


def windows(trace: JobTrace, source: ThroughputTable, hosts: int) -> DummyVecEnv:
    """Make an environment for each of some windows, evenly spaced over a trace."""
    cluster = (HostPool(kind=source.kinds[0], hosts=hosts, devices=8),)
    configs = [
        ElasticConfig(trace=window(trace, at, JOBS), source=source, cluster=cluster)
        for at in np.linspace(0, len(trace) - JOBS, WINDOWS, dtype=int).tolist()
    ]
    return DummyVecEnv([lambda c=c: ElasticStreamEnv(c, slots=8) for c in configs])


if data := os.environ.get("MESHWRIGHT_DATA"):
    folder, hosts = Path(data) / "traces" / "elasticflow", 8
    source = elasticflow_throughputs(folder / "throughputs_A100")
    files = [folder / f"cluster{number}.csv.gz" for number in ("01", "03")]
    traces = [read_trace(file, "elasticflow", source) for file in files]
else:
    rates, hosts = np.zeros((1, 1, 4, 2)), 2  # models, types, degrees, layouts
    rates[0, 0, :, 0] = 1.0, 1.9, 3.5, 6.0
    table = {"models": (ModelKey("net", 64),), "degrees": (1, 2, 4, 8)}
    source = ThroughputTable(name="drawn", kinds=("gpu",), table=rates, **table)
    traces = [drawn(seed, source) for seed in range(2)]
train, held_out = [windows(trace, source, hosts) for trace in traces]
settings = {"n_steps": 64, "batch_size": 256, "n_epochs": 5, "learning_rate": 1e-3}
model = MaskablePPO("MultiInputPolicy", train, gamma=0.999, seed=0, **settings)
model.learn(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
# Each job in time brings +1, each that is blocked -1.
reward, _ = evaluate_policy(model, held_out, WINDOWS, warn=False)
print(f"jobs blocked on {WINDOWS} windows that were not trained on:")
print(f"  PPO             {(1 - reward / JOBS) / 2:.1%}")
for rule in ("elasticflow", "cheapest-first"):
    found = []
    for session in held_out.get_attr("session"):
        play(session, make_rule(rule))
        found.append(session.summary().blocked)
    print(f"  {rule:15} {np.mean(found):.1%}")
