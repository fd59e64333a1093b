"""Gymnasium worlds over the planner's cost model. May import planner, never policies."""
