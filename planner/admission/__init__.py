"""Admission control of jobs with deadlines on a shared cluster."""

from planner.admission.check import guarantee_violations
from planner.admission.decide import admit, reschedule

__all__ = ["admit", "guarantee_violations", "reschedule"]
