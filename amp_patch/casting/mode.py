"""Which half dtype the patched functions of this thread cast to right now.

Knows nothing of functions, models or caches. Three things decide, the first that speaks wins:
a region or ``disable_casts`` around the call, the model whose forward runs, the process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import _get_current_function_mode_stack

from amp_patch.levels import HALVES as HALVES

#: The value of a cast dtype that means: casts are off, everything runs as it comes in.
OFF = torch.float32
#: The dtypes that casts cast from, to those of `HALVES`; float64 is somebody's choice.
FLOATS = (torch.float32, *HALVES)
#: For each of these the others, which are cast to it.
OTHER_FLOATS: dict[Any, frozenset[torch.dtype]] = {
    dtype: frozenset(FLOATS) - {dtype} for dtype in FLOATS
}
#: The device types that torch has, where no model says which ones are meant.
ALL_DEVICES = frozenset(
    {"cpu", "cuda", "hpu", "ipu", "lazy", "maia", "meta", "mps", "mtia", "xla", "xpu"}
)


Dtype = torch.dtype | None


class Saved(NamedTuple):
    """What a block or a step changes of one thread's mode, for `CastMode.restore`."""

    level: torch.dtype | None
    off: bool
    region: Any


class AutocastOff(NamedTuple):
    """What ``torch.set_autocast_enabled(False)`` has switched off in one thread.

    Attributes:
        saved: the mode before.
        models: in how many models' forwards.
        blocks: in how many blocks.
        torchs: whether torch's own autocast was on.
    """

    saved: Saved
    models: int
    blocks: int
    torchs: bool


