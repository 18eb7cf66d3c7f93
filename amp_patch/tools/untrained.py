"""Scripts that do not train with amp: known before they run, or told of after; with the mend.

Knows the text of scripts, and what a tool noted of one that ran; imports no torch.
"""

from __future__ import annotations

import ast
import itertools
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

from .early_notice import VARIABLE, most_steps
from .errors import BadArguments, refuse_notebook
from .recorded import read_lines

#: The name of the files in which `child.begin` notes what has become of amp, before the rank.
NAME = "amp"
MEND = (
    "call model, optimizer = amp.initialize(model, optimizer), and before optimizer.step() "
    "with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()"
)
_WHOLE_MEND = f"write from amp_patch import amp, {MEND}"
#: What had become of amp when the script ended -> in words, with the mend; None: not imported.
REASONS = {
    None: f"the script imported neither amp_patch nor apex; {_WHOLE_MEND}",
    "no": f"the script never called amp.initialize; {MEND}",
    "disabled": (
        "the script called amp.initialize(enabled=False); leave enabled=False out, or give the "
        "script the option by which it turns amp on"
    ),
    # The tools start scripts with nothing to read: a loop over standard input makes no step.
    "yes": (
        "the script stepped no optimizer that it had given to amp.initialize; give amp.initialize "
        "the optimizer that is stepped, in model, optimizer = amp.initialize(model, optimizer); "
        "standard input is empty here: a script that trains on it must read a file"
    ),
}
#: Packages that are sure not to use amp by themselves, with those of Python.
_HARMLESS = {"PIL", "matplotlib", "numpy", "pandas", "scipy", "sklearn", "torch", "torchaudio"}
_HARMLESS |= {"torchvision", "tqdm", "yaml", *sys.stdlib_module_names}
#: Names by which code runs that a reader of the script does not see.
_HIDING = {"__import__", "eval", "exec", "importlib", "runpy", "subprocess"}
_HIDING_CALLS = {"execv", "execve", "execvp", "import_module", "popen", "system"}
_LAUNCHERS = {"python", "python3", "torchrun"}
_LAUNCHING_MODULES = {"torch.distributed.launch", "torch.distributed.run"}


def notice(steps: int) -> str:
    """Return what is said of a script that runs, and has made so many steps without amp."""
    most = most_steps()
    end = f"It is ended after {most} such steps." if most else "It is not ended for that."
    return f"{steps} optimizer steps were made, and the script has not called amp.initialize. {end}"


def is_to_end(steps: int) -> bool:
    """Return whether a script is ended that has made so many steps without amp."""
    return 0 < most_steps() <= steps


def reason_after(steps: int) -> str:
    """Return why a script was ended that had made so many steps without amp, with the mend."""
    return (
        f"the script had made {steps} optimizer steps and not called amp.initialize, so it was "
        f"ended; if it begins later, set {VARIABLE} to more steps, or to 0 for no limit; else "
        f"{MEND}"
    )


def reason_in(folder: Path) -> str:
    """Return why a run left nothing to look at, with the mend.

    Args:
        folder: in which `child.begin` has noted what became of amp.
    """
    states = [line["amp"] for path in folder.glob(f"{NAME}-*.jsonl") for line in read_lines(path)]
    best = next((one for one in ("yes", "disabled", "no") if one in states), None)
    return REASONS[best]


def refuse_without_amp(words: Sequence[str]) -> None:
    """Refuse a script that is sure not to use amp.

    Args:
        words: what stands after ``--``.

    Raises:
        BadArguments: it, and all that it imports, was read and uses neither amp_patch nor apex; or
            the environment says badly how long to wait for amp.
    """
    most_steps()
    if words:
        refuse_notebook(words[0])
    place = _place(words)
    if place is not None and not _may_use_amp(*place):
        raise BadArguments(
            f"the script must train with amp_patch or apex; got {place[0]}, which imports neither, "
            f"nor does what it imports; {_WHOLE_MEND}"
        )


def _place(words: Sequence[str]) -> tuple[Path, Path] | None:
    """Return the file of a script, and the folder in which Python looks for its modules first.

    None where the file is not found, or something else than Python starts it.
    """
    waiting = list(words)
    if Path(waiting[0]).name in _LAUNCHERS:
        del waiting[0]
    elif waiting[0] != "-m":
        return Path(waiting[0]), Path(waiting[0]).parent
    for word, following in itertools.pairwise([*waiting, ""]):
        if word == "-m" and following and following not in _LAUNCHING_MODULES:
            files = _module_files(following)
            return (files[-1], Path()) if files else None
        if word.endswith(".py") and Path(word).is_file():
            return Path(word), Path(word).parent
    return None


def is_runnable(name: str) -> bool:
    """Return whether ``python -m NAME`` runs a module of this folder: no path, no mere package."""
    files = _module_files(name) if all(name.split(".")) and "/" not in name else []
    return bool(files) and files[-1].suffix == ".py" and files[-1].name != "__init__.py"


def _module_files(name: str) -> list[Path]:
    """Return the files that ``python -m NAME`` runs in this folder, the outermost first."""
    return _files(f"{name}.__main__", Path()) or _files(name, Path())


def _may_use_amp(script: Path, folder: Path) -> bool:
    """Return whether a script, or what it imports of the user's own, may use amp."""
    folder = folder.absolute()
    waiting, seen = [script.absolute()], set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            with tokenize.open(path) as file:
                text = file.read()
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError, RecursionError):
            return True
        if "apex" in text or "amp_patch" in text or _hides(tree):
            return True
        for name, where in _imports(tree, path, folder):
            found = _files(name, where)
            if not found and (where != folder or name.partition(".")[0] not in _HARMLESS):
                return True
            waiting += found
    return False


def _hides(tree: ast.Module) -> bool:
    """Return whether a script may run what cannot be read."""
    return any(
        (isinstance(node, ast.Name) and node.id in _HIDING)
        or (isinstance(node, ast.Attribute) and node.attr in _HIDING_CALLS)
        or (isinstance(node, ast.alias) and node.name.partition(".")[0] in _HIDING)
        or (isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in _HIDING)
        for node in ast.walk(tree)
    )


def _imports(tree: ast.Module, path: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the dotted names that a module imports, and the folder in which to look for each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, folder) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = min(node.level, len(path.parents))
            where = path.parents[above - 1] if above else folder
            if node.module:
                yield node.module, where
            for alias in node.names:
                name = f"{node.module}.{alias.name}" if node.module else alias.name
                if not node.module or _files(name, where):
                    yield name, where


def _files(name: str, folder: Path) -> list[Path]:
    """Return the files that the import of a dotted name runs, the outermost first; [] for none."""
    place = folder.joinpath(*name.split("."))
    if not place.name:  # of "." alone
        return []
    own = [one for one in (place / "__init__.py", place.with_suffix(".py")) if one.is_file()]
    if not own:
        return [place] if place.is_dir() else []
    packages = [parent for parent in reversed(place.parents) if folder in parent.parents]
    return [file for one in packages if (file := one / "__init__.py").is_file()] + own
