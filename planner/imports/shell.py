"""Scripts that start a trainer, read without running them.

Assignments, arrays, tests and arithmetic are followed as bash does; nothing is
executed, so that output of commands and values that the caller would give stay open:
``${NAME}`` in a word stands for a variable that is not set.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from planner.errors import PlanFileError

__all__ = ["Launch", "is_script", "open_variables", "read_script"]

#: Largest script, and most statements that are followed.
_MOST_LINES, _MOST_WORDS = 5_000, 20_000

_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNED = re.compile(rf"^({_NAME})(\+?)=(.*)$", re.DOTALL)
_ARRAY = re.compile(rf"^\s*({_NAME})(\+?)=\((.*)\)\s*$", re.DOTALL)
_OPEN = re.compile(rf"\$\{{({_NAME}|\d+|command)\}}")
_VARIABLE = re.compile(
    rf"\$\{{(?P<long>{_NAME}|\d+|[@*#])(?P<array>\[[@*]\])?(?P<rest>[^}}]*)\}}"
    rf"|\$(?P<short>{_NAME}|\d|[@*#])"
)
#: Programs that start a trainer.
_LAUNCHERS = (
    "torchrun",
    "torch.distributed",
    "deepspeed",
    "srun",
    "mpirun",
    "accelerate",
)
_PYTHON = re.compile(r"(^|/)python[0-9.]*$|^uv$|torchrun$")
_NODES = ("--nnodes", "--num_nodes", "--num-nodes")
_EACH = ("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--num-gpus")


def is_script(text: str) -> bool:
    """True if a text is a shell script rather than a list of arguments."""
    if text.startswith("#!"):
        return True
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line[0] != "#"), "")
    return not first.startswith("-") and bool(
        re.search(rf"^\s*(export\s+)?{_NAME}\+?=|torchrun|python", text, re.MULTILINE)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A trainer's start.

    Attributes:
        words: Arguments of the trainer.
        processes: As the launcher is told; None if it is not.
        program: Path of the trainer.
    """

    words: tuple[str, ...]
    processes: int | None
    program: str


def open_variables(words: Sequence[str]) -> list[str]:
    """Names of variables that are not set, in words of :func:`read_script`."""
    found = {name: None for word in words for name in _OPEN.findall(word)}
    return list(found)


