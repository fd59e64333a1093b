"""Random numbers of a forward, those of a part of a batch being the batch's own.

Ranks and microbatches draw numbers of their own, so that what they compute can be held
to one process only if both draw alike: each draw of a batch is kept, and a part of the
batch is given its share of it. The numbers that all samples of a batch have in common
are the same for its parts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["DRAWS", "BatchDraws", "host_numbers_kept", "host_state", "one_other_size"]

#: Ops of which the result is drawn, without ``aten::``.
# fmt: off
DRAWS = frozenset({
    "_sample_dirichlet", "_standard_gamma", "bernoulli", "bernoulli_", "binomial",
    "cauchy", "cauchy_", "exponential", "exponential_", "geometric", "geometric_",
    "log_normal", "log_normal_", "multinomial", "normal", "normal_", "poisson", "rand",
    "rand_like", "randint", "randint_like", "randn", "randn_like", "random_",
    "randperm", "uniform", "uniform_",
})
# fmt: on
#: The seed of torch's generator counts batches, their parts, and draws of each. A
#: recomputation finds the generator as it was, and with it the same numbers.
_DRAWS_EACH, _PARTS_EACH = 1 << 24, 1 << 16
#: Numbers of which the smallest and the largest are taken for extremes.
_MANY = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """One draw of a whole batch: op, what it was told beside sizes, and its result."""

    name: str
    told: tuple[object, ...]
    value: torch.Tensor


class BatchDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that keeps what whole batches draw, or gives parts of them their share.

    A draw that depends on how many samples there are (``randperm``, a bound of
    ``randint``) is a new one for a part.

    Args:
        whole: Draws of the whole batches; None to keep them.
        parts: Equal parts of each batch.
        extreme: ``torch.minimum`` or ``torch.maximum``, by which single numbers are the
            smallest or the largest of many.

    Attributes:
        unlike: True if a part drew something that the whole batch did not.
        on_host: True if Python or NumPy drew a number.
        unlike_on_host: True if they did not draw as much for a part as for the whole.
        taken: Draws of which a part was given its share, each with the part's number.
    """

    def __init__(
        self,
        whole: BatchDraws | None = None,
        parts: int = 1,
        extreme: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.unlike, self.on_host, self.unlike_on_host = False, False, False
        self.taken = set[tuple[int, int]]()
        self._kept: dict[int, _Draw] = {}
        self._whole, self._parts, self._extreme = whole, parts, extreme
        self._host = host_numbers_kept()
        self._begun: object = None
        self._ended: dict[int, object] = {}

    def __bool__(self) -> bool:
        """Return True if whole batches drew numbers, of torch or on the host."""
        return bool(self._kept) or self.on_host

    def __enter__(self) -> Self:
        self._host = host_numbers_kept()
        self._host.__enter__()
        self.begin_on_host()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._host.__exit__(None, None, None)

    @property
    def single(self) -> bool:
        """True if a whole batch drew single numbers, by which code may branch."""
        return self.on_host or any(
            one.value.numel() == 1 for one in self._kept.values()
        )

    def covers(self, taken: Set[tuple[int, int]], parts: int) -> bool:
        """Return True if parts of batches were given their share of all draws."""
        return taken == {(draw, part) for draw in self._kept for part in range(parts)}

    def begin(self, batch: int, part: int = 0, draw: int = 0) -> None:
        """Begin the forward of a batch or of one of its parts, at a draw of it."""
        _seed((batch * _PARTS_EACH + part) * _DRAWS_EACH + draw)

    def begin_on_host(self) -> None:
        """Let Python and NumPy draw the numbers of a batch from the first on.

        All of its parts draw them alike, as they do those that samples share.
        """
        batch = torch.initial_seed() // (_PARTS_EACH * _DRAWS_EACH)
        random.seed(batch)
        np.random.seed(batch)  # noqa: NPY002, as models draw
        self._begun = host_state()

    def end(self) -> None:
        """End it; the next part follows."""
        begun, host = torch.initial_seed() // _DRAWS_EACH, host_state()
        self.on_host |= host != self._begun
        if self._whole is None:
            self._ended[begun // _PARTS_EACH] = host
        else:
            self.unlike_on_host |= self._whole._ended[begun // _PARTS_EACH] != host
        _seed((begun + 1) * _DRAWS_EACH)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        if name not in DRAWS:
            return func(*args, **kwargs)
        seed = torch.initial_seed()
        made = func(*args, **kwargs)
        if self._extreme is not None and made.numel() == 1:
            found = made.clone()
            for _ in range(_MANY):
                found = self._extreme(found, func(*args, **kwargs))
            made.copy_(found)
        told = _told(func, args, kwargs)
        if self._whole is None:
            value = made.detach().clone()
            self._kept[seed] = _Draw(name=name, told=told, value=value)
        else:
            self._take(seed, name, told, made)
        _seed(seed + 1)
        return made

    def _take(
        self, seed: int, name: str, told: tuple[object, ...], made: torch.Tensor
    ) -> None:
        """Replace what a part has drawn by its share of what the whole batch drew."""
        assert self._whole is not None
        part = seed // _DRAWS_EACH % _PARTS_EACH
        of_batch = self._whole._kept.get(seed - part * _DRAWS_EACH)
        if of_batch is None or of_batch.name != name:
            self.unlike = True
            return
        self.taken.add((seed - part * _DRAWS_EACH, part))
        value, shape = of_batch.value, tuple(made.shape)
        dim = one_other_size(shape, tuple(value.shape), self._parts)
        if dim == -1:
            self.unlike = True
        elif of_batch.told == told:
            share = value if dim is None else value.chunk(self._parts, dim)[part]
            made.copy_(share)


def host_state() -> object:
    """Return a value that changes as Python or NumPy draw a number."""
    arrays: Any = np.random.get_state()  # noqa: NPY002, as models draw
    return random.getstate(), arrays[1].tobytes(), *arrays[2:]


@contextlib.contextmanager
def host_numbers_kept() -> Iterator[None]:
    """Open a block after which Python and NumPy draw as if it had drawn nothing."""
    host, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(host)
        np.random.set_state(arrays)  # noqa: NPY002


def _seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _told(func: Any, args: Any, kwargs: Any) -> tuple[object, ...]:
    """Numbers that a draw is told, without sizes."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("replacement"):
        # Draws that know nothing of each other, of which there may be any number.
        del given["num_samples"]
    return tuple(
        (name, value)
        for name, value in sorted(given.items())
        if isinstance(value, bool | int | float)
    )


def one_other_size(
    part: tuple[int, ...], whole: tuple[int, ...], times: int
) -> int | None:
    """Dimension that is so many times larger; None if equal, -1 if else differs."""
    if part == whole:
        return None
    if len(part) != len(whole):
        return -1
    at, *more = [i for i, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    return at if not more and whole[at] == times * part[at] else -1
