"""TrainJobs, read by the models of Kubeflow Trainer 2.3.0 and shellcheck."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from checking import check_in_environment, judge, same
from kubernetes_objects import PACKAGES, check_names, check_object, check_plan
from launcher_plans import launcher_plans
from shell_scripts import PACKAGE, check_script


def _check(folder: Path, plan: dict[str, Any]) -> None:
    import yaml
    from kubeflow_trainer_api import models

    text = (folder / "trainjob.yaml").read_text()
    job, config = yaml.safe_load_all(text)
    check_names(job, config)
    check_plan(config, plan)
    read = check_object(models.TrainerV1alpha1TrainJob, job)
    same("apiVersion", read.api_version, "trainer.kubeflow.org/v1alpha1")
    trainer = read.spec.trainer
    ranks = trainer.num_nodes * trainer.num_proc_per_node
    same("ranks", ranks, plan["cluster"]["num_devices"])
    same("shell", trainer.command[:2], ["bash", "-c"])
    check_script(trainer.command[2])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    packages = [*PACKAGES, PACKAGE]
    sys.exit(check_in_environment(__file__, "kubeflow", launcher_plans(), packages))
