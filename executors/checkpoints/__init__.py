"""The state of a run by names that no plan changes, on disk and back.

A folder holds checkpoints; each is the model, the optimizer and the generators, written
by all ranks together. Any plan for the same model can go on from one.
"""
