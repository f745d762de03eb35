"""Where autograd enters and leaves a unit.

Hooks stand on graph nodes, not on tensors: a node's pre-hook still runs after its output was
viewed or changed in place, and it needs no extra node in the graph. One node may be the output
of one unit and the input of the next; its hooks then end the later unit's backward before they
begin the earlier one's, so that two full buffers are enough.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.autograd.graph import Node, get_gradient_edge

if TYPE_CHECKING:
    from shard_fsdp._path import Path
    from shard_fsdp._unit import Unit

_KEY = "shard_fsdp"


class Call:
    """One forward of a unit that autograd recorded.

    Attributes:
        unit: whose forward it was.
        versions: of the unit's groups when it ran.
        began_at: autograd's counter then; nodes that the forward makes count from there.
        path: the outermost forward that it was a part of; None in a backward.
        entered_at: where it began on the path.
        left_at: where it ended.
        begun: backward has reached its outputs and not yet passed all of its inputs.
        inputs: how many graph nodes its inputs come from; 0 where none requires a gradient.
        passed: how many of them backward has reached.
    """

    def __init__(self, unit: Unit, versions: list[tuple[int, int]]) -> None:
        self.unit = unit
        self.versions = versions
        self.began_at: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        self.path: Path | None = None
        self.entered_at = self.left_at = -1
        self.inputs = 0
        self.rewind()

    def rewind(self) -> None:
        """Be ready for another backward through the same graph. Local."""
        self.begun = False
        self.passed = 0


class _NodeHooks:
    """All hooks of one graph node.

    Calls to end are held weakly: a node may be the input of many forwards and outlive them.
    """

    def __init__(self) -> None:
        self.ends: list[weakref.ref[Call]] = []
        self.begins: list[Call] = []

    def __call__(self, grads: Any) -> None:
        for call in self.live_ends():
            call.passed += 1
            if call.begun and call.passed == call.inputs:
                call.unit.backward.end(call)
        for call in self.begins:
            call.unit.backward.begin(call)

    def live_ends(self) -> list[Call]:
        """Return the calls whose graphs still exist, and forget the others. Local."""
        calls = [call for ref in self.ends if (call := ref()) is not None]
        if len(calls) < len(self.ends):
            self.ends = [weakref.ref(call) for call in calls]
        return calls


def watch_inputs(call: Call, tensors: Iterable[torch.Tensor]) -> list[Node]:
    """End ``call``'s backward when the gradients of all these tensors are complete.

    Leaves should come as views of themselves: autograd runs the node of a leaf before everything
    else, also before parts of the unit that do not lead to it, and so it may do with a node that
    another thread made. Such inputs leave the unit to the end of backward.

    Returns:
        The nodes; keep them until the forward has used the tensors, since nothing else holds the
        node of a leaf before that.

    **Collective**: local.
    """
    nodes = list({get_gradient_edge(t).node for t in tensors if t.requires_grad})
    call.inputs = len(nodes)
    for node in nodes:
        if node._sequence_nr() >= call.began_at:
            continue  # autograd may run it before parts of the unit: the end of backward ends it
        hooks = _hooks_of(node)
        hooks.live_ends()
        hooks.ends.append(weakref.ref(call))
    return nodes


def watch_outputs(call: Call, tensors: Iterable[torch.Tensor]) -> int:
    """Begin ``call``'s backward at the first gradient of these tensors.

    Returns:
        How many nodes are watched; 0 where no output requires a gradient.

    **Collective**: local.
    """
    watched: dict[int, _NodeHooks] = {}
    for tensor in tensors:
        if not tensor.requires_grad:
            continue
        # A view of an input leads past the unit through its base, but not by its own node; an
        # input that is handed through leads nowhere else.
        for node in (_node_of(tensor, call.began_at), get_gradient_edge(tensor).node):
            hooks = _hooks_of(node)
            if call not in hooks.live_ends():
                watched[id(hooks)] = hooks
                break
    for hooks in watched.values():
        hooks.begins.append(call)
    return len(watched)


def is_made_since(tensor: torch.Tensor, began_at: int) -> bool:
    """Whether a tensor's graph node was made since autograd's counter stood there. Local."""
    node = tensor.grad_fn
    return tensor.requires_grad and node is not None and node._sequence_nr() >= began_at


def will_run(node: Node) -> bool:
    """Whether the backward that runs will run ``node``, which accumulates a gradient. Local."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # autograd.grad() returns this gradient instead
        return False


def reaches_a_leaf() -> bool:
    """Whether the backward that runs will run the first leaf that its current node leads to.

    ``backward()`` runs every leaf. ``torch.autograd.grad`` runs those it was asked for, if any.

    Local.
    """
    node = torch._C._current_autograd_node()
    while following := [n for n, _ in node.next_functions if n is not None]:
        node = following[0]
    return will_run(node)


def _node_of(tensor: torch.Tensor, began_at: int) -> Node:
    """The node that runs before anything behind ``tensor``; for a view, that of its base.

    A change in place replaces the node of a view but not that of its base. A base that was there
    before the forward leads past the unit.
    """
    base = tensor._base
    if base is not None and is_made_since(base, began_at):
        tensor = base
    return get_gradient_edge(tensor).node


def _hooks_of(node: Node) -> _NodeHooks:
    metadata = cast("dict[Any, Any]", node.metadata)  # torch's stub takes it for a method
    hooks = metadata.get(_KEY)
    if hooks is None:
        hooks = metadata[_KEY] = _NodeHooks()
        node.register_prehook(hooks)
    assert isinstance(hooks, _NodeHooks)
    return hooks
