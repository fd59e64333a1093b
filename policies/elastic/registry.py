"""Schedulers of elastic jobs by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from envs.elastic.session import Allocation, ElasticSession
from planner.errors import UnknownNameError
from policies.elastic.cheapest import CheapestFirst
from policies.elastic.mixed import ArenaLike, Assignment
from policies.elastic.rules import EarliestDeadline, ElasticFlow, Gandiva, Tiresias

__all__ = ["ELASTIC_RULES", "ElasticRule", "Rule", "make_rule", "play"]


class ElasticRule(Protocol):
    """A scheduler: it sees a session and decides."""

    def decide(self, session: ElasticSession) -> Allocation:
        """Return what the jobs get now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A registered scheduler.

    Attributes:
        make: Makes one for an episode.
        source: The publication.
        promises: Whether it turns jobs away, and promises the others their deadlines.
        mixed: Whether it knows several device types.
    """

    make: Callable[[], ElasticRule]
    source: str
    promises: bool = False
    mixed: bool = False


def make_rule(name: str) -> ElasticRule:
    """Make a scheduler by its name in :data:`ELASTIC_RULES`.

    Raises:
        UnknownNameError: If there is no such scheduler.
    """
    if name not in ELASTIC_RULES:
        raise UnknownNameError("scheduler of elastic jobs", name, ELASTIC_RULES)
    return ELASTIC_RULES[name].make()


def play(session: ElasticSession, rule: ElasticRule, seed: int = 0) -> None:
    """Let a scheduler decide an episode from its begin to its end.

    Args:
        session: The session.
        rule: The scheduler, made for this episode.
        seed: Seed of the failures.
    """
    session.begin(seed)
    while not session.over:
        session.apply(rule.decide(session))


def _learned() -> ElasticRule:
    # torch, which reads weights, is slow to import.
    from policies.elastic.learned import NetworkOrder, load_network

    return CheapestFirst(NetworkOrder(load_network()))


#: Schedulers by name.
ELASTIC_RULES: Mapping[str, Rule] = {
    "edf": Rule(make=EarliestDeadline, source="EDF in Gu et al. 2023 (ElasticFlow)"),
    "edf+admission": Rule(
        make=lambda: EarliestDeadline(admit=True),
        source="EDF with admission control in Gu et al. 2023 (ElasticFlow)",
        promises=True,
    ),
    "gandiva": Rule(make=Gandiva, source="Xiao et al. 2018 (Gandiva)"),
    "tiresias": Rule(make=Tiresias, source="Gu et al. 2019 (Tiresias)"),
    "elasticflow": Rule(
        make=ElasticFlow, source="Gu et al. 2023 (ElasticFlow)", promises=True
    ),
    "elasticflow-published": Rule(
        make=lambda: ElasticFlow(greedy="most", together=True),
        source="pkusys/ElasticFlow, commit 04a0109, scheme ef-accessctrl",
        promises=True,
    ),
    "cheapest-first": Rule(
        make=CheapestFirst,
        source="own; jobs are chosen as in Moore 1968",
        promises=True,
        mixed=True,
    ),
    "learned": Rule(
        make=_learned,
        source="own; trained by evolution strategies, Salimans et al. 2017",
        promises=True,
        mixed=True,
    ),
    "gavel-like": Rule(
        make=lambda: Assignment(elastic=False),
        source="Narayanan et al. 2020 (Gavel)",
        mixed=True,
    ),
    "sia-like": Rule(
        make=lambda: Assignment(elastic=True),
        source="Jayaram Subramanya et al. 2023 (Sia)",
        mixed=True,
    ),
    "arena-like": Rule(
        make=ArenaLike, source="sjtu-epcc/arena (Arena, EuroSys 2026)", mixed=True
    ),
}
