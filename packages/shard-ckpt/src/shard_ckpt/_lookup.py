"""What a checkpoint calls the tensors of a template."""

from __future__ import annotations

from collections.abc import Mapping

from shard_ckpt._index import TensorId, TensorRecord
from shard_ckpt._leaf import Leaf
from shard_ckpt._naming import Naming, Rename, stored_name, with_owner


class Lookup:
    """Finds a template's tensors among those of a checkpoint.

    A ``Naming`` is a declaration of both sides: wrappers are taken off the checkpoint's names too,
    and of tied names any does.

    Args:
        tensors: what the checkpoint holds.
        rename: from the template's names to the checkpoint's.
    """

    def __init__(self, tensors: Mapping[TensorId, TensorRecord], rename: Rename | None) -> None:
        self._tensors = tensors
        self._rename = rename
        self._bare: dict[TensorId, list[TensorId]] = {}
        if isinstance(rename, Naming) and (rename.prefix or rename.strip):
            for section, name in tensors:
                bare = (section, with_owner(name, rename.bare))
                self._bare.setdefault(bare, []).append((section, name))

    def wanted(self, leaf: Leaf) -> TensorId:
        """Return what the checkpoint should call a tensor. Local."""
        return leaf.section, stored_name(leaf.name, self._rename)

    def find(self, leaf: Leaf) -> TensorId | None:
        """Return what the checkpoint calls a tensor; None where it has none. Local.

        Raises:
            ValueError: two of the checkpoint's names become the one that is looked for.
        """
        section, name = self.wanted(leaf)
        names = [name]
        if isinstance(self._rename, Naming):
            owner, mark, slot = name.partition("#")
            names += [f"{other}{mark}{slot}" for other in self._rename.kin(owner)]
        for candidate in names:
            tensor = (section, candidate)
            if tensor in self._tensors:
                return tensor
            found = self._bare.get(tensor, ())
            if len(found) > 1:
                stored = " and ".join(name for _, name in found)
                raise ValueError(
                    f"{leaf.label}: the checkpoint has {stored}, which become one by the names "
                    f"declared; rename to the one that counts"
                )
            if found:
                return found[0]
        return None
