"""Figures of the code itself: lines, files, import circles, first words, walks.

python -m benchmarks.house [ROOT ...]

ROOT is a checkout; this one if none is given. Two stand side by side. The walk of a
strategy counts what ``CostModel.cost`` enters for one pipeline that was planned before:
files of ``planner``, and how often it comes back to a file that it had left.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import networkx as nx

__all__ = ["figures", "main"]

PACKAGES = ("planner", "envs", "policies", "executors")
SHORT = 80
#: First words that tell a reader nothing of what a thing is or does.
RIDDLES = ("What", "Whether", "How", "Which", "Of", "Those", "As")

_WALK = """
import sys
from pathlib import Path
import planner
from planner import predict
from planner.cost import CostModel
root = str(Path(planner.__file__).parent)
given = {"mesh": {"pp": 2, "dp_shard": 2, "tp": 2}, "schedule": "1F1B",
         "zero_stage": 2, "num_microbatches": 8}
stays, seen, names = [], set(), set()
def note(frame, event, _):
    file = frame.f_code.co_filename
    if event == "call" and file.startswith(root):
        names.add((file, frame.f_code.co_name))
        if not stays or stays[-1] != file:
            stays.append(file)
cost = CostModel.cost
def traced(self, *args, **kwargs):
    stays.clear(); names.clear()
    sys.setprofile(note)
    try:
        return cost(self, *args, **kwargs)
    finally:
        sys.setprofile(None)
predict("gpt2", "dgx-a100:1", given, seq_len=256)
CostModel.cost = traced
predict("gpt2", "dgx-a100:1", given, seq_len=256)
files = set(stays)
print(len(files), len(names), len(stays) - len(files))
"""


def _modules(root: Path) -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = path
    return found


def _only_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def _imported(
    tree: ast.AST, known: dict[str, Path], *, types: bool = True
) -> Iterator[str]:
    """Modules that a module imports; without ``types`` only those read at run time."""
    guarded = [] if types else [n for n in ast.walk(tree) if _only_types(n)]
    left_out = {inner for node in guarded for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in left_out:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                if inner in known:
                    yield inner
                elif node.module in known:
                    yield node.module


def _circles(
    modules: dict[str, Path], trees: dict[str, ast.Module], *, types: bool
) -> str:
    arrows = nx.DiGraph()
    for name, tree in trees.items():
        arrows.add_edges_from(
            (name, other)
            for other in set(_imported(tree, modules, types=types))
            if other != name and modules[other].name != "__init__.py"
        )
    circles = [c for c in nx.strongly_connected_components(arrows) if len(c) > 1]
    sizes = ", ".join(str(len(circle)) for circle in sorted(circles, key=len))
    return f"{len(circles)}" + (f" of {sizes} files" * bool(sizes))


def _first_words(tree: ast.AST) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text:
            yield re.split(r"[\s:,.]", text, maxsplit=1)[0]


def _walk(root: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _WALK],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    files, names, back = done.stdout.split()
    return f"{files} files, {names} functions, {back} times back"


def figures(root: Path) -> dict[str, str]:
    """Every figure of a checkout, by name.

    Args:
        root: Its folder.
    """
    modules = _modules(root)
    trees = {name: ast.parse(path.read_text()) for name, path in modules.items()}
    lengths = {n: len(path.read_text().splitlines()) for n, path in modules.items()}
    found: dict[str, str] = {}
    for package in PACKAGES:
        own = [n for n in modules if n.split(".")[0] == package]
        short = sum(lengths[name] < SHORT for name in own)
        total = sum(lengths[name] for name in own)
        found[package] = f"{total:,} lines, {len(own)} files, {short} below {SHORT}"
    found["import circles"] = _circles(modules, trees, types=False)
    found["with imports of types"] = _circles(modules, trees, types=True)
    public = sum(
        len(node.value.elts)
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.List)
        and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
    )
    found["names in __all__"] = f"{public:,}"
    words = Counter(word for tree in trees.values() for word in _first_words(tree))
    riddles = sum(words[word] for word in RIDDLES)
    shown = ", ".join(f"{word} {words[word]}" for word in RIDDLES if words[word])
    share = riddles / max(words.total(), 1)
    found["docstrings that begin as riddles"] = (
        f"{riddles} of {words.total():,} ({share:.1%}){': ' if shown else ''}{shown}"
    )
    readme = (root / "README.md").read_text()
    found["README"] = f"{len(readme.split()):,} words"
    found["a strategy's price"] = _walk(root)
    return found


def main() -> None:
    """Print the figures of one checkout, or of several under each other."""
    roots = [Path(arg).resolve() for arg in sys.argv[1:]] or [
        Path(__file__).resolve().parents[1]
    ]
    columns = [figures(root) for root in roots]
    for name in columns[0]:
        print(name)
        for column in columns:
            print(f"    {column[name]}")


if __name__ == "__main__":
    main()
