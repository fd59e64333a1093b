"""Modules of one's own, in the styles in which public code writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from planner.capture import capture
from planner.errors import CaptureError
from planner.graph.model import ModelGraph

_X = {"x": ((8, 16), "float32")}
_LABELS = {**_X, "labels": ((8,), "int64")}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(16), nn.GELU()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return made


class _Own(nn.Module):
    """Equal blocks, called in a way of the test's own, and a forward of its own."""

    def __init__(self, forward: Any = None, call: Any = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(4))
        self.head = nn.Linear(16, 4)
        self.own, self.call = forward, call

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.call is None else self.call(block, x)
        made: torch.Tensor = self.head(x)
        return made

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        if self.own is None:
            return self.scores(x).square().mean()
        return self.own(self, x) if labels is None else self.own(self, x, labels)


def _read(model: nn.Module, **more: Any) -> ModelGraph:
    return capture(model, _X, dtype="float32", **more)


def _sums(graph: ModelGraph) -> tuple[float, ...]:
    names = ("forward_flops", "backward_flops", "saved_bytes")
    return tuple(sum(getattr(b, name) for b in graph.blocks) for name in names)


# -- How blocks are called -------------------------------------------------------


def test_blocks_that_forward_checkpoints_are_computed_twice_and_kept_once() -> None:
    plain = _sums(_read(_Own()))
    forward, backward, saved = _sums(
        _read(_Own(call=partial(checkpoint, use_reentrant=False)))
    )
    head = 2 * 8 * 16 * 4
    again = backward - plain[1]
    assert forward == plain[0]
    # A recomputation stops before the last product, of which only the output is new.
    assert again == pytest.approx((forward - head) / 2)
    assert saved < plain[2] / 4


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_are_read_once_as_one_by_one(reentrant: bool) -> None:
    model = _Own(call=partial(checkpoint, use_reentrant=reentrant))
    assert _sums(_read(model)) == _sums(_read(model, repeat=False))
    newer = _Own(call=partial(checkpoint, use_reentrant=False))
    assert _sums(_read(model)) == _sums(_read(newer))


def test_compiled_blocks_are_read_as_the_code_that_was_compiled() -> None:
    model = _Own()
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    graph = _read(model)
    assert graph.assumptions == ()
    assert _sums(graph) == _sums(_read(_Own()))


# -- What forward returns --------------------------------------------------------


@dataclass
class _Output:
    scores: torch.Tensor
    loss: torch.Tensor | None = None


def _entropy(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model.scores(x), labels)


def _right(model: Any, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (model.scores(x).argmax(-1) == labels).float().mean()


_LOSSES: dict[str, Callable[..., Any]] = {
    "loss, accuracy": lambda *given: (_entropy(*given), _right(*given)),
    "scores, loss, accuracy": lambda m, x, y: (
        m.scores(x),
        _entropy(m, x, y),
        _right(m, x, y),
    ),
    "dataclass": lambda m, x, y: _Output(m.scores(x), _entropy(m, x, y)),
    "distillation": lambda m, x, y: (
        _entropy(m, x, y)
        + functional.kl_div(
            m.scores(x).log_softmax(-1), x[:, :4].softmax(-1), reduction="batchmean"
        )
        * 4
    ),
    "label smoothing": lambda m, x, y: functional.cross_entropy(
        m.scores(x), y, label_smoothing=0.1
    ),
}


@pytest.mark.parametrize("name", _LOSSES)
def test_the_loss_is_told_from_what_only_watches_training(name: str) -> None:
    graph = capture(_Own(_LOSSES[name]), _LABELS, dtype="float32")
    assert graph.config["loss"] == "model"
    assert graph.assumptions == ()


def test_fields_of_a_dataclass_are_outputs() -> None:
    graph = _read(_Own(lambda m, x: _Output(m.scores(x))))
    assert graph.config["loss"] == "mean_square"
    assert "own_loss" not in graph.config
    meeting = _read(_Own(lambda m, x: _Output(m.scores(x) - m.scores(x).mean(0))))
    assert meeting.config["own_loss"] == "coupled"


def test_a_mean_over_places_that_a_mask_chooses_keeps_the_batch_whole() -> None:
    def masked(model: Any, x: torch.Tensor) -> torch.Tensor:
        mask = (x > 0).float()
        made: torch.Tensor = (model.blocks[0](x) * mask).sum() / mask.sum()
        return made

    assert _read(_Own(masked)).config["own_loss"] == "coupled"


_UNCLEAR: dict[str, tuple[Callable[..., Any], str]] = {
    "loss and a part": (
        lambda m, x: (m.scores(x), m.scores(x).mean(), m.scores(x).square().mean()),
        "several scalars, none of them named loss",
    ),
    "losses by task": (
        lambda m, x: {"depth": m.scores(x).mean(), "class": m.scores(x).std()},
        "several scalars, none of them named loss",
    ),
    "accuracy first": (
        lambda m, x: (m.scores(x).detach().mean(), m.scores(x).mean()),
        "several scalars, none of them named loss",
    ),
    "kept": (
        lambda m, x: (setattr(m.head, "aux", m.scores(x).mean()), m.scores(x))[1],
        "keeps a scalar that needs a gradient as 'head.aux'",
    ),
}


@pytest.mark.parametrize("name", _UNCLEAR)
def test_scalars_of_which_none_is_known_as_the_loss_are_asked_about(name: str) -> None:
    forward, reason = _UNCLEAR[name]
    with pytest.raises(CaptureError, match=f"{reason}.*named loss, or"):
        _read(_Own(forward))
    assert _read(_Own(forward), loss="mean_square").config["loss"] == "mean_square"


# -- What forward is given -------------------------------------------------------


class _Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Any, scale: float = 2.0, **flags: Any) -> torch.Tensor:
        values = x if isinstance(x, torch.Tensor) else sum(x.values())
        made: torch.Tensor = self.inner(values * scale)
        return made


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({**_X, "scale": 3.0}, r"scale=3.0, .* forward's default \(2.0\)"),
        ({**_X, "auxiliary": True}, r"auxiliary=True, .* default \(None\)"),
        ({"x": {"a": _X["x"], "b": _X["x"]}}, r"'x' as a dict of tensors.*\(a, b\)"),
    ],
)
def test_arguments_that_training_would_not_give_are_refused(
    given: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CaptureError, match=reason):
        capture(_Flagged(), given)


