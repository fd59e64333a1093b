"""Times of single kernels and collectives, as surfaces fitted to measured tables.

One module a kind: its form, its constants, and ``seconds(...)`` over arrays of shapes.
Constants have no dimension where they can, so that a device without a table takes those
of its family. :mod:`planner.measurements.kernels` has the fitted ones.
"""
