"""Members of a federation: each trains by its own plan, and they exchange weights.

Processes of a member are a world of their own. What members tell each other goes
through the store that all processes meet by, and through groups of their own of those
who own the same weights::

    run           train as one process of a member
    exchange      agreement on who exchanges, and the rings in which they do
    weights       which rank of a member holds and exchanges which weight
    saving        checkpoints of members
"""

from executors.federation.run import FederationResult, run_federation
from executors.federation.saving import require_exchange

__all__ = ["FederationResult", "require_exchange", "run_federation"]
