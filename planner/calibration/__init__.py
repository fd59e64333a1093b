"""Fitting the cost model's constants to measurements."""
