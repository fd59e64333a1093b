"""What a step takes on this rank: time, live memory, messages.

Modes that see every operation count while the step runs; dry runs use some of them.
"""
