"""Time of the host itself on a CPU: the constants of planner/cost/recipes.py.

python -m benchmarks.host_overhead

Three parts. Models of next to no size: seconds a counted kernel takes in training, over
a bare op. Fully sharded against plain on one process: seconds that each gather or
reduction adds. Four processes that compute, then gather next to nothing, against four
that only compute: what each hop of a ring waits for a core, where there are fewer cores
than processes. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


def _seconds(call: Callable[[], object], times: int = 15) -> float:
    """Least CPU seconds of a call, after one to warm up."""
    call()
    found = []
    for _ in range(times):
        begin = time.process_time()
        call()
        found.append(time.process_time() - begin)
    return min(found)


def _step(model: nn.Module) -> None:
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(input_ids=tokens).logits.sum().backward()
    model.zero_grad(set_to_none=True)


def bare_op_s() -> float:
    """Seconds of an op on one element, as the probe counts them."""
    one = torch.zeros(1)

    def many() -> None:
        for _ in range(1000):
            one.add(1.0)

    return _seconds(many) / 1000


def kernel_s(name: str) -> float:
    """Seconds of one kernel of a model of no size, forward or backward."""
    model = _build(name)
    graph = capture(
        _build(name),
        {"input_ids": torch.zeros(1, 8, dtype=torch.int64)},
        dtype="float32",
    )
    kernels = [kernel for block in graph.blocks for kernel in block.kernels]
    count = sum(k.count * (3 if k.weight_bytes else 2) for k in kernels)
    return _seconds(lambda: _step(model)) / count


def collective_s(name: str) -> float:
    """Seconds that fully sharding adds to a collective of next to no bytes."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = _build(name)
        plain = _seconds(lambda: _step(model))
        mesh = init_device_mesh("cpu", (1,))
        layers = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
        for layer in layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
        # Of each layer two gathers and a reduction; the root stays gathered.
        calls = 3 * _LAYERS + 2
        return (_seconds(lambda: _step(model)) - plain) / calls
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
    """Print the three parts."""
    torch.set_num_threads(1)
    bare = bare_op_s()
    print(f"bare op: {bare * 1e6:.1f} us")
    for name in _MODELS:
        found = kernel_s(name)
        print(f"{name}: {found * 1e6:.1f} us a kernel, {found / bare:.1f} bare ops")
    for name in ("Llama", "Qwen2"):
        print(f"{name}: {collective_s(name) * 1e3:.2f} ms a collective of FSDP2")
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
