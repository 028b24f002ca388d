"""State: writes of a function to its arguments are kept, although the function may run on copies of them.

`implicit` puts a tracer in place of each implicit array, so it copies every container on the way to one: dicts, lists,
modules, the variables of modules. Containers without implicit arrays are passed as they are. After the call, also after
one that raised, every change to a copy is made to its original, and no tracer is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax import tree_util as jtu

from .array import ImplicitArray, is_implicit
from .types import Node, Structure

_PLAIN = (jax.Array, np.ndarray, np.generic, bool, int, float, complex, str, type(None))
_MISSING = object()
Contents: TypeAlias = Mapping[Any, Node]  # by index, key or attribute


class _Copy(NamedTuple):
    original: Node
    copy: Node
    contents: Contents  # of the copy, when it was made


class ArgumentCopies:
    """The arguments of one call: `copies_of` copies them for the function, `write_back` its changes to the originals.

    `wrap` makes a tracer of an implicit array, and `unwrap` the reverse. An object that occurs twice stays one object.
    """

    def __init__(self, wrap: Callable[[ImplicitArray], Node], unwrap: Callable[[Node], Node]) -> None:
        self._wrap, self._unwrap = wrap, unwrap
        self._arguments: list[Node] = []
        self._copies: dict[int, _Copy] = {}  # by the id of the original
        self._originals: dict[int, Node] = {}  # by the id of the copy
        self._restored: dict[int, tuple[Node, Node]] = {}  # by id: the value, kept alive, and its replacement
        self._halves: set[Hashable] = set()  # keys of arrays that several arguments hold a part of

    def copies_of(self, *trees: Node) -> list[Node]:
        """The `trees` with a tracer in place of each implicit array; a tree itself if there is none.

        The halves of a tree that was split are no arrays: the function joins them. They are left as they are.
        """
        arrays = [
            [x for x in jtu.tree_leaves(tree, is_leaf=is_implicit) if is_implicit(x)]
            if not isinstance(tree, _PLAIN)
            else []
            for tree in trees
        ]
        self._halves = {_identity(x) for each in arrays for x in each if not x._is_whole()}
        self._arguments += [tree for tree in trees if not (isinstance(tree, _PLAIN) or is_implicit(tree))]
        return [self._copied(tree) if found else tree for tree, found in zip(trees, arrays, strict=True)]

    def _copied(self, node: Node) -> Node:
        if id(node) in self._copies:
            return self._copies[id(node)].copy
        if is_implicit(node):
            is_half = len(self._halves) > 0 and _identity(node) in self._halves
            return node if is_half else self._note(node, self._wrap(node), {})
        if type(node) is dict:  # JAX would sort the keys; a function may iterate over them
            copy = {key: self._copied(value) for key, value in node.items()}
            return node if _same(node.values(), copy.values()) else self._note(node, copy, dict(copy))
        children, structure = _one_level(node)
        if jtu.treedef_is_leaf(structure):
            return node
        copied = [self._copied(child) for child in children]
        if _same(children, copied):
            return node
        changes = {id(old): new for old, new in zip(children, copied, strict=True) if old is not new}
        copy = _cloned(node, changes)
        copy = jtu.tree_unflatten(structure, copied) if copy is None else copy
        return self._note(node, copy, _contents(copy))

    def _note(self, original: Node, copy: Node, contents: Contents) -> Node:
        self._copies[id(original)] = _Copy(original, copy, contents)
        self._originals[id(copy)] = original
        return copy

    def write_back(self) -> None:
        """Make every change to a copy in its original, and take tracers out of the containers that were not copied."""
        for original, copy, before in list(self._copies.values()):
            after = _contents(copy) if before else {}
            changed = [name for name, value in after.items() if name not in before or before[name] is not value]
            removed = [name for name in before if name not in after]
            if changed or removed:
                _update(original, {name: self.restored(value) for name, value in after.items()}, changed, removed)
        for tree in self._arguments:
            if any(self._unwrap(leaf) is not leaf for leaf in jtu.tree_leaves(tree)):
                self.restored(tree)

    def restored(self, value: Node) -> Node:
        """`value` with the original in place of each copy, and the implicit array in place of each tracer."""
        if isinstance(value, _PLAIN):
            return self._unwrap(value)
        if id(value) in self._originals:
            return self._originals[id(value)]
        if id(value) not in self._restored:
            self._restored[id(value)] = (value, value)  # ends the recursion of a container that holds itself
            self._restored[id(value)] = (value, self._restored_container(value))
        return self._restored[id(value)][1]

    def given(self, value: Node) -> Node:
        """`restored(value)`, of one of many values: nothing of it is kept."""
        found = self.restored(value)
        self._restored.clear()
        return found

    def _restored_container(self, value: Node) -> Node:
        children, structure = _one_level(value)
        if jtu.treedef_is_leaf(structure):
            return value
        contents = _contents(value)
        after = {name: self.restored(each) for name, each in contents.items()}
        changed = [name for name in contents if after[name] is not contents[name]]
        if changed:
            try:
                _update(value, after, changed, [])
            except (AttributeError, TypeError):  # a frozen object, which is made anew
                pass
            else:
                return value
        made = [self.restored(child) for child in children]
        return value if _same(children, made) else jtu.tree_unflatten(structure, made)


def _identity(array: ImplicitArray) -> Hashable:
    """What both halves of an array have, also where one has all leaves."""
    return type(array), tuple(getattr(array, name) for name in array._static_fields), array._kept


def _same(before: Iterable[Node], after: Iterable[Node]) -> bool:
    return all(a is b for a, b in zip(before, after, strict=True))


def _one_level(node: Node) -> tuple[list[Node], Structure]:
    """The children of a node and its structure; of a leaf, itself and the structure of a leaf."""
    return jtu.tree_flatten(node, is_leaf=lambda x: x is not node)


def _contents(node: Node) -> dict[Any, Node]:
    """What can be changed in place: the entries of a dict or list, the attributes of an object; of a tuple nothing.

    An attribute that is a dict belongs to its object: its entries are there too, under (attribute, key).
    """
    if isinstance(node, dict):
        return dict(node)
    if isinstance(node, list):
        return dict(enumerate(node))
    found = _attributes(node)
    inner = {(name, key): v for name, value in found.items() if type(value) is dict for key, v in value.items()}
    return {**found, **inner}


def _cloned(node: Node, changes: Mapping[int, Node]) -> Node:
    """A copy of an object with other children, by the ids of the old ones, in the attributes that hold them.

    Attributes that the class does not show to JAX are kept so. None if the children are not found in attributes.
    """
    if isinstance(node, (dict, list, tuple)):
        return None
    try:
        copy = object.__new__(type(node))
    except TypeError:  # a built-in class
        return None
    placed = set()
    for name, value in _attributes(node).items():
        if id(value) in changes:
            placed.add(id(value))
            value = changes[id(value)]
        elif type(value) is dict and (inside := {id(v) for v in value.values()} & changes.keys()):
            placed |= inside
            value = {key: changes.get(id(v), v) for key, v in value.items()}
        object.__setattr__(copy, name, value)
    return copy if placed == changes.keys() else None


def _attributes(node: Node) -> dict[str, Node]:
    """The object's own attributes, in slots and in its `__dict__`, whatever its class says to pickle."""
    state: Any = object.__getstate__(node)
    attributes, slots = state if isinstance(state, tuple) else (state, None)
    return {**(slots or {}), **(attributes or {})}


def _update(target: Node, contents: Contents, changed: Sequence[Any], removed: Sequence[Any]) -> None:
    """Set what changed in `target`, by `setattr`, so that a class which forbids it can object; delete what is gone."""
    if isinstance(target, list):
        target[:] = contents.values()
    elif isinstance(target, dict):
        for key in removed:
            target.pop(key, None)
        target.update((key, contents[key]) for key in changed)
    else:
        names = {name[0] if isinstance(name, tuple) else name for name in (*changed, *removed)}
        # Private attributes, which a class may set itself, come last.
        for name in sorted(names, key=lambda name: name.startswith("_")):
            if name not in contents:
                delattr(target, name)
            elif not _equal(_attributes(target).get(name, _MISSING), contents[name]):
                setattr(target, name, contents[name])


def _equal(x: object, y: object) -> bool:
    """Whether both are one object, or equal values; arrays and containers are equal only to themselves."""
    return x is y or (isinstance(x, Hashable) and isinstance(y, Hashable) and type(x) is type(y) and bool(x == y))
