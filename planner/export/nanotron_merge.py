#!/usr/bin/env python3
"""Lay one YAML file over another and print the whole: merge.py BASE OVER.

Sections are merged, all else in OVER takes the place of what BASE has. It needs PyYAML,
and nothing of Meshwright.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

__all__ = ["main"]


def _over(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    merged = dict(base)
    for key, value in over.items():
        merged[key] = _over(base.get(key), value)
    return merged


def main() -> None:
    """Read both files, print the result."""
    if len(sys.argv) != 3:
        raise SystemExit("usage: merge.py BASE OVER")
    base, over = (
        yaml.safe_load(Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]
    )
    if not isinstance(base, dict):
        raise SystemExit(f"merge.py: {sys.argv[1]} is no config: it has no sections")
    yaml.safe_dump(_over(base, over), sys.stdout, sort_keys=False)


if __name__ == "__main__":
    main()
