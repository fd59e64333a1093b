"""Elastic jobs of real traces: the world of ``meshwright/ElasticStream-v0``."""
