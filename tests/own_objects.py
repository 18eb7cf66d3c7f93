"""Which of our classes an object is of, as annotations and constructors in the source say.

Read, not run. An object of which nothing says that it is ours counts as foreign.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator

Function = ast.FunctionDef | ast.AsyncFunctionDef
#: They return what they are given, or what is in it.
_PASSING = {"enumerate", "iter", "list", "max", "min", "next", "reversed", "sorted", "tuple", "zip"}


class Classes:
    """Our classes, with what they declare, and the functions that return their objects.

    Classes of one name in two modules count as one.

    Args:
        trees: of all our modules.
    """

    def __init__(self, trees: Iterable[ast.Module]) -> None:
        trees = list(trees)
        self._bases: dict[str, set[str]] = defaultdict(set)
        self._families: dict[str, set[str]] = {}
        self._returns: dict[str, set[str]] = defaultdict(set)
        self._globals: dict[str, set[str]] = defaultdict(set)
        self._imported: set[str] = set()  # from modules of ours, modules among them
        # (class, attribute) -> classes of its objects
        self._declared: dict[tuple[str, str], set[str]] = defaultdict(set)
        nodes = [node for tree in trees for node in ast.walk(tree)]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        for node in classes:
            self._bases[node.name] |= {_last_name(base) for base in node.bases}
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                self._read_import(node)
        for read in (self._read_definitions, self._read_globals):
            for tree in trees:
                read(tree)
        for read_class in (self._read_annotations, self._read_assignments):
            for node in classes:
                read_class(node)

    def _read_import(self, node: ast.ImportFrom) -> None:
        if node.level or str(node.module).startswith("amp_patch"):
            for alias in node.names:
                self._imported.add(alias.asname or alias.name)
                if alias.asname:
                    self._globals[alias.asname].add(alias.name)

    def _read_definitions(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, Function):
                self._returns[node.name] |= self._named_in(node.returns)
            elif isinstance(node, ast.AnnAssign):
                self._globals[_last_name(node.target)] |= self._named_in(node.annotation)

    def _read_globals(self, tree: ast.Module) -> None:
        for target, value in _assignments(tree.body):
            if isinstance(target, ast.Name):
                self._globals[target.id] |= self.of(value, Scope(self))

    def declare(self, owner: str, attribute: str) -> bool:
        """Return whether a class, a base or a subclass of it declares an attribute."""
        return any((one, attribute) in self._declared for one in self._family(owner))

    def of(self, node: ast.expr | None, scope: Scope) -> set[str]:
        """Return the classes that an expression's object, or what is in it, may be of."""
        if isinstance(node, ast.Name):
            return scope.classes_of(node.id)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(self.of(node.value, scope), node.attr)
        if isinstance(node, ast.Call):
            return self._of_call(node, scope)
        if isinstance(node, ast.Subscript | ast.Starred | ast.Await):
            return self.of(node.value, scope)
        if isinstance(node, ast.IfExp):
            return self.of(node.body, scope) | self.of(node.orelse, scope)
        parts = getattr(node, "values", None) or getattr(node, "elts", ())
        if isinstance(node, ast.NamedExpr | ast.ListComp | ast.GeneratorExp | ast.DictComp):
            parts = [getattr(node, "elt", None) or node.value]
        return set().union(*(self.of(one, scope) for one in parts))

    def _of_call(self, node: ast.Call, scope: Scope) -> set[str]:
        if isinstance(node.func, ast.Attribute):
            owners = self.of(node.func.value, scope)
            if not owners and _last_name(node.func.value) in self._imported:
                return self._returns.get(node.func.attr, set())
            if any(self.declare(owner, node.func.attr) for owner in owners):
                return self._of_attribute(owners, node.func.attr)
            return owners  # the method is one of a container: values(), pop()
        name = _last_name(node.func)
        if name in _PASSING:
            return set().union(*(self.of(one, scope) for one in node.args))
        return self._returns.get(name) or scope.classes_of(name)

    def _of_attribute(self, owners: set[str], name: str) -> set[str]:
        keys = [(one, name) for owner in owners for one in self._family(owner)]
        return set().union(*(self._declared.get(key, set()) for key in keys))

    def _family(self, name: str) -> set[str]:
        if name in self._families:
            return self._families[name]
        above, below = {name}, {name}
        while more := set().union(*(self._bases.get(one, set()) for one in above)) - above:
            above |= more
        while more := {one for one, bases in self._bases.items() if bases & below} - below:
            below |= more
        self._families[name] = above | below
        return self._families[name]

    def _named_in(self, annotation: ast.expr | None) -> set[str]:
        """Return our classes of which an annotation speaks: ``Group`` of ``dict[str, Group]``."""
        names = map(_last_name, ast.walk(annotation)) if annotation is not None else ()
        return set().union(*map(self.names_of, names))

    def _read_annotations(self, owner: ast.ClassDef) -> None:
        for node in ast.walk(owner):
            if isinstance(node, ast.AnnAssign) and _is_own_place(node.target, owner):
                found = self._named_in(node.annotation)
                self._declared[owner.name, _last_name(node.target)] |= found
            elif isinstance(node, Function) and node in owner.body:
                self._declared[owner.name, node.name] |= self._named_in(node.returns)

    def _read_assignments(self, owner: ast.ClassDef) -> None:
        for method in owner.body:
            if not isinstance(method, Function):
                continue
            scope = Scope(self, method, owner.name)
            for target, value in _assignments(ast.walk(method)):
                if isinstance(target, ast.Attribute) and _is_own_place(target, owner):
                    self._declared[owner.name, target.attr] |= self.of(value, scope)

    def names_of(self, name: str) -> set[str]:
        """Return the classes that a name of a module stands for."""
        return {name} if name in self._bases else self._globals.get(name, set())


