"""Mechanisms that measured runs have, by recipe: ``data/evidence.json``.

``python -m benchmarks.evidence --write`` makes the file from published measurements.
"""

from __future__ import annotations

import json
from functools import cache

from planner.cost.evidence import Evidence, RecipeEvidence, Seen
from planner.measurements.catalogues import DATA

__all__ = ["EVIDENCE", "evidence_document", "shipped_evidence"]

#: File of the evidence that comes with Meshwright.
EVIDENCE = DATA / "evidence.json"


@cache
def shipped_evidence() -> Evidence:
    """Evidence for the constants that are shipped."""
    document = json.loads(EVIDENCE.read_text(encoding="utf-8"))
    recipes = {
        name: RecipeEvidence(
            base=entry["base"],
            tokens=entry["tokens"],
            runs=entry["runs"],
            seen={
                mechanism: Seen(runs=runs, tokens=tokens)
                for mechanism, (runs, tokens) in entry["seen"].items()
            },
        )
        for name, entry in document["recipes"].items()
    }
    spreads = {name: document[name] for name in ("base", "elsewhere", "unseen")}
    return Evidence(recipes=recipes, **spreads)


def evidence_document(evidence: Evidence) -> dict[str, object]:
    """Return the fields of the file, which :func:`shipped_evidence` reads."""
    return {
        "base": evidence.base,
        "elsewhere": evidence.elsewhere,
        "unseen": evidence.unseen,
        "recipes": {
            name: {
                "runs": one.runs,
                "base": one.base,
                "tokens": one.tokens,
                "seen": {key: [of.runs, of.tokens] for key, of in one.seen.items()},
            }
            for name, one in sorted(evidence.recipes.items())
        },
    }
