"""Mutations of documents from outside: only clean errors, in bounded time and memory.

``python -m benchmarks.fuzz_documents --count 100000`` changes real documents of every
kind at random, reads each in a worker process as the command line would, and counts
what comes of it. A *clean* error is a MeshwrightError; anything else that is raised
is a traceback for a user. A mutation that takes more than 5 s, or after which
the worker has grown by more than 1 GB, fails as well. Failing inputs are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import functools
import hashlib
import json
import math
import multiprocessing
import random
import re
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

__all__ = ["KINDS", "OUTCOMES", "Kind", "judge", "mutate", "read", "seeds"]

#: A document may take this long, and this much memory.
SECONDS, BYTES = 5.0, 10**9
OUTCOMES = ("clean", "accepted", "traceback", "slow", "large")
_EXAMPLES = ROOT / "tests" / "export" / "golden"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of document.

    Attributes:
        suffix: Ending of its files.
        seeds: Real documents.
        read: Reads a file as commands do, and goes on with what it holds.
    """

    suffix: str
    seeds: Callable[[], Sequence[str]]
    read: Callable[[Path], Any]


def _golden(launcher: str, name: str) -> list[str]:
    found = sorted((_EXAMPLES / launcher).glob(f"*/{name}"))
    return [path.read_text() for path in found]


def _plans() -> list[str]:
    from planner.schema import Plan

    text = (ROOT / "benchmarks" / "data" / "fuzz_plan.json").read_text()
    plan = Plan.from_json(text)
    return [text, json.dumps(plan.to_data())]


def _strategies() -> list[str]:
    data = [json.loads(text)["strategy"] for text in _plans()]
    pipeline = {
        "mesh": {"pp": 4, "dp_shard": 2, "tp": 2},
        "schedule": "Interleaved1F1B",
        "virtual_stages": 2,
        "num_microbatches": 8,
        "zero_stage": 1,
        "sharding": {"patterns": {"layers.*.mlp.up": "colwise"}},
        "device_ranges": [[0, 8], [8, 16]],
    }
    return [json.dumps(data[0]), json.dumps(pipeline)]


def _clusters() -> list[str]:
    from planner.cluster import Cluster, device_type

    made = [Cluster.parse(name).document for name in ("dgx-h100:4", "dgx-a100")]
    square = [[1e9] * 4 for _ in range(4)]
    matrix = Cluster.from_matrices(square, [[1e-6] * 4] * 4, device_type("h100-80"))
    return [document.to_json() for document in (*made, matrix.document)]


def _cluster_yaml() -> list[str]:
    import yaml

    own = (ROOT / "examples" / "cluster.yaml").read_text()
    return [own, yaml.safe_dump(json.loads(_clusters()[0]))]


def _measurements() -> list[str]:
    traffic = {"all_reduce": {"count": 4, "bytes": 4096.0}}
    return [
        json.dumps(
            {
                "schema_version": 1,
                "plan_label": "dp_replicate2 mb1x1",
                "model_name": "tiny",
                "model_fingerprint": "0123456789abcdef",
                "step_times_s": [0.5, 0.25, 0.25],
                "warm_up_steps": 1,
                "median_step_time_s": 0.25,
                "peak_memory_bytes": [1000, 1000],
                "collectives": [traffic, traffic],
                "losses": [2.5, "NaN", 2.0],
                "environment": {"backend": "gloo"},
            }
        )
    ]


def _points() -> list[str]:
    lines = (ROOT / "benchmarks" / "data" / "collected.csv").read_text().splitlines()
    return ["\n".join(lines[:6]) + "\n", "\n".join([lines[0], *lines[20:24]]) + "\n"]


def _megatron() -> list[str]:
    return [
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--micro-batch-size 1 --global-batch-size 32 --num-layers 32 --bf16 "
        "--use-distributed-optimizer --lr 3e-4 --recompute-granularity full\n",
        "--pipeline-model-parallel-size 2 --micro-batch-size 2 --num-layers 6 "
        '--pipeline-model-parallel-layout "Et|(tt|)*2,tL" --context-parallel-size 2\n',
        "--pipeline-model-parallel-size 4 --micro-batch-size 1 --num-layers 32 "
        "--num-layers-per-virtual-pipeline-stage 4 --global-batch-size 64\n",
    ]


