"""Orders of device groups as ranks: layouts, moves, prices.

On machines that differ, or whose links do, a strategy is half the answer; the other
half is which devices share a stage, and in which order stages follow one another.
"""
