"""Jobs arrive at a shared cluster: place them by a rule, and by the policy that ships.

    python examples/job_stream.py --cluster dgx-a100:4 --load 1.25

One learns what a decision is (over how many devices, and which plan, or not at all),
how an episode is run, and what the learned policy does otherwise than the rule: both
see the same jobs. Needs ``pip install "meshwright[learn]"``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from envs.stream.arrivals import StreamLaw
from envs.stream.env import JobStreamEnv
from policies.by_name import make_stream_policy

POLICIES = ("min_feasible", "learned")


def play(
    name: str, env: JobStreamEnv, seed: int, shown: int
) -> tuple[dict[str, Any], Counter[str]]:
    """One episode; prints the first decisions."""
    policy = make_stream_policy(name, env)
    made: Counter[str] = Counter()
    obs, info = env.reset(seed=seed)
    ended = False
    while not ended:
        action = policy.predict(obs, env.action_masks())
        obs, _, ended, _, info = env.step(action)
        placed = info["outcome"] == "placed"
        said = f"{info['degree']} devices" if placed else info["outcome"]
        if made.total() < shown:
            print(f"  job {made.total() + 1}: {said}, {info.get('plan', 'no plan')}")
        made[said] += 1
    return info["summary"], made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="dgx-a100:4")
    parser.add_argument("--load", type=float, default=1.25, help="1 is all it can do")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hours", type=float, default=200.0)
    parser.add_argument("--quick", action="store_true", help="50 hours on two hosts")
    options = parser.parse_args()
    if options.quick:
        options.cluster, options.hours = "dgx-a100:2", 50.0

    env = JobStreamEnv(
        cluster=options.cluster,
        law=StreamLaw(load=options.load),
        horizon_s=options.hours * 3600.0,
    )
    rates = {}
    for name in POLICIES:
        print(f"{name}:")
        summary, made = play(name, env, options.seed, shown=4)
        rates[name] = summary["blocking_rate"]
        for what, count in made.most_common():
            print(f"  {count:>4} x {what}")
        print(
            f"  blocked {summary['blocking_rate']:.1%}, busy "
            f"{summary['utilisation']:.1%} of the time, a job takes "
            f"{summary['mean_jct_s'] / 3600.0:.2f} h on average\n"
        )
    rule, learned = (rates[name] for name in POLICIES)
    print(f"the learned policy blocks {learned:.1%} of the jobs, the rule {rule:.1%}")


if __name__ == "__main__":
    main()
