"""Fingerprints: equal models and files have equal ones."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from planner.capture import load_model
from planner.schema.base import fingerprint_bytes, fingerprint_parameters
from tests.plans import gpt2_graph, gpt2_plan


def test_of_bytes() -> None:
    assert fingerprint_bytes(b"abc") == hashlib.sha256(b"abc").hexdigest()[:16]


def test_order_and_dtype_do_not_count() -> None:
    shapes = [("a", (2, 3)), ("b", (4,))]
    assert fingerprint_parameters(shapes) == fingerprint_parameters(shapes[::-1])
    module = nn.Linear(3, 2)
    both = [
        fingerprint_parameters((n, p.shape) for n, p in made.named_parameters())
        for made in (module, module.bfloat16())
    ]
    assert both[0] == both[1]


def test_names_and_shapes_count() -> None:
    base = fingerprint_parameters([("a", (2, 3))])
    assert base != fingerprint_parameters([("a", (3, 2))])
    assert base != fingerprint_parameters([("b", (2, 3))])
    assert base != fingerprint_parameters([("a", (2, 3)), ("b", (1,))])


def test_a_plan_has_the_fingerprint_of_the_built_model() -> None:
    with torch.device("meta"):
        model = load_model("gpt2").build()
    found = fingerprint_parameters((n, p.shape) for n, p in model.named_parameters())
    assert gpt2_plan().model.fingerprint == found
    assert gpt2_plan().model.parameters == gpt2_graph().num_parameters
