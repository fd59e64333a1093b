"""Names that every launcher takes, made from names that may hold anything.

Only these, numbers, and words of the schema get into scripts and YAML: what a model is
called is never read by a shell.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.schema import Plan

__all__ = ["label_name", "run_name"]


def label_name(text: str, longest: int = 63) -> str:
    """An RFC 1123 label (also RFC 1035) from any text.

    Lower-case letters, digits and single dashes; it starts with a letter and does not
    end with a dash. Texts may share a label.

    Args:
        text: Anything.
        longest: Characters that it may have.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not plain[:1].isalpha():
        plain = f"x-{plain}"
    return plain[:longest].strip("-")


def run_name(plan: Plan) -> str:
    """What a run of a plan is called: a label of at most 38 characters.

    Its end is a hash of the plan, so that two plans for a model can be queued together.
    """
    digest = hashlib.sha256(plan.canonical_bytes()).hexdigest()[:6]
    return f"meshwright-{label_name(plan.model.name, 20)}-{digest}"
