"""Time, live memory and messages of a step on this rank.

Modes that see every operation count while the step runs; dry runs use some of them.
"""
