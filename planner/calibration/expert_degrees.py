"""Over how many ranks a measured run spread its experts."""

from __future__ import annotations

from planner.calibration.frameworks import Framework
from planner.calibration.points import Point

__all__ = ["expert_degree"]

#: Ranks of a host, within which runs whose tables leave ep out are taken to exchange
#: tokens: an assumption, and what the recipes of NVIDIA's tables do on H100 or exceed.
_HOST = 8


def expert_degree(
    point: Point, experts: int, framework: Framework, ways: int, why: list[str]
) -> int:
    """The ep that a row is priced with.

    Where it is blank, Megatron-LM and what is built like it spread experts over as
    much of a host as divides both: one rank can hardly hold those of a model that
    anybody measures. Others are taken to keep or gather all of them.

    Args:
        point: The row.
        experts: Of a layer; 0 without.
        framework: That it ran in.
        ways: Ranks over which plans may spread them: dp x cp.
        why: Takes what was assumed.
    """
    if point.ep is None:
        if not experts or not framework.recipe.name.startswith("megatron"):
            return 1
        ep = max(d for d in range(1, _HOST + 1) if ways % d == 0 and experts % d == 0)
        why.append(f"ep={ep}, not given: experts over a host's ranks")
        return ep
    fits = [d for d in range(1, point.ep + 1) if ways % d == 0 and point.ep % d == 0]
    if fits[-1] != point.ep:
        why.append(
            f"ep={point.ep} priced as {fits[-1]}: dp x cp={ways}, and plans spread "
            f"experts over no tp"
        )
    return fits[-1]
