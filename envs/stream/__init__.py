"""A stream of jobs on any cluster: the world of ``meshwright/JobStream-v0``."""
