"""Fitting the cost model to measurements, and judging it by them."""
