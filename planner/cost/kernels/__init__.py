"""Time of ops on a device: a model's kernels as arrays, and a roofline over them.

Shapes, dtypes and frameworks decide how much of a datasheet's peak a kernel reaches.
"""
