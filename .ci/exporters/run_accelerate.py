"""What is exported to accelerate, run on 2 gloo processes beside ``meshwright run``.

Both train the demo model from the same weights on the same tokens in float32; losses of
every step must be within 1e-4 of each other, and fall.

replicas: as it is written; accelerate's launcher, its config, the exported script.
zero3: accelerate turns FSDP on for accelerators alone, on a CPU it would train plain
replicas. So a wrapper (fsdp_on_gloo.py) tells it that its processes are on GPUs, though
they compute on the CPU; launcher, config, script, FSDP2 and mesh are accelerate's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from check_accelerate import PACKAGES
from checking import ROOT

LIMIT_S = 240.0
STEPS = 6
TOLERANCE = 1e-4
TOKENS = ROOT / "examples" / "tiny-llama" / "genesis.npy"


def _environment(scratch: Path) -> Path:
    """Python of an environment with accelerate and transformers."""
    kept = Path(os.environ.get("EXPORTER_VENVS", scratch)).absolute()
    python = kept / "accelerate" / "bin" / "python"
    if not python.exists():
        subprocess.run(
            [sys.executable, "-m", "venv", str(kept / "accelerate")], check=True
        )
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile"]
    pip += ["--disable-pip-version-check", *os.environ.get("PIP_ARGS", "").split()]
    subprocess.run([*pip, *PACKAGES], check=True)
    return python


def _free_port() -> str:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return str(listening.getsockname()[1])


def _run(command: list[str], environment: dict[str, str]) -> None:
    """Run in a group of processes of its own, of which none is left."""
    started = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        code = started.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        # torchrun ends its ranks, which are in sessions of their own, when it is told.
        os.killpg(started.pid, signal.SIGTERM)
        code = started.wait(60.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
    if code:
        raise SystemExit(f"{command[0]} exited with {code}")


def _expected(plan: Path) -> list[float]:
    """Losses of the same plan by Meshwright's own executors."""
    command = [sys.executable, "-m", "planner.cli.main", "run", str(plan)]
    command += ["--data", str(TOKENS), "--steps", str(STEPS), "--json", "--force"]
    ran = subprocess.run(
        command,
        check=True,
        timeout=LIMIT_S,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    losses: list[float] = json.loads(ran.stdout)["losses"]
    return losses


def _measured(out: Path, python: Path, weights: Path, wrapped: bool) -> list[float]:
    losses = out / "losses.json"
    command = [str(out / "run.sh"), "--plan", str(out / "plan.json")]
    command += ["--data", str(TOKENS), "--weights", str(weights)]
    command += ["--steps", str(STEPS), "--losses", str(losses)]
    path = [str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {
        "PATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_PORT": _free_port(),
    }
    if wrapped:
        environment["SCRIPT"] = str(out / "train.py")
        environment["TRAIN"] = str(Path(__file__).with_name("fsdp_on_gloo.py"))
    _run(command, environment)
    found: list[float] = json.loads(losses.read_text())
    return found


def _main() -> int:
    sys.path.insert(0, str(ROOT))
    import torch

    from executors import build_model
    from planner.capture import load_model
    from tests.export.plans import on
    from tests.plans import TINY, local_plan

    passed = failed = 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        python = _environment(scratch)
        weights = scratch / "weights.pt"
        model = build_model(load_model(f"hf:{TINY}", seq_len=32).build, 0)
        torch.save(model.state_dict(), weights)
        for name, pins in {
            "replicas": {"dp_replicate": 2, "num_microbatches": 2},
            "zero3": {"dp_shard": 2, "zero_stage": 3, "num_microbatches": 2},
        }.items():
            plan = local_plan(2, **pins)
            clipped = plan.strategy.model_copy(update={"grad_clip_norm": 0.5})
            plan = plan.model_copy(update={"strategy": clipped})
            plan.save(scratch / f"{name}.json")
            wrapped = plan.strategy.mesh.dp_shard > 1
            written = on(plan, h100_80=2) if wrapped else plan
            written.export("accelerate", scratch / name)
            want = _expected(scratch / f"{name}.json")
            have = _measured(scratch / name, python, weights, wrapped)
            worst = max(abs(a - b) for a, b in zip(have, want, strict=True))
            good = worst <= TOLERANCE and have[-1] < have[0]
            passed, failed = passed + good, failed + (not good)
            print(
                f"{'passed' if good else 'FAILED'} {name}: loss {have[0]:.6f} -> "
                f"{have[-1]:.6f}, meshwright run {want[0]:.6f} -> {want[-1]:.6f}, "
                f"largest difference {worst:.1e}"
            )
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(_main())
