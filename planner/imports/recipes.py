"""Python recipes of configs, read without running them.

A recipe is a function that returns a config. Calls with keyword arguments, constants,
arithmetic, other recipes of the same file and assignments to fields are followed;
anything else stays open.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.errors import PlanFileError, UnknownNameError

__all__ = ["Call", "Open", "read_recipe", "recipe_names"]

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
#: Most calls from recipe to recipe, and levels of one expression.
_DEEPEST = 20
_MOST_CHARACTERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Open:
    """A value that only running the recipe would tell.

    Attributes:
        text: Its Python.
    """

    text: str


@dataclass(slots=True)
class Call:
    """A call that makes an object, as ``ParallelismConfig(tensor_parallel_degree=8)``.

    Attributes:
        name: The function's dotted name.
        fields: Keyword arguments, and fields that were assigned later.
        arguments: The others.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    arguments: list[Any] = field(default_factory=list)


def _functions(text: str, where: str) -> dict[str, ast.FunctionDef]:
    if len(text) > _MOST_CHARACTERS:
        raise PlanFileError(
            f"{where}: {len(text):,} characters of Python, at most "
            f"{_MOST_CHARACTERS:,} are read"
        )
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PlanFileError(f"{where}: not Python: {error}") from error
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def recipe_names(text: str, where: str) -> list[str]:
    """Functions without arguments that say they return a config.

    Raises:
        PlanFileError: If the text is not Python.
    """
    found = _functions(text, where).items()
    return [name for name, node in found if _is_recipe(name, node)]


def _is_recipe(name: str, node: ast.FunctionDef) -> bool:
    returned = ast.unparse(node.returns) if node.returns else ""
    bare = not (node.args.args or node.args.kwonlyargs)
    return bare and not name.startswith("_") and returned.endswith("Config")


def read_recipe(text: str, name: str, where: str) -> Call:
    """The config that a recipe returns.

    Args:
        text: The Python file.
        name: The recipe; may be empty if there is one.
        where: Path of the file, for messages.

    Raises:
        PlanFileError: If it is not Python, or the recipe returns something else.
        UnknownNameError: If there is no such recipe.
    """
    functions = _functions(text, where)
    names = [key for key, node in functions.items() if _is_recipe(key, node)]
    if not name:
        if len(names) != 1:
            shown = ", ".join(names[:20]) or "none"
            raise PlanFileError(
                f"{where} has {len(names)} recipes ({shown}); name one with --recipe"
            )
        name = names[0]
    if name not in functions:
        raise UnknownNameError("recipe", name, names)
    found = _Reader(functions=functions).returned(functions[name], {}, 0)
    if not isinstance(found, Call):
        raise PlanFileError(
            f"{where}: the recipe {name} does not return a config that can be read "
            f"without running it"
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    functions: Mapping[str, ast.FunctionDef]

    def returned(
        self, node: ast.FunctionDef, values: dict[str, Any], depth: int
    ) -> Any:
        """Value that a function returns; branches of tests are taken as they stand."""
        for statement in node.body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                return self.value(statement.value, values, depth)
            self._assign(statement, values, depth)
        return Open(node.name)

    def _assign(self, statement: ast.stmt, values: dict[str, Any], depth: int) -> None:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            return
        found = self.value(value, values, depth)
        if isinstance(target, ast.Name):
            values[target.id] = found
        elif isinstance(target, ast.Attribute):
            owner = self._owner(target.value, values)
            if owner is not None:
                owner.fields[target.attr] = found

    def _owner(self, node: ast.expr, values: dict[str, Any]) -> Call | None:
        """Object whose field is assigned; made if the recipe left it at its default."""
        if isinstance(node, ast.Name):
            found = values.get(node.id)
            return found if isinstance(found, Call) else None
        if isinstance(node, ast.Attribute):
            above = self._owner(node.value, values)
            if above is None:
                return None
            inner = above.fields.setdefault(node.attr, Call(node.attr))
            return inner if isinstance(inner, Call) else None
        return None

    def value(self, node: ast.expr, values: dict[str, Any], depth: int) -> Any:
        """Value of an expression; an :class:`Open` if it stays open."""
        if depth > _DEEPEST:
            return Open(ast.unparse(node)[:80])
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            return [self.value(item, values, depth + 1) for item in node.elts]
        if isinstance(node, ast.Dict):
            return {
                key.value: self.value(item, values, depth + 1)
                for key, item in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
            }
        if isinstance(node, ast.Call):
            return self._called(node, values, depth + 1)
        if isinstance(node, ast.BinOp | ast.UnaryOp):
            return self._number(node, values, depth + 1)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value, values, depth + 1)
            if isinstance(owner, Call) and node.attr in owner.fields:
                return owner.fields[node.attr]
        return Open(ast.unparse(node)[:80])

    def _number(
        self, node: ast.BinOp | ast.UnaryOp, values: dict[str, Any], depth: int
    ) -> Any:
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand, values, depth)
            if isinstance(node.op, ast.USub) and isinstance(inner, int | float):
                return -inner
            return Open(ast.unparse(node)[:80])
        left = self.value(node.left, values, depth)
        right = self.value(node.right, values, depth)
        apply = _OPERATORS.get(type(node.op))
        if apply and isinstance(left, int) and isinstance(right, int | float) and right:
            return apply(left, right)
        return Open(ast.unparse(node)[:80])

    def _called(self, node: ast.Call, values: dict[str, Any], depth: int) -> Any:
        name = ast.unparse(node.func)
        arguments = [self.value(item, values, depth) for item in node.args]
        fields = {
            word.arg: self.value(word.value, values, depth)
            for word in node.keywords
            if word.arg
        }
        if name == "float" and arguments == ["inf"]:
            return float("inf")
        if name in ("dataclasses.replace", "replace") and arguments:
            base = arguments[0]
            made = copy.deepcopy(base) if isinstance(base, Call) else Call(name)
            made.fields |= fields
            return made
        function = self.functions.get(name)
        if function is not None:
            names = [argument.arg for argument in function.args.args]
            given = dict(zip(names, arguments, strict=False)) | fields
            found = self.returned(function, given, depth)
            return (
                found if not isinstance(found, Open) else Call(name, fields, arguments)
            )
        return Call(name, fields, arguments)