@dataclass(slots=True)
class _Shell:
    """Values of variables; arrays are lists."""

    values: dict[str, str | list[str]] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)

    def get(self, name: str) -> str | None:
        value = self.values.get(name)
        return " ".join(value) if isinstance(value, list) else value

    def expand(self, text: str, *, closed: bool = False) -> str:
        """Text with variables and arithmetic put in; commands stay open.

        Args:
            text: Text outside single quotes.
            closed: True to take what is not set as empty, as a test does.
        """
        for _ in range(8):
            # Inner brackets first: ${A:-${B}} and $((A * $B)).
            before = text
            text = _VARIABLE.sub(lambda match: self._value(match, closed), text)
            text = _arithmetic(text, self)
            if text == before:
                break
        commands = re.compile(r"\$\((?!\()[^()]*\)|`[^`]*`")
        return commands.sub("" if closed else "${command}", text)

    def _value(self, match: re.Match[str], closed: bool) -> str:
        name = match["long"] or match["short"]
        rest = match["rest"] or ""
        value = self.get(name)
        if match["long"] == "#":
            return match[0] if rest else str(len(self.values.get("@", [])))
        if rest.startswith((":-", "-", ":=", "=")):
            default = rest.lstrip(":").lstrip("-=")
            return value if value else _unquoted(default)
        if rest.startswith((":+", "+")):
            return _unquoted(rest.lstrip(":").lstrip("+")) if value else ""
        if rest.startswith((",,", "^^")) and value is not None:
            return value.lower() if rest.startswith(",") else value.upper()
        if value is None:
            empty = closed or name in ("@", "*")
            return "" if empty else f"${{{name}}}"
        return value


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARED: Mapping[type, Callable[[int, int], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def _arithmetic(text: str, shell: _Shell) -> str:
    def value(match: re.Match[str]) -> str:
        found = _number(match[1], shell)
        return match[0] if found is None else str(found)

    return re.sub(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)", value, text)


def _number(text: str, shell: _Shell) -> int | None:
    """Value of an arithmetic expression; None if it has an open variable."""
    text = _OPEN.sub("nothing", text).strip()
    if len(text) > 500:
        return None
    chosen = re.fullmatch(r"(.*)\?(.*):(.*)", text)
    if chosen:
        which = _number(chosen[1], shell)
        return None if which is None else _number(chosen[2 if which else 3], shell)
    try:
        tree = ast.parse(text.replace("/", "//"), mode="eval").body
        return _evaluated(tree, shell)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _evaluated(node: ast.expr, shell: _Shell) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.Name):
        return int(shell.get(node.id) or "nothing")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluated(node.operand, shell)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _evaluated(node.left, shell), _evaluated(node.right, shell)
        return _OPERATORS[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _COMPARED:
        left = _evaluated(node.left, shell)
        right = _evaluated(node.comparators[0], shell)
        return int(_COMPARED[type(node.ops[0])](left, right))
    raise ValueError("not arithmetic of whole numbers")


def read_script(text: str, where: str, words: Sequence[str] = ()) -> Launch:
    """The first trainer that a script starts.

    Args:
        text: The script.
        where: Its name, for messages.
        words: What it is started with: assignments, then arguments.

    Raises:
        PlanFileError: If it starts none, or is too long.
    """
    shell = _Shell()
    given = list(words)
    while given and (match := _ASSIGNED.match(given[0])):
        shell.values[match[1]] = match[3]
        given.pop(0)
    shell.values["@"] = given
    for index, word in enumerate(given, start=1):
        shell.values[str(index)] = word
    statements = list(_statements(text, where))
    _follow(shell, statements)
    if not shell.launches:
        # A command line that is kept in a variable, for a job's own script.
        for name in list(shell.values):
            for part in (shell.get(name) or "").replace("\n", " ").split(";"):
                if ".py" in part and "--" in part:
                    _launch(shell, part.strip())
    if not shell.launches:
        raise PlanFileError(
            f"{where}: starts no trainer by torchrun, python or srun that Meshwright "
            f"recognises; give its arguments themselves, a file of --flag value"
        )
    return max(shell.launches, key=lambda launch: len(launch.words))


def _statements(text: str, where: str) -> Iterator[str]:
    """Statements: lines joined by backslashes, quotes and brackets, cut at ; and &&."""
    lines = text.splitlines()
    if len(lines) > _MOST_LINES:
        raise PlanFileError(
            f"{where}: {len(lines):,} lines, at most {_MOST_LINES:,} of a script are "
            f"read"
        )
    pending, ended = "", None
    for line in lines:
        if ended is not None:
            ended = None if line.strip() == ended else ended
            continue
        if not pending and line.lstrip().startswith("#"):
            continue
        joined = pending + line if not pending.endswith("\\\n") else pending[:-2] + line
        bare, state = _scan(joined)
        if state == "\\":
            pending = bare[:-1] + "\\\n"
            continue
        if state:
            pending = bare + "\n"
            continue
        pending = ""
        here = re.search(r"<<-?\s*['\"]?(\w+)", bare)
        ended = here[1] if here else None
        yield from _cut(bare)
    if pending:
        yield from _cut(pending)


def _scan(text: str) -> tuple[str, str]:
    """Text without comments, and what it leaves open: quote, bracket, backslash."""
    kept: list[str] = []
    quote, depth, index = "", 0, 0
    while index < len(text):
        char = text[index]
        if char == "\\" and quote != "'":
            if index + 1 >= len(text):
                return "".join([*kept, char]), "\\"
            kept.append(text[index : index + 2])
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "#" and (not kept or kept[-1][-1:].isspace()):
            end = text.find("\n", index)
            index = len(text) if end < 0 else end
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth = max(0, depth - 1)
        kept.append(char)
        index += 1
    return "".join(kept), quote or ("(" if depth else "")


def _cut(text: str) -> Iterator[str]:
    """Parts of a statement between ; && || and |, outside quotes and brackets."""
    quote, depth, start, index = "", 0, 0, 0
    while index < len(text):
        char = text[index]
        if char == "\\":
            index += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char in "([":
            depth += 1
        elif char in ")]":
            depth = max(0, depth - 1)
        elif not depth and (char == ";" or text[index : index + 2] in ("&&", "||")):
            yield text[start:index].strip()
            if text[index : index + 2] in ("&&", "||"):
                yield text[index : index + 2]
                index += 1
            start = index + 1
        index += 1
    yield text[start:].strip()


def _follow(shell: _Shell, statements: Sequence[str]) -> None:
    """Follow statements in order; branches that a test rules out are left out."""
    flow = _Flow(shell=shell)
    index = 0
    while index < len(statements):
        index += flow.take(statements, index)


@dataclass(slots=True)
class _Flow:
    """Place in a script's branches.

    Attributes:
        shell: Values of variables.
        branches: Of every open if, case and loop, outermost first: whether this branch
            is followed, and whether one was before.
        cases: Values that open cases compare.
        within_function: True in the body of a function, which is not followed.
    """

    shell: _Shell
    branches: list[list[bool]] = field(default_factory=list)
    cases: list[str] = field(default_factory=list)
    within_function: bool = False

    def run(self, statement: str) -> None:
        if statement and all(branch[0] for branch in self.branches):
            _run(self.shell, statement)

    def take(self, statements: Sequence[str], index: int) -> int:
        """Follow the statement at an index; returns how many are done with it."""
        statement = statements[index]
        word, _, rest = statement.partition(" ")
        following = list(statements[index + 1 : index + 3])
        if self.within_function:
            self.within_function = statement != "}"
        elif re.match(rf"^(function\s+)?{_NAME}\s*\(\)", statement):
            self.within_function = "}" not in statement
        elif word in ("if", "elif", "else", "fi", "then"):
            self._if(word, rest, statements[index + 1 :])
        elif word in ("case", "esac"):
            self._case(word, rest)
        elif self.cases and re.match(r"^\(?[^()]*\)", statement):
            self._label(statement)
        elif word in ("while", "until", "for"):
            self.branches.append([False, True])
        elif word == "done" and self.branches:
            self.branches.pop()
        elif statement.startswith("[") and following and following[0] in ("&&", "||"):
            if _true(self.shell, statement) == (following[0] == "&&"):
                self.run(following[1] if len(following) > 1 else "")
            return 3
        else:
            self.run(statement)
        return 1

    def _if(self, word: str, rest: str, following: Sequence[str]) -> None:
        if word in ("if", "elif"):
            tests = [rest]
            joined = list(following)
            while len(joined) > 1 and joined[0] in ("&&", "||"):
                tests += joined[:2]
                joined = joined[2:]
            true = _tests(self.shell, tests)
            if word == "if":
                self.branches.append([true, true])
            elif self.branches:
                taken = self.branches[-1][1]
                self.branches[-1] = [true and not taken, true or taken]
        elif word == "else" and self.branches:
            self.branches[-1] = [not self.branches[-1][1], True]
        elif word == "fi" and self.branches:
            self.branches.pop()
        if word in ("else", "then"):
            self.run(rest)

    def _case(self, word: str, rest: str) -> None:
        if word == "esac":
            if self.cases:
                self.cases.pop()
                self.branches.pop()
            return
        value = re.sub(r"\s+in$", "", rest).strip("\"'")
        self.cases.append(self.shell.expand(value, closed=True))
        self.branches.append([False, False])

    def _label(self, statement: str) -> None:
        labels, _, rest = statement.partition(")")
        names = [label.strip().strip("\"'") for label in labels.strip("( ").split("|")]
        taken = self.branches[-1][1]
        true = not taken and (self.cases[-1] in names or "*" in names)
        self.branches[-1] = [true, taken or true]
        self.run(rest.strip())


def _tests(shell: _Shell, tests: Sequence[str]) -> bool:
    found = _true(shell, tests[0])
    for joint, test in zip(tests[1::2], tests[2::2], strict=False):
        other = _true(shell, test)
        found = found and other if joint == "&&" else found or other
    return found


def _true(shell: _Shell, text: str) -> bool:
    """Value of a test; of a file or a command false."""
    bare = re.sub(r"^\s*\[{1,2}\s+|\s+\]{1,2}(\s*then)?\s*$", "", text.strip())
    for joint, fold in (("||", any), ("&&", all), (" -o ", any), (" -a ", all)):
        if joint in bare:
            parts = [
                re.sub(r"^\s*\[{1,2}|\]{1,2}\s*$", "", p) for p in bare.split(joint)
            ]
            return fold(_true(shell, part.strip()) for part in parts)
    if bare.startswith("! "):
        return not _true(shell, bare[2:])
    if not text.strip().startswith("[") and not re.search(r"==|=|-\w+\s", bare):
        return bare == "true"
    try:
        words = shlex.split(shell.expand(bare, closed=True))
    except ValueError:
        return False
    return _compared(words)


def _compared(words: list[str]) -> bool:
    if words and words[0] in ("-z", "-n"):
        return (len(words) < 2 or not words[1]) == (words[0] == "-z")
    if words and words[0] in ("-f", "-d", "-e", "-v", "-x"):
        return False
    if len(words) == 2:
        # A side without quotes that is not set is no word at all.
        words = ["", *words] if words[0] in ("=", "==", "!=") else [*words, ""]
    if len(words) < 3:
        return bool(words and words[0])
    left, sign, right = words[:3]
    if sign in ("=", "==", "!="):
        pattern = re.escape(right).replace(r"\*", ".*")
        return bool(re.fullmatch(pattern, left)) == (sign != "!=")
    numbers = {
        "-eq": "==",
        "-ne": "!=",
        "-gt": ">",
        "-ge": ">=",
        "-lt": "<",
        "-le": "<=",
    }
    found = _number(f"{left or 0}{numbers.get(sign, sign)}{right or 0}", _Shell())
    return bool(found)


def _run(shell: _Shell, statement: str) -> None:
    """Follow one assignment or launch."""
    statement = re.sub(r"^(export|local|declare(\s+-\w+)*|readonly)\s+", "", statement)
    array = _ARRAY.match(statement)
    if array:
        found = _words(shell, array[3])
        before = shell.values.get(array[1], []) if array[2] else []
        kept = [before] if isinstance(before, str) else list(before)
        shell.values[array[1]] = [*kept, *found]
        return
    match = _ASSIGNED.match(statement)
    if match and (whole := _whole_word(match[3])) is not None:
        value = _of_word(shell, whole)
        old = shell.get(match[1]) or "" if match[2] else ""
        shell.values[match[1]] = old + value
        return
    if statement.startswith("unset "):
        shell.values.pop(statement.split()[1], None)
        return
    _launch(shell, statement)


def _whole_word(text: str) -> str | None:
    """Text that is one word of a shell; None if more follow."""
    quote, depth = "", 0
    for char in text.strip():
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"`":
            quote = char
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
        elif char.isspace() and not depth:
            return None
    return text.strip()


#: Parts of a word: quoted, or in braces, whose inside may be quoted, or bare.
_PARTS = re.compile(
    r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\$\{(?:[^{}]|\{[^{}]*\})*\}|(?:[^'\"$]|\$(?!\{))+",
    re.DOTALL,
)


def _of_word(shell: _Shell, text: str) -> str:
    """Value of one word, quotes removed."""
    parts = _PARTS.findall(text)
    values = []
    for part in parts:
        if part[0] == "'":
            values.append(part[1:-1])
        elif part[0] == '"':
            inner = part[1:-1].replace("\\\n", " ").replace('\\"', '"')
            values.append(shell.expand(inner))
        else:
            values.append(shell.expand(part))
    return "".join(values)


def _words(shell: _Shell, text: str) -> list[str]:
    """Words, after expansion split again as bash splits what is not quoted."""
    text = text.replace("\\\n", " ")
    whole = re.sub(
        rf"\"?\$\{{({_NAME}|@)\[?@?\]?\}}\"?",
        lambda match: _quoted_items(shell, match),
        text,
    )
    expanded = shell.expand(whole)
    try:
        words = shlex.split(expanded, comments=False)
    except ValueError:
        words = expanded.split()
    return words[:_MOST_WORDS]


def _quoted_items(shell: _Shell, match: re.Match[str]) -> str:
    value = shell.values.get(match[1])
    if isinstance(value, list):
        return " ".join(value)
    return match[0]


def _launch(shell: _Shell, statement: str) -> None:
    """Note a trainer that a statement starts."""
    statement = re.sub(r"^(eval|exec|time|nohup)\s+", "", statement).split("2>&1")[0]
    words = _words(shell, statement)
    for _ in range(3):
        # A whole command line in one variable, or behind bash -c.
        again = [part for word in words for part in _split_again(word)]
        if again == words:
            break
        words = again
    trainer = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if trainer is None:
        return
    before, after = words[:trainer], words[trainer + 1 :]
    starts = any(_PYTHON.search(word) for word in before) or any(
        name in word for word in before for name in _LAUNCHERS
    )
    if not starts or not any(word.startswith("--") for word in after):
        return
    ends = [at for at, word in enumerate(after) if re.match(r"^[12&]?>|^\|$", word)]
    after = after[: ends[0]] if ends else after
    launch = Launch(
        words=tuple(word for word in after if word != "&"),
        processes=_processes(before),
        program=words[trainer],
    )
    shell.launches.append(launch)


def _split_again(word: str) -> list[str]:
    if " " not in word.strip() and "\n" not in word:
        return [word]
    return word.split() if "--" in word or ".py" in word else [word]


def _processes(words: Sequence[str]) -> int | None:
    """Processes that a launcher's words start; None if they are not whole numbers."""
    found: dict[bool, int] = {}
    spread = [part for word in words for part in word.split("=", 1)]
    for flag, value in pairwise(spread):
        if flag in (*_NODES, *_EACH):
            if not value.isdigit():
                return None
            found[flag in _EACH] = int(value)
    return found.get(False, 1) * found[True] if True in found else None
