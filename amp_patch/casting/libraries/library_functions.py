"""Makes functions of other libraries take mixed dtypes, at every level, while amp is initialised.

Knows which functions `library_rules` names, and which have no half kernel; patches a module when it
is imported, or at once if it is; imports none. It must not know how a call is cast, as
`library_casts` does.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from amp_patch.casting import (
    autocast_questions,
    half_numbers,
    layer_forwards,
    targets,
    written_values,
)
from amp_patch.casting.held_functions import HeldFunctions
from amp_patch.casting.installation import calling, replace_by
from amp_patch.casting.kept_wrappers import KeptWrappers
from amp_patch.common.imported_modules import is_left_alone
from amp_patch.common.weak_modules import WeakModules
from amp_patch.patching import (
    Patches,
    as_function,
    as_if_defined_at,
    is_no_method,
    resolve,
    resolve_in,
    when_imported,
)

from . import library_rules
from .library_casts import Rule, is_for_half, wrap

Pairs = dict[int, tuple[Any, Any]]

#: Of torch's functions.
_kept = KeptWrappers()


class LibraryFunctions:
    """The functions of other libraries that are patched between `install` and `undo`.

    And torch's own; of these, what acts in models alone that are stored in half waits for one.

    Args:
        beneath: calls what it is given with the functions that a user registered restored, for
            their wrappers stand on ours; and with those of torch, where True is given as well.
    """

    def __init__(self, beneath: Callable[..., None]) -> None:
        self._beneath = beneath
        self._rules: dict[str, dict[str, Rule]] = {
            module: {name: Rule(*row[:2]) for name, row in names.items()}
            for module, names in library_rules.RULES.items()
        }
        for module, found in targets.no_half_targets().items():
            rows = self._rules.setdefault(module, {})
            rows.update({name: Rule(found[name]) for name in found.keys() - rows.keys()})
        self._patches, self._patches_for_half = Patches(), Patches()
        self._of_torch: Pairs = {}
        self._held = HeldFunctions()
        self._models = WeakModules()
        self._active = self._serves_half = False
        self._awaited: set[str] = set()
        self._known_due: dict[tuple[str, bool], dict[str, Rule]] = {}

    def install(self) -> None:
        """Patch the functions of every imported module, and of the others when they come."""
        self._active = True
        replaced: Pairs = {}
        self._of_torch = {}
        for name in self._rules:
            module = sys.modules.get(name)
            if module is not None:
                # Torch's are called as torch.sparse.mm: to look for other names in every module
                # that uses torch would make each initialize a third longer. `reach` does.
                (self._of_torch if is_left_alone(name) else replaced).update(self._patch(module))
            elif name not in self._awaited:
                self._awaited.add(name)
                when_imported(name, self._imported)
        if replaced:
            self._patches.replace_bindings(replaced, users_only=True)
        if self._serves_half:
            self._install_for_half()

    def serve_half(self, on_error: contextlib.ExitStack) -> None:
        """Patch what models need that are stored in half, of which one is about to come.

        Args:
            on_error: gets what undoes it.
        """
        if self._serves_half:
            return
        on_error.callback(self._leave_half)
        self._serves_half = True
        if self._active:
            self._beneath(self._install_for_half, True)

    def _leave_half(self) -> None:
        self._serves_half = False
        self._beneath(self._restore_for_half, True)

    def _install_for_half(self) -> None:
        for name in self._rules:
            if name in sys.modules:  # of other libraries methods alone, which no module binds
                self._of_torch.update(self._patch(sys.modules[name], for_half=True))
        questions = autocast_questions.replacements_for_half()
        others = {
            **questions,
            **written_values.replacements_for_half(),
            **half_numbers.replacements(),
        }
        for path, make in others.items():
            original, replacement = replace_by(self._patches_for_half, make, path, _kept)
            self._of_torch[id(original)] = original, replacement
        standing = {path: resolve(path)[2] for path in questions}
        autocast_questions.trace(self._patches_for_half, standing)
        # A module that is imported from now on may bind one by its name.
        self._patches_for_half.expect_bindings(self._of_torch)
        layer_forwards.install_for_half(self._patches_for_half)
        self._held.install(self._of_torch, (), ())
        self.reach(list(self._models))

    def _restore_for_half(self) -> None:
        if not (self._patches_for_half or self._held):
            return
        self._patches_for_half.undo()
        layer_forwards.forget_half()
        self._held.undo(_modules_of(self._models).values(), _kept.ids)

    def reach(self, models: Collection[nn.Module]) -> None:
        """Patch the functions of torch that models in half hold, or modules have imported.

        ``self.loss = F.mse_loss``, and ``from torch.nn.functional import mse_loss`` in any module;
        and those that are in tables of the modules in which the models' classes are defined, or of
        which these name a function, a class or the module itself.
        """
        if not models:
            return
        self._models.update(models)
        # First, for what is imported by name is put back by the patches alone.
        users = self._patches_for_half.replace_bindings(self._of_torch, users_only=True)
        files = _modules_of(models).values()
        # To look through tables takes long: not in all that use torch.
        named = set().union(*map(_named_in, files))
        self._held.reach(models, {*files, *(one for one in users if one.__name__ in named)})

    def undo(self) -> None:
        """Restore every function, also where a model or module took it since; the rules stay."""
        self._active = self._serves_half = False
        self._restore()
        self._models.clear()

    def _restore(self) -> None:
        self._of_torch = {}  # else each would be looked for, for something holds it
        self._patches.undo()
        self._restore_for_half()
        _kept.forget_held()

    def register(self, module: str, name: str, rule: Rule) -> None:
        """Add a rule for ``module.name``, for as long as this process runs."""
        self._rules.setdefault(module, {})[name] = rule
        self._known_due.clear()
        if self._active:
            self._beneath(self._reinstall, True)

    def _reinstall(self) -> None:
        self._restore()
        self.install()

    def _imported(self, module: types.ModuleType) -> None:
        if self._active:
            self._beneath(lambda: self._patch_late(module))

    def _patch_late(self, module: types.ModuleType) -> None:
        self._patches.expect_bindings(self._patch(module))
        if self._serves_half:
            self._patches_for_half.expect_bindings(self._patch(module, for_half=True))

    def _patch(self, module: types.ModuleType, for_half: bool = False) -> Pairs:
        """Patch what a module has, that waits for a model in half or all else.

        Returns:
            ``id(original) -> (original, wrapper)`` of functions.
        """
        replaced: Pairs = {}
        patches = self._patches_for_half if for_half else self._patches
        is_torchs = is_left_alone(module.__name__)
        for path, rule in _expanded(module, self._due(module.__name__, for_half)).items():
            with contextlib.suppress(AttributeError):  # another version of the library
                owner, name, original = resolve_in(module, path)
                if is_no_method(owner, original):
                    continue
                make = functools.partial(wrap, as_function(original, name), rule)
                wrapper: Any = _kept.get(original, rule, make) if is_torchs else make()
                if owner is Tensor:
                    wrapper.traced = wrap(calling(name), rule)
                patches.replace(owner, name, wrapper)
                if owner is module or owner is Tensor:  # a method of Tensor's is of a base class
                    as_if_defined_at(wrapper, f"{module.__name__}.{path}")
                if owner is module:
                    replaced[id(original)] = original, wrapper
        return replaced

    def _due(self, module: str, for_half: bool) -> dict[str, Rule]:
        """Return the rules for a module that wait for a model in half, or all others."""
        key = module, for_half
        if key not in self._known_due:
            self._known_due[key] = {
                path: rule
                for path, rule in self._rules[module].items()
                if _waits_for_half(module, path, rule) is for_half
            }
        return self._known_due[key]


def _waits_for_half(module: str, path: str, rule: Rule) -> bool:
    return is_for_half(rule) and (is_left_alone(module) or "." in path)


def _modules_of(models: Iterable[nn.Module]) -> dict[str, types.ModuleType]:
    """Return where the classes of models and their submodules are defined, but for torch's."""
    names = {type(module).__module__ for model in models for module in model.modules()}
    users = {name for name in names if not is_left_alone(name)}
    return {name: sys.modules[name] for name in users & sys.modules.keys()}


