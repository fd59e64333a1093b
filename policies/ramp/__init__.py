"""Policies of the job stream on RAMP: planners, training and evaluation."""
