"""Kernels of training on one GPU: measured with CUDA events, beside what prices them.

python -m benchmarks.gpu_kernels measure FILE.csv   # where the GPU is; one minute
python -m benchmarks.gpu_kernels table [FILE.csv]   # anywhere

Products as torch runs a linear layer: forward, input's and weight's gradient; scaled
dot-product attention both ways; passes over memory; the optimizer; launches of a host.
The table compares products and attention with the surfaces that were fitted to NVIDIA's
published tables (``planner/measurements/data/kernels.json``), which have no backward.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from planner.cluster.presets import device_type
from planner.measurements.kernels import KernelSurfaces, surfaces_of

#: Products (tokens, outputs, inputs) of the models of benchmarks/data/one_gpu.yaml.
_PRODUCTS = (
    (8192, 2048, 2048),
    (8192, 512, 2048),
    (8192, 8192, 2048),
    (8192, 2048, 8192),
    (8192, 128256, 2048),
    (16384, 1024, 1024),
    (16384, 3072, 1024),
    (16384, 4096, 1024),
    (16384, 1024, 4096),
    (16384, 50257, 1024),
    (16384, 30522, 1024),
    (8192, 4096, 4096),
    (8192, 1024, 4096),
    (8192, 14336, 4096),
    (8192, 4096, 14336),
    (8192, 896, 896),
    (8192, 4864, 896),
    (8192, 896, 4864),
    (12608, 3072, 1024),
    (16448, 5120, 1280),
    (2048, 2048, 2048),
    (1024, 768, 3072),
    (256, 3072, 768),
    (1024, 768, 2048),
)
#: Batch, sequence, heads, heads of keys, head size, causal.
_ATTENTION = (
    (4, 2048, 32, 8, 64, True),
    (1, 8192, 32, 8, 64, True),
    (16, 1024, 16, 16, 64, True),
    (32, 512, 16, 16, 64, False),
    (64, 197, 16, 16, 64, False),
    (64, 257, 16, 16, 80, False),
    (2, 4096, 32, 8, 128, True),
    (4, 2048, 32, 4, 128, True),
    (8, 1024, 14, 2, 64, True),
    (1, 256, 12, 12, 64, True),
    (1, 32768, 32, 8, 128, True),
)
#: Rows of 2-byte numbers that begin at 16, 8, 4 and 2 bytes.
_UNALIGNED = (
    *((8192, 50264 - less, 1024) for less in (0, 4, 2, 1)),
    *((8192, 4096, 1024 - less) for less in (4, 2, 1)),
    *((8192, 1024, 4096 - less) for less in (4, 2, 1)),
)
_SHIPPED = Path(__file__).parent / "data" / "gpu_kernels_h200.csv"
_WIDTHS = {"kind": 9, "dtype": 8, "pass": 30, "sizes": 20, "notes": 15}
#: Shorter kernels wait for their launch, 20 us on the host of the file that ships.
_HOST_BOUND_S = 4e-5
_COLUMNS = ("kind", "dtype", "pass", "sizes", "seconds", "sustained_seconds", "notes")


def _seconds(call: Callable[[], object], least: float = 0.03) -> tuple[float, float]:
    """Median of short runs, and the mean of one run of 10 times ``least`` seconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - begin, 1e-6)
    times = int(min(max(least / once, 3), 200))
    found = []
    for _ in range(times):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    many = int(min(max(10 * least / once, 3), 2000))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(many):
        call()
    end.record()
    torch.cuda.synchronize()
    return statistics.median(found), start.elapsed_time(end) / 1e3 / many


def _products(
    dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[Any, ...]]:
    for m, n, k in shapes:
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        weight = torch.randn(n, k, device="cuda", dtype=dtype)
        y = torch.randn(m, n, device="cuda", dtype=dtype)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda x=x, weight=weight: functional.linear(x, weight),
            "input": lambda y=y, weight=weight: torch.mm(y, weight),
            "weight": lambda y=y, x=x: torch.mm(y.t(), x),
        }
        for name, call in calls.items():
            yield "product", name, (m, n, k), _seconds(call), ""


