"""Algorithms for a sum over ranks, as send tables.

Each takes the ranks in an order and the part of the tensor that each of them sums.
Sizes are of the whole tensor, n bytes over p ranks whose links all take α seconds a
message and 1/β seconds a byte:

===========  ==============  ==============================================
algorithm    steps           seconds
===========  ==============  ==============================================
ring         2 (p - 1)       2 (p - 1) (α + n / p β)
halving      2 log2 p        2 log2 p α + 2 (p - 1) / p n / β
direct       1 + k           (1 + k) α + max over ranks (1 + (p - 2) share) n / β
tree         2 depth + k - 1  each of k pieces follows the one before
hierarchy    2 + inner's     within a domain directly, then between domains
===========  ==============  ==============================================

Source: Thakur, Rabenseifner, Gropp 2005, Optimization of Collective Communication
Operations in MPICH, for ring and halving; Sanders, Speck, Träff 2009, Two-tree
algorithms, for the tree; Ryabinin et al. 2021, arXiv 2103.03239, for shares.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from planner.errors import StrategyError
from planner.schema.send_tables.table import Send, SendTable

__all__ = ["ALGORITHMS", "direct", "halving", "hierarchy", "ring", "tree"]


@dataclass(slots=True)
class _Builder:
    """Messages and chunks as they are found."""

    shares: list[float] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)

    def chunks(self, shares: Sequence[float]) -> list[int]:
        """Cut new chunks."""
        first = len(self.shares)
        self.shares.extend(shares)
        return list(range(first, len(self.shares)))

    def send(
        self, step: int, source: int, destination: int, chunks: Sequence[int], add: bool
    ) -> None:
        """Send chunks from one rank to another, unless it is the same."""
        if source != destination:
            for chunk in chunks:
                self.sends.append(Send(step, source, destination, chunk, add))

    def table(self, ranks: int) -> SendTable:
        """All of it, as one all-reduce."""
        return SendTable(
            collective="all_reduce",
            ranks=ranks,
            shares=tuple(self.shares),
            sends=tuple(self.sends),
        )


#: Sums a part of the tensor over ranks: builder, ranks in order, part, first step;
#: returns the chunks that it cut the part into, and the step after its last.
_Part = Callable[[_Builder, Sequence[int], float, int], tuple[list[int], int]]


def _ring(
    b: _Builder, ranks: Sequence[int], part: float, start: int
) -> tuple[list[int], int]:
    """Chunk c ends its way round at rank c - 1, summed, and goes round once more."""
    p = len(ranks)
    chunks = b.chunks([part / p] * p)
    for step in range(2 * (p - 1)):
        for place, rank in enumerate(ranks):
            chunk = chunks[(place - step) % p]
            b.send(
                start + step, rank, ranks[(place + 1) % p], [chunk], add=step < p - 1
            )
    return chunks, start + 2 * (p - 1)


def _halving(
    b: _Builder, ranks: Sequence[int], part: float, start: int
) -> tuple[list[int], int]:
    """Trade halves with ever nearer ranks, then put them together again.

    Ranks beyond the largest power of two give theirs to a partner first.
    """
    p = len(ranks)
    core = 1 << (p.bit_length() - 1)
    chunks = b.chunks([part / core] * core)
    step = start
    if core < p:
        for extra in range(core, p):
            b.send(step, ranks[extra], ranks[extra - core], chunks, add=True)
        step += 1
    distance = core // 2
    while distance:
        for place in range(core):
            other = place ^ distance
            first = other // distance * distance
            half = chunks[first : first + distance]
            b.send(step, ranks[place], ranks[other], half, add=True)
        step, distance = step + 1, distance // 2
    distance = 1
    while distance < core:
        for place in range(core):
            first = place // distance * distance
            held = chunks[first : first + distance]
            b.send(step, ranks[place], ranks[place ^ distance], held, add=False)
        step, distance = step + 1, distance * 2
    if core < p:
        for extra in range(core, p):
            b.send(step, ranks[extra - core], ranks[extra], chunks, add=False)
        step += 1
    return chunks, step


def _direct(fractions: Sequence[float]) -> _Part:
    """Every rank sums its part of the tensor, and sends the sum to all."""

    def part_of(
        b: _Builder, ranks: Sequence[int], part: float, start: int
    ) -> tuple[list[int], int]:
        shares = list(fractions) or [1 / len(ranks)] * len(ranks)
        chunks = b.chunks([part * share for share in shares])
        for chunk, owner, share in zip(chunks, ranks, shares, strict=True):
            for rank in ranks if share else ():
                b.send(start, rank, owner, [chunk], add=True)
                b.send(start + 1, owner, rank, [chunk], add=False)
        return [c for c, share in zip(chunks, shares, strict=True) if share], start + 2

    return part_of


def _tree(pieces: int) -> _Part:
    """Two binary trees, each over half of the pieces, one in the order turned round.

    Who has two children in one tree has at most one in the other, about.
    """

    def part_of(
        b: _Builder, ranks: Sequence[int], part: float, start: int
    ) -> tuple[list[int], int]:
        chunks = b.chunks([part / pieces] * pieces)
        depth, end = len(ranks).bit_length() - 1, start
        for index, chunk in enumerate(chunks):
            order = ranks if index % 2 == 0 else ranks[::-1]
            first = start + index
            for place in range(1, len(order)):
                level = (place + 1).bit_length() - 1
                child, parent = order[place], order[(place - 1) // 2]
                b.send(first + depth - level, child, parent, [chunk], add=True)
                b.send(first + depth + level - 1, parent, child, [chunk], add=False)
            end = first + 2 * depth
        return chunks, end

    return part_of


def _whole(part_of: _Part, order: Sequence[int]) -> SendTable:
    _require_order(order)
    b = _Builder()
    if len(order) == 1:
        b.chunks([1.0])
    else:
        part_of(b, list(order), 1.0, 0)
    return b.table(len(order))


def _require_pieces(pieces: int) -> None:
    if pieces < 1:
        raise StrategyError(f"pieces={pieces}; use 1 or more")


def _piped(part_of: _Part, pieces: int) -> _Part:
    """Do all for each of some pieces, each a step behind the one before."""
    _require_pieces(pieces)

    def piece_by_piece(
        b: _Builder, ranks: Sequence[int], part: float, start: int
    ) -> tuple[list[int], int]:
        chunks, end = [], start
        for piece in range(pieces):
            more, end = part_of(b, ranks, part / pieces, start + piece)
            chunks += more
        return chunks, end

    return piece_by_piece


def _require_order(order: Sequence[int]) -> None:
    if not order or sorted(order) != list(range(len(order))):
        raise StrategyError(
            f"order={tuple(order)}; name each rank from 0 to {len(order) - 1} once"
        )


def ring(order: Sequence[int]) -> SendTable:
    """Pass chunks round a ring, twice.

    Args:
        order: Ranks, each of which sends to the next, the last to the first.
    Raises:
        StrategyError: If a rank is missing or named twice; so do the others.
    """
    return _whole(_ring, order)


def halving(order: Sequence[int]) -> SendTable:
    """Halve recursively, then double; ranks beyond a power of two join in at the ends.

    Args:
        order: Ranks; neighbours trade last, when messages are shortest.
    """
    return _whole(_halving, order)


def direct(fractions: Sequence[float], pieces: int = 1) -> SendTable:
    """Send each part to the rank that sums it, and its sum to all.

    Args:
        fractions: Part of the tensor that each rank sums; they add up to 1.
        pieces: That the tensor is cut into: the sums of one go out while the parts of
            the next come in, so that slow ranks send and receive at a time.
    Raises:
        StrategyError: If there is no piece.
    """
    return _whole(_piped(_direct(fractions), pieces), range(len(fractions)))


def tree(order: Sequence[int], pieces: int = 2) -> SendTable:
    """Add up two binary trees, and down again, piece after piece.

    Args:
        order: Ranks, the first being one tree's root and the last the other's.
        pieces: That the tensor is cut into.
    Raises:
        StrategyError: If there is no piece.
    """
    _require_pieces(pieces)
    return _whole(_tree(pieces), order)


def hierarchy(
    order: Sequence[int],
    domains: Sequence[Sequence[int]],
    fractions: Sequence[float] = (),
    pieces: int = 1,
) -> SendTable:
    """Sum inside domains, then between them, then hand the sums out inside again.

    Args:
        order: Ranks; domains come in the order of their first rank.
        domains: Number of the domain of each rank, innermost level first: hosts, then
            for example sites. Each level's domains lie in the next one's.
        fractions: Part that each outermost domain sums, directly; a ring between them
            if left out.
        pieces: As of :func:`direct`.
    Raises:
        StrategyError: If there is no piece, a level has not one number for each rank,
            or the number of fractions is not that of the outermost domains.
    """
    for level in domains:
        if len(level) != len(order):
            raise StrategyError(
                f"{len(level)} domains for {len(order)} ranks; give one for each"
            )
    if fractions and domains and len(set(domains[-1])) != len(fractions):
        raise StrategyError(
            f"{len(fractions)} fractions for {len(set(domains[-1]))} domains; give one "
            f"for each"
        )
    outermost = _direct(fractions) if fractions else _ring
    return _whole(_piped(_levels(list(domains), outermost), pieces), order)


def _levels(domains: list[Sequence[int]], outermost: _Part) -> _Part:
    if not domains:
        return outermost
    beyond = _levels(domains[1:], outermost)

    def part_of(
        b: _Builder, ranks: Sequence[int], part: float, start: int
    ) -> tuple[list[int], int]:
        inside: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            inside[domains[0][rank]].append(rank)
        rails = max(len(members) for members in inside.values())
        found, ends = [], start + 1
        for rail in range(rails):
            handlers = [members[rail % len(members)] for members in inside.values()]
            if len(handlers) == 1:
                chunks, end = b.chunks([part / rails]), start + 1
            else:
                chunks, end = beyond(b, handlers, part / rails, start + 1)
            found.append((rail, chunks))
            ends = max(ends, end)
        for rail, chunks in found:
            for members in inside.values():
                handler = members[rail % len(members)]
                for rank in members:
                    b.send(start, rank, handler, chunks, add=True)
                    b.send(ends, handler, rank, chunks, add=False)
        return [chunk for _, chunks in found for chunk in chunks], ends + 1

    return part_of


#: Algorithms by the name that a strategy gives them.
ALGORITHMS = {
    "ring": ring,
    "halving": halving,
    "direct": direct,
    "tree": tree,
    "hierarchy": hierarchy,
}