def _configs() -> list[str]:
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
    }
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32}
    vit = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 2}
    vit |= {"num_attention_heads": 2, "intermediate_size": 64, "image_size": 32}
    return [json.dumps(data) for data in (llama, gpt2, vit)]


def _profiles() -> list[str]:
    names = ("Embedding(32, 8)", "LSTM(8, 8)", "Linear(8, 32)")
    nodes = [
        f"node{i} -- {op} -- forward_compute_time=0.{i}, backward_compute_time=1.{i}, "
        f"activation_size={size}, parameter_size=1024.000"
        for i, (op, size) in enumerate(
            zip(names, ("64.0", "[64.0; 32.0]", "128.0"), strict=True), start=1
        )
    ]
    return ["\n".join([*nodes, "\tnode1 -- node2", "\tnode2 -- node3"]) + "\n"]


def _traces() -> list[str]:
    rows = [f"{10.5 * i},gnmt,{0.1 * i + 0.2:.1f}" for i in range(6)]
    return ["\n".join(["arrival_s,model,beta", *rows]) + "\n"]


def _read_plan(path: Path) -> Any:
    from planner.errors import ExportError
    from planner.export import export_files, exporter_names
    from planner.schema import Plan

    plan = Plan.load(path)
    told = plan.explain(), plan.summary(), plan.diff(plan), plan.strategy.label()
    for target in exporter_names():
        with contextlib.suppress(ExportError):
            export_files(plan, target)
    return told


def _read_strategy(path: Path) -> Any:
    from planner import predict
    from planner.strategy_input import read_strategy

    strategy = read_strategy(path)
    told = strategy.label(), strategy.device_ids(), strategy.to_json()
    return told, predict(*_world(), strategy).explain()


@functools.cache
def _world() -> tuple[Any, Any]:
    from planner import Cluster
    from planner.capture import capture, load_model

    return capture(load_model("gpt2", seq_len=128)), Cluster.parse("dgx-h100:2")


def _read_cluster(path: Path) -> Any:
    from planner.cluster import Cluster

    cluster = Cluster.parse(str(path))
    return cluster.describe(), cluster.document.to_json(), cluster.reference()


def _read_measurement(path: Path) -> Any:
    from planner.schema.measurement import Measurement

    found = Measurement.load(path)
    return found.total_traffic(), found.to_json()


def _read_points(path: Path) -> Any:
    from planner.measurements.points import read_points

    return read_points(path)


def _read_calibration(path: Path) -> Any:
    from planner.measurements.store import load_calibration

    return load_calibration(path)


def _read_config(source: str, processes: int | None = 8) -> Callable[[Path], Any]:
    def read_one(path: Path) -> Any:
        from planner.cli.strategies import read_config
        from planner.imports import Wanted, detect_source, import_text

        text = read_config(str(path))
        found = import_text(source, text, Wanted(world_size=processes), path.name)
        return found.strategy.to_json(), detect_source(text, path.name)

    return read_one


def _read_model(path: Path) -> Any:
    from planner.capture.fakes import build_on_meta
    from planner.capture.models import load_model

    return build_on_meta(load_model(f"hf:{path}").build, None)


def _read_profile(path: Path) -> Any:
    from planner.capture.pipedream import read_profile

    return read_profile(path).to_dict()


def _read_trace(path: Path) -> Any:
    from envs.ramp.arrivals import read_arrivals

    return read_arrivals(path)


def _constants() -> list[str]:
    text = (ROOT / "planner" / "measurements" / "data" / "published.json").read_text()
    return [text]


