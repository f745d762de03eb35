"""From the names of a state to the names in another's files, as declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from shard_ckpt._header import METADATA_KEY


@dataclass(frozen=True)
class Naming:
    """How names in a model or checkpoint become names in files that others read.

    In this order: the prefix goes, stripped components go, then ``rename`` applies. With
    ``prefix="module."``, ``strip=("_orig_mod",)`` and ``rename={"head.bias": "lm_head.bias"}``::

        module.layers.0._orig_mod.weight    layers.0.weight
        module.head.bias                    lm_head.bias

    As the ``rename`` of ``save`` and ``load`` it applies to names without section, and of optimizer
    state to the parameter's; ``load`` takes wrappers off the checkpoint's names too.

    Attributes:
        prefix: what names begin with, removed where they do.
        strip: components of dotted names that wrappers put in, removed wherever they stand:
            ``_orig_mod`` (torch.compile), ``_checkpoint_wrapped_module``,
            ``_fsdp_wrapped_module``.
        rename: a table of names, or a function of one.
        ties: for a name in files, the name of the tensor that it shares. A load takes the tensor
            under any of its names; a save stores it once, under all; an export leaves the former
            name out.
    """

    prefix: str = ""
    strip: tuple[str, ...] = ()
    rename: Mapping[str, str] | Callable[[str], str] = field(default_factory=dict)
    ties: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.strip, str):
            raise TypeError(f"strip: expected a tuple of components, got {self.strip!r}")
        for name, shared in self.ties.items():
            if shared in self.ties:
                raise ValueError(
                    f"ties: {name} is tied to {shared}, which is tied to {self.ties[shared]}; tie "
                    f"each to the one that is stored"
                )

    def table(self, names: Iterable[str], *, what: str) -> dict[str, str]:
        """Return the name in files of each of ``names``. Local.

        Args:
            names: names of one state.
            what: what errors call the state.

        Raises:
            ValueError: two names become one, a name cannot be used, or a declared name is not
                there.
        """
        bare = {name: self.bare(name) for name in names}
        result = {name: self._renamed(text) for name, text in bare.items()}
        owners: dict[str, str] = {}
        for name, text in result.items():
            if text in ("", METADATA_KEY):
                raise ValueError(f"{what}: {name} cannot be called {text!r}")
            other = owners.setdefault(text, name)
            if other != name:
                raise ValueError(f"{what}: {other} and {name} would both be called {text!r}")
        if isinstance(self.rename, Mapping):
            _check_known(self.rename, set(bare.values()), f"rename: {what}")
        _check_known(self.ties, set(owners), f"ties: {what}")
        return result

    def of(self, name: str) -> str:
        """Return the name in files of one name. Local."""
        return self._renamed(self.bare(name))

    def kin(self, name: str) -> list[str]:
        """Return the other names in files of a tensor, the one that is stored first. Local."""
        stored = self.ties.get(name, name)
        group = [stored, *(tied for tied, shared in self.ties.items() if shared == stored)]
        return [other for other in group if other != name]

    def bare(self, name: str) -> str:
        """Return a name without what wrappers put in. Local."""
        name = name.removeprefix(self.prefix)
        dropped = {component.rstrip(".") for component in self.strip}
        return ".".join(part for part in name.split(".") if part not in dropped)

    def _renamed(self, name: str) -> str:
        if isinstance(self.rename, Mapping):
            return self.rename.get(name, name)
        return self.rename(name)


Rename = Mapping[str, str] | Callable[[str], str] | Naming
"""From a state's names to the checkpoint's."""


def stored_name(name: str, rename: Rename | None) -> str:
    """Return what the checkpoint calls a tensor that the state calls ``name``.

    Optimizer state goes with its parameter: renaming ``w`` to ``v`` takes ``w#exp_avg`` to
    ``v#exp_avg``. Names that a mapping lacks stay. Local.

    Raises:
        TypeError: ``rename`` gave something that is no string.
    """
    if rename is None:
        return name
    if isinstance(rename, Naming):
        return with_owner(name, rename.of)
    if isinstance(rename, Mapping):
        table = rename
        return with_owner(name, lambda owner: table.get(owner, owner))
    return with_owner(name, rename)


def with_owner(name: str, change: Callable[[str], str]) -> str:
    """Return a name with the parameter's part of it changed. Local."""
    owner, mark, slot = name.partition("#")
    new = change(owner)
    if not isinstance(new, str):
        raise TypeError(f"rename: expected a str for {owner!r}, got {new!r}")
    return f"{new}{mark}{slot}"


def _check_known(declared: Iterable[str], known: set[str], what: str) -> None:
    for name in declared:
        if name not in known:
            raise ValueError(f"{what} has no {name!r}")
