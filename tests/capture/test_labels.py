"""Labels stand where the model's own loss expects them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from executors.losses import LossFunction
from planner import plan
from planner.assemble import workload
from planner.capture import capture
from planner.errors import CaptureError, MeshwrightError
from tests.models.tiny import TINY, built

_VOCAB, _LENGTH = 96, 16


def _xlnet() -> nn.Module:
    from transformers import XLNetConfig, XLNetLMHeadModel

    return XLNetLMHeadModel(
        XLNetConfig(
            vocab_size=_VOCAB, d_model=32, n_layer=2, n_head=4, d_inner=64, dropout=0.0
        )
    )


def _token_classes() -> nn.Module:
    from transformers import BertConfig, BertForTokenClassification

    return BertForTokenClassification(
        BertConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=_VOCAB,
            num_labels=_VOCAB,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _bart(kind: str) -> nn.Module:
    import transformers
    from transformers import BartConfig

    made: nn.Module = getattr(transformers, kind)(
        BartConfig(
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            vocab_size=_VOCAB,
            max_position_embeddings=_LENGTH,
            dropout=0.0,
            use_cache=False,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )
    return made


_MODELS: dict[str, tuple[Any, int]] = {
    "tiny-llama": (lambda: built("tiny-llama"), 1),
    "tiny-gpt2": (lambda: built("tiny-gpt2"), 1),
    "tiny-mamba": (lambda: built("tiny-mamba"), 1),
    "tiny-bert": (lambda: built("tiny-bert"), 0),
    "tiny-t5": (lambda: built("tiny-t5"), 0),
    "tiny-whisper": (lambda: built("tiny-whisper"), 0),
    "xlnet": (_xlnet, 0),
    "token classes": (_token_classes, 0),
    "bart": (lambda: _bart("BartForConditionalGeneration"), 0),
    "bart's decoder": (lambda: _bart("BartForCausalLM"), 0),
}


@pytest.mark.parametrize("name", _MODELS)
def test_the_loss_of_logits_and_labels_is_the_model_s_own(name: str) -> None:
    build, shift = _MODELS[name]
    torch.manual_seed(0)
    model = build().eval()
    tokens: Any = {"input_ids": ((4, _LENGTH), "int64")}
    if name == "bart":
        tokens["decoder_input_ids"] = tokens["input_ids"]
    shapes = TINY[name].example(4) if name in TINY else tokens
    found = workload(capture(model, shapes, dtype="float32"), 4)
    assert (found.loss, found.label_shift) == ("cross_entropy", shift)
    inputs = {
        key: torch.randint(3, _VOCAB, shape) if kind == "int64" else torch.randn(shape)
        for key, (shape, kind) in shapes.items()
    }
    labels = torch.randint(3, _VOCAB, (4, _LENGTH))
    labels[1, 5:] = -100
    labels[2, :3] = -100
    loss = LossFunction(
        kind="cross_entropy", data_parallel=1, label_shift=found.label_shift
    )
    loss.prepare({"labels": labels}, 1)
    with torch.no_grad():
        own = model(**inputs, labels=labels).loss
        ours = loss(model(**inputs), loss.target({"labels": labels}))
    assert float(ours) == pytest.approx(float(own), rel=1e-5)


@pytest.mark.parametrize(("causal", "shift"), [(True, 1), (False, 0)])
def test_a_module_of_ones_own_is_told_by_its_attention(
    causal: bool, shift: int
) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(_VOCAB, 32)
            self.project = nn.Linear(32, 32)
            self.head = nn.Linear(32, _VOCAB)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.project(self.embed(words)).unsqueeze(1)
            x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=causal)
            logits: torch.Tensor = self.head(x.squeeze(1))
            return logits

    graph = capture(Tokens(), {"words": ((2, _LENGTH), "int64")}, dtype="float32")
    assert workload(graph, 2).label_shift == shift


class _Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        scores = self.left(a) @ self.right(b).T
        own = torch.arange(len(a), device=a.device)
        entropy = nn.functional.cross_entropy
        return (entropy(scores, own) + entropy(scores.T, own)) / 2


class _Ignoring(nn.Module):
    """Cross entropies of tokens, each with an ignore_index of its own."""

    def __init__(self, *ignored: int) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.ignored = ignored

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.words(input_ids)).flatten(0, 1)
        losses = [
            nn.functional.cross_entropy(scores, labels.flatten(), ignore_index=one)
            for one in self.ignored
        ]
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]


def test_a_plan_knows_the_label_that_a_loss_leaves_out() -> None:
    inputs = dict.fromkeys(("input_ids", "labels"), ((4, 8), "int64"))
    for ignored in (-100, -1, 0, 49):
        found = workload(capture(_Ignoring(ignored), inputs), 4)
        assert (found.own_loss, found.ignore_index) == ("tokens", ignored)
    with pytest.raises(CaptureError, match="leave out labels -1, 49"):
        capture(_Ignoring(49, -1), inputs)


def test_own_losses_are_told_apart() -> None:
    pair = {"a": ((4, 8), "float32"), "b": ((4, 8), "float32")}
    found = workload(capture(_Contrast(), pair, dtype="float32"), 4)
    assert (found.loss, found.own_loss) == ("model", "coupled")
    tokens = dict.fromkeys(("input_ids", "labels"), ((4, _LENGTH), "int64"))
    for name in ("tiny-llama", "tiny-bert", "tiny-mamba"):
        found = workload(capture(built(name), tokens, dtype="float32"), 4)
        assert (found.loss, found.own_loss) == ("model", "tokens")
    routed = built("tiny-mixtral")
    routed.config.output_router_logits = True  # its loss then has a second term
    found = workload(capture(routed, tokens, dtype="float32"), 4)
    assert (found.loss, found.own_loss) == ("model", None)


def _rates(**options: Any) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        target = torch.zeros(len(x), dtype=torch.long)
        return nn.functional.cross_entropy(model(x), target, **options)

    return loss


_SQUARE: Any = nn.functional.mse_loss


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (lambda m, x: _SQUARE(m(x), x, reduction="sum"), False),
        (lambda m, x: _SQUARE(m(x), x, reduction="sum") / 99, False),
        (lambda m, x: _SQUARE(m(x), x, reduction="sum") / len(x), True),
        (lambda m, x: 0.25 * _SQUARE(m(x), x, reduction="sum"), False),
        (lambda m, x: _SQUARE(m(x), x).sqrt(), False),
        (lambda m, x: _SQUARE(m(x), x) ** 2, False),
        (lambda m, x: m(x).max(), False),
        (lambda m, x: _SQUARE(m(x), x) + m.weight.pow(2).sum(), True),
        (lambda m, x: _SQUARE(m(x), x) * m.bias.pow(2).sum().exp(), True),
        (lambda m, x: torch.stack([_SQUARE(m(x), x)] * 4).sum(), True),
        (_rates(), True),
        (_rates(reduction="sum"), False),
        (_rates(weight=torch.ones(8)), False),
    ],
)
def test_own_losses_that_are_no_means_keep_the_batch_whole(
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor], mean: bool
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return loss(self.layer, x)

    graph = capture(Own(), {"x": ((4, 8), "float32")}, dtype="float32")
    assert (graph.config.get("own_loss") != "coupled") == mean


def test_a_plan_says_that_it_minimises_a_mean_square() -> None:
    graph = capture(nn.Linear(4, 4), {"input": ((2, 4), "float32")}, dtype="float32")
    assert any("mean square of its output" in text for text in graph.assumptions)
    graph = capture(built("tiny-llama"), dtype="float32", seq_len=_LENGTH)
    assert not any("mean square" in text for text in graph.assumptions)


def test_no_plan_divides_samples_that_a_loss_compares() -> None:
    pair = {"a": ((4, 8), "float32"), "b": ((4, 8), "float32")}
    graph = capture(_Contrast(), pair, dtype="float32")
    strategy = plan(graph, "local:1", global_batch=4).strategy
    assert strategy.mesh.data_parallel * strategy.num_microbatches == 1
    reason = r"compares its samples .* \(its forward brings samples"
    with pytest.raises(MeshwrightError, match=reason):
        plan(graph, "local:2", global_batch=4, pin={"dp_shard": 2})
