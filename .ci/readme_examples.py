"""Read the README's install line and first examples, so that they can be checked."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def main(readme: Path, folder: Path) -> None:
    """Write ``first.sh`` and ``first.py``; print the extras that are installed."""
    text = readme.read_text(encoding="utf-8")
    for language, name in (("sh", "first.sh"), ("python", "first.py")):
        found = re.search(
            rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE
        )
        if found is None:
            raise SystemExit(f"{readme} has no block of {language}")
        (folder / name).write_text(found[1], encoding="utf-8")
    line = re.search(r'pip install "?meshwright(\[[\w,]+\])?"?$', text, re.MULTILINE)
    if line is None:
        raise SystemExit(f"{readme} has no line that installs meshwright")
    print(line[1] or "")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
