"""A model cut into pipeline stages, and the schedule that runs them.

The model is exported, each value of its graph is placed on a stage, and stages become
modules that torch's schedules run.
"""
