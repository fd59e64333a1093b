"""Gymnasium worlds over the cost model. May import planner, never policies."""
