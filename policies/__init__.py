"""Learned partitioners and their training. May import planner and envs."""