KINDS: dict[str, Kind] = {
    "plan": Kind(suffix=".json", seeds=_plans, read=_read_plan),
    "strategy": Kind(suffix=".json", seeds=_strategies, read=_read_strategy),
    "cluster": Kind(suffix=".json", seeds=_clusters, read=_read_cluster),
    "cluster YAML": Kind(suffix=".yaml", seeds=_cluster_yaml, read=_read_cluster),
    "measurement": Kind(suffix=".json", seeds=_measurements, read=_read_measurement),
    "measured points": Kind(suffix=".csv", seeds=_points, read=_read_points),
    "calibration": Kind(suffix=".json", seeds=_constants, read=_read_calibration),
    "accelerate": Kind(
        suffix=".yaml",
        seeds=lambda: _golden("accelerate", "accelerate.yaml"),
        read=_read_config("accelerate", None),
    ),
    "DeepSpeed": Kind(
        suffix=".json",
        seeds=lambda: _golden("deepspeed", "ds_config.json"),
        read=_read_config("deepspeed"),
    ),
    "Megatron": Kind(suffix=".txt", seeds=_megatron, read=_read_config("megatron")),
    "transformers": Kind(suffix=".json", seeds=_configs, read=_read_model),
    "PipeDream": Kind(suffix=".txt", seeds=_profiles, read=_read_profile),
    "job trace": Kind(suffix=".csv", seeds=_traces, read=_read_trace),
}


# -- Mutations -------------------------------------------------------------------------

#: Values that readers forget: ranges without end, no numbers, other types, odd texts.
_VALUES: tuple[Any, ...] = (
    *(0, -1, 1, 2, 3, 7, 2**20, 2**31, 3 * 10**9, 2**63 - 1, 2**63, 2**64, 10**40),
    *(0.0, -0.5, 1.5, 1e9, 1e308, 1e-320, math.nan, math.inf, -math.inf),
    *(None, True, False, "", "auto", "none", "NaN", "1e999", "\x00", "\ud800", "\n"),
    *(
        "hf:/dev/zero",
        "hf:~nobody",
        "../" * 40,
        "x" * 20_000,
        "é" * 300,
        "*",
        "9" * 5000,
    ),
    *(
        "9" * 5000,
        [],
        {},
        [[]],
        [None],
        {"": 1},
        {"a": {"a": {"a": 1}}},
        [0] * 300,
        "[" * 200,
    ),
)
_BROKEN: tuple[bytes, ...] = (
    *(b"[" * 50_000, b'{"a":' * 5_000, b"\xff\xfe", b"\x00" * 8, b"\xed\xa0\x80"),
    *(b"&a [*a]", b"*x", b"!!python/object:os.system x", b"!!binary x", b"? ? ?"),
    *(b"NaN", b"1e999", b"9" * 5_000, b"-0", b"0x" + b"f" * 200, b"1:59:59", b"\t"),
    *(b"- " * 3_000, b"2020-13-45", b"<<: {a: 1}", b'"\\ud800"', b"'", b'"', b"\\"),
    *(b"--", b"=", b",", b";", b"\r", b"\xc2\x85", b" -- ", b"%", b"(t|)*4000" * 9),
)
_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_LAUGHS = b"".join(
    b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 10))
    for i in range(12)
)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """Containers, each with a key of its own, of everything in a document."""
    found: list[tuple[Any, Any]] = []
    queue = [data]
    while queue:
        part = queue.pop()
        keys = part if isinstance(part, dict) else range(len(part))
        for key in keys:
            found.append((part, key))
            if isinstance(part[key], dict | list):
                queue.append(part[key])
    return found


def _mutate_data(data: Any, rng: random.Random) -> None:
    """Change one place of a parsed document."""
    places = _places(data)
    if not places:
        return
    part, key = rng.choice(places)
    how = rng.randrange(8)
    if how < 4:
        part[key] = copy.deepcopy(rng.choice(_VALUES))
    elif how == 4:
        del part[key]
    elif how == 5 and isinstance(part, dict):
        part[str(rng.choice(_VALUES))] = copy.deepcopy(part[key])
    elif how == 6 and isinstance(part[key], int | float):
        part[key] = part[key] * rng.choice((-1, 0, 2, 0.5, 1000, 10**9))
    else:
        other, name = rng.choice(places)
        # A copy: a document holds no part of itself.
        part[key] = copy.deepcopy(other[name])


