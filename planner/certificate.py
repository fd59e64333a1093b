"""Certificates: a small twin of a plan is trained, and held to plain training.

Another process does it (:mod:`planner.cli.certifier`), because what trains is forked,
and what plans may have used a GPU. It is started while the search runs. Answers are
kept on disk under the model's kind, the axes, and the versions of all that computes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from planner.capture.small import small_module
from planner.errors import MeshwrightError
from planner.schema import Mesh, Plan, Strategy
from planner.schema.base import write_atomically
from planner.schema.plan_parts import Certificate

__all__ = ["Certifier", "certifies", "own_twin", "twin_layers"]

_STEPS = 3
#: Seconds after which an answer is not waited for.
_PATIENCE_S = 120.0
#: Own modules of more parameters lose layers to be certified. Parameters of all copies
#: that are trained, on the ranks and in one process.
_MOST_PARAMETERS, _MOST_TRAINED = 50_000_000, 450_000_000
#: Most ranks of a twin.
_MOST_RANKS = 8
_NO_TWIN = "no small model of it can be built"
#: Starts the process. Its imports make a million objects that stay, through which the
#: garbage collector would go several times meanwhile, an eighth of the time.
_START = "import gc; gc.disable(); from planner.cli.certifier import main; main()"
#: Switches certificates off where it is 0.
_SWITCH = "MESHWRIGHT_CERTIFY"


def certifies(wanted: bool | None) -> bool:
    """Return True if plans are certified: as asked, or as the environment says."""
    return os.environ.get(_SWITCH, "1") != "0" if wanted is None else wanted


def twin_layers(strategy: Strategy) -> int:
    """Return how many layers of each kind a strategy's twin has."""
    stages = 2 * min(strategy.virtual_stages, 2)
    return max(4, stages) if strategy.mesh.pp > 1 else 2


def own_twin(module: Any, strategy: Strategy | None) -> tuple[Any, str] | None:
    """Return a small module that stands for one of own code, and what it is.

    Args:
        module: Of own code.
        strategy: Of its plan; None for the one whose twin is smallest.

    Returns:
        None if the module has no values, or is large with few layers, too.
    """
    if any(one.is_meta for one in module.parameters()):
        return None
    if _parameters(module) <= _MOST_PARAMETERS:
        return module, "the model itself"
    layers = 2 if strategy is None else twin_layers(strategy)
    degrees = Mesh().model_dump() if strategy is None else strategy.mesh.model_dump()
    small_mesh = Mesh(**{axis: min(degree, 2) for axis, degree in degrees.items()})
    ranks = min(_MOST_RANKS, small_mesh.num_devices)
    try:
        small = small_module(module, layers=layers)
    except Exception:  # whatever a model's own code raises
        return None
    count = _parameters(small)
    if count * (ranks + 1) > _MOST_TRAINED:
        return None
    return small, f"{layers} layers, {count:,} parameters"


def _parameters(module: Any) -> int:
    return sum(one.numel() for one in module.parameters())


