"""Which functions are patched for O1 and O4, and by whose rules.

Knows no optimizer, and of the models only that they may hold functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from amp_patch.common.did_you_mean import did_you_mean, meant
from amp_patch.common.weak_modules import WeakModules
from amp_patch.levels import OptLevel
from amp_patch.patching import Patches, resolve

from . import (
    autocast_questions,
    autocast_setters,
    half_numbers,
    installation,
    layer_forwards,
    targets,
    torch_compile,
    written_values,
)
from .held_functions import HeldFunctions
from .mode import OFF, process
from .wrappers import Casts

USER_RULES = ("half", "half_out", "float", "promote", "bfloat16", "off")


def expand(rules: Mapping[str, str]) -> dict[str, str]:
    """Return dotted path -> rule for a user's ``rules``.

    Raises:
        ValueError: no such rule, or no such function.
    """
    expanded = {}
    for name, rule in rules.items():
        if rule not in USER_RULES:
            raise ValueError(
                f"a rule must be one of {', '.join(map(repr, USER_RULES))}; got {rule!r} for "
                f"{name!r}{did_you_mean(rule, USER_RULES)} Call amp.initialize(..., "
                f"rules={{{name!r}: {meant(rule, USER_RULES) or 'float'!r}}})."
            )
        for path in targets.user_rule_targets(name):
            expanded[path] = rule
    return expanded


class PatchedFunctions:
    """The functions that cast their arguments while a model at O1 or O4 lives, and only then.

    Args:
        casts: makes the wrappers.
        registered: ``(id(module), name) -> (module, name, rule)``, what `register` was told;
            filled here, and the caller's, for it outlives `undo`.
    """

    def __init__(
        self, casts: Casts, registered: dict[tuple[int, str], tuple[Any, str, str]]
    ) -> None:
        self._casts = casts
        self._registered = registered
        self._rules: dict[str, str] = {}
        self._observer = casts.observer
        self._patches = Patches()
        self._held = HeldFunctions()
        self._models = WeakModules()

    def set_up(
        self,
        models: Iterable[nn.Module],
        level: OptLevel,
        rules: Mapping[str, str],
        casting: set[torch.dtype],
        on_error: contextlib.ExitStack,
        observer: Callable[[str], None] | None = None,
    ) -> None:
        """Patch for models that come at ``level``; earlier rules hold while ``casting`` has any.

        Args:
            models: those that come; the functions that they hold are replaced, too.
            level: theirs.
            rules: dotted path -> rule, see `expand`.
            casting: the half dtypes of the models that live at O1 or O4.
            on_error: gets what undoes it.
            observer: see `Casts`; of all functions that cast from now on.
        """
        on_error.callback(process.restore, process.save())
        process.region_dtype = level.half_dtype
        process.is_mixed = level.casts_functions or level.stores_half
        if not level.casts_functions:
            return
        process.dtype = level.half_dtype
        rules = {**(self._rules if casting else {}), **rules}
        new = self._models.new(models)
        before = self._rules, bool(self._patches), self._casts.observer
        on_error.callback(self._roll_back, new, *before)
        self._models.update(new)
        self._casts.observer = observer
        if rules == self._rules and self._patches and observer is self._observer:
            self._held.reach(models)
        else:
            self._set_rules(rules, True)

    def follow_models(self, casting: set[torch.dtype]) -> None:
        """Cast to a dtype of the models that live at O1 or O4; without any, patch nothing."""
        if not casting:
            process.dtype = OFF
            self._set_rules({}, False)
        elif process.dtype not in casting:
            process.dtype = next(iter(casting))

    def register(self, module: Any, name: str, rule: str) -> None:
        """Cast the arguments of ``module.name`` by ``rule``, for as long as this process runs.

        While a model at O1 or O4 lives this begins at once; else where the next one comes.

        Raises:
            TypeError: its owner's attributes cannot be replaced.
        """
        before = dict(self._registered)
        self._registered[id(module), name] = (module, name, rule)
        if not self._patches:
            return
        try:
            self._reinstall()
        except BaseException:
            self._registered.clear()
            self._registered.update(before)
            self._reinstall()
            raise

    def beneath(self, patch: Callable[[], None], torchs: bool = False) -> None:
        """Patch something else while no function is: its wrapper must not stand on one of ours.

        Args:
            patch: does it.
            torchs: it patches functions of torch, too.
        """
        if not self._patches or not (torchs or self._registered):
            patch()
            return
        self._models.update(self._restore())
        try:
            patch()
        finally:
            self._reinstall()

    def undo(self) -> None:
        """Restore every function and forget the rules; what was registered stays registered."""
        self._set_rules({}, False)

    def _roll_back(
        self,
        models: list[nn.Module],
        rules: dict[str, str],
        patched: bool,
        observer: Callable[[str], None] | None,
    ) -> None:
        self._casts.observer = observer
        self._models.update(self._restore())
        for model in models:
            for module in model.modules():
                self._models.discard(module)
        self._set_rules(rules, patched)

    def _set_rules(self, rules: dict[str, str], patched: bool) -> None:
        self._rules = rules
        if patched:
            self._reinstall()
        else:
            self._restore()
            self._models.clear()

    def _reinstall(self) -> None:
        # A copy of a model holds what the model held.
        self._models.update(self._restore())
        self._observer = self._casts.observer
        try:
            torch_compile.install(self._patches)
            layer_forwards.install(self._patches)
            registered = self._registered.values()
            questions = {**autocast_questions.replacements(), **autocast_setters.replacements()}
            others = {
                **questions,
                **written_values.replacements(),
                **half_numbers.replacements(),
            }
            # an observer hears of those alone that are made while it is there
            kept = self._casts.kept if self._observer is None else None
            wrappers, users = installation.install(
                self._casts.wrap, self._patches, self._rules, registered, others, kept
            )
            autocast_questions.trace(self._patches, {path: resolve(path)[2] for path in questions})
            self._held.install(wrappers, users, list(self._models))
        except BaseException:
            self._restore()
            raise

    def _restore(self) -> list[nn.Module]:
        """Put every function back; return the modules that held a patched one."""
        if not (self._patches or self._held):  # to look for wrappers takes a part of `initialize`
            return []
        held = self._held.undo(self._patches.undo(), self._casts.kept.ids)
        self._casts.kept.forget_held()
        return held
