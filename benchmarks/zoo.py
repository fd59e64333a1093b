"""Small models under every axis, held to one process.

python -m benchmarks.zoo [--set architectures|modules|all] [--certify]
                         [--only NAME ...] [--pins NAME ...] [--workers 2] [--out FILE]

The models are every architecture of transformers, made small, and the modules of
``benchmarks.harmful_modules``. A case is a model and what is pinned. ``plan()`` makes a
plan of two devices (or what the pins need), and three of its steps, by real processes
on gloo, are compared with the same steps of plain torch in one. Plans are not
certified, so that the table shows what analysis alone lets through; with ``--certify``
they are, and it shows what a user gets. A case is

- right: losses, and what training changed of every parameter, are equal;
- refused: ``plan()`` says that it cannot;
- late: the executors say so, after a plan was made;
- wrong: training differs;
- crashed: anything else was raised, or a process died;
- hung: processes waited for each other until they were killed;
- no comparison: plain training differs from itself as much, by rounding or random
  numbers.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harmful_modules import BATCH, MODULES, SEQ, build_module

__all__ = ["PINS", "case", "models"]

#: Group, name in its registry, and name to print.
Job = tuple[str, str, str]

#: Name of a case to its pins.
PINS: dict[str, dict[str, Any]] = {
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "tp": {"tp": 2, "sequence_parallel": False},
    "tp sp": {"tp": 2, "sequence_parallel": True},
    "cp ring": {"cp": 2},
    "cp all-to-all": {"cp": 2},
    "GPipe": {"pp": 2, "schedule": "GPipe", "num_microbatches": 4},
    "1F1B": {"pp": 2, "schedule": "1F1B", "num_microbatches": 4},
    "Interleaved1F1B": {"pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2},
    "InterleavedZeroBubble": {
        "pp": 2,
        "schedule": "InterleavedZeroBubble",
        "virtual_stages": 2,
    },
    "DualPipeV": {"pp": 2, "schedule": "DualPipeV", "virtual_stages": 2},
    "ep": {"ep": 2, "zero_stage": 3},
    "2x2x2": {"dp_shard": 2, "tp": 2, "pp": 2, "schedule": "1F1B"},
}
_GROUPS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
#: What the defaults of a config lack to build a model: model type to fields.
_LACKING: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "esm": {"vocab_size": 33},
    "xmod": {"default_language": "en_XX"},
    "dots1": {
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
_MOST_PARAMETERS = 30e6
_TIMEOUT_S = 60.0
#: Seconds and bytes of address space for all cases of one model.
_MODEL_TIMEOUT_S, _MOST_BYTES = 600, 12 << 30
#: Most seconds of a forward: a slower model says nothing about plans.
_SLOWEST_S = 5.0


def modules() -> Iterator[Job]:
    """Group and name of every module that means harm."""
    for name, specimen in MODULES.items():
        yield f"modules: {specimen.group}", name, name


def models() -> Iterator[Job]:
    """Group, model type and class of every architecture, each class once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for group, table in _GROUPS.items():
        for kind, named in getattr(modeling_auto, table).items():
            cls = named[0] if isinstance(named, tuple | list) else named
            if cls not in seen:
                seen.add(cls)
                yield group, kind, cls


_SETS = {"architectures": models, "modules": modules}


def build(group: str, kind: str, cls: str) -> tuple[Any, dict[str, Any]]:
    """A small model, and example inputs.

    Raises:
        ValueError: If no small model of it can be built and run.
    """
    if group.startswith("modules"):
        return build_module(kind)
    import torch
    import transformers

    from planner.capture.small import small_config

    why = ""
    for head_size in (16, None):
        try:
            make = getattr(transformers, cls)
            whole = transformers.AutoConfig.for_model(kind)
            if not isinstance(whole, make.config_class):
                whole = make.config_class()
            for name, value in _LACKING.get(kind, {}).items():
                setattr(whole, name, value)
            config = small_config(whole, head_size=head_size)
            with torch.device("meta"):
                count = sum(p.numel() for p in make(config).parameters())
            if count > _MOST_PARAMETERS:
                why = f"{count / 1e6:.0f}M parameters"
                continue
            torch.manual_seed(0)
            model = make(config).train()
            inputs = _inputs(group, config)
            started = time.perf_counter()
            # Some keep what a forward made, which cannot be copied afterwards.
            copy.deepcopy(model)(**inputs)
            if (took := time.perf_counter() - started) > _SLOWEST_S:
                why = f"a forward takes {took:.0f} s"
                continue
        except Exception as error:  # whatever a model's code raises
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        else:
            return model, inputs
    raise ValueError(why)


