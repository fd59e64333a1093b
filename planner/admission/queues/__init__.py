"""Queues that admission control reads and writes: SLURM, Kueue and Ray."""

from planner.admission.queues.base import (
    Entry,
    Launch,
    Queue,
    QueueError,
    Snapshot,
)
from planner.admission.queues.kueue import KueueQueue
from planner.admission.queues.ray_cluster import RayQueue
from planner.admission.queues.slurm import SlurmQueue

__all__ = [
    "Entry",
    "KueueQueue",
    "Launch",
    "Queue",
    "QueueError",
    "RayQueue",
    "SlurmQueue",
    "Snapshot",
]
