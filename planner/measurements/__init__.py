"""Measured training runs, what they were taken with, and constants fitted to them."""
