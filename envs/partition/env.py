"""``meshwright/Partition-v0``: one episode builds one plan, for gymnasium."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.partition.ordering import Ordering
from envs.partition.padding import Sizes, observation_space, pad
from envs.partition.problem import PLAIN, Built, Fidelity, Problem, ProblemStore
from envs.partition.sampler import WorldSampler
from envs.partition.world import World
from planner.errors import StrategyError, UnknownNameError
from planner.search import Candidate

__all__ = ["PartitionEnv"]

Floats = NDArray[np.float32]

#: Kinds of worlds that are drawn unless others are given.
_KINDS = ("mixed", "uneven", "sites", "occupied", "uniform")


class PartitionEnv(gymnasium.Env[dict[str, Any], np.int64]):
    """A mesh is chosen, then groups of devices are put in order until it is full.

    Actions below ``max_meshes`` point at meshes, one of which the first decision takes;
    the others point at groups of devices (the free devices of a host). A mesh sets the
    devices of a stage and those that hold the same weights; groups fill it in the order
    in which they are taken. All else is found by exact methods, so that every plan is
    legal and fits: the best schedule, microbatch, ZeRO stage and recomputation by
    closed forms, cuts by dynamic programming, and the price by the simulator.

    The reward comes at the end: the logarithm of the baseline's score over the plan's,
    no lower than ``worst``. An order in which nothing of the mesh fits in memory, or an
    action that is masked, ends the episode with the baseline's plan and the reward
    ``worst``.

    The observation is a flat Dict of float32 arrays with room for ``max_units`` (U),
    ``max_groups`` (G) and ``max_meshes`` (M); padding is 0, in edges -1:

    - ``units`` [U, UNIT_FEATURES], ``unit_mask`` [U], ``unit_edges`` [2, 8 U];
    - ``groups`` [G, GROUP_FEATURES], ``group_mask`` [G], ``group_edges`` [2, 12 G];
    - ``meshes`` [M, MESH_FEATURES], ``mesh_mask`` [M]: on offer, fitting or not;
    - ``whole`` [WHOLE_FEATURES];
    - ``steps`` [G, STEP_FEATURES], ``left`` [G]: features of each group as the next
      one, and the groups that may be taken;
    - ``chosen`` [1]: the mesh, -1 before; ``phase`` [1]: 1 once there is one.

    ``info`` has ``world``, ``baseline`` (``name`` and ``score``), ``mesh`` once
    chosen, ``placed`` (devices) and ``groups`` (taken so far); at the end ``built``
    (``own``, ``overflow`` or ``masked``), ``score``, ``row``, ``order`` (device ids by
    rank), ``strategy`` and ``step_time_s``, the last two None with closed forms alone.

    Args:
        worlds: A sampler to draw from, or some worlds; worlds of every kind to train
            on if None. Worlds of a sampler that are too large are skipped.
        max_units: Most pipeline units of a model.
        max_groups: Most groups of devices.
        max_meshes: Most meshes on offer; if there are more, a sample spread over all.
        baselines: Partitioners whose best plan is the baseline; ``plain`` is the best
            mesh under the best plain order.
        fidelity: ``simulated``, or ``analytic`` for closed forms alone: faster.
        worst: Lowest reward.
        pool: Worlds of a sampler that are drawn from.

    Raises:
        StrategyError: If there are no worlds, or a number is out of range.
        UnknownNameError: If there is no such fidelity.
    """

    def __init__(
        self,
        worlds: WorldSampler | Sequence[World] | None = None,
        *,
        max_units: int = 512,
        max_groups: int = 512,
        max_meshes: int = 256,
        baselines: Sequence[str] = ("expert", PLAIN),
        fidelity: Fidelity = "simulated",
        worst: float = -2.0,
        pool: int = 4096,
    ) -> None:
        if fidelity not in get_args(Fidelity):
            raise UnknownNameError("fidelity", fidelity, get_args(Fidelity))
        if not worst < 0:
            raise StrategyError(f"worst={worst} of the rewards is below 0")
        if worlds is None:
            worlds = WorldSampler(kinds=_KINDS, split="train")
        self.worst = worst
        self.sizes = Sizes(units=max_units, groups=max_groups, meshes=max_meshes)
        self.store = ProblemStore(
            worlds, self.sizes, baselines=baselines, fidelity=fidelity, pool=pool
        )
        self.observation_space = observation_space(self.sizes)
        self.action_space = spaces.Discrete(max_meshes + max_groups)
        self._problem: Problem | None = None
        self._ordering: Ordering | None = None
        self._choice = -1
        self._candidate: Candidate | None = None
        self._obs: dict[str, Floats] = {}
        self._masks = np.zeros(max_meshes + max_groups, dtype=np.bool_)
        self._masks[0] = True

    def alike(self) -> PartitionEnv:
        """Make another environment that shares the worlds and their preparation."""
        store, sizes = self.store, self.sizes
        made = PartitionEnv(
            store.worlds,
            max_units=sizes.units,
            max_groups=sizes.groups,
            max_meshes=sizes.meshes,
            baselines=store.baselines,
            fidelity=store.fidelity,
            worst=self.worst,
            pool=store.pool,
        )
        made.store = store
        return made

    @property
    def problem(self) -> Problem:
        """Problem of the episode.

        Raises:
            StrategyError: Before the first reset.
        """
        if self._problem is None:
            raise StrategyError("no episode has begun; call reset() first")
        return self._problem

    @property
    def candidate(self) -> Candidate | None:
        """Plan that the last episode built, with its price.

        None during an episode, and with closed forms alone.
        """
        return self._candidate

    def action_masks(self) -> NDArray[np.bool_]:
        """Return the actions that are allowed. Shape [max_meshes + max_groups]."""
        return self._masks.copy()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Floats], dict[str, Any]]:
        """Begin with the next world.

        Args:
            seed: Restarts the sequence of worlds.
            options: ``world``: the :class:`World` to take instead of the next.

        Raises:
            NoFeasiblePlanError: If no mesh of a given world fits.
            StrategyError: If a given world is too large, or all that are drawn are; or
                if an option is not known.
        """
        super().reset(seed=seed)
        options = options or {}
        if unknown := sorted(set(options) - {"world"}):
            raise StrategyError(f"options[{unknown[0]!r}] is unknown; there is 'world'")
        world = options.get("world")
        self._problem = (
            self.store.draw(self.np_random) if world is None else self.store.open(world)
        )
        self._ordering, self._choice, self._candidate = None, -1, None
        self._obs = pad(self._problem.seen, self.sizes)
        self._masks[:] = False
        self._masks[: len(self._problem.fits)] = self._problem.fits
        return self._see(), self._info()

    def step(
        self, action: np.int64
    ) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        """Take a mesh, or the next group of devices.

        Raises:
            StrategyError: If the action is out of range, or no episode is going on.
        """
        problem, chosen = self.problem, int(action)
        if self._choice < 0 and not self._obs:
            raise StrategyError("the episode has ended; call reset()")
        if not 0 <= chosen < len(self._masks):
            raise StrategyError(
                f"action={chosen} is not from 0 to {len(self._masks) - 1}"
            )
        if not self._masks[chosen]:
            return self._end(None, "masked")
        if self._ordering is None:
            self._choice = chosen
            self._ordering = self._begin_order(problem, chosen)
        else:
            self._ordering.take(np.array([chosen - self.sizes.meshes]))
        if self._ordering.going.any():
            self._describe(self._ordering)
            return self._see(), 0.0, False, False, self._info()
        built = problem.build(self._choice, self._ordering.sequences()[0])
        return self._end(built, "own" if np.isfinite(built.score) else "overflow")

    def _begin_order(self, problem: Problem, choice: int) -> Ordering:
        subset = problem.choices.subsets[problem.choices.subset[choice]]
        return Ordering.start(
            sizes=problem.groups.sizes,
            kinds=problem.groups.kinds,
            groups=problem.seen.groups,
            pairs=problem.seen.pairs,
            mesh=problem.choices.mesh[[choice]],
            count=np.array([subset.count]),
            usable=subset.usable[None, :],
        )

    def _describe(self, ordering: Ordering) -> None:
        """Write the order so far to the observation and the masks."""
        many, offset = len(self.problem.groups), self.sizes.meshes
        left = ordering.left[0]
        self._obs["steps"][:many] = ordering.describe()[0]
        self._obs["left"][:many] = left
        self._obs["chosen"][0], self._obs["phase"][0] = self._choice, 1.0
        self._masks[:] = False
        self._masks[offset : offset + many] = left

    def _end(
        self, built: Built | None, how: str
    ) -> tuple[dict[str, Floats], float, bool, bool, dict[str, Any]]:
        problem, baseline = self.problem, self.problem.baseline
        info: dict[str, Any] = {**self._info(), "built": how, "score": baseline.score}
        self._candidate, reward = baseline.candidate, self.worst
        if built is not None and how == "own":
            reward = max(self.worst, float(np.log(baseline.score / built.score)))
            self._candidate = built.candidate
            info |= {"score": built.score, "row": built.row}
            info["order"] = tuple(built.order.tolist())
        if self._candidate is not None:
            info["strategy"] = self._candidate.strategy
            info["step_time_s"] = self._candidate.cost.step_time_s
            info.setdefault("order", self._candidate.strategy.device_ids())
        last = self._see()
        self._obs, self._ordering, self._choice = {}, None, -1
        # Nothing may be chosen any more, but samplers treat an empty mask as a full
        # one.
        self._masks[:] = False
        self._masks[: len(problem.fits)] = problem.fits
        for name in ("row", "order", "strategy", "step_time_s"):
            info.setdefault(name, None)
        return last, reward, True, False, info

    def _see(self) -> dict[str, Floats]:
        return {name: array.copy() for name, array in self._obs.items()}

    def _info(self) -> dict[str, Any]:
        problem, ordering = self.problem, self._ordering
        info: dict[str, Any] = {
            "world": problem.world.name,
            "baseline": {
                "name": problem.baseline.name,
                "score": problem.baseline.score,
            },
            "mesh": problem.mesh(self._choice) if self._choice >= 0 else None,
            "placed": 0,
            "groups": (),
        }
        if ordering is not None:
            taken = ordering.state.sequence[0, : int(ordering.state.length[0])]
            info["placed"] = int(ordering.state.position[0])
            info["groups"] = tuple(taken.tolist())
        return info
