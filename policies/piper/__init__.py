"""A learned solver of layers that choose a parallelism each."""