def _inputs(group: str, config: Any) -> dict[str, Any]:
    import torch

    if group == "image":
        seen = getattr(config, "vision_config", config)
        size = getattr(seen, "image_size", 64)
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": torch.randn(BATCH, 3, height, width)}
    tokens = torch.randint(4, 90, (BATCH, SEQ))
    names = ["input_ids", *(["decoder_input_ids"] if group == "seq2seq" else [])]
    return dict.fromkeys(names, tokens)


#: What no pin says, by the name of the case: fields of the strategy.
_CHANGES = {
    "cp ring": {"context_algorithm": "ring"},
    "cp all-to-all": {"context_algorithm": "all_to_all"},
}


def case(
    model: Any,
    inputs: dict[str, Any],
    name: str,
    *,
    graph: Any = None,
    certify: bool = False,
) -> tuple[str, str]:
    """Verdict on one case, and why.

    Args:
        model: A small model.
        inputs: Of it.
        name: Of the pins.
        graph: What was read of the model; None to read it.
        certify: Whether the plan is certified, which takes the model itself.
    """
    from executors.certifying.compare import compare_with_whole
    from planner import plan
    from planner.errors import ExecutionError, MeshwrightError
    from planner.schema import Optimizer, Precision

    pins = PINS[name]
    degrees = [v for k, v in pins.items() if k in ("tp", "pp", "cp", "dp_shard")]
    devices = 2
    if len(degrees) > 1:
        devices = 2 ** len(degrees)
    try:
        made = plan(
            model if certify or graph is None else graph,
            f"local:{devices}",
            global_batch=BATCH,
            example_inputs=inputs,
            pin=pins,
            partitioner="exhaustive",
            precision=Precision(compute="float32"),
            optimizer=Optimizer(name="SGD", learning_rate=1e-2),
            certify=certify,
        )
    except MeshwrightError as error:
        return "refused", _short(error)
    except Exception as error:
        return "crashed", f"plan: {type(error).__name__}: {_short(error)}"
    changed = made.strategy.model_copy(update=_CHANGES.get(name, {}))
    made = made.model_copy(update={"strategy": changed})
    try:
        found = compare_with_whole(made, model, timeout_s=_TIMEOUT_S)
    except ExecutionError as error:
        return "no comparison", _short(error)
    except Exception as error:  # whatever a model's code raises
        return "crashed", f"plain training: {type(error).__name__}: {_short(error)}"
    return found.verdict, found.violation or ""


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _work(job: Job, pins: list[str], out: Path, certify: bool) -> None:
    import torch

    torch.set_num_threads(1)
    group, kind, cls = job
    try:
        model, inputs = build(group, kind, cls)
    except ValueError as error:
        _write(out, {"model": cls, "group": group, "built": str(error)})
        return
    graph = None if certify else _read(model, inputs)
    for name in pins:
        if name == "ep" and not _has_experts(model):
            continue
        started = time.perf_counter()
        verdict, why = case(model, inputs, name, graph=graph, certify=certify)
        _write(
            out,
            {
                "model": cls,
                "group": group,
                "pins": name,
                "verdict": verdict,
                "why": why,
                "seconds": round(time.perf_counter() - started, 2),
            },
        )


def _read(model: Any, inputs: dict[str, Any]) -> Any:
    """Read a model once for all cases; None if it cannot be, which each then says."""
    from planner.api import read_model

    try:
        return read_model(model, inputs, seq_len=None, dtype="float32")
    except Exception:  # whatever a model's code raises
        return None


