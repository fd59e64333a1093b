"""The state of a training run as tensors by name, the same names under every plan.

``model.FQN`` for parameters and persistent buffers, ``optimizer.KEY.FQN`` for what the
optimizer keeps of a parameter, ``rng.RANK.DEVICE`` for generators. A parameter that has
several FQNs goes by its first in the whole model. Where copies of the weights are apart
between exchanges, each copy's optimizer states are its own,
``replica.COPY.optimizer.KEY.FQN``, and those of the first are the run's for another
plan. If weights differ when no exchange is under way they are saved likewise,
``replica.COPY.model.FQN``, and their mean is the run's. Weights that copies divide are
put together in the order of the whole, whatever order a copy has its part in. What
copies keep in common between exchanges is ``synchronisation.KEY.FQN``. What a codec of
gradients keeps on a rank, residuals above all, is
``compression.RANK.PART.CODEC.NAME``, what a rule of learning keeps of its stage
``learning.RANK.NAME``; on another mesh they begin anew.

Buffers are not reduced over the ranks that share a batch: each rank's running
statistics are of the samples that it saw. Those of the first data-parallel rank are the
run's, as they are under torch's DistributedDataParallel, which gives rank 0's to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from executors.averages import AVERAGE
from executors.checkpoints.dcp import SavedTensor
from executors.checkpoints.eight_bit import is_eight_bit, new_eight_bit, plain
from executors.communication.buckets import BucketedReplicas
from executors.names import tied_parameters
from executors.offloading import held_as
from executors.replicas import (
    HoldingReplicas,
    KeepsOwn,
    SplitReplicas,
    skipped_parameters,
)
from executors.trainer import Trainer
from planner.errors import ExecutionError, FingerprintError
from planner.schema.base import fingerprint_parameters
from planner.schema.optimizers import OPTIMIZERS

__all__ = [
    "Inventory",
    "Targets",
    "collect",
    "counter_device",
    "difference",
    "full_gradients",
    "full_parameters",
    "require_states",
    "restore_codecs",
    "restore_generators",
    "targets",
]

#: Counters are scalars on the CPU, whatever the parameter is.
_COUNTER = "step"

#: Prefix of what copies keep in common between exchanges.
_SYNCHRONISATION = "synchronisation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Parameters and buffers of a whole model, noted before it is taken apart.

    Attributes:
        shapes: Of the parameters, by first FQN.
        first: First FQN of a parameter, by each of its other FQNs.
        buffers: FQNs of persistent buffers.
    """

    shapes: Mapping[str, tuple[int, ...]]
    first: Mapping[str, str]
    buffers: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Inventory:
        """Note the parameters and buffers of a model."""
        every = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return cls(
            shapes={n: tuple(p.shape) for n, p in model.named_parameters()},
            first={
                name: group[0] for group in tied_parameters(model) for name in group
            },
            buffers=frozenset(
                name
                for name, value in model.state_dict().items()
                if name not in every and isinstance(value, torch.Tensor)
            ),
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint, computed as that of a plan's model."""
        return fingerprint_parameters(self.shapes.items())

    def name(self, fqn: str) -> str:
        """The FQN that a parameter goes by."""
        return self.first.get(fqn, fqn)


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Tensors that a checkpoint is read into.

    Attributes:
        tensors: To be filled, by name.
        copies: Other tensors of this rank that are to equal one of these: pairs of
            copy and original.
        complete: Whether what copies keep between exchanges is among them.
    """

    tensors: Mapping[str, torch.Tensor]
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    complete: bool

    def copy(self) -> None:
        """Make the copies equal to what has been read."""
        for copy, original in self.copies:
            _local(copy).copy_(_local(original))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _buffers(
    trainer: Trainer, inventory: Inventory
) -> Iterator[tuple[str, torch.Tensor]]:
    for part in trainer.parts.values():
        for name, buffer in part.inner.named_buffers():
            if name in inventory.buffers:
                yield name, buffer


def collect(trainer: Trainer, inventory: Inventory) -> dict[str, torch.Tensor]:
    """This rank's part of the state: the live tensors, and its generators' states.

    Raises:
        ExecutionError: If the optimizer does not hold the model's own parameters.
    """
    tensors: dict[str, torch.Tensor] = {}
    own = _own_prefix(trainer)
    copy = trainer.place.index("replicate") if own else 0
    holds = isinstance(trainer.replicas, HoldingReplicas)
    known = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    divided = _in_order(trainer, dict(trainer.named_parameters()))
    for fqn, parameter in _with_values(trainer, trainer.named_parameters()):
        name = inventory.name(fqn)
        if parameter.requires_grad and id(parameter) not in known:
            raise ExecutionError(
                f"the optimizer holds no state of {name} by itself "
                f"({trainer.plan.strategy.label()}); plan with another zero_stage to "
                f"keep checkpoints"
            )
        tensors[f"model.{name}"] = divided.get(fqn, parameter.detach())
        if own and not trainer.replicas.in_sync(trainer.done):
            tensors[f"{own}model.{name}"] = parameter.detach()
            tensors[f"model.{name}"] = _mean(parameter, trainer)
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            _require_kept(trainer, name, key, value, parameter)
            if isinstance(value, torch.Tensor):
                full = f"optimizer.{key}.{name}"
                # Counters are equal on all copies.
                if own and key != _COUNTER and not holds:
                    tensors[f"{own}{full}"] = value
                if not copy or key == _COUNTER or holds:
                    tensors[full] = value
    tensors |= {name: kept for name, kept, _ in _kept_by_replicas(trainer, inventory)}
    if _owns_buffers(trainer):
        for name, buffer in _buffers(trainer, inventory):
            tensors.setdefault(f"model.{name}", buffer)
    tensors.update(_generators(trainer))
    tensors.update(_kept_by_codecs(trainer))
    tensors.update(_scaler(trainer))
    return tensors


def _in_order(
    trainer: Trainer,
    values: Mapping[str, torch.Tensor | None],
    *,
    gradients: bool = False,
) -> dict[str, torch.Tensor]:
    """Values of parameters that copies divide, as parts of the whole; collective.

    Args:
        trainer: Holds the parameters.
        values: Of some parameters, by FQN.
        gradients: Whether they are gradients, and not the parameters' own.
    """
    replicas = trainer.replicas
    if not isinstance(replicas, SplitReplicas):
        return {}
    names = {parameter: name for name, parameter in trainer.named_parameters()}
    own = {
        parameter: _local(value)
        for parameter, name in names.items()
        if (value := values[name]) is not None
    }
    return {
        names[parameter]: _divided(trainer, local, replicas.split[parameter])
        for parameter, local in replicas.in_order(own, gradients=gradients).items()
    }


def _divided(trainer: Trainer, local: torch.Tensor, dim: int) -> DTensor:
    """Part of a tensor that copies divide along a dimension."""
    mesh = trainer.place.along("replicate")
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)


def _with_values(
    trainer: Trainer, named: Iterable[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters but for those that other copies have now."""
    elsewhere = skipped_parameters(trainer.replicas)
    return ((name, one) for name, one in named if one not in elsewhere)


def _mean(parameter: nn.Parameter, trainer: Trainer) -> torch.Tensor:
    """Mean of a weight over the copies; collective."""
    mean = _local(parameter).clone()
    dist.all_reduce(mean, group=trainer.place.group("replicate"))
    return _like(parameter, mean / trainer.place.size("replicate"))


def require_states(trainer: Trainer, inventory: Inventory) -> None:
    """Refuse an optimizer whose states no checkpoint can hold, once it has some.

    Raises:
        ExecutionError: Naming a state, and the remedy.
    """
    for fqn, parameter in trainer.named_parameters():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            _require_kept(trainer, inventory.name(fqn), key, value, parameter)


def _require_kept(
    trainer: Trainer, name: str, key: str, value: object, parameter: nn.Parameter
) -> None:
    """Refuse an optimizer's state that no other mesh could be given its part of.

    Raises:
        ExecutionError: If it is neither a scalar tensor nor shaped as its parameter.
    """
    kind = OPTIMIZERS.get(trainer.optimizer_name)
    if kind is not None and kind.whole:
        # No mesh divides them.
        return
    if is_eight_bit(value):
        return
    if isinstance(value, torch.Tensor) and type(_local(value)) is not torch.Tensor:
        raise ExecutionError(
            f"{trainer.optimizer_name} keeps {key!r} of {name} as "
            f"{type(_local(value)).__name__}, of which checkpoints know nothing; keep "
            f"none with it, or use another optimizer"
        )
    shaped = isinstance(value, torch.Tensor) and (
        not value.ndim or value.numel() == 1 or value.shape == parameter.shape
    )
    if value is None or shaped or isinstance(trainer.replicas, SplitReplicas):
        return
    found = list(value.shape) if isinstance(value, torch.Tensor) else value
    raise ExecutionError(
        f"{trainer.optimizer_name} keeps {key!r} of {name} as {found}, neither a "
        f"scalar tensor nor of its shape {list(parameter.shape)}; keep no checkpoints "
        f"with it, or use another optimizer"
    )


def _kept_by_replicas(
    trainer: Trainer, inventory: Inventory
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name all that copies keep in common, with this rank's part, saved and live."""
    for part in trainer.parts.values():
        for fqn, parameter in part.inner.named_parameters():
            for key, kept in trainer.replicas.state().items():
                if parameter in kept:
                    name = f"{_SYNCHRONISATION}.{key}.{inventory.name(fqn)}"
                    yield name, _like(parameter, kept[parameter]), kept[parameter]


def _like(parameter: nn.Parameter, local: torch.Tensor) -> torch.Tensor:
    """A rank's part of values that are divided as a parameter is."""
    if not isinstance(parameter, DTensor):
        return local.to(parameter.device)
    return DTensor.from_local(
        local.to(parameter.to_local().device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _own_prefix(trainer: Trainer) -> str:
    """Prefix of what each copy of the weights has of its own; empty if none has."""
    place = trainer.place
    return f"replica.{place.index('replicate')}." if place.apart else ""


def _owns_buffers(trainer: Trainer) -> bool:
    """Return True on the one rank of each stage whose buffers are the run's."""
    place = trainer.place
    return place.data_index == place.index("cp") == place.index("tp") == 0


def _generators(trainer: Trainer) -> dict[str, torch.Tensor]:
    place = trainer.place
    states = {f"rng.{place.rank}.cpu": torch.get_rng_state()}
    if place.device.type == "cuda":
        states[f"rng.{place.rank}.cuda"] = torch.cuda.get_rng_state(place.device)
    return states


def _codecs(trainer: Trainer) -> Iterator[tuple[str, BucketedReplicas]]:
    """Replicas of this rank in buckets of our own, by the prefix of what they keep."""
    for index, part in trainer.parts.items():
        if isinstance(part.module, BucketedReplicas):
            kind = type(part.module.exchange).__name__
            yield f"compression.{trainer.place.rank}.{index}.{kind}.", part.module


def _kept_by_codecs(trainer: Trainer) -> dict[str, torch.Tensor]:
    found = {
        prefix + name: kept
        for prefix, replicas in _codecs(trainer)
        for name, kept in replicas.state().items()
    }
    if isinstance(trainer.replicas, KeepsOwn):
        own = trainer.replicas.own_state().items()
        rank = trainer.place.rank
        found |= {f"compression.{rank}.residual.{name}": kept for name, kept in own}
    if isinstance(trainer.step_rule, KeepsOwn):
        own = trainer.step_rule.own_state().items()
        rank = trainer.place.rank
        found |= {f"learning.{rank}.{name}": kept for name, kept in own}
    return found


def _scaler(trainer: Trainer) -> dict[str, torch.Tensor]:
    """State of the scaling of losses, the same on all of a copy; empty without."""
    scaler, place = trainer.loss.scaler, trainer.place
    if scaler is None:
        return {}
    copy = f"{place.copy}." if place.apart else ""
    return {f"loss_scaler.{copy}state": scaler.state}


def restore_codecs(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Continue from what this rank's codecs kept, if all of it was read."""
    for prefix, replicas in _codecs(trainer):
        names = replicas.state()
        if all(prefix + name in tensors for name in names):
            replicas.restored({name: tensors[prefix + name] for name in names})


def restore_generators(trainer: Trainer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Continue this rank's random numbers from the states that were read."""
    place = trainer.place
    torch.set_rng_state(tensors[f"rng.{place.rank}.cpu"])
    if place.device.type == "cuda":
        torch.cuda.set_rng_state(tensors[f"rng.{place.rank}.cuda"], place.device)


def targets(
    trainer: Trainer,
    inventory: Inventory,
    saved: Mapping[str, SavedTensor],
    *,
    same_mesh: bool,
) -> Targets:
    """Find the tensors that this rank reads; make the optimizer's states.

    Args:
        trainer: Its parameters and buffers are the targets themselves.
        inventory: Of the whole model.
        saved: What the checkpoint holds.
        same_mesh: Whether it is of the same mesh: then this rank's random states are
            read too, and its copy's own optimizer states.

    Raises:
        FingerprintError: If the checkpoint lacks a parameter.
    """
    reading = _Reading(saved, _own_prefix(trainer) if same_mesh else "")
    _read_parameters(reading, trainer, inventory)
    kept = list(_kept_by_replicas(trainer, inventory))
    complete = all(name in saved for name, *_ in kept)
    for name, read, live in kept if complete else ():
        reading.add(name, read)
        reading.copies.append((live, read))
    for name, buffer in _buffers(trainer, inventory):
        # Constants of a graph: a plan's stages need not hold them all.
        if f"model.{name}" in saved:
            reading.add(f"model.{name}", buffer)
    found = reading.found
    generators = _generators(trainer) if same_mesh else {}
    found |= {name: state for name, state in generators.items() if name in saved}
    codecs = _kept_by_codecs(trainer) if same_mesh else {}
    shapes = {name: tuple(kept.shape) for name, kept in codecs.items()}
    if all(name in saved and saved[name].shape == shapes[name] for name in codecs):
        found |= codecs
    found |= {n: state for n, state in _scaler(trainer).items() if n in saved}
    return Targets(tensors=found, copies=tuple(reading.copies), complete=complete)


@dataclass(slots=True)
class _Reading:
    """Targets while they are gathered.

    Attributes:
        saved: What the checkpoint holds.
        own: Prefix of what this rank's copy has of its own there; empty if it has none.
        found: Tensors to be filled, by name.
        copies: Pairs of another tensor of this rank and the one that it is to equal.
    """

    saved: Mapping[str, SavedTensor]
    own: str
    found: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Read into a tensor; into its first, where several bear one name."""
        if name in self.found:
            self.copies.append((tensor, self.found[name]))
        else:
            self.found[name] = tensor

    def own_or_common(self, name: str) -> str:
        """Name of what this rank's copy has of its own, if that was saved."""
        return f"{self.own}{name}" if f"{self.own}{name}" in self.saved else name


def _read_parameters(reading: _Reading, trainer: Trainer, inventory: Inventory) -> None:
    """Add this rank's parameters, and make and add their optimizer's states.

    Raises:
        FingerprintError: If the checkpoint lacks a parameter.
    """
    saved = reading.saved
    averages = trainer.plan.strategy.optimizer.ema is not None
    keys = _state_keys(saved, averages=averages)
    replicas = trainer.replicas
    split = replicas if isinstance(replicas, SplitReplicas) else None
    for fqn, parameter in _with_values(trainer, _here(trainer)):
        name = inventory.name(fqn)
        if f"model.{name}" not in saved:
            raise FingerprintError(
                f"the checkpoint holds no {name}; it is of another model, choose "
                f"another checkpoint_dir"
            )
        if split is not None and parameter in split.split:
            part = _divided(trainer, split.kept(parameter), split.split[parameter])
            reading.add(f"model.{name}", part)
            continue
        reading.add(reading.own_or_common(f"model.{name}"), parameter.detach())
        for key in keys.get(name, ()) if parameter.requires_grad else ():
            full = reading.own_or_common(f"optimizer.{key}.{name}")
            state = _empty_state(trainer.optimizer, key, parameter, saved[full])
            trainer.optimizer.state[parameter][key] = state
            reading.add(full, plain(state))
            reading.copies.append((state, reading.found[full]))


def _here(trainer: Trainer) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that this rank has values of, tied copies too."""
    replicas = trainer.replicas
    held = replicas.held() if isinstance(replicas, HoldingReplicas) else None
    for part in trainer.parts.values():
        for fqn, parameter in part.inner.named_parameters():
            if held is None or parameter in held:
                yield fqn, parameter


def _state_keys(
    saved: Mapping[str, SavedTensor], *, averages: bool
) -> dict[str, list[str]]:
    """Names of what the optimizer had of each parameter.

    Averages of the weights that nothing would go on with are left out.
    """
    keys: dict[str, list[str]] = {}
    for full in saved:
        kind, _, rest = full.partition(".")
        key, _, name = rest.partition(".")
        if kind == "optimizer" and (averages or key != AVERAGE):
            keys.setdefault(name, []).append(key)
    return keys


def counter_device(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> torch.device:
    """Device of the counter of a parameter's steps: fused kernels read it there."""
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return parameter.device if fused else torch.device("cpu")


def _empty_state(
    optimizer: torch.optim.Optimizer,
    key: str,
    parameter: nn.Parameter,
    saved: SavedTensor,
) -> torch.Tensor:
    small = new_eight_bit(optimizer, key, parameter)
    if small is not None:
        return small
    parameter = held_as(optimizer, parameter)
    counters = counter_device(optimizer, parameter)
    if key == _COUNTER or saved.shape != tuple(parameter.shape):
        device = counters if key == _COUNTER else None
        if math.prod(saved.shape) > 1:
            device = parameter.device
        return torch.zeros(saved.shape, dtype=saved.dtype, device=device)
    return torch.zeros_like(parameter, requires_grad=False)


def difference(inventory: Inventory, saved: Mapping[str, SavedTensor]) -> str:
    """Describe how a checkpoint's parameters differ from a model's; empty if equal.

    Args:
        inventory: Of the model.
        saved: What the checkpoint holds.
    """
    there = {
        name.removeprefix("model."): tensor.shape
        for name, tensor in saved.items()
        if name.startswith("model.")
        and name.removeprefix("model.") not in inventory.buffers
    }
    here = inventory.shapes
    said = [
        f"{name} is {list(there[name])} there and {list(shape)} here"
        for name, shape in here.items()
        if name in there and there[name] != shape
    ]
    said += [f"{name} is only here" for name in here if name not in there]
    said += [f"{name} is only there" for name in there if name not in here]
    more = f" (and {len(said) - 2} more)" if len(said) > 2 else ""
    return "; ".join(said[:2]) + more


def _whole(named: list[tuple[str, torch.Tensor | None]]) -> dict[str, torch.Tensor]:
    local: dict[str, torch.Tensor] = {}
    for name, tensor in named:
        if tensor is not None:
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            local[name] = whole.detach().cpu().clone()
    everything: list[dict[str, torch.Tensor]] = [
        {} for _ in range(dist.get_world_size())
    ]
    dist.all_gather_object(everything, local)
    merged: dict[str, torch.Tensor] = {}
    for part in everything:
        for name, tensor in part.items():
            merged.setdefault(name, tensor)
    return merged


def full_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter of the model, whole, on the CPU of every rank; collective.

    Meant for models that one process can hold; tied parameters appear once.
    """
    named = dict(_with_values(trainer, trainer.named_parameters()))
    return _whole([*{**named, **_in_order(trainer, named)}.items()])


def full_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients of the last step, clipped if the plan clips; see parameters."""
    named = {name: p.grad for name, p in trainer.named_parameters()}
    divided = _in_order(trainer, named, gradients=True)
    return _whole([*{**named, **divided}.items()])
