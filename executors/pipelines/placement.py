"""Assignment of a graph's values to pipeline stages."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Set

import torch
from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from executors.pipelines.export import ExportedModel
from planner.errors import ExecutionError
from planner.schema import Stage

__all__ = ["Aliases", "Placement", "keeps_state"]


class Placement:
    """A stage for every node of a graph, or none: every stage may compute it anew.

    Args:
        exported: The graph; its module calls are the units.
        stages: Say where the units are.

    Raises:
        ExecutionError: If a unit reads what a later stage makes.
    """

    def __init__(self, exported: ExportedModel, stages: Sequence[Stage]) -> None:
        self.exported = exported
        self.nodes = [node for node in exported.graph.nodes if node.op != "output"]
        self.aliases = Aliases(self.nodes)
        self._homes = {
            unit: index for index, stage in enumerate(stages) for unit in stage.modules
        }
        #: Nodes that depend on inputs and constants alone, and may be repeated.
        self.free = self._free_nodes()
        #: Stage of every other node, but for parameters and packed arguments.
        self.stage_of = self._assign()

    def packs(self, node: fx.Node) -> bool:
        """Return True if a node only packs tensors into a unit's arguments."""
        if node in self.free or node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return self.packs(node.all_input_nodes[0])
        return node.target is tree_unflatten

    def _free_nodes(self) -> Set[fx.Node]:
        # What an op that runs once writes to is not free either, nor its readers.
        held: set[fx.Node] = set()
        while True:
            free: set[fx.Node] = set()
            for node in self.nodes:
                if self._may_repeat(node, free) and self.aliases.base(node) not in held:
                    free.add(node)
            writes = self.aliases.writes.items()
            found = {base for node, to in writes if node not in free for base in to}
            if found <= held:
                return free
            held |= found

    def _may_repeat(self, node: fx.Node, free: Set[fx.Node]) -> bool:
        if node.op == "get_attr":
            value = self.exported.attributes[str(node.target)]
            return not isinstance(value, nn.Parameter)
        if node.op != "call_function":
            return node.op == "placeholder"
        # Inputs and buffers outlive the stage: a second write would be seen.
        lasting = any(base.op != "call_function" for base in self._written(node))
        known = all(source in free for source in node.all_input_nodes)
        return known and not lasting and not keeps_state(node)

    def _written(self, node: fx.Node) -> Set[fx.Node]:
        return self.aliases.writes.get(node, frozenset())

    def _assign(self) -> dict[fx.Node, int]:
        """A unit's stage, or the first that has what the node reads.

        What is written in place is read before and after as in the model: no reader is
        on an earlier stage than a writer before it, and no writer than a reader.
        """
        base = self.aliases.base
        stage_of: dict[fx.Node, int] = {}
        written: dict[fx.Node, int] = {}
        touched: dict[fx.Node, set[int]] = {}
        for node in self.nodes:
            if node in self.free or node.op == "get_attr" or self.packs(node):
                continue
            sources, writes = list(self._sources(node)), self._written(node)
            stages = [0, *(stage_of.get(source, 0) for source in sources)]
            stages += [written.get(base(source), 0) for source in sources]
            stages += [max(touched.get(value, {0})) for value in writes]
            stage_of[node] = stage = self._home(node, max(stages))
            written |= dict.fromkeys(writes, stage)
            for source in sources:
                touched.setdefault(base(source), set()).add(stage)
        for value in written:
            if value.op == "get_attr" and len(touched[value]) > 1:
                raise ExecutionError(
                    f"forward changes the buffer {value.target}, which stages "
                    f"{sorted(touched[value])} use; plan with pp=1"
                )
        return stage_of

    def _sources(self, node: fx.Node) -> Iterator[fx.Node]:
        """Values that a node reads, also through packed arguments."""
        for source in node.all_input_nodes:
            if self.packs(source):
                yield from self._sources(source)
            else:
                yield source

    def _home(self, node: fx.Node, earliest: int) -> int:
        """Stage of a node that cannot run before stage ``earliest``."""
        if node.op != "call_module":
            return earliest
        unit = str(node.target)
        home = self._homes[unit]
        if home >= earliest:
            return home
        calls = sum(other.target == unit for other in self.nodes)
        if calls > 1:
            raise ExecutionError(
                f"{unit} is on stage {home}, but one of its {calls} calls reads what "
                f"stage {earliest} makes; put all between its calls on one stage or "
                f"plan with pp=1"
            )
        raise ExecutionError(
            f"{unit} is on stage {home}, but reads what stage {earliest} makes; put "
            f"it on that stage or a later one"
        )


_ATEN = torch.ops.aten

#: Ops that update running statistics, of which their schemas do not tell.
_STATEFUL = frozenset({_ATEN.batch_norm.default, _ATEN.instance_norm.default})


def keeps_state(node: fx.Node) -> bool:
    """Return True if running an op twice differs from running it once."""
    tags = getattr(node.target, "tags", ())
    return node.target in _STATEFUL or torch.Tag.nondeterministic_seeded in tags


class Aliases:
    """Views and in-place ops of a graph, followed to the value that owns the memory.

    Calls of modules are taken to return memory of their own.

    Args:
        nodes: In order of execution.
    """

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._base: dict[fx.Node, fx.Node] = {}
        #: Values that each op writes to, by op; each stands for its whole memory.
        self.writes: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in nodes:
            self._base[node] = self._follow(node)
            written = {self.base(value) for value in _arguments(node, written=True)}
            if written:
                self.writes[node] = frozenset(written)

    def base(self, node: fx.Node) -> fx.Node:
        """The first value in whose memory a value lies; itself, if it is no view."""
        return self._base.get(node, node)

    def _follow(self, node: fx.Node) -> fx.Node:
        if node.target is operator.getitem:
            # One of several views (of a split), or one of several new values.
            source = node.all_input_nodes[0]
            base = self.base(source)
            return node if base is source else base
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(value.alias_info for value in schema.returns):
            return node
        return next((self.base(value) for value in _arguments(node)), node)


def _arguments(node: fx.Node, *, written: bool = False) -> Iterator[fx.Node]:
    """Arguments whose memory an op shares with its result, or writes to."""
    schema = getattr(node.target, "_schema", None)
    for index, argument in enumerate(schema.arguments if schema is not None else ()):
        info = argument.alias_info
        if info is None or (written and not info.is_write):
            continue
        given = node.kwargs.get(argument.name)
        value = node.args[index] if index < len(node.args) else given
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, fx.Node):
                yield one