def _named_in(module: types.ModuleType) -> set[str]:
    """Return the names of the modules that a module has, or has functions or classes of."""
    values = list(vars(module).values())
    modules = (one for one in values if isinstance(one, types.ModuleType))
    owners = (one for one in values if isinstance(one, (types.FunctionType, type)))
    names = {getattr(one, "__name__", None) for one in modules}
    names |= {getattr(one, "__module__", None) for one in owners}
    return {name for name in names if isinstance(name, str)}


def _expanded(module: types.ModuleType, rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules with a star, as in ``"*.method"``, standing for classes of the module."""
    found: dict[str, Rule] = {}
    for path, rule in rules.items():
        if path.startswith("*."):
            names = _classes_with(module, path[2:])
            found.update({f"{name}{path[1:]}": rule for name in names})
    return {**found, **{path: rule for path, rule in rules.items() if not path.startswith("*.")}}


def _classes_with(module: types.ModuleType, method: str) -> list[str]:
    """Return the names of classes with such a method, less those that inherit another's of them.

    Those that the module, or a package's modules, define: others are imported from elsewhere.
    """
    classes = {
        kind: name
        for name, kind in vars(module).items()
        if isinstance(kind, type)
        and f"{kind.__module__}.".startswith(f"{module.__name__}.")
        and any(method in vars(base) for base in kind.__mro__)
    }
    return [
        name
        for kind, name in classes.items()
        if method in vars(kind) or not any(base in classes for base in kind.__mro__[1:])
    ]
