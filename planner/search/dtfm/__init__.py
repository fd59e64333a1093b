"""Assignment of devices to stages by communication alone, after DT-FM.

A grid of pipeline stages and replicas is laid over devices that are joined by uneven
links. Source: Yuan et al. 2022, DT-FM (2206.01288), section 3.
"""

from planner.search.dtfm.cost import Communication, Placement, place
from planner.search.dtfm.search import MemeticResult, memetic_search

__all__ = ["Communication", "MemeticResult", "Placement", "memetic_search", "place"]