def _mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Change some bytes of a text."""
    at = rng.randrange(len(raw) + 1)
    end = min(len(raw), at + rng.choice((1, 2, 8, 64)))
    how = rng.randrange(7)
    if how == 0:
        return raw[:at]
    if how == 1:
        return raw[:at] + raw[end:]
    if how == 2:
        return raw[:at] + raw[at:end] * rng.choice((2, 3, 100)) + raw[end:]
    if how == 3:
        return raw[:at] + rng.choice(_BROKEN) + raw[rng.choice((at, end)) :]
    if how == 4:
        return raw[:at] + bytes(rng.randbytes(rng.choice((1, 4)))) + raw[end:]
    numbers = list(_NUMBER.finditer(raw))
    if how == 5 and numbers:
        match = rng.choice(numbers)
        value = str(rng.choice(_VALUES)).encode(errors="replace")
        return raw[: match.start()] + value + raw[match.end() :]
    lines = raw.splitlines(keepends=True) or [b""]
    chosen = rng.randrange(len(lines))
    return b"".join([*lines[: chosen + 1], lines[chosen], *lines[chosen + 1 :]])


def mutate(text: str, kind: str, rng: random.Random) -> bytes:
    """Return a real document after a few changes.

    Args:
        text: The document.
        kind: A name of :data:`KINDS`.
        rng: Draws the changes.
    """
    suffix = KINDS[kind].suffix
    raw, changes = text.encode(), rng.choice((1, 1, 2, 4))
    if suffix in {".json", ".yaml"} and rng.random() < 0.8:
        data = _parsed(text, suffix)
        for _ in range(changes):
            _mutate_data(data, rng)
        raw, changes = _written(data, suffix), int(rng.random() < 0.1)
    if suffix == ".yaml" and rng.random() < 0.02:
        return b"a: &a [x,x,x,x]\n" + _LAUGHS + raw
    for _ in range(changes):
        raw = _mutate_bytes(raw, rng)
    return raw


def _parsed(text: str, suffix: str) -> Any:
    import yaml

    return json.loads(text) if suffix == ".json" else yaml.safe_load(text)


def _written(data: Any, suffix: str) -> bytes:
    import yaml

    # JSON is YAML too, but for its escapes of half characters.
    if suffix == ".json" or "\\ud8" in json.dumps(data):
        return json.dumps(data).encode()
    return yaml.safe_dump(data, default_flow_style=False).encode()


# -- Judging ---------------------------------------------------------------------------


def seeds(kind: str) -> Sequence[str]:
    """Return the real documents of a kind."""
    return KINDS[kind].seeds()


def read(kind: str, path: Path) -> Any:
    """Read a file as commands do."""
    return KINDS[kind].read(path)


class _LateError(BaseException):
    """Raised when a document takes too long; nothing catches it."""


def _late(*_: object) -> None:
    raise _LateError


def judge(kind: str, path: Path) -> tuple[str, str]:
    """Read one file, within the limit of time.

    Returns:
        A name of :data:`OUTCOMES`, and the message or the traceback.
    """
    from planner.errors import MeshwrightError

    before = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
    try:
        read(kind, path)
        found = "accepted", ""
    except MeshwrightError as error:
        found = "clean", str(error)
    except MemoryError:
        found = "large", traceback.format_exc()
    except _LateError:
        found = "slow", traceback.format_exc()
    except Exception:
        found = "traceback", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took = time.monotonic() - before
    return ("slow", f"{took:.1f} s") if took > SECONDS else found


def _limit_memory() -> None:
    """Allow a gigabyte above what the libraries have taken by now."""
    # Data, not addresses: libraries go on to map files of their own.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    taken = int(re.search(r"VmData:\s*(\d+)", status)[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (taken + BYTES, taken + BYTES))


def _work(kind: str, folder: Path, pipe: Connection) -> None:
    """Judge the mutated file each time it is asked to; runs in a process of its own."""
    from planner.errors import MeshwrightError

    signal.signal(signal.SIGALRM, _late)
    suffix = KINDS[kind].suffix
    first = folder / f"real{suffix}"
    found = {}
    for text in seeds(kind):
        first.write_bytes(text.encode())
        # Once without a limit: libraries are loaded, and models are read.
        with contextlib.suppress(MeshwrightError):
            read(kind, first)
        found[text] = judge(kind, first)
    # Some are for another number of processes.
    originals = [text for text, (outcome, _) in found.items() if outcome == "accepted"]
    if not originals:
        raise SystemExit(f"{kind}: no real document is accepted: {found.popitem()[1]}")
    _limit_memory()
    pipe.send(originals)
    while pipe.recv():
        pipe.send(judge(kind, folder / f"mutation{suffix}"))


class _Worker:
    """A process that judges mutations of one kind; it is started anew when it dies."""

    def __init__(self, kind: str, seed: int, folder: Path) -> None:
        self._kind, self._seed, self._folder = kind, seed, folder
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        arguments = (self._kind, self._folder, theirs)
        self._process = context.Process(target=_work, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(120):
            raise SystemExit(f"{self._kind}: the worker does not start")
        self._originals: list[str] = self._pipe.recv()

    def judge(self, number: int) -> tuple[str, str]:
        """Judge one mutation; a worker that dies or hangs is replaced."""
        rng = random.Random(f"{self._seed} {self._kind} {number}")
        path = self._folder / f"mutation{KINDS[self._kind].suffix}"
        path.write_bytes(mutate(rng.choice(self._originals), self._kind, rng))
        self._pipe.send(True)
        try:
            if self._pipe.poll(4 * SECONDS):
                found: tuple[str, str] = self._pipe.recv()
                return found
            found = "slow", f"no answer in {4 * SECONDS:g} s"
        except EOFError:
            found = "large", "the worker died"
        self._process.kill()
        self._process.join()
        self._start()
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.send(False)
        self._process.join(10)


def _fuzz_kind(
    kind: str, numbers: range, seed: int, keep: Path, seconds: float
) -> Counter[str]:
    """Count the outcomes of mutations; those that fail are kept."""
    counts: Counter[str] = Counter()
    folder = keep / re.sub(r"\W+", "_", kind)
    folder.mkdir(parents=True, exist_ok=True)
    worker = _Worker(kind, seed, folder)
    until = time.monotonic() + seconds
    seen: set[str] = set()
    for number in numbers:
        if time.monotonic() > until:
            break
        outcome, why = worker.judge(number)
        counts[outcome] += 1
        if outcome not in {"clean", "accepted"}:
            # One input for each last line of a traceback is enough to mend it.
            name = hashlib.sha256(why[-200:].encode(errors="replace")).hexdigest()[:8]
            if name not in seen:
                seen.add(name)
                stem = folder / f"{outcome}-{number}"
                raw = (folder / f"mutation{KINDS[kind].suffix}").read_bytes()
                stem.with_suffix(KINDS[kind].suffix).write_bytes(raw)
                stem.with_suffix(".log").write_text(why, errors="replace")
    worker.close()
    return counts


def _report(found: dict[str, Counter[str]], started: float) -> str:
    lines = [
        "| document | mutations | clean errors | accepted | tracebacks | above 5 s | "
        "above 1 GB |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    total: Counter[str] = sum(found.values(), Counter())
    for name, counts in [*found.items(), ("all", total)]:
        cells = [f"{sum(counts.values()):,}"]
        cells += [f"{counts[outcome]:,}" for outcome in OUTCOMES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines.append("")
    lines.append(f"{time.monotonic() - started:.0f} s.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="mutations in all")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--out", type=Path, help="folder for a dated result")
    options = parser.parse_args()
    started = time.monotonic()
    kinds = options.kind or list(KINDS)
    found: dict[str, Counter[str]] = {}
    for index, kind in enumerate(kinds):
        left = options.seconds - (time.monotonic() - started)
        share = max(left / (len(kinds) - index), 1.0)
        numbers = range(options.count // len(kinds))
        found[kind] = _fuzz_kind(kind, numbers, options.seed, options.keep, share)
        print(f"{kind}: {dict(found[kind])}", file=sys.stderr, flush=True)
    text = _report(found, started)
    print(text)
    if options.out is not None:
        today = datetime.date.today().isoformat()
        command = " ".join(sys.argv[1:])
        page = (
            f"# Documents from outside, mutated\n\n{today}, seed {options.seed}. "
            f"`python -m benchmarks.fuzz_documents {command}`\n\n{text}\n"
        )
        (options.out / f"fuzz_documents_{today}.md").write_text(page)
    bad = sum(c[o] for c in found.values() for o in ("traceback", "slow", "large"))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
