"""A model whose parameters are recorded, and computed where their shards live.

A factory is run under a recording: its operations go on a tape. From the tape each
process computes its own shards, and no process holds the whole model.
"""
