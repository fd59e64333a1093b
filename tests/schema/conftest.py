"""Hypothesis on a busy machine: slow is not wrong."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "schema", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("schema")
