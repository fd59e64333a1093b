"""JobSets, read by the models of JobSet v1alpha2 in kubeflow-trainer-api 2.3.0."""

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

    text = (folder / "jobset.yaml").read_text()
    job, config = yaml.safe_load_all(text)
    name = check_names(job, config)
    check_plan(config, plan)
    read = check_object(models.JobsetV1alpha2JobSet, job)
    same("apiVersion", read.api_version, "jobset.x-k8s.io/v1alpha2")
    (nodes,) = read.spec.replicated_jobs
    (container,) = nodes.template.spec.template.spec.containers
    resources = container.resources.limits or container.resources.requests
    (each,) = (int(count.actual_instance) for count in resources.values())
    ranks = nodes.template.spec.completions * each
    same("ranks", ranks, plan["cluster"]["num_devices"])
    first = {e.name: e.value for e in container.env}["MASTER_ADDR"]
    same("first pod", first, f"{name}-{nodes.name}-0-0.{read.spec.network.subdomain}")
    check_script(container.command[2])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    packages = [*PACKAGES, PACKAGE]
    sys.exit(check_in_environment(__file__, "jobset", launcher_plans(), packages))
