"""Splits of graphs that are no chain: a network orders, dynamic programming cuts."""
