"""Which pipeline stage computes which value of a model's graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence, Set

from torch import fx, nn
from torch.utils._pytree import tree_unflatten

from executors.pipelines.aliases import Aliases, keeps_state
from executors.pipelines.export import ExportedModel
from planner.errors import ExecutionError
from planner.schema import Stage

__all__ = ["Placement"]


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
        """Whether a node only puts a unit's arguments together, out of tensors."""
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
