"""The parts of a probe: the process group, computing, talking."""