def _starred(self: Any, *given: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = self.head(given[0])
    return made


def _by_place(self: Any, x: torch.Tensor, /) -> torch.Tensor:
    return _starred(self, x)


@pytest.mark.parametrize("forward", [_starred, _by_place])
def test_arguments_without_a_name_are_refused(forward: Any) -> None:
    model = type("_Unnamed", (_Own,), {"forward": forward})()
    with pytest.raises(CaptureError, match=r"takes 0 \(none\) by a name"):
        capture(model, (_X["x"],))


def test_arguments_equal_to_what_is_left_out_are_read() -> None:
    given = {**_X, "scale": 2.0, "use_cache": False, "return_dict": True}
    assert [one[0] for one in capture(_Flagged(), given).inputs] == ["x"]


# -- Parameters ------------------------------------------------------------------


def _averaged(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.blocks[0].up.weight.mul_(0.9)
    return model.scores(x).square().mean()  # type: ignore[no-any-return]


def test_a_forward_that_changes_parameters_is_refused() -> None:
    with pytest.raises(CaptureError, match="changes a parameter in place"):
        _read(_Own(_averaged))


def _limited(model: Any, x: torch.Tensor) -> torch.Tensor:
    model.blocks[0].up.weight.data.clamp_(-1.0, 1.0)
    return model.scores(x).square().mean()  # type: ignore[no-any-return]


def test_limits_on_parameters_are_read_and_told() -> None:
    told = _read(_Own(_limited)).assumptions
    assert any("limits a parameter in place" in one for one in told)


def test_parameters_of_lazy_modules_are_to_be_made_first() -> None:
    lazy = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet"):
        capture(lazy, {"input": ((8, 16), "float32")})
    lazy(torch.zeros(8, 16))
    assert capture(lazy, {"input": ((8, 16), "float32")}).parameters


# -- Packed sequences ------------------------------------------------------------


class _Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        _, last = self.rnn(packed)
        made: torch.Tensor = self.head(last[-1])
        return made.square().mean()


class _Centred(_Packed):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0), lengths)


@pytest.mark.parametrize(("kind", "whole"), [(_Packed, False), (_Centred, True)])
def test_code_that_fakes_cannot_run_is_tried_on_numbers(
    kind: type[nn.Module], whole: bool
) -> None:
    inputs = {"x": torch.randn(4, 5, 16), "lengths": torch.tensor([5, 3, 4, 1])}
    graph = capture(kind(), inputs, dtype="float32")
    assert (graph.config.get("own_loss") == "coupled") == whole
    assert graph.values == {"lengths": ((5, 1),)}
