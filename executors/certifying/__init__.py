"""Certificates: a plan's small twin is trained, and held to plain training."""