def _attentions(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    backends = torch.nn.attention.SDPBackend
    for b, s, h, kv, d, causal in _ATTENTION:
        for backend in (backends.FLASH_ATTENTION, backends.CUDNN_ATTENTION):
            q = torch.randn(b, h, s, d, device="cuda", dtype=dtype, requires_grad=True)
            k, v = (
                torch.randn(b, h, s, d, device="cuda", dtype=dtype, requires_grad=True)
                for _ in range(2)
            )
            with torch.nn.attention.sdpa_kernel(backend):

                def forward(
                    q: Any = q, k: Any = k, v: Any = v, causal: bool = causal
                ) -> Any:
                    return functional.scaled_dot_product_attention(
                        q, k, v, is_causal=causal
                    )

                sizes, name = (b, s, h, kv, d, int(causal)), backend.name
                try:
                    yield "attention", "forward", sizes, _seconds(forward), name
                    out = forward()
                    grad = torch.randn_like(out)

                    def backward(
                        out: Any = out, grad: Any = grad, given: Any = (q, k, v)
                    ) -> Any:
                        return torch.autograd.grad(out, given, grad, retain_graph=True)

                    yield "attention", "backward", sizes, _seconds(backward), name
                except RuntimeError as error:
                    yield "attention", "error", sizes, (0.0, 0.0), str(error)[:80]


def _passes(dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    rows, width = 8192, 8192
    x = torch.randn(rows, width, device="cuda", dtype=dtype)
    y, wide = torch.randn_like(x), torch.randn(rows, width, device="cuda")
    gain = torch.ones(width, device="cuda", dtype=dtype)
    cases: dict[str, Callable[[], object]] = {
        "copy": x.clone,
        "add": lambda: x + y,
        "multiply": lambda: x * y,
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x, approximate="tanh"),
        "to_float32": x.float,
        "to_half": lambda: wide.to(dtype),
        "square_mean": lambda: wide.pow(2).mean(-1, keepdim=True),
        "sum_rows": lambda: x.sum(0),
        "layer_norm": lambda: functional.layer_norm(x, (width,), gain, gain),
        "rms_norm": lambda: functional.rms_norm(x, (width,), gain),
        "softmax_float32": lambda: torch.softmax(wide, -1),
        "dropout": lambda: functional.dropout(x, 0.1),
        "transpose": lambda: x.t().contiguous(),
    }
    for name, call in cases.items():
        yield "pass", name, (rows, width), _seconds(call), ""
    logits = torch.randn(8192, 128256, device="cuda", requires_grad=True)
    labels = torch.randint(128256, (8192,), device="cuda")
    loss = functional.cross_entropy(logits, labels)
    yield (
        "pass",
        "cross_entropy forward float32",
        (8192, 128256),
        _seconds(lambda: functional.cross_entropy(logits, labels)),
        "",
    )
    yield (
        "pass",
        "cross_entropy backward float32",
        (8192, 128256),
        _seconds(lambda: torch.autograd.grad(loss, logits, retain_graph=True)),
        "",
    )
    table = torch.randn(128256, 2048, device="cuda", dtype=dtype, requires_grad=True)
    found = functional.embedding(labels, table)
    grad = torch.randn_like(found)
    yield (
        "pass",
        "embedding backward",
        (8192, 128256, 2048),
        _seconds(lambda: torch.autograd.grad(found, table, grad, retain_graph=True)),
        "",
    )


def _optimizers() -> Iterator[tuple[Any, ...]]:
    for fused in (False, True):
        weights = [
            torch.nn.Parameter(torch.randn(4096, 1024, device="cuda"))
            for _ in range(128)
        ]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        adam = torch.optim.AdamW(weights, fused=fused, foreach=not fused)
        name = "AdamW fused" if fused else "AdamW foreach"
        yield "optimizer", name, (128, 4096 * 1024), _seconds(adam.step), ""


def _launches() -> Iterator[tuple[Any, ...]]:
    x = torch.randn(16, 16, device="cuda", requires_grad=True)
    still = x.detach()

    def host(call: Callable[[], object], times: int) -> tuple[float, float]:
        call()
        found = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            found.append((time.perf_counter() - begin) / times)
        return statistics.median(found), min(found)

    def chain(start: torch.Tensor) -> torch.Tensor:
        for _ in range(200):
            start = start * 1.0001
        return start

    yield "launch", "bare", (200,), host(lambda: chain(still), 200), ""
    yield "launch", "with a graph", (200,), host(lambda: chain(x), 200), ""

    def both() -> None:
        torch.autograd.grad(chain(x).sum(), x)

    yield "launch", "forward and backward", (400,), host(both, 400), ""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(still)
    yield (
        "launch",
        "graph replay on the device",
        (200,),
        _seconds(graph.replay),
        "a 200",
    )


def measure(path: Path) -> None:
    """Measure all kernels and write one row each."""
    torch.manual_seed(0)
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(_COLUMNS)
        parts: list[tuple[str, Callable[[], Iterator[tuple[Any, ...]]]]] = [
            ("", _launches),
            ("bfloat16", lambda: _products(torch.bfloat16, _PRODUCTS)),
            ("bfloat16", lambda: _products(torch.bfloat16, _UNALIGNED)),
            ("bfloat16", lambda: _attentions(torch.bfloat16)),
            ("bfloat16", lambda: _passes(torch.bfloat16)),
            ("float32", _optimizers),
            ("float32", lambda: _products(torch.float32, _PRODUCTS[:8])),
        ]
        for dtype, part in parts:
            begin = time.perf_counter()
            for kind, name, sizes, (once, long), notes in part():
                shape = "x".join(map(str, sizes))
                rows.writerow(
                    (kind, dtype, name, shape, f"{once:.4g}", f"{long:.4g}", notes)
                )
            file.flush()
            print(f"{time.perf_counter() - begin:6.1f} s", flush=True)
            torch.cuda.empty_cache()


def _predicted(surfaces: KernelSurfaces, row: Mapping[str, str]) -> float | None:
    """Seconds that prices say, at the clocks of a long run; None for what has none."""
    sizes = [float(size) for size in row["sizes"].split("x")]
    if row["kind"] == "product":
        m, n, k = sizes
        shape = {"forward": (m, n, k), "input": (m, k, n), "weight": (n, k, m)}
        wide = row["dtype"] == "bfloat16"
        if wide and (n % 8 or k % 8):
            return None
        surface = surfaces.products(row["dtype"])
        return float(surface.seconds(*shape[row["pass"]]))
    if row["kind"] == "attention" and row["pass"] == "forward":
        batch, length, heads, _, size, causal = sizes
        attention = surfaces.attention(causal=bool(causal))
        return float(attention.seconds(batch, length, heads, heads, size))
    return None


def table(path: Path, device: str) -> None:
    """Print all rows, and the errors of those that surfaces price."""
    surfaces = surfaces_of(device_type(device))
    errors: dict[tuple[str, ...], list[float]] = {}
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        said, found = _predicted(surfaces, row), float(row["sustained_seconds"])
        line = [f"{row[name]:{width}}" for name, width in _WIDTHS.items()]
        print(*line, f"{found * 1e6:10.1f} us", end="")
        if said is not None and found > _HOST_BOUND_S:
            kind = (row["kind"], row["dtype"], row["pass"], row["notes"])
            errors.setdefault(kind, []).append(said / found - 1)
            print(f" predicted {said * 1e6:10.1f} {said / found - 1:+7.1%}", end="")
        print()
    for kind, found_of in errors.items():
        mean = statistics.mean(map(abs, found_of))
        bias = statistics.mean(found_of)
        print(*kind, f"{len(found_of)} rows: {mean:.1%}, bias {bias:+.1%}")


def main() -> None:
    """Measure or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("measure", "table"))
    parser.add_argument("file", type=Path, nargs="?", default=_SHIPPED)
    parser.add_argument("--device", default="h200-141", help="of FILE, for table")
    options = parser.parse_args()
    if options.what == "measure":
        measure(options.file)
    else:
        table(options.file, options.device)


if __name__ == "__main__":
    main()
