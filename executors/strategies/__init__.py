"""Strategies that plans apply to modules, one a file, and their building blocks.

Parallelism (tensor, context, expert), recomputation, compilation, prefetching and
compressed gradients. :mod:`executors.parallelize` puts them together.
"""