def _has_experts(model: Any) -> bool:
    return any(name.endswith("experts") for name, _ in model.named_modules())


def _write(out: Path, row: dict[str, Any]) -> None:
    with out.open("a") as stream:
        stream.write(json.dumps(row) + "\n")


_VERDICTS = ("right", "refused", "late", "wrong", "crashed", "hung", "no comparison")


def _table(rows: list[dict[str, Any]], key: str, title: str) -> str:
    """Cases by verdict, as a table in Markdown.

    Args:
        rows: Of the cases.
        key: What a line stands for: ``pins`` or ``group``.
        title: Of its column.
    """
    counts: dict[str, Counter[str]] = {}
    for row in rows:
        for name in (row[key], "all"):
            counts.setdefault(name, Counter())[row["verdict"]] += 1
    known = [*(n for n in PINS if n in counts), *sorted({*counts} - {*PINS, "all"})]
    lines = [
        f"| {title} | cases | {' | '.join(_VERDICTS)} | runs |",
        f"|---|{'---:|' * (len(_VERDICTS) + 2)}",
    ]
    for name in (*known, "all"):
        found = counts[name]
        compared = found.total() - found["no comparison"]
        share = f"{found['right'] / max(1, compared):.0%}"
        numbers = " | ".join(str(found[word]) for word in _VERDICTS)
        lines.append(f"| {name} | {found.total()} | {numbers} | {share} |")
    return "\n".join(lines)


def main() -> None:
    """Run the cases, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--set", choices=(*_SETS, "all"), default="architectures")
    parser.add_argument("--only", nargs="+", help="names of classes or modules")
    parser.add_argument("--every", type=int, default=1, help="each n-th model")
    parser.add_argument("--certify", action="store_true", help="as plan() does")
    parser.add_argument("--pins", nargs="+", choices=PINS, default=list(PINS))
    parser.add_argument(
        "--append", action="store_true", help="keep --out, leave out models in it"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("zoo.jsonl"))
    parser.add_argument("--table", action="store_true", help="of --out, run nothing")
    options = parser.parse_args()
    if not options.table:
        _run(options)
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    cases = [row for row in rows if "pins" in row]
    print(_table(cases, "pins", "pins"), _table(cases, "group", "models"), sep="\n\n")
    for row in rows:
        if row.get("verdict") in ("wrong", "crashed", "hung", "late"):
            print(f"{row['verdict']}: {row['model']}, {row['pins']}: {row['why']}")
    if any(row.get("verdict") in ("wrong", "crashed", "hung") for row in rows):
        sys.exit(1)


def _run(options: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    import torch.distributed.pipelining
    import torch.export  # noqa: F401
    import transformers

    import planner  # noqa: F401

    transformers.utils.logging.set_verbosity_error()
    sets = [options.set] if options.set in _SETS else list(_SETS)
    jobs = [job for name in sets for job in _SETS[name]()]
    jobs = [job for job in jobs if not options.only or job[2] in options.only]
    jobs = jobs[:: options.every]
    # A run that is stopped early is then a fair sample.
    random.Random(0).shuffle(jobs)
    if not options.append:
        options.out.unlink(missing_ok=True)
    elif options.out.exists():
        rows = map(json.loads, options.out.read_text().splitlines())
        done = {row["model"] for row in rows}
        jobs = [job for job in jobs if job[2] not in done]
    running: dict[int, Job] = {}
    while jobs or running:
        while jobs and len(running) < options.workers:
            job = jobs.pop(0)
            running[_fork(job, options)] = job
        pid, status = os.wait()
        group, _, name = running.pop(pid)
        if status:
            why = f"ended with code {os.waitstatus_to_exitcode(status)}"
            _write(options.out, {"model": name, "group": group, "built": why})


def _fork(job: Job, options: argparse.Namespace) -> int:
    """Run the cases of one model in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
        signal.alarm(_MODEL_TIMEOUT_S)
        _work(job, options.pins, options.out, options.certify)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
