"""Price a whole table of strategies at once, by closed forms: what prunes the space.

Arrays over rows (struct of arrays) run through compiled loops; stages are cut evenly by
time. The files bear the same names as those of :mod:`planner.cost.strategy`.
"""
