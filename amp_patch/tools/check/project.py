"""The files of a project: which of them an import in a script finds; runs nothing."""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Iterable
from pathlib import Path

from .source import Source, Unreadable, read

#: What rules know by name, also where a copy lies beside the script.
_KNOWN = {"amp_patch", "apex", "torch", "torchvision"}
#: What lies in the folder of a project.
_MARKS = (".git", "pyproject.toml", "setup.py", "setup.cfg")
#: Where packages are installed, which are no part of a project.
_INSTALLED = ("site-packages", "dist-packages")


class Project:
    """What scripts of one's own import of each other.

    Args:
        paths: files that are looked at; these are named as they are here.
        folders: where modules are looked for, besides the folders of the importing file and of its
            project.
    """

    def __init__(self, paths: Iterable[Path] = (), folders: Iterable[Path] = ()) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._names = {path.resolve(): path for path in paths}
        self._sources: dict[Path, Source] = {}
        self._imports: dict[Path, set[Path]] = {}
        self._found: dict[tuple[Path, int, str], Path | None] = {}
        self._search_paths: dict[Path, list[Path]] = {}
        self._by_node: dict[int, Source] = {}  # of trees that are kept, so ids stay

    def read(self, path: Path) -> Source:
        """Return a file of the project.

        Raises:
            Unreadable: it is no Python.
        """
        path = path.resolve()
        if path not in self._sources:
            self._sources[path] = read(self._names.get(path) or _shown(path))
        return self._sources[path]

    def tree_of(self, source: Source) -> ast.Module:
        """Return the statements of a file; `source_of` knows them from then on."""
        if id(source.tree) not in self._by_node:
            self._by_node |= dict.fromkeys(map(id, ast.walk(source.tree)), source)
        return source.tree

    def source_of(self, node: ast.AST) -> Source | None:
        """Return the file in which a node stands; None for one that `tree_of` has not returned."""
        return self._by_node.get(id(node))

    def read_if_python(self, path: Path) -> Source | None:
        """Return a file that is imported; None where it is no Python."""
        try:
            return self.read(path)
        except Unreadable:
            return None

    def find(self, importer: Path, level: int, dotted: str) -> Path | None:
        """Return the file, or the folder without an ``__init__.py``, that an import reads.

        Args:
            importer: the file with the statement.
            level: number of dots before the name.
            dotted: the name, ``"package.module"``.

        Returns:
            An absolute path; None for what is not of the project.
        """
        key = importer.parent, level, dotted
        if key not in self._found:
            found = self._find(importer.parent.resolve(), level, dotted)
            self._found[key] = found and found.resolve()
        return self._found[key]

    def _find(self, folder: Path, level: int, dotted: str) -> Path | None:
        first, _, rest = dotted.partition(".")
        if level:
            folders = [*folder.parents][level - 2 : level - 1] if level > 1 else [folder]
        elif first in _KNOWN:
            return None
        else:
            if folder not in self._search_paths:
                self._search_paths[folder] = _search_path(folder)
            folders = [*self._search_paths[folder], *self._folders]
        modules = [one for folder in folders if (one := _module(folder, first)) is not None]
        # a folder without an __init__.py comes after all that is a package or a file
        found = next((one for one in modules if one.is_file()), next(iter(modules), None))
        for name in rest.split(".") if rest else ():
            package = None if found is None else _folder_of(found)
            found = None if package is None else _module(package, name)
        return found

    def is_started(self, script: Source) -> bool:
        """Return whether a script may be what is run, and not only what others import.

        It says so itself, by asking for its ``__name__``, or no other file imports it.
        """
        return script.asks_name or script.path.resolve() not in self._imported

    @functools.cached_property
    def _imported(self) -> set[Path]:
        """The files that others of those that are looked at import."""
        return {path for one in self._names for path in self._imported_by(one)}

    def uses_amp(self, script: Source) -> bool:
        """Return whether a script, or a file that it imports, imports amp."""
        return script.names_amp or script.path.resolve() in self._use_amp

    @functools.cached_property
    def _use_amp(self) -> set[Path]:
        """The files that import amp, or one of these files."""
        importers: dict[Path, list[Path]] = {path: [] for path in self._names}
        waiting = list(importers)
        while waiting:
            importer = waiting.pop()
            for path in self._imported_by(importer):
                if path not in importers:
                    importers[path] = []
                    waiting.append(path)
                importers[path].append(importer)
        sources = map(self.read_if_python, importers)
        found = {one.path.resolve() for one in sources if one is not None and one.names_amp}
        waiting = list(found)
        while waiting:
            new = set(importers[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    def _imported_by(self, importer: Path) -> set[Path]:
        """Return the files that a file imports, in whichever function."""
        if importer not in self._imports:
            source = self.read_if_python(importer)
            found = (self.find(source.path, *one) for one in source.imports) if source else ()
            self._imports[importer] = {one for one in found if one is not None and one.is_file()}
        return self._imports[importer]


def _shown(path: Path) -> Path:
    """Return a path as one writes it here: without the folders that one is in."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def _search_path(folder: Path) -> list[Path]:
    """Return where the modules of a project may lie that a file in a folder imports.

    These are the folders from that of the file up to that of the project, and its ``src``; without
    a project, up to where the package lies that the file is of.
    """
    above = [folder, *folder.parents]
    above = list(itertools.takewhile(lambda one: one.name not in _INSTALLED, above))
    for number, one in enumerate(above):
        if any((one / mark).exists() for mark in _MARKS):
            return [*above[: number + 1], one / "src"]
    packages = itertools.takewhile(lambda one: (one / "__init__.py").exists(), above)
    return above[: len(list(packages)) + 1]


def _module(folder: Path, name: str) -> Path | None:
    """Return the file of a module in a folder, or the folder that it is.

    Args:
        folder: of the package.
        name: without dots; empty for the package itself.
    """
    path = folder / name
    files = [path / "__init__.py", *([folder / f"{name}.py"] if name else [])]
    return next((one for one in files if one.is_file()), path if path.is_dir() else None)


def _folder_of(package: Path) -> Path | None:
    """Return the folder in which the modules of a package lie; None where it is no package."""
    if package.is_dir():
        return package
    return package.parent if package.name == "__init__.py" else None
