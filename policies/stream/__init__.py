"""Policies of the job stream on any cluster: planners, training and evaluation."""
