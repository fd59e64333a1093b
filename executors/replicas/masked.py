"""Copies that train a core of the neurons alone, and all of them every few steps.

The core is the first share of the neurons of each group of layers, and all that belongs
to no neuron. Nothing is held twice: in a core step the layers of a group compute with
views of their weights, as narrower layers would, so that gradients outside of the core
are zero. All copies average the core's part of the gradients in every step, and strong
ones the other part in full steps. The optimizer steps views of weights and of its own
states: in a core step those of the core alone.

A weak replica does not compute in a full step. It adds zero to the sum of the core's
gradients, and updates its core as the others do, so that the core is the same on all
copies, bit for bit. What it holds outside of the core is old, and is never read: before
weights are compared or saved it takes all that the first strong replica has.
Source: Mohtashami et al. 2022, arXiv 2106.08895.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from executors.optimizers import build_optimizer
from executors.replicas.pieces import local_part, pieces
from executors.steps import (
    ParallelModel,
    PlainStep,
    clip_gradients,
    gradient_norm,
)
from executors.strategies.narrow import CutParameter, find_groups, require_unshared
from executors.strategies.sharded import is_transposed
from planner.schema import Optimizer
from planner.schema.methods.masked import Masked

if TYPE_CHECKING:
    from executors.trainer import Trainer

__all__ = ["CoreOptimizer", "CorePart", "MaskedReplicas"]

_CORE, _FULL = "core", "full"
#: Counters of steps of a parameter's core, and of what is outside of it.
_COUNTERS = ("step", "step_outside")
#: What optimizers keep of a parameter, beside counters.
_KEPT = {"SGD": ("momentum_buffer",)}
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class CorePart:
    """Part of a parameter that is the core's.

    Attributes:
        dim: Dimension along which its neurons lie.
        size: Length of the core along it.
    """

    dim: int
    size: int

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of the core."""
        return tensor.narrow(self.dim, 0, self.size)

    def outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """View of what is outside of it, empty if nothing is."""
        return tensor.narrow(self.dim, self.size, tensor.shape[self.dim] - self.size)


class CoreOptimizer(torch.optim.Optimizer):
    """Updates the core of some parameters alone, or all of them.

    A step is that of torch's optimizer, on views of the parameters and of states that
    are whole tensors. Nothing outside of the core changes in a step of the core, and
    what is there has a counter of steps of its own, ``step_outside``.

    Args:
        groups: Groups of parameters, as of another optimizer.
        spec: Name and arithmetic.
        parts: Core of each parameter that is not the core's as a whole.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        spec: Optimizer,
        parts: Mapping[nn.Parameter, CorePart],
    ) -> None:
        listed = [{"params": group["params"]} for group in groups]
        super().__init__(listed, {"lr": spec.learning_rate})
        self._spec, self._parts = spec, parts
        #: Whether a step updates all of the parameters.
        self.steps_all = True
        #: Views of the core, then of what is outside, by parameter, and who steps them.
        self._views: list[dict[nn.Parameter, nn.Parameter]] = []
        self._rules: list[torch.optim.Optimizer] = []

    def _make_views(self) -> None:
        inside: dict[nn.Parameter, nn.Parameter] = {}
        outside: dict[nn.Parameter, nn.Parameter] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                local, part = local_part(parameter), self._parts.get(parameter)
                core = local if part is None else part.inside(local)
                inside[parameter] = nn.Parameter(core)
                if part is not None and part.outside(local).numel():
                    outside[parameter] = nn.Parameter(part.outside(local))
        self._views = [inside, outside]
        self._rules = [_make_rule(views.values(), self._spec) for views in self._views]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the core of all parameters that have a gradient, or all of them."""
        assert closure is None, "a closure is not called"
        if not self._views:
            self._make_views()
        for place in (0, 1) if self.steps_all else (0,):
            for parameter, view in self._views[place].items():
                if parameter.grad is not None:
                    grad = local_part(parameter.grad)
                    view.grad = self._view(parameter, grad, place)
                    self._lend_state(parameter, view, place)
            for group in self._rules[place].param_groups:
                # A scheduler changes this optimizer's rate.
                group["lr"] = self.param_groups[0]["lr"]
            self._rules[place].step()
            for view in self._views[place].values():
                view.grad = None

    def _view(
        self, parameter: nn.Parameter, whole: torch.Tensor, place: int
    ) -> torch.Tensor:
        part = self._parts.get(parameter)
        if part is None:
            return whole
        return part.outside(whole) if place else part.inside(whole)

    def _lend_state(
        self, parameter: nn.Parameter, view: nn.Parameter, place: int
    ) -> None:
        """Give a rule views of the states of a parameter; make those that are new."""
        state, name = self.state[parameter], self._spec.name
        if name == "SGD" and not self._spec.momentum:
            return
        kept = _KEPT.get(name, _MOMENTS)
        for key in kept:
            if key not in state:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
        lent = {
            key: self._view(parameter, local_part(state[key]), place) for key in kept
        }
        if name != "SGD":
            # Where fused kernels read it, and nobody else waits for it.
            device = view.device if view.is_contiguous() else "cpu"
            if "step" not in state:
                state["step"] = torch.zeros(())
            if parameter in self._views[1] and "step_outside" not in state:
                # Also of a run that had one counter.
                state["step_outside"] = state["step"].clone()
            key = _COUNTERS[place]
            state[key] = state[key].to(device)
            lent["step"] = state[key]
        self._rules[place].state[view] = lent


