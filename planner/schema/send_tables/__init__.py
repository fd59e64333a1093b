"""Collectives as tables of messages."""

from planner.schema.send_tables.algorithms import (
    ALGORITHMS,
    direct,
    halving,
    hierarchy,
    ring,
    tree,
)
from planner.schema.send_tables.table import CollectiveKind, Send, SendTable

__all__ = [
    "ALGORITHMS",
    "CollectiveKind",
    "Send",
    "SendTable",
    "direct",
    "halving",
    "hierarchy",
    "ring",
    "tree",
]
