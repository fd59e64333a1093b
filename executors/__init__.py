"""Run a Plan on torch.distributed.

Needs of planner only documents (:mod:`planner.schema`), :mod:`planner.errors` and
:mod:`planner.plugins`; pyproject.toml lists the modules. Names resolve lazily: a
launched process must be tied to its parent before it spends seconds on importing torch.

Each room, and each file beside them, imports those below alone, neighbours not at all
(import-linter holds it)::

    dryrun                         a step of any rank, on no devices
    federation                     members that train apart and exchange weights
    runner                         train by a plan
    loop                           steps, and what is done between them
    prepared                       a plan's model, for a loop of one's own
    model_source                   the model built, checked and made parallel
    weights                        Hugging Face's files, read and written
    checkpoints, measuring         state of a run; time, memory and traffic of a step
    first_step                     a step by a plan beside the same in one process
    soundness                      finite numbers, and weights that ranks agree on
    nonfinite                      steps that are left out
    trainer                        one step, on this process's part of the model
    building                       stages of this process, made parallel
    replicas                       copies of the weights: kept equal, or let part
    steps                          a batch becomes new weights; gradients, optimizer
    own_loss                       a loss that the user gives
    parallelize, pipelines         one part made parallel; a model cut into parts
    losses                         from a model's output to a scalar
    deferred, strategies           parameters without values; modules made parallel
    data, mesh, names              batches, processes, modules, as a plan means them
    launching                      processes: started, watched, ended
    learning_rates                 warm-up and what follows
    exception_chain                the error behind an error, in one line
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.data import Samples, Volumes
    from executors.deferred.materialize import build_model
    from executors.federation import FederationResult, run_federation
    from executors.launching.launcher import launch
    from executors.learning_rates import learning_rate
    from executors.loop import Callback, LoopState, StepReport
    from executors.prepared import Prepared, prepare
    from executors.runner import RunResult, run

_HOMES = {
    "Callback": "executors.loop",
    "FederationResult": "executors.federation",
    "LoopState": "executors.loop",
    "Prepared": "executors.prepared",
    "RunResult": "executors.runner",
    "Samples": "executors.data",
    "StepReport": "executors.loop",
    "Volumes": "executors.data",
    "build_model": "executors.deferred.materialize",
    "launch": "executors.launching.launcher",
    "learning_rate": "executors.learning_rates",
    "prepare": "executors.prepared",
    "run": "executors.runner",
    "run_federation": "executors.federation",
}

__all__ = [
    "Callback",
    "FederationResult",
    "LoopState",
    "Prepared",
    "RunResult",
    "Samples",
    "StepReport",
    "Volumes",
    "build_model",
    "launch",
    "learning_rate",
    "prepare",
    "run",
    "run_federation",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'executors' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
