"""Orders that are drawn, and how likely they were."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from envs.partition.ordering import Ordering
from policies.partition.decoding import Drawn, draw_orders, log_likelihood
from policies.partition.examples import Example
from policies.partition.network import PartitionNetwork
from tests.envs.partition.small import small_world
from tests.policies.partition.made import example_of, network, site_world


def _draw(
    net: PartitionNetwork, example: Example, seed: int, many: int, **options: object
) -> Drawn:
    choice = np.arange(many) * 7 % len(example.choices)
    return draw_orders(
        net,
        example.seen,
        net.encode(example.seen),
        example.groups,
        example.choices,
        choice,
        np.random.default_rng(seed),
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("seed", range(2))
def test_draws_are_orders_of_the_usable_groups_and_come_again(seed: int) -> None:
    net, example = network(seed), example_of(small_world(devices="any"))
    drawn = _draw(net, example, seed, 24)
    for choice, sequence in zip(drawn.choice, drawn.sequence, strict=True):
        usable = example.choices.subsets[example.choices.subset[choice]].usable
        members = np.flatnonzero(usable).tolist()
        assert sorted(sequence[: len(members)].tolist()) == members
        assert (sequence[len(members) :] == -1).all()
    again = _draw(net, example, seed, 24)
    assert (again.sequence == drawn.sequence).all()
    assert (_draw(net, example, seed + 9, 24).sequence != drawn.sequence).any()
    assert drawn.steps is None


def test_greedy_orders_need_no_luck() -> None:
    net, example = network(), example_of(site_world())
    first = _draw(net, example, 0, 12, greedy=12)
    second = _draw(net, example, 1, 12, greedy=12)
    assert (first.sequence == second.sequence).all()
    # Cold enough, drawing is the same.
    cold = _draw(net, example, 2, 12, temperature=1e-6)
    assert (cold.sequence == first.sequence).all()


@torch.no_grad()
def test_likelihoods_are_the_products_of_the_steps() -> None:
    net, example = network(), example_of(small_world(devices="any"))
    drawn = _draw(net, example, 3, 16, keep=True)
    encoded = net.encode(example.seen)
    logs, entropy = log_likelihood(net, example.seen, encoded, drawn)
    subsets = example.choices.subsets
    uncertain = []
    for at, choice in enumerate(drawn.choice.tolist()):
        subset = subsets[example.choices.subset[choice]]
        ordering = Ordering.start(
            sizes=example.groups.sizes,
            kinds=example.groups.kinds,
            groups=example.seen.groups,
            pairs=example.seen.pairs,
            mesh=example.choices.mesh[[choice]],
            count=np.array([subset.count]),
            usable=subset.usable[None, :],
        )
        base = net.bases(example.seen, encoded, torch.tensor([choice]))
        total, step = 0.0, 0
        while ordering.going.any():
            logits = net.step_logits(base, torch.from_numpy(ordering.describe()))[0]
            left = np.flatnonzero(ordering.left[0])
            parts = torch.log_softmax(logits[left], dim=0)
            group = int(drawn.sequence[at, step])
            total += float(parts[left.tolist().index(group)])
            uncertain.append(float(-(parts.exp() * parts).sum()))
            ordering.take(np.array([group]))
            step += 1
        assert float(logs[at]) == pytest.approx(total, abs=1e-4)
    assert float(entropy) == pytest.approx(np.mean(uncertain), abs=1e-4)


@torch.no_grad()
def test_orders_come_as_often_as_they_are_likely() -> None:
    net, example = network(), example_of(site_world(3, global_batch=6))
    counts = np.array([f.count for f in example.choices.subsets])[
        example.choices.subset
    ]
    (choice,) = np.flatnonzero((counts == 3) & (example.choices.mesh[:, 0] == 3))[:1]
    encoded, many = net.encode(example.seen), 4000
    drawn = draw_orders(
        net,
        example.seen,
        encoded,
        example.groups,
        example.choices,
        np.full(many, choice),
        np.random.default_rng(0),
        keep=True,
    )
    logs, _ = log_likelihood(net, example.seen, encoded, drawn)
    total = 0.0
    for order in itertools.permutations(range(3)):
        same = np.flatnonzero((drawn.sequence == order).all(axis=1))
        likely = float(logs[same[0]].exp())
        total += likely
        assert len(same) / many == pytest.approx(likely, abs=0.03)
    assert total == pytest.approx(1.0, abs=1e-4)


def test_what_was_not_kept_cannot_be_learned_from() -> None:
    net, example = network(), example_of(site_world())
    drawn = _draw(net, example, 0, 2)
    with pytest.raises(ValueError, match="drawn without keep=True"):
        log_likelihood(net, example.seen, net.encode(example.seen), drawn)
    kept = _draw(net, example, 0, 2, keep=True)
    with pytest.raises(ValueError, match="drawn without keep=True"):
        log_likelihood(
            net, example.seen, net.encode(example.seen), replace(kept, left=None)
        )