class Scope:
    """The names of a function, those of functions inside it included.

    Args:
        classes: ours.
        function: None for a module's own names.
        owner: the class whose method it is.
    """

    def __init__(self, classes: Classes, function: Function | None = None, owner: str = "") -> None:
        self._classes = classes
        self._bound: dict[str, list[ast.expr | None]] = defaultdict(list)
        self._annotated: dict[str, set[str]] = {"self": {owner}, "cls": {owner}} if owner else {}
        for node in ast.walk(function) if function is not None else ():
            self._read(node)

    def _read(self, node: ast.AST) -> None:
        if isinstance(node, ast.arg) and node.arg not in self._annotated:
            self._annotated[node.arg] = self._classes._named_in(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            self._annotated[_last_name(node.target)] = self._classes._named_in(node.annotation)
        for target, value in _assignments([node]):
            for name in ast.walk(target):
                if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                    self._bound[name.id].append(value)

    def classes_of(self, name: str) -> set[str]:
        """Return the classes that a name's object may be of."""
        if name in self._annotated:
            return self._annotated[name]
        if name not in self._bound:
            return self._classes.names_of(name)
        values = self._bound.pop(name)  # a name that is bound by itself adds nothing
        try:
            return set().union(*(self._classes.of(value, self) for value in values))
        finally:
            self._bound[name] = values


def _assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target with what is assigned to it, or with what that is taken from."""
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            yield node.target, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            yield node.target, node.iter
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            yield node.optional_vars, node.context_expr


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if not isinstance(target, ast.Tuple):
        yield target, value
        return
    is_parted = isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts)
    for number, one in enumerate(target.elts):
        yield from _pairs(one, value.elts[number] if is_parted else value)


def _is_own_place(target: ast.expr, owner: ast.ClassDef) -> bool:
    """Return whether a target is ``self.name``, or ``name`` in the body of the class."""
    if isinstance(target, ast.Attribute):
        return isinstance(target.value, ast.Name) and target.value.id in {"self", "cls"}
    return any(isinstance(node, ast.AnnAssign) and node.target is target for node in owner.body)


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def assigned_attributes(
    tree: ast.Module, classes: Classes
) -> Iterator[tuple[ast.Attribute, set[str]]]:
    """Yield each attribute that is assigned or deleted, with the classes of its owner."""
    for scope, nodes in _scopes(tree, classes):
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                yield node, classes.of(node.value, scope)


def _scopes(tree: ast.Module, classes: Classes) -> Iterator[tuple[Scope, list[ast.AST]]]:
    """Yield the scope of each function that is in no other, and what is in it."""
    classes_in = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    bodies = [("", tree), *((node.name, node) for node in classes_in)]
    functions = [(name, one) for name, body in bodies for one in body.body]
    inside: set[int] = set()
    for name, function in functions:
        if isinstance(function, Function):
            nodes = list(ast.walk(function))
            inside.update(map(id, nodes))
            yield Scope(classes, function, name), nodes
    yield Scope(classes), [node for node in ast.walk(tree) if id(node) not in inside]
