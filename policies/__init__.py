"""Learned partitioners: encoders, training, checkpoints. May import planner and envs."""
