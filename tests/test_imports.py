"""Imports stay light, and extras stay optional."""

from __future__ import annotations

import subprocess
import sys


def _fresh(code: str) -> str:
    """Output of a new interpreter."""
    ran = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def _loaded(statement: str, *names: str) -> list[str]:
    code = (
        f"import sys\n{statement}\nprint(*[n for n in {names!r} if n in sys.modules])"
    )
    return _fresh(code).split()


HEAVY = ("stable_baselines3", "gymnasium", "transformers")


def test_executors_are_light() -> None:
    assert _loaded("import executors", "torch", "numpy", *HEAVY) == []
    every = "import executors; [getattr(executors, n) for n in executors.__all__]"
    planning = ("planner.cost", "planner.search", "planner.cluster", "planner.capture")
    assert _loaded(every, *HEAVY, *planning) == []


def test_the_planner_is_light_until_it_is_used() -> None:
    assert _loaded("import planner", "torch", "numpy", "pydantic", "numba") == []


def test_documents_need_pydantic_alone() -> None:
    names = ("torch", "numpy", "numba", "networkx", "yaml", "rich", "tyro")
    assert _loaded("import planner.schema, planner.schema.publish", *names) == []


def test_the_command_line_starts_without_torch() -> None:
    names = ("torch", "numba", "transformers", "executors")
    assert _loaded("import planner.cli.main", *names) == []
    others = ("planner.cli.plan", "planner.cli.train", "yaml", "psutil")
    one = (
        "import contextlib, io\nfrom planner.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()): main(['explain', '--help'])"
    )
    assert _loaded(one, *names, *others) == []


def test_planning_reads_constants_and_no_measurements() -> None:
    rooms = ("planner.measurements", "planner.calibration")
    code = (
        "import sys, planner.api\n"
        f"print(*[name for name in sys.modules if name.startswith({rooms!r})])"
    )
    assert set(_fresh(code).split()) == {
        "planner.measurements",
        "planner.measurements.catalogues",
        "planner.measurements.convergence",
        "planner.measurements.evidence",
        "planner.measurements.kernels",
        "planner.measurements.store",
    }


def test_clusters_need_no_torch() -> None:
    assert (
        _loaded("from planner import Cluster; Cluster.parse('dgx-h100')", "torch") == []
    )


def test_planning_works_without_torch_distributed_and_the_extra_for_learning() -> None:
    code = (
        "import sys\n"
        "import torch\n"
        # As in a torch that was built without it (Windows, macOS).
        "import torch.distributed as d; d.is_available = lambda: False\n"
        "for n in ('init_process_group', 'ProcessGroup', 'device_mesh'):\n"
        "    d.__dict__.pop(n, None)\n"
        "for n in ('device_mesh', 'pipelining', 'fsdp'):\n"
        "    sys.modules[f'torch.distributed.{n}'] = None\n"
        f"for n in {HEAVY!r}: sys.modules[n] = None\n"
        "from torch import nn\n"
        "from planner import plan\n"
        "net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))\n"
        "p = plan(net, 'dgx-a100', global_batch=64,\n"
        "         example_inputs={'input': ((64, 64), 'float32')})\n"
        "assert p.strategy.mesh.num_devices == 8\n"
        "print(len(p.summary().splitlines()))"
    )
    assert int(_fresh(code)) >= 8