def _make_rule(views: Iterable[nn.Parameter], spec: Optimizer) -> torch.optim.Optimizer:
    """Make torch's optimizer, unfused for views that are not contiguous.

    Fused kernels take memory for contiguous.
    """
    whole: list[nn.Parameter] = []
    strided: list[nn.Parameter] = []
    for view in views:
        (whole if view.is_contiguous() else strided).append(view)
    rule = build_optimizer((("", view) for view in whole), spec)
    if strided:
        rule.add_param_group({"params": strided, "fused": False})
    return rule


class _MaskedStep(PlainStep):
    """A step of the core or of all; computes nothing on a weak replica's full steps.

    Args:
        replicas: Whose copies it is for.
    """

    def __init__(self, replicas: MaskedReplicas) -> None:
        self._replicas = replicas

    def update(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """See :meth:`executors.steps.Step.update`."""
        loss = self.backward(trainer, local)
        limit, norm = trainer.plan.strategy.grad_clip_norm, None
        if limit is not None:
            named = (parameter for _, parameter in trainer.named_parameters())
            norm = self._replicas.whole_norm(gradient_norm(named, trainer.place))
            clip_gradients(trainer.all_parameters(), norm, limit)
        trainer.optimizer.step()
        return loss, norm

    def _forward_backward(
        self, trainer: ParallelModel, local: Mapping[str, torch.Tensor]
    ) -> torch.Tensor | None:
        replicas = self._replicas
        if replicas.waits:
            return torch.zeros((), device=trainer.place.device)
        with replicas.narrowed():
            loss = super()._forward_backward(trainer, local)
        # The mean over all copies is to be that over those that compute.
        return None if loss is None else loss * replicas.loss_factor


class MaskedReplicas:
    """Trains the core in core steps, and all of the model in full ones.

    Args:
        synchronisation: Its settings.
    """

    rests_every = 1
    lead_in = 0

    def __init__(self, synchronisation: Masked) -> None:
        self.settings = synchronisation
        self._forced: str | None = None
        self._phase = _FULL
        #: Whether layers compute with their core alone.
        self._narrow = False
        self._group: dist.ProcessGroup | None = None
        self._strong_group: dist.ProcessGroup | None = None
        self._copies, self._strong = 1, [0]
        self._weak = False
        self._device = torch.device("cpu")
        self._parts: dict[nn.Parameter, CorePart] = {}
        self._trained: list[nn.Parameter] = []
        self._buffers: list[torch.Tensor] = []
        #: Whether weak replicas lack an update of what is outside of the core.
        self._behind = False

    def attach(self, trainer: Trainer) -> None:
        """Find the core, and take over steps and the optimizer."""
        place, strategy = trainer.place, trainer.plan.strategy
        self._device = place.device
        self._copies, index = place.size("replicate"), place.index("replicate")
        self._weak = index in self.settings.weak_replicas
        self._strong = [
            copy
            for copy in range(self._copies)
            if copy not in self.settings.weak_replicas
        ]
        self._group = self._strong_group = place.group("replicate")
        if 1 < len(self._strong) < self._copies:
            # Copies are one device each; every rank makes the group.
            self._strong_group = dist.new_group(self._strong)
        elif len(self._strong) == 1:
            self._strong_group = None
        (part,) = trainer.parts.values()
        model = part.inner
        groups = find_groups(model, strategy.sharding)
        require_unshared(model, groups)
        for group in groups:
            share = self.settings.core_neurons(group.neurons), group.neurons
            for cut in group.parameters:
                self._cut(model, cut, *share)
        self._trained = [p for p in trainer.all_parameters() if p.requires_grad]
        # Of masks, which are bool, no forward makes new ones.
        self._buffers = [b for b in model.buffers() if b.dtype != torch.bool]
        trainer.optimizer = CoreOptimizer(
            trainer.optimizer.param_groups, strategy.optimizer, self._parts
        )
        self._optimizer = trainer.optimizer
        trainer.step_rule = _MaskedStep(self)

    def _cut(
        self, model: nn.Module, cut: CutParameter, core: int, neurons: int
    ) -> None:
        """Note the core of a parameter; let its layer compute with it alone."""
        parameter = model.get_parameter(cut.name)
        size = parameter.shape[cut.dim] // neurons * core
        self._parts[parameter] = CorePart(cut.dim, size)
        holder, _, leaf = cut.name.rpartition(".")
        if leaf == "weight":
            self._narrow_layer(model.get_submodule(holder), self._parts[parameter])

    def _narrow_layer(self, layer: nn.Module, part: CorePart) -> None:
        whole, transposed = layer.forward, is_transposed(layer)
        of_outputs = (part.dim == 0) != transposed

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._narrow:
                return whole(*args, **kwargs)
            (given,) = (*args, *kwargs.values())
            weight, bias = part.inside(layer.weight), layer.bias  # type: ignore[arg-type]
            if bias is not None and of_outputs:
                bias = bias.narrow(0, 0, part.size)  # type: ignore[operator]
            weight = weight.t() if transposed else weight
            return functional.linear(given, weight, bias)  # type: ignore[arg-type]

        layer.forward = forward

    # -- A step ----------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """True if this copy computes nothing in the step."""
        return self._weak and self._phase == _FULL

    @property
    def loss_factor(self) -> float:
        """Copies over those that compute in the step."""
        return self._copies / self._takers

    @property
    def _takers(self) -> int:
        return self._copies if self._phase == _CORE else len(self._strong)

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """A block in which layers compute with the core alone, in a core step."""
        self._narrow = self._phase == _CORE
        try:
            yield
        finally:
            self._narrow = False

    def before_forward(self, step: int) -> None:
        """Begin a core step or a full one."""
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._phase = self.phase(step)
        self._optimizer.steps_all = self._phase == _FULL and not self._weak

    def after_backward(self, step: int) -> None:
        """Average the core's gradients over all copies, others over strong ones."""
        inside, outside = [], []
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            grad, part = local_part(parameter.grad), self._parts.get(parameter)
            inside.append(grad if part is None else part.inside(grad))
            if part is not None and part.outside(grad).numel():
                outside.append(part.outside(grad))
        _average(inside, self._group, self._takers)
        if self._phase == _FULL and not self._weak:
            _average(outside, self._strong_group, self._takers)

    def whole_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """Norm of the whole gradient: weak replicas have the core's part of it."""
        if self._phase == _FULL and len(self._strong) < self._copies:
            dist.all_reduce(norm, dist.ReduceOp.MAX, group=self._group)
        return norm

    def after_update(self, step: int) -> None:
        """Note that weak replicas have not been given all of a full step."""
        if self._phase == _FULL and len(self._strong) < self._copies:
            self._behind = True
        # Gradients that are asked for between steps are of all of the model.
        self._phase = _FULL

    # -- Between steps ---------------------------------------------------------------

    @torch.no_grad()
    def settle(self) -> None:
        """Give weak replicas all that the first strong one has."""
        if not self._behind:
            return
        self._behind = False
        values: list[torch.Tensor] = [*self._trained, *self._buffers]
        for parameter in self._trained:
            state = self._optimizer.state.get(parameter, {})
            values += [state[key] for key in sorted(state)]
        for piece in pieces(values):
            self._take([local_part(one) for one in piece])

    def _take(self, locals_: Sequence[torch.Tensor]) -> None:
        """Take some tensors from the first strong replica."""
        # Counters lie on the CPU, which not all backends send from.
        flat = torch.cat([one.reshape(-1).to(self._device) for one in locals_])
        dist.broadcast(flat, group=self._group, group_src=self._strong[0])
        parts = torch.split(flat, [one.numel() for one in locals_])
        for one, part in zip(locals_, parts, strict=True):
            one.copy_(part.view_as(one))

    def rests(self, done: int) -> bool:
        """Return True: a step ends what it began."""
        return True

    def meets(self, done: int) -> bool:
        """Return True: every step ends with the loss of all copies."""
        return True

    def in_sync(self, done: int) -> bool:
        """Return True: copies are equal, weak ones once they have settled."""
        return True

    def state(self) -> Mapping[str, Mapping[nn.Parameter, torch.Tensor]]:
        """Nothing is kept beside the optimizer's states."""
        return {}

    def restored(self, *, complete: bool) -> None:
        """Begin with the weights and states that were read, on weak replicas too."""
        self._behind = False

    def phase(self, step: int) -> str:
        """Return ``full`` for the last of ``every`` steps, else ``core``."""
        if self._forced is not None:
            return self._forced
        return _CORE if (step + 1) % self.settings.every else _FULL

    def force(self, phase: str | None) -> None:
        """See :meth:`executors.replicas.Replicas.force`."""
        self._forced = phase


@torch.no_grad()
def _average(
    gradients: Sequence[torch.Tensor], group: dist.ProcessGroup | None, takers: int
) -> None:
    """Divide the sum of gradients over a group by the copies that computed, in place.

    Args:
        gradients: Views; equal shapes on all ranks of the group.
        group: Ranks whose gradients are summed; None for one rank alone.
        takers: Number of them that computed a gradient; others have zeros.
    """
    if group is None:
        return
    for piece in pieces(gradients):
        flat = torch.cat([one.reshape(-1) for one in piece])
        dist.all_reduce(flat, group=group)
        flat /= takers
        parts = torch.split(flat, [one.numel() for one in piece])
        for one, part in zip(piece, parts, strict=True):
            one.copy_(part.view_as(one))
