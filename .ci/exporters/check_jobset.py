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
    head, ranks, counts = read.spec.replicated_jobs[0].name, 0, []
    for nodes in read.spec.replicated_jobs:
        pod = nodes.template.spec.template.spec
        (container,) = pod.containers
        resources = container.resources.limits or container.resources.requests
        (each,) = (int(count.actual_instance) for count in resources.values())
        ranks += nodes.template.spec.completions * each
        counts.append(nodes.template.spec.completions)
        first = {e.name: e.value for e in container.env}["MASTER_ADDR"]
        same("first pod", first, f"{name}-{head}-0-0.{read.spec.network.subdomain}")
        runs = plan["cluster"]["host_types"]
        same("nodes of one type alone", bool(pod.node_selector), bool(runs))
        check_script(container.command[2])
    same("ranks", ranks, plan["cluster"]["num_devices"])
    if runs:
        same("pods of each job", counts, [count for count, _ in runs])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(judge(sys.argv[1], _check))
    packages = [*PACKAGES, PACKAGE]
    sys.exit(check_in_environment(__file__, "jobset", launcher_plans(), packages))
