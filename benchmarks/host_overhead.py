"""Time of the host itself: the constants of planner/cost/recipes.py.

python -m benchmarks.host_overhead [--device cpu|cuda]

Models of next to no size: seconds a counted kernel takes in training, over a bare op.
Fully sharded against plain on one process: seconds that each gather or reduction adds,
and each tensor in it. Seconds a tensor of the optimizer. On CPUs also four processes
that compute, then gather next to nothing, against four that only compute: what each hop
of a ring waits for a core, where there are fewer cores than processes. Run it on an
otherwise idle machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from executors import launch
from planner.capture import capture

_LAYERS, _VOCABULARY = 4, 64
_TINY = {"hidden_size": 32, "num_hidden_layers": _LAYERS, "vocab_size": _VOCABULARY}
_HEADS = {"num_attention_heads": 2, "intermediate_size": 64}
_KV = {"num_key_value_heads": 2}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", _TINY | _HEADS | _KV),
    "Qwen2": ("Qwen2ForCausalLM", _TINY | _HEADS | _KV),
    "BERT": ("BertForMaskedLM", _TINY | _HEADS),
    "GPT-2": (
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": _LAYERS, "n_head": 2, "vocab_size": _VOCABULARY},
    ),
}
#: Processes, rounds, scalars of a message, and seconds of compute between messages.
_PROCESSES, _ROUNDS, _SCALARS, _COMPUTE_S = 4, 60, 1024, 0.01


def _build(name: str) -> nn.Module:
    made, figures = _MODELS[name]
    kind = getattr(transformers, made)
    model: nn.Module = kind(kind.config_class(**figures))
    return model


def _seconds(device: str, call: Callable[[], object], times: int = 15) -> float:
    """Least seconds of a call, of the CPU or until the GPU is done, when warm."""
    call()
    found = []
    for _ in range(times):
        if device == "cpu":
            begin = time.process_time()
            call()
            found.append(time.process_time() - begin)
            continue
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found)


def _step(device: str, model: nn.Module) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)
    model(input_ids=tokens).logits.sum().backward()
    model.zero_grad(set_to_none=True)


def bare_op_s(device: str) -> float:
    """Seconds of an op on one element, as the probe counts them."""
    one = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(1000):
            one.add(1.0)

    return _seconds(device, many) / 1000


def kernel_s(device: str, name: str) -> float:
    """Seconds of one kernel of a model of no size, forward or backward."""
    model = _build(name).to(device)
    graph = capture(
        _build(name),
        {"input_ids": torch.zeros(1, 8, dtype=torch.int64)},
        dtype="float32",
    )
    kernels = [kernel for block in graph.blocks for kernel in block.kernels]
    count = sum(k.count * (3 if k.weight_bytes else 2) for k in kernels)
    return _seconds(device, lambda: _step(device, model)) / count


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Cost of fully sharding, added to a step of a model of next to no size.

    Attributes:
        calls: Gathers and reductions.
        members: Tensors in all of them together.
        seconds: That they add.
        optimizer_s: Of a step of the fused AdamW; of ``tensors``.
        tensors: Of the model.
    """

    calls: int
    members: int
    seconds: float
    optimizer_s: float
    tensors: int


def sharding(device: str, name: str) -> Sharding:
    """Compare a model that is fully sharded, in bf16, with a plain one."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        plain = _build(name).to(device)
        alone = _seconds(device, lambda: _step(device, plain))
        model = _build(name).to(device)
        mesh = init_device_mesh(device, (1,))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        inside = sum(len(list(layer.parameters())) for layer in layers)
        for layer in layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        tensors = len(list(model.parameters()))
        both = _seconds(device, lambda: _step(device, model))
        adam = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(1, 8, dtype=torch.int64, device=device)
        model(input_ids=tokens).logits.sum().backward()
        return Sharding(
            # Of each layer two gathers and a reduction; the root stays gathered.
            calls=3 * _LAYERS + 2,
            members=3 * inside + 2 * (tensors - inside),
            seconds=both - alone,
            optimizer_s=_seconds(device, adam.step),
            tensors=tensors,
        )
    finally:
        dist.destroy_process_group()


def turns(arguments: dict[str, Any], emit: Callable[[Any], None]) -> float:
    """On a rank: seconds of a round of compute, then of a message if asked for."""
    del emit
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    a, own = torch.randn(256, 256), torch.zeros(_SCALARS)
    whole = [torch.empty_like(own) for _ in range(dist.get_world_size())]

    def turn() -> None:
        begin = time.thread_time()
        while time.thread_time() - begin < _COMPUTE_S:
            torch.mm(a, a)
        if arguments["gather"]:
            dist.all_gather(whole, own)

    begin = time.perf_counter()
    for _ in range(_ROUNDS):
        turn()
    dist.barrier()
    took = (time.perf_counter() - begin) / _ROUNDS
    dist.destroy_process_group()
    return took


def main() -> None:
    """Print the parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    bare = bare_op_s(device)
    print(f"bare op: {bare * 1e6:.1f} us")
    for name in _MODELS:
        found = kernel_s(device, name)
        print(f"{name}: {found * 1e6:.1f} us a kernel, {found / bare:.1f} bare ops")
    for name in _MODELS:
        added = sharding(device, name)
        print(
            f"{name}: FSDP2 adds {added.seconds * 1e3:.2f} ms for {added.calls} "
            f"collectives of {added.members} tensors, "
            f"{added.seconds / added.calls * 1e3:.2f} each; "
            f"{added.optimizer_s * 1e3:.2f} ms a step of fused AdamW, "
            f"{added.tensors} tensors"
        )
    if device != "cpu":
        return
    rounds = []
    for gather in (False, True):
        results = launch(
            "benchmarks.host_overhead:turns", {"gather": gather}, processes=_PROCESSES
        )
        rounds.append(sum(results) / len(results))
    wait = (rounds[1] - rounds[0]) / (_PROCESSES - 1)
    print(
        f"{_PROCESSES} processes, {_COMPUTE_S * 1e3:.0f} ms of compute each: a round "
        f"{rounds[0] * 1e3:.1f} ms, with a gather {rounds[1] * 1e3:.1f} ms: "
        f"{wait * 1e3:.1f} ms for each of its {_PROCESSES - 1} hops"
    )


if __name__ == "__main__":
    main()
