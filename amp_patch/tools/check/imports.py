"""Reads import statements: what is known by name stays a name, a project's own files are read."""

from __future__ import annotations

import ast
from pathlib import Path

from .contexts import Contexts
from .guards import NO_GUARDS
from .project import Project
from .source import Source
from .values import Const, Imported, Module, Scope

#: Imports inside of imports that are followed.
DEEPEST_IMPORT = 30


class Imports(Contexts):
    """What import statements bind names to.

    Args:
        project: see `Statements`.
    """

    def __init__(self, project: Project | None) -> None:
        super().__init__()
        self._project = project
        self._modules: dict[Path, Module] = {}
        self._importing = 0

    def source_of(self, node: ast.AST) -> Source | None:
        """Return the file in which a node stands; None where no project is followed."""
        return None if self._project is None else self._project.source_of(node)

    def _do_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            first, *others = alias.name.split(".")
            package = module = self._module(node, 0, first)
            dotted = first
            for name in others:
                dotted = f"{dotted}.{name}"
                module = self._submodule(module, name, node, 0, dotted)
            value = module if alias.asname else package
            self.scope.write(alias.asname or first, self.guards, value)

    def _do_ImportFrom(self, node: ast.ImportFrom) -> None:
        dotted = node.module or ""
        module = self._module(node, node.level, dotted)
        for alias in node.names:
            if alias.name == "*":
                self._import_all(module)
                continue
            value = self.attribute(module, alias.name)
            if isinstance(module, Module) and alias.name not in module.attrs:
                name = f"{dotted}.{alias.name}".lstrip(".")
                value = self._submodule(module, alias.name, node, node.level, name)
            self.scope.write(alias.asname or alias.name, self.guards, value)

    def _import_all(self, module: Imported) -> None:
        known = _STARS.get(module.dotted, ())
        own = module.attrs.names() if isinstance(module, Module) else ()
        for name in (*known, *(one for one in own if not one.startswith("_"))):
            self.scope.write(name, self.guards, self.attribute(module, name))

    def _submodule(
        self, package: Imported, name: str, node: ast.AST, level: int, dotted: str
    ) -> Imported:
        """Return a module of a package, which has it as an attribute from then on."""
        module = self._module(node, level, dotted)
        if isinstance(package, Module) and isinstance(module, Module):
            package.attrs.write(name, NO_GUARDS, module)
        return module

    def _module(self, node: ast.AST, level: int, dotted: str) -> Imported:
        """Return a module, a file of the project as what stands in it.

        Args:
            node: the import statement.
            level: number of dots before the name.
            dotted: its name.
        """
        text = "." * level + dotted
        importer = self.source_of(node)
        if self._project is None or importer is None or self._importing > DEEPEST_IMPORT:
            return Imported(text)
        path = self._project.find(importer.path, level, dotted)
        if path is None:
            return Imported(text)
        if path not in self._modules:
            scope = Scope()
            scope.write("__name__", NO_GUARDS, Const(text))
            self._modules[path] = Module(text, scope)
            source = None if path.is_dir() else self._project.read_if_python(path)
            if source is not None:
                self._read_module(self._project.tree_of(source).body, scope)
        return self._modules[path]

    def _read_module(self, body: list[ast.stmt], scope: Scope) -> None:
        """Read a file's statements as those of no function and no block."""
        before = self.scope, self.guards, self.blocks, self.regions, self.loops
        self.scope, self.guards = scope, NO_GUARDS
        self.blocks, self.regions, self.loops = (), (), ()
        self.returned.append([])
        self._importing += 1
        try:
            self.read_body(body)
        finally:
            self._importing -= 1
            self.returned.pop()
            self.scope, self.guards, self.blocks, self.regions, self.loops = before


#: What ``from MODULE import *`` gives, of the modules that rules know.
_STARS = {
    "apex": ("amp", "optimizers", "parallel", "fp16_utils"),
    "apex.amp": ("initialize", "scale_loss", "state_dict", "load_state_dict", "master_params"),
    "amp_patch": ("amp",),
    "amp_patch.amp": ("initialize", "scale_loss", "state_dict", "load_state_dict"),
    "torch.cuda.amp": ("GradScaler", "autocast"),
    "torch.amp": ("GradScaler", "autocast"),
    "torch.optim": ("Adam", "AdamW", "SGD", "RMSprop", "Adagrad"),
    "torch.nn.utils": ("clip_grad_norm_", "clip_grad_value_"),
}
