"""Training data: batches, the part of them that a rank reads, and where they come from.

Every source is a :class:`DataSource`: it gives a rank its part of the batch of a step,
and keeps its position in checkpoints. :func:`open_source` adapts token files, datasets
and loaders to that.
"""

from __future__ import annotations

from executors.data.batches import (
    Batch,
    Data,
    global_batches,
    require_equal_batches,
    require_inputs,
    require_lengths,
    require_size,
    slice_batch,
    synthetic_batch,
    take_samples,
)
from executors.data.data_source import DataSource
from executors.data.documents import (
    require_documents,
    require_no_restarts,
    split_documents,
)
from executors.data.parts import BatchPart, Part, agree_on_parts, gather_batch
from executors.data.samples import Samples, require_rows
from executors.data.sources import (
    TrainingData,
    evaluation_batches,
    open_source,
    require_data,
)
from executors.data.tokens import TokenFile, open_tokens
from executors.data.volumes import Volumes

__all__ = [
    "Batch",
    "BatchPart",
    "Data",
    "DataSource",
    "Part",
    "Samples",
    "TokenFile",
    "TrainingData",
    "Volumes",
    "agree_on_parts",
    "evaluation_batches",
    "gather_batch",
    "global_batches",
    "open_source",
    "open_tokens",
    "require_data",
    "require_documents",
    "require_equal_batches",
    "require_inputs",
    "require_lengths",
    "require_no_restarts",
    "require_rows",
    "require_size",
    "slice_batch",
    "split_documents",
    "synthetic_batch",
    "take_samples",
]