class Certifier:
    """The process that certifies plans of one model; a context manager.

    Args:
        model: What ``plan`` was given: a module, a reference, or a config's fields.
        remote_code: Whether code that came with the model may run.
    """

    def __init__(self, model: Any, *, remote_code: bool = False) -> None:
        self._model = model
        self._remote_code = remote_code
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._answers: dict[str, Certificate] = {}
        self._kept_in = _folder_of(self._kind())

    def prepare(self) -> None:
        """Start the process early, unless this kind of model was certified before."""
        known = self._kept_in is not None and self._kept_in.exists()
        if not known and self._has_twin():
            self._start()

    def _start(self) -> None:
        """Start the process; it then imports what it needs, beside this one."""
        if self._process is not None:
            return
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # Classes of a script's neighbours are imported there as they are here.
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, 9)
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def certify(self, plan: Plan, *, kept: bool = True) -> Certificate:
        """Certify a plan, or return what an equal one was given before.

        Args:
            plan: For the model.
            kept: Whether a kept certificate will do.
        """
        key = _key(plan)
        file = self._kept_in / f"{key}.json" if self._kept_in else None
        if kept and key not in self._answers and file is not None:
            with contextlib.suppress(MeshwrightError):
                self._answers[key] = Certificate.load(file)
        if key not in self._answers:
            found = self._answers[key] = self._certify(plan)
            if file is not None and found.verdict in {"right", "wrong", "late"}:
                # A certificate that cannot be kept is made again.
                with contextlib.suppress(MeshwrightError, OSError):
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(file, found.to_json().encode())
        return self._answers[key]

    def _has_twin(self) -> bool:
        own = _is_own_module(self._model)
        return not own or own_twin(self._model, None) is not None

    def _certify(self, plan: Plan) -> Certificate:
        if not self._has_twin():
            return Certificate(verdict="unknown", reason=_NO_TWIN)
        inputs = plan.workload.inputs
        if not _is_own_module(self._model) and any(i.values for i in inputs):
            reason = "a small model of it would read pictures of another size"
            return Certificate(verdict="unknown", reason=reason)
        batch_norms = plan.model.batch_norm_values is not None
        if batch_norms and plan.strategy.semantics == "approximate":
            reason = "batch norms take the statistics of each microbatch, by consent"
            return Certificate(verdict="unknown", reason=reason)
        try:
            named = self._named(plan)
        except MeshwrightError as error:
            return Certificate(verdict="unknown", reason=str(error))
        answer = self._ask({"plan": plan.to_data(), "model": named, "steps": _STEPS})
        return Certificate.from_data(answer, where="the certifier's answer")

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            self._stop()
            return {"verdict": "unknown", "reason": "the certifier did not start"}
        ready, _, _ = select.select([process.stdout], [], [], _PATIENCE_S)
        line = process.stdout.readline() if ready else ""
        if not line:
            self._stop()
            reason = "ended" if ready else f"gave no answer in {_PATIENCE_S:g} s"
            return {"verdict": "unknown", "reason": f"the certifier {reason}"}
        found: dict[str, Any] = json.loads(line)
        return found

    def _named(self, plan: Plan) -> dict[str, Any]:
        """Name the model so that the process can build what stands for it in a plan.

        Raises:
            MeshwrightError: If it cannot be handed over.
        """
        if isinstance(self._model, str):
            return {"ref": self._model, "remote_code": self._remote_code}
        if isinstance(self._model, Mapping):
            return {"config": dict(self._model)}
        own, what = _is_own_module(self._model), ""
        try:
            import cloudpickle  # type: ignore[import-untyped]

            given: Any = (self._model.config, type(self._model)) if not own else None
            if own:
                twin = own_twin(self._model, plan.strategy)
                if twin is None:
                    raise MeshwrightError(_NO_TWIN)
                given, what = twin
            text = cloudpickle.dumps(given)
        except MeshwrightError:
            raise
        except Exception as error:  # whatever a model's own code raises
            raise MeshwrightError(
                f"the model cannot be handed to another process "
                f"({type(error).__name__}: {error})"
            ) from error
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="meshwright-")
        path = Path(self._folder.name, "model.pickle")
        path.write_bytes(text)
        return {"pickle": str(path), "what": what}

    def _kind(self) -> Any:
        """Data that tell models apart; None for own code, which may change."""
        if isinstance(self._model, Mapping):
            return dict(self._model)
        if isinstance(self._model, str):
            code = ":" in self._model and not self._model.startswith("hf:")
            if code or self._remote_code:
                return None
            path = Path(self._model.removeprefix("hf:")).expanduser()
            path = path / "config.json" if path.is_dir() else path
            return path.read_text() if path.is_file() else self._model
        config = getattr(self._model, "config", None)
        module = type(self._model).__module__
        if config is None or not module.startswith("transformers."):
            return None
        return [module, type(self._model).__name__, config.to_dict()]


def _is_own_module(model: Any) -> bool:
    """Return True for a module that has no config of transformers."""
    if isinstance(model, str | Mapping):
        return False
    return not hasattr(getattr(model, "config", None), "to_diff_dict")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _code() -> str:
    """Hash of the source of the executors and of what makes models small."""
    digest = hashlib.sha256()
    for package in ("executors", "planner.capture"):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            for path in sorted(Path(folder).rglob("*.py")):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(plan: Plan) -> str:
    """Hash of what a plan's twin is made from."""
    strategy = plan.strategy
    parts = {
        "mesh": {axis: min(n, 2) for axis, n in strategy.mesh.model_dump().items()},
        "zero_stage": strategy.zero_stage,
        "schedule": strategy.schedule,
        "virtual_stages": min(strategy.virtual_stages, 2),
        "num_microbatches": min(strategy.num_microbatches, 2),
        "microbatch_size": min(strategy.microbatch_size, 2),
        "recompute": sorted({stage.recompute for stage in strategy.stages}),
        "sharding": strategy.sharding.to_data(),
        "context_algorithm": strategy.context_algorithm,
        "spatial": bool(strategy.spatial),
        "overlap": strategy.overlap.to_data(),
        "inputs": [(spec.name, spec.dtype) for spec in plan.workload.inputs],
        "loss": plan.workload.loss,
        "label_shift": plan.workload.label_shift,
        "own_loss": plan.workload.own_loss,
        "ignore_index": plan.workload.ignore_index,
        "steps": _STEPS,
    }
    return _hash(parts)


def _folder_of(kind: Any) -> Path | None:
    """Folder for the certificates of a kind of model, by this code; None for none."""
    if kind is None:
        return None
    root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    versions = [_version(name) for name in ("torch", "transformers")]
    name = _hash([kind, versions, _code()])
    return root / "meshwright" / "certificates" / name


def _hash(parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
