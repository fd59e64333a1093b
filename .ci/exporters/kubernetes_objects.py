"""Kubernetes objects held to published schemas: kubeflow-trainer-api 2.3.0.

Its models are made from the OpenAPI schemas of Kubernetes, JobSet and Trainer. They
drop what they do not know, so that what comes out of them must be all that went in.
"""

from __future__ import annotations

import json
import re
from typing import Any

from checking import same

__all__ = ["PACKAGES", "check_names", "check_object", "check_plan"]

PACKAGES = ("kubeflow-trainer-api==2.3.0", "pyyaml==6.0.3")

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def check_object(model: Any, value: dict[str, Any]) -> Any:
    """Read an object by its model; nothing may be lost.

    Returns:
        The model's object.
    """
    read = model.from_dict(value)
    kept = json.loads(json.dumps(read.to_dict(), default=str))
    same(f"what {model.__name__} keeps", kept, value)
    return read


def check_names(*values: dict[str, Any]) -> str:
    """All objects have one name, which is an RFC 1123 label."""
    (name,) = {value["metadata"]["name"] for value in values}
    assert len(name) <= 63, name
    assert _LABEL.fullmatch(name), name
    return str(name)


def check_plan(config: dict[str, Any], plan: dict[str, Any]) -> None:
    """A ConfigMap holds the plan, and is one."""
    from kubeflow_trainer_api import models

    # Trainer's schemas have no ConfigMap of their own; its parts are these.
    metadata = models.IoK8sApimachineryPkgApisMetaV1ObjectMeta
    check_object(metadata, config["metadata"])
    same("kind", (config["apiVersion"], config["kind"]), ("v1", "ConfigMap"))
    same("keys", set(config), {"apiVersion", "kind", "metadata", "data"})
    same("the plan", json.loads(config["data"]["plan.json"]), plan)
    assert len(config["data"]["plan.json"].encode()) < 1024 * 1024
