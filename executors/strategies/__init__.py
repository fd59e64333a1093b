"""What a plan can do to modules, one strategy a file, and what these are made of.

Parallelism (tensor, context, expert), recomputation, compilation, prefetching and
compressed gradients. :mod:`executors.parallelize` puts them together.
"""
