"""A DLRM-like recommender (Naumov et al. 2019), an LSTM, and modules with traps."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn


def _mlp(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    def __init__(self, rows: int = 10**6, tables: int = 8, width: int = 32) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables)
        )
        self.bottom = _mlp(13, 64, width)
        pairs = tables * (tables + 1) // 2
        self.top = _mlp(width + pairs, 64, 1)

    def forward(self, dense: torch.Tensor, sparse: torch.Tensor) -> torch.Tensor:
        x = self.bottom(dense)
        looked_up = [
            table(sparse[:, index]) for index, table in enumerate(self.embeddings)
        ]
        features = torch.stack([x, *looked_up], 1)
        products = features @ features.transpose(1, 2)
        rows, columns = torch.tril_indices(
            products.shape[1], products.shape[1], -1
        ).unbind()
        return self.top(torch.cat([x, products[:, rows, columns]], 1))


class Recurrent(nn.Module):
    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + self.drop(self.down(inner))


class Stack(nn.Module):
    """Tied weights, views and dropout in a stack of equal blocks."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x.transpose(0, 1).contiguous().transpose(0, 1))


class Branchy(nn.Module):
    """Control flow and shapes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.sum().item() > 0:
            x = self.second(x)
        chosen = x[x[:, 0] > 0]
        return chosen.nonzero().float().sum() + chosen


class Endless(nn.Module):
    """A loop that does not end on stand-in values."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while not bool((x.abs().max() > 1e6).item()):
            x = self.step(x) * 10
        return x


class Broken(nn.Module):
    """A product of matrices that do not fit, below a named child."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Linear(4, 4)
        self.bad = nn.ModuleDict({"inner": nn.Linear(5, 4)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad["inner"](self.fine(x))
