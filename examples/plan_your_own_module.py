"""Plan a module that nobody has seen before, and see what was read of it.

    python examples/plan_your_own_module.py --cluster dgx-a100:2

One learns what Meshwright needs to know of a model (the module and the shapes of its
inputs, nothing else), what it finds in it, and why a part of it cannot be divided by
tensor parallelism. The model has two inputs, convolutions beside attention, and a
projection of all heads at once: nothing about it is special to Meshwright.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from planner import plan
from planner.capture import capture


class Block(nn.Module):
    """Attention with one projection for queries, keys and values, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[0], x.shape[1], self.heads, -1)
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.view(size).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class PictureAndText(nn.Module):
    """Scores how well a picture and a text go together."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(32_000, width)
        self.text = nn.ModuleList(Block(width, width // 64) for _ in range(layers))
        sizes = (3, width // 8, width // 4, width // 2, width)
        self.picture = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(one, other, 3, stride=2, padding=1), nn.ReLU())
                for one, other in pairwise(sizes)
            )
        )
        self.score = nn.Linear(2 * width, 1)

    def forward(self, pixels: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.text:
            x = block(x)
        seen = self.picture(pixels).mean(dim=(2, 3))
        return self.score(torch.cat((x.mean(dim=1), seen), dim=-1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", default="dgx-a100:2")
    parser.add_argument("--global-batch", type=int, default=256)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--quick", action="store_true", help="a model of 2 layers")
    options = parser.parse_args()
    width, layers = (256, 2) if options.quick else (options.width, options.layers)

    # Keys are the arguments of forward; a real tensor would do instead of a shape. The
    # first dimension is the batch: 4 samples are enough to read the model by.
    inputs = {
        "pixels": ((4, 3, 224, 224), "float32"),
        "tokens": ((4, 256), "int64"),
    }
    # A function that builds the module is as good as the module, and allocates nothing.
    graph = capture(lambda: PictureAndText(width, layers), inputs)

    print(f"{len(graph.unit_names)} units that a pipeline could be cut between:")
    print(f"  {', '.join(graph.unit_names)}")
    size = graph.num_parameters / 1e6
    print(f"{size:.1f}M parameters, {graph.forward_flops:.3g} FLOPs forward")
    print("kept whole by tensor parallelism:")
    for module, why in list(graph.whole.items())[:4]:
        print(f"  {module}: {why}")
    print()

    found = plan(graph, options.cluster, global_batch=options.global_batch)
    print(found.explain())


if __name__ == "__main__":
    main()
