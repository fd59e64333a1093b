"""Kernels that frameworks make of ops: what they move, and what they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from planner.capture import capture, load_config, load_model
from planner.graph import Block, Fusion, ModelGraph

_HIDDEN, _INNER, _TOKENS = 64, 160, 32


class _Norm(nn.Module):
    """RMSNorm op by op, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide * scale).to(x.dtype)


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_HIDDEN, _INNER, bias=False)
        self.up = nn.Linear(_HIDDEN, _INNER, bias=False)
        self.down = nn.Linear(_INNER, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return made


class _Layer(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = norm, _Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def _built_in() -> nn.Module:
    return nn.RMSNorm(_HIDDEN)


def _graph(norm: Any = _Norm, layers: int = 3) -> ModelGraph:
    def build() -> nn.Module:
        return nn.Sequential(*(_Layer(norm()) for _ in range(layers)))

    return capture(build, {"input": ((1, _TOKENS, _HIDDEN), "float32")})


def _blocks(graph: ModelGraph, fusion: Fusion) -> tuple[Block, Block]:
    """Norm and MLP of the second layer."""
    blocks = graph.with_kernels(fusion, loss=False).blocks
    norm, mlp = (block for block in blocks if block.layer == "1")
    return norm, mlp


_STREAM = 2.0 * _TOKENS * _HIDDEN  # Bytes in bfloat16.
_WIDE = 2.0 * _TOKENS * _INNER


@pytest.mark.parametrize("fusion", ["kernels", "compiled"])
def test_a_norm_reads_and_writes_the_stream_once(fusion: Fusion) -> None:
    eager, _ = _blocks(_graph(), "none")
    norm, _ = _blocks(_graph(), fusion)
    assert sum(kernel.count for kernel in eager.kernels) == 8
    (kernel,) = norm.kernels
    assert kernel.forward_bytes == 2 * _STREAM
    # In float32, a number for each token.
    scale = 4.0 * _TOKENS
    assert norm.saved_bytes == _STREAM + scale
    assert eager.saved_bytes == 3 * _STREAM + scale
    # It reads the gradient of its output and what it kept, and writes that of its
    # input; the compiled one reads the gradients of both readers of its output.
    readers = {"kernels": 1, "compiled": 2}[fusion]
    assert kernel.backward_bytes == (2 + readers) * _STREAM + scale


def test_norms_alone_leave_activations_as_they_are() -> None:
    norm, mlp = _blocks(_graph(), "norms")
    assert (norm.kernels, norm.saved_bytes) == tuple(
        getattr(_blocks(_graph(), "kernels")[0], name)
        for name in ("kernels", "saved_bytes")
    )
    _, eager = _blocks(_graph(), "none")
    assert mlp.saved_bytes == eager.saved_bytes


def test_a_norm_op_by_op_is_fused_into_what_the_built_in_op_is() -> None:
    own, built_in = (_blocks(_graph(norm), "kernels")[0] for norm in (_Norm, _built_in))
    (one,), (other,) = own.kernels, built_in.kernels
    assert one.forward_bytes == pytest.approx(other.forward_bytes, rel=0.05)
    assert one.backward_bytes == pytest.approx(other.backward_bytes, rel=0.05)
    assert own.saved_bytes == pytest.approx(built_in.saved_bytes, rel=0.05)


@pytest.mark.parametrize("fusion", ["kernels", "compiled"])
def test_a_gated_activation_keeps_both_products(fusion: Fusion) -> None:
    _, eager = _blocks(_graph(), "none")
    _, mlp = _blocks(_graph(), fusion)
    assert eager.saved_bytes == _STREAM + 4 * _WIDE
    assert mlp.saved_bytes == _STREAM + 3 * _WIDE
    memory = [k for k in mlp.kernels if k.kind == "memory"]
    assert {k.forward_bytes for k in memory} == {3 * _WIDE, 3 * _STREAM}


def test_products_of_one_input_are_one_where_kernels_are_written_by_hand() -> None:
    sizes = {
        fusion: sorted(k.n for k in block.kernels for _ in range(k.count) if k.n > 1)
        for fusion in ("none", "kernels", "compiled")
        for _, block in [_blocks(_graph(), fusion)]
    }
    assert sizes["none"] == sizes["compiled"] == [_HIDDEN, _INNER, _INNER]
    assert sizes["kernels"] == [_HIDDEN, 2 * _INNER]
    _, mlp = _blocks(_graph(), "kernels")
    (both,) = (k for k in mlp.kernels if k.n == 2 * _INNER)
    assert both.forward_bytes == _STREAM + 2 * _WIDE
    assert both.weight_bytes == 2.0 * 2 * _HIDDEN * _INNER


class _Between(nn.Module):
    """A product lies between two pointwise ops, of which it reads the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_HIDDEN, _HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x.sigmoid()
        made = self.linear(first)
        return made * first


def test_ops_on_both_sides_of_a_product_stay_apart() -> None:
    graph = capture(_Between, {"x": ((1, _TOKENS, _HIDDEN), "float32")})
    fused = graph.with_kernels("compiled", loss=False)
    kernels = [k for block in fused.blocks for k in block.kernels]
    moved = sorted(k.forward_bytes for k in kernels if k.kind == "memory")
    # The second, with the mean square that is the loss, reads two and writes a number.
    assert moved[-2:] == [2 * _STREAM, 2 * _STREAM + 4]


@pytest.mark.parametrize("fusion", ["none", "kernels", "compiled"])
def test_a_fused_loss_keeps_the_logits_alone(fusion: Fusion) -> None:
    graph = capture(load_model("gpt2", seq_len=_TOKENS))
    logits = 2.0 * _TOKENS * 50257
    plain, fused = (
        graph.with_kernels(fusion, loss=loss).blocks[-1] for loss in (False, True)
    )
    assert plain.saved_bytes - fused.saved_bytes == pytest.approx(logits, rel=1e-3)
    assert sum(k.count for k in fused.kernels) < sum(k.count for k in plain.kernels)
    # The gradient of the logits, and that of the stream beside it.
    assert fused.transient_bytes == pytest.approx(logits, rel=0.02)


def test_a_scan_moves_what_enters_and_leaves_and_its_states() -> None:
    chunks, chunk, heads, size, state, groups = 4, 64, 8, 32, 16, 2
    config = {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "num_heads": heads,
        "head_dim": size,
        "state_size": state,
        "n_groups": groups,
        "chunk_size": chunk,
        "vocab_size": 256,
    }
    graph = capture(load_config(config, name="mamba2", seq_len=chunks * chunk))
    plain, scan = (
        next(block for block in made.blocks if block.name.endswith("mixer"))
        for made in (graph, graph.with_kernels("kernels", loss=False))
    )
    (kernel,) = (k for k in scan.kernels if k.kind == "memory" and k.forward_flops)
    # Float32 states of every chunk, and those of all chunks before, the first's, too.
    states = 4.0 * heads * size * state * (chunks + chunks + 1)
    inner, tokens = heads * size, chunks * chunk
    entering = 2.0 * tokens * (inner + 2 * groups * state + heads)
    leaving = 4.0 * tokens * inner
    assert kernel.forward_bytes == pytest.approx(
        entering + leaving + 2 * states, rel=0.05
    )
    assert scan.forward_flops == pytest.approx(plain.forward_flops)
    assert scan.saved_bytes < 0.5 * plain.saved_bytes
    assert len(scan.kernels) < 0.3 * len(plain.kernels)


_MODELS = ("llama3.2-1b", "gpt2", "bert-base", "mixtral-8x7b", "t5-small", "vit-b")


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("fusion", ["kernels", "compiled"])
def test_work_and_weights_stay_and_bytes_fall(name: str, fusion: Fusion) -> None:
    graph = capture(load_model(name))
    fused = graph.with_kernels(fusion, loss=True)
    assert fused.unit_names == graph.unit_names
    for one, other in zip(graph.blocks, fused.blocks, strict=True):
        assert (one.name, one.kind, one.tp_collectives) == (
            other.name,
            other.kind,
            other.tp_collectives,
        )
        assert other.forward_flops == pytest.approx(one.forward_flops)
        assert other.backward_flops == pytest.approx(one.backward_flops)
        assert other.parameter_count == one.parameter_count
        assert other.boundary_bytes == one.boundary_bytes
        assert other.saved_bytes <= one.saved_bytes
    moved = [
        sum(
            k.count * (k.forward_bytes + k.backward_bytes)
            for block in made.blocks
            for k in block.kernels
        )
        for made in (fused, graph)
    ]
    assert moved[0] < moved[1]


def test_units_in_another_order_take_their_kernels_along() -> None:
    graph = capture(load_model("t5-small", seq_len=64))
    names = list(graph.unit_names)
    first = next(i for i, name in enumerate(names) if name.startswith("decoder"))
    order = [*names[first : first + 1], *names[:first], *names[first + 1 :]]
    moved = graph.reordered(order).with_kernels("kernels", loss=False)
    plain = graph.with_kernels("kernels", loss=False)
    figures = {block.name: block.saved_bytes for block in plain.blocks}
    assert {block.name: block.saved_bytes for block in moved.blocks} == figures
    assert [block.index for block in moved.blocks] == list(range(len(moved.blocks)))


@pytest.mark.further
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_what_a_compiled_layer_keeps_is_what_torch_keeps(kind: str) -> None:
    """Bytes of one layer, to the byte: of the partitioner that Inductor goes by."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    rope = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 160}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    more = off | {"n_positions": 64} if kind == "gpt2" else rope
    config = AutoConfig.for_model(kind, vocab_size=128, **sizes, **more)
    config.bos_token_id = config.eos_token_id = 1
    model = AutoModelForCausalLM.from_config(config)
    inputs = {"input_ids": ((2, _TOKENS), "int64"), "use_cache": False}
    graph = capture(model, inputs, dtype=None).with_kernels("compiled", loss=False)
    found = sum(block.saved_bytes for block in graph.blocks if block.layer[-2:] == ".1")
    assert found == _kept_by_torch(model)


def _kept_by_torch(model: Any) -> int:
    x = torch.randn(2, _TOKENS, 64, requires_grad=True)
    base, extra = model.base_model, {}
    apart = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
    if hasattr(base, "rotary_emb"):
        tables = base.rotary_emb(x, torch.arange(_TOKENS)[None])
        extra["position_embeddings"] = tables
        # A unit of their own makes and keeps them.
        apart |= {table.untyped_storage().data_ptr() for table in tables}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in apart:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    layer = (base.layers if hasattr(base, "layers") else base.h)[1]
    run = torch.compile(layer, backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(x, **extra)
    return sum(kept.values())
