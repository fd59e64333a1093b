"""Search for the order of device groups as ranks: layouts, changes, prices.

On machines that differ, or whose links differ, a strategy is half of the answer; the
other half is which devices share a stage, and the order in which stages follow one
another. An *arrangement* is a mesh with an order of device groups.
"""
