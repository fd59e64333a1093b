"""Price one strategy with its own stages, exactly: what ranks the finalists.

The files bear the same names as those of :mod:`planner.cost.table`, which prices many
strategies at once: the stages, their memory, and the step.
"""