class ProcessMode:
    """What holds where neither a model nor a region says otherwise.

    Attributes:
        dtype: half dtype of the casts of O1/O4, or `OFF`.
        region_dtype: half dtype of a ``half_region`` outside every model's forward.
        devices: device types ("cpu", "cuda") whose tensors are cast.
        is_mixed: whether the model that came last is at a level with half precision, not O0.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Casts off, no device."""
        self.dtype = OFF
        self.region_dtype: torch.dtype | None = None
        self.devices: frozenset[str] = frozenset()
        self.is_mixed = False

    def save(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return dict(vars(self))

    def restore(self, saved: dict[str, Any]) -> None:
        """Set what `save` returned."""
        vars(self).update(saved)


class CastMode(threading.local):
    """The calling thread's mode.

    Every attribute is set on the instance from the start: torch.compile guards on the keys of
    the thread's dictionary, and a key that appears while a function is traced fails them.

    Attributes:
        dtype: what the wrappers read; None stands for the process's dtype.
        level: what the model says whose forward runs in this thread; None outside of models.
        off: True inside ``disable_casts``, a region or an optimizer's step.
        region: the innermost active region, or None.
        region_dtype: half dtype of a region in the running model's forward, None outside.
        stored: half dtype that the running model is stored in (O2, O3, O5), else None.
        in_checkpoint: True inside a checkpointed function (its first run is under no_grad).
        in_hook: True inside a script's hook of a gradient, see `gradient_hooks`.
        models: models whose forward runs, innermost last, with the mode around them. A tuple:
            torch.compile lets a checkpointed function set attributes, and append to no list.
        modules: modules whose forward runs in a region by a rule, innermost last, each with how
            many entries ``around`` has had with it.
        around: the modes around the blocks (regions, ``disable_casts``) that are open.
        autocasts: blocks of ``torch.autocast`` that switched casts off, with the modes around them.
        autocast_off: what ``torch.set_autocast_enabled`` has switched off, or None.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.level: torch.dtype | None = None
        self.off = False
        self.region: Any = None
        self.region_dtype: torch.dtype | None = None
        self.stored: torch.dtype | None = None
        self.in_checkpoint = False
        self.in_hook = False
        self.models: tuple[tuple[int, Dtype, Dtype, Dtype], ...] = ()
        self.modules: list[tuple[int, int]] = []
        self.around: list[Saved] = []
        self.autocasts: list[tuple[int, Saved]] = []
        self.autocast_off: AutocastOff | None = None

    def save(self) -> Saved:
        """Return what `restore` needs."""
        return Saved(self.level, self.off, self.region)

    def restore(self, saved: Saved) -> None:
        """Set level, off and region, and from them what the wrappers read."""
        self.level, self.off, self.region = saved
        self.dtype = OFF if self.off else self.level

    def is_of_process(self) -> bool:
        """Whether neither a region nor a model says anything here but what the process says."""
        own = self.__dict__  # of this thread; to look up one attribute takes as long as all here
        if own["stored"] is not None or own["region"] is not None:
            return False
        dtype = own["dtype"]
        return dtype is None or dtype is process.dtype

    def note(self) -> dict[str, Any]:
        """Return what `run` needs, for what of this moment's call runs later."""
        own = self.__dict__
        return {name: own[name] for name in _NOTED}

    def run(
        self, noted: dict[str, Any], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function in the mode that was noted, and put back the mode that is now."""
        own, around = self.__dict__, self.note()
        region = noted["region"]
        own.update(noted)
        try:
            if region is None or _is_entered(region, around["region"]):
                return function(*args, **kwargs)
            with region:  # it was left since
                return function(*args, **kwargs)
        finally:
            own.update(around)

    def switch_off(self, region: Any = None) -> Saved:
        """Turn the wrappers' casts off, in favour of ``region`` if one is given."""
        saved = Saved(self.level, self.off, self.region)
        self.off, self.region, self.dtype = True, region, OFF
        return saved

    def enter_autocast(self, key: int) -> None:
        """A block of ``torch.autocast`` that switches casts off begins."""
        self.autocasts.append((key, self.switch_off()))

    def leave_autocast(self, key: int) -> None:
        """A block ended or its body raised; without effect if it switched nothing off."""
        if self.autocasts and self.autocasts[-1][0] == key:
            self.restore(self.autocasts.pop()[1])

    def switch_autocast_off(self, torchs: bool) -> None:
        """Casts are off until `switch_autocast_on`, by no block; see `AutocastOff`."""
        models, blocks = len(self.models), len(self.around) + len(self.autocasts)
        self.autocast_off = AutocastOff(self.switch_off(), models, blocks, torchs)

    def switch_autocast_on(self) -> AutocastOff | None:
        """Switch on what `switch_autocast_off` switched off in the blocks that are open now.

        A block that began or ended since then has a mode of its own.

        Returns:
            What was; None where nothing was.
        """
        is_of_block = self.is_autocast_off_in_block()
        switched, self.autocast_off = self.autocast_off, None
        if switched is None or not is_of_block:
            return None
        self.restore(Saved(self.level, switched.saved.off, switched.saved.region))
        return switched

    def is_autocast_off_in_block(self) -> bool:
        """Tell whether `switch_autocast_off` was called in the innermost block that is open."""
        off = self.autocast_off
        return off is not None and off.blocks == len(self.around) + len(self.autocasts)

    def enter_model(
        self,
        key: int,
        level: torch.dtype,
        region_dtype: torch.dtype,
        stored: torch.dtype | None = None,
    ) -> None:
        """A model's forward begins: its level decides, unless casts are off around it."""
        if is_dynamo_compiling():  # whose guards are on attributes
            self.models = (*self.models, (key, self.level, self.region_dtype, self.stored))
            self.level, self.region_dtype, self.stored = level, region_dtype, stored
            self.dtype = OFF if self.off else level
            return
        own = self.__dict__  # of this thread; to look up one attribute takes as long as all here
        around = key, own["level"], own["region_dtype"], own["stored"]
        own["models"] = (*own["models"], around)
        own["level"], own["region_dtype"], own["stored"] = level, region_dtype, stored
        own["dtype"] = OFF if own["off"] else level

    def leave_model(self, key: int) -> None:
        """A model's forward ended or raised; without effect if it never began."""
        own = None if is_dynamo_compiling() else self.__dict__
        models = self.models if own is None else own["models"]
        if not models or models[-1][0] != key:
            return
        _, level, region_dtype, stored = models[-1]
        if own is None:
            self.models, self.level = models[:-1], level
            self.region_dtype, self.stored = region_dtype, stored
            self.dtype = OFF if self.off else level
            return
        own["models"], own["level"] = models[:-1], level
        own["region_dtype"], own["stored"] = region_dtype, stored
        own["dtype"] = OFF if own["off"] else level

    def leave_models_but(self, running: Collection[int], is_stepping: bool = False) -> None:
        """The forwards of all models but these are over, and all steps: an interrupt may end one.

        torch calls no hook then, and what a ``finally`` was to switch on again may be off. Blocks
        that are open stay, and what was switched off by ``torch.set_autocast_enabled`` outside of
        those forwards.

        Args:
            running: ids of the models.
            is_stepping: whether a step goes on, which has switched casts off.
        """
        while self.models and self.models[-1][0] not in running:
            self.leave_model(self.models[-1][0])
        if self.autocast_off is not None and self.autocast_off.models > len(self.models):
            self.switch_autocast_on()
        has_blocks = self.around or self.autocasts or self.autocast_off is not None
        if not (self.models or has_blocks or is_stepping):
            self.restore(Saved(None, False, None))


def _is_entered(region: Any, current: Any) -> bool:
    """Whether torch asks a region, of the thread or not, about the calls that come now.

    In a backward that is called within another one torch asks none of those that are open.
    """
    if torch.compiler.is_compiling():  # which cannot see torch's own list
        return region is current
    return any(one is region for one in _get_current_function_mode_stack())


# What a call's mode is, wherever it runs: the rest says what is open in the thread.
_NOTED = ("dtype", "level", "off", "region", "region_dtype", "stored", "in_hook")
#: What `CastMode.note` returns where the process alone says what is cast.
PROCESS = dict.fromkeys(_NOTED, None) | {"off": False, "in_hook": False}
process = ProcessMode()
mode = CastMode()


def casts_are_on() -> bool:
    """Tell whether functions cast in this thread now, patched ones or those in a region."""
    return mode.region is not None or (mode.dtype or process.dtype) is not OFF


def cast_dtype() -> torch.dtype:
    """Return what functions cast to in this thread now: a half dtype, or `OFF`."""
    return mode.region.dtype if mode.region is not None else mode.dtype or process.dtype
