"""Bytes and seconds of communication: groups on a network, and the layers' collectives.

Communication between replicas is priced in :mod:`planner.cost.replicas`, transfers
between stages in :mod:`planner.cost.pipelines`.
"""
