"""Integers whose values decide sizes, and default pictures of models that read them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from executors.data import require_size, synthetic_batch
from planner import plan
from planner.assemble import workload
from planner.capture import capture, load_config, load_model
from planner.errors import CaptureError, ExecutionError, NoFeasiblePlanError

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
MROPE = {"type": "mrope", "mrope_section": [2, 1, 1]}
QWEN = {
    "model_type": "qwen2_vl",
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "text_config": {**TEXT, "rope_scaling": MROPE},
    "vision_config": {
        "depth": 2,
        "embed_dim": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "hidden_size": 32,
        "patch_size": 56,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "image_token_id": 500,
    "video_token_id": 501,
    "vision_start_token_id": 502,
}
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        "projection_dim": 32,
    },
    "image_token_index": 500,
}


SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
#: Embeds patches by a convolution with padding="valid".
GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "text_config": {**TEXT, "head_dim": 8, "sliding_window": 16},
    "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
    "mm_tokens_per_image": 4,
    "image_token_index": 500,
}
#: Returns features as the last hidden state, without a pooled one.
LLAMA4 = {
    "model_type": "llama4",
    "architectures": ["Llama4ForConditionalGeneration"],
    "text_config": {
        **TEXT,
        "intermediate_size_mlp": 64,
        "head_dim": 8,
        "num_local_experts": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        **SIGLIP,
        "vision_output_dim": 32,
        "projector_input_dim": 32,
        "projector_output_dim": 32,
        "intermediate_size": 128,
    },
    "image_token_index": 500,
}


class Pictures(nn.Module):
    """Embed patches at their places in grids whose sizes come with the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, 16)
        self.place = nn.Embedding(64, 16)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        """Return [patches, 16]; grid is [pictures, 2]."""
        places = [torch.arange(high * wide) for high, wide in grid.tolist()]
        embedded: torch.Tensor = self.patch(patches)
        return embedded + self.place(torch.cat(places))


def _pictures(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
    grid = torch.tensor(sizes)
    return {"patches": torch.zeros(int(grid.prod(1).sum()), 12), "grid": grid}


def test_integers_that_decide_sizes_keep_their_values() -> None:
    inputs = _pictures((4, 6), (4, 6))
    graph = capture(Pictures(), inputs, dtype="float32")
    assert graph.batch == 2
    assert graph.sized_by == ("grid",)
    assert graph.values == {"grid": ((4, 1), (6, 1))}
    assert graph.seq_len is None
    patches, grid = workload(graph, 6).inputs
    assert (patches.rows, patches.shape, grid.rows) == (24, (12,), 1)
    batch = synthetic_batch(workload(graph, 6), 0)
    assert batch["grid"].tolist() == [[4, 6]] * 6
    assert batch["patches"].shape == (144, 12)
    Pictures()(**batch)


def test_integers_made_by_a_factory_keep_their_values() -> None:
    from planner.capture.fakes import build_on_meta

    made: list[dict[str, torch.Tensor]] = []

    def build() -> nn.Module:
        made.append(_pictures((4, 6)))
        return Pictures()

    module = build_on_meta(build, None, valued=True)
    assert made[0]["grid"].tolist() == [[4, 6]]
    assert {p.device.type for p in module.parameters()} == {"meta"}


def test_a_model_that_values_size_is_not_cut_into_stages() -> None:
    with pytest.raises(NoFeasiblePlanError, match="follow from the values of grid"):
        plan(
            Pictures(),
            "dgx-a100",
            example_inputs=_pictures((4, 6), (4, 6)),
            global_batch=16,
            pin={"pp": 2},
            certify=False,
        )


def test_batches_have_so_many_rows_a_sample() -> None:
    graph = capture(Pictures(), _pictures((4, 6), (4, 6)), dtype="float32")
    inputs = workload(graph, 6).inputs
    require_size(_pictures(*[(4, 6)] * 6), 6, inputs)
    with pytest.raises(ExecutionError, match=r"120 rows in 'patches'.*24 rows"):
        require_size(_pictures(*[(4, 6)] * 5), 6, inputs)


@pytest.mark.parametrize(
    ("config", "images", "tokens"),
    [
        (QWEN, 1, 16),
        (QWEN, 2, 16),
        (LLAVA, 2, 16),
        (GEMMA, 2, 4),
        (LLAMA4, 2, 4),
    ],
)
def test_models_that_read_pictures_are_given_some(
    config: dict[str, Any], images: int, tokens: int
) -> None:
    loaded = load_config(config, seq_len=64, images_per_sample=images)
    graph = capture(loaded, dtype="float32")
    runs = graph.values["input_ids"]
    assert [times for value, times in runs if value == 500] == [tokens] * images
    assert sum(times for _, times in runs) == 64
    text = capture(load_config(config, seq_len=64, images_per_sample=0))
    assert [name for name, *_ in text.inputs] == ["input_ids"]
    tower = ("visual", "vision_tower", "vision_model")
    seen = {block.name for block in graph.blocks if any(t in block.name for t in tower)}
    assert seen
    assert graph.forward_flops > text.forward_flops
    assert workload(graph, 4).images_per_sample == images
    assert workload(text, 4).images_per_sample == 0
    batch = synthetic_batch(workload(graph, 4), 0)
    assert ((batch["input_ids"] == 500).sum(1) == images * tokens).all()
    # The model itself finds as many features as it has places for.
    with torch.no_grad():
        assert loaded.build()(**batch).logits.isfinite().all()


def test_pictures_leave_room_for_text() -> None:
    loaded = load_config(LLAVA, seq_len=32, images_per_sample=2)
    with pytest.raises(CaptureError, match="no room for text beside 34 tokens"):
        capture(loaded)


def test_what_a_model_reads_as_a_picture_may_be_unknown() -> None:
    config = {
        "model_type": "mllama",
        "architectures": ["MllamaForConditionalGeneration"],
    }
    with pytest.raises(CaptureError, match="without one its vision_config computes"):
        capture(load_config(config, seq_len=64))
    with pytest.raises(CaptureError, match="images_per_sample=-1 is negative"):
        load_model("hf:x", images_per_sample=-1)
