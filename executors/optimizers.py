"""A plan's optimizer: torch's class, or what its kind needs around it.

Muon takes matrices of hidden layers, and AdamW the rest; a matrix that ranks divide is
put together for its products, which every rank makes by itself. Optimizers that take
whole tensors alone are given plain ones.

The only file that knows private parts of ``torch.optim.Muon``: the products themselves,
and the scale of an update. Seen to work with torch 2.13.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from executors.names import inside
from executors.offloading import TwinOptimizer
from planner.errors import ExecutionError
from planner.schema import Optimizer, Strategy
from planner.schema.optimizers import OPTIMIZERS

__all__ = ["build_optimizer", "hidden_matrices"]


def hidden_matrices(model: nn.Module, strategy: Strategy) -> frozenset[str]:
    """Names of the matrices of hidden layers: neither an embedding's nor the head's.

    Args:
        model: Whole, before it is taken apart.
        strategy: Whose last module is the head.
    """
    head = strategy.stages[-1].modules[-1] if strategy.stages else ""
    outer: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or (head and inside(name, head)):
            outer |= {id(parameter) for parameter in module.parameters()}
    return frozenset(
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.ndim == 2 and id(parameter) not in outer
    )


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    spec: Optimizer,
    matrices: Collection[str] = (),
) -> torch.optim.Optimizer:
    """Build the optimizer; eps is torch's default, and betas if none are given.

    Adam is fused: on an H200 that took 4.3 ms for 537M weights, the loop over lists
    ("foreach") 11.8 ms (`python -m benchmarks.gpu_kernels`, 2026-11-26), and its host
    dispatches one op a group, where DTensors make each cost more. torch has no fused
    SGD of DTensors.

    Args:
        named: All parameters of this rank by name; those without a gradient are left
            out.
        spec: Name and arithmetic.
        matrices: Names of matrices of hidden layers.

    Raises:
        ExecutionError: If the package that has the optimizer is not installed.
    """
    trained = [(name, one) for name, one in named if one.requires_grad]
    parameters = [one for _, one in trained]
    kind = OPTIMIZERS[spec.name]
    if kind.matrix_states is not None:
        hidden = [one for name, one in trained if name in matrices]
        rest = [one for name, one in trained if name not in matrices]
        return _MuonWithAdamW(hidden, rest, spec)
    settings: dict[str, Any] = {"weight_decay": spec.used_weight_decay}
    if kind.momentum:
        settings["momentum"] = spec.momentum
    if spec.betas is not None:
        settings["betas"] = spec.betas
    if kind.fused:
        settings["fused"] = True
    made: torch.optim.Optimizer = _class_of(spec.name)(
        _groups(parameters), lr=spec.learning_rate, **settings
    )
    return _LocalOptimizer(made) if kind.whole else made


def _class_of(name: str) -> Callable[..., torch.optim.Optimizer]:
    module = OPTIMIZERS[name].module
    try:
        found: Callable[..., torch.optim.Optimizer] = getattr(
            importlib.import_module(module), name
        )
    except ImportError as error:
        package = module.partition(".")[0]
        raise ExecutionError(
            f"the plan's optimizer {name} is of {package}, which is not installed; "
            f"install it (pip install {package}), or plan with AdamW"
        ) from error
    return found


def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Group parameters by mesh.

    Fused kernels refuse lists that mix plain tensors, and DTensors of several meshes.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    # A stage of frozen modules still takes part in steps.
    listed: list[dict[str, Any]] = [{"params": group} for group in groups.values()]
    return listed or [{"params": [nn.Parameter(torch.zeros(0))]}]


class _LocalOptimizer(TwinOptimizer):
    """An optimizer that is given plain tensors, where a rank has all of each."""

    def copied(self, parameter: nn.Parameter) -> torch.Tensor:
        return _local(parameter.detach())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights."""
        assert closure is None, "a closure is not called"
        self.hand_on_settings()
        for parameter, twin in self.twins.items():
            grad = parameter.grad
            twin.grad = None if grad is None else _local(grad)
        self.inner.step()


class _MuonWithAdamW(torch.optim.Optimizer):
    """Muon for matrices of hidden layers, AdamW for all other parameters.

    One learning rate fits both: an update of Muon is as long as one of AdamW
    (``adjust_lr_fn="match_rms_adamw"``).
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        spec: Optimizer,
    ) -> None:
        rate, decay = spec.learning_rate, spec.used_weight_decay
        self._inner: list[torch.optim.Optimizer] = []
        if matrices:
            self._inner.append(
                _DividedMuon(
                    matrices,
                    lr=rate,
                    weight_decay=decay,
                    adjust_lr_fn="match_rms_adamw",
                )
            )
        if others or not matrices:
            betas = spec.used_betas or (0.9, 0.999)
            self._inner.append(
                torch.optim.AdamW(
                    _groups(others),
                    lr=rate,
                    betas=betas,
                    weight_decay=decay,
                    fused=True,
                )
            )
        groups = [group for one in self._inner for group in one.param_groups]
        super().__init__([{**group} for group in groups], {})
        # Schedulers change the groups that the two have; states have one place.
        self.param_groups = groups
        for one in self._inner:
            one.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update matrices, then the rest."""
        assert closure is None, "a closure is not called"
        for one in self._inner:
            one.step()


class _DividedMuon(torch.optim.Muon):
    """Muon of matrices that ranks may divide."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the matrices; collective over the ranks that divide one."""
        assert closure is None, "a closure is not called"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        grad, momentum = parameter.grad, group["momentum"]
        assert grad is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        update = grad.lerp(buffer, momentum) if group["nesterov"] else buffer
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        whole = _zeropower_via_newtonschulz(
            whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
        own = _local(parameter.detach())
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(_part_of(whole, parameter), alpha=-rate)


def _part_of(whole: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """This rank's part of a tensor that is divided as a parameter is."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    every = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return every.redistribute(placements=parameter.placements).to_local()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
