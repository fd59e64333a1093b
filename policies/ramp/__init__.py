"""Policies of the job stream on RAMP: who they are, how they are trained and judged."""
