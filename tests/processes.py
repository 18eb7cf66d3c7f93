"""Runs Python commands in processes whose import of torch was paid once.

To import torch and its compiler takes seconds of the CPU's time, more than most of the scripts that
tests run. So a server imports both, and most of this package, and each command runs in a fork of
it: a process of its own, with its own arguments, environment, folder, warnings, standard streams,
exit handlers and exit code, in which torch is as an import leaves it. What a fork cannot show is
how Python starts and how process groups end: tests of that have ``fork=False`` or call
``subprocess``. ``HYPOTHESIS_PROFILE=nightly``, and systems other than Linux, run every command in a
Python of its own.
"""

import atexit
import functools
import importlib.machinery
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

FORKS = sys.platform == "linux" and os.environ.get("HYPOTHESIS_PROFILE") != "nightly"
TIMEOUT = 300  # seconds
IMPORTED = ("torch", "torch._dynamo", "torch.distributed")


@dataclass
class Job:
    """A command to run in a fork, and the files that its standard streams go to."""

    command: list[str]
    cwd: str
    env: dict[str, str]
    out: str
    err: str
    timeout: int


def run(
    command: Sequence[object],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = TIMEOUT,
    fork: bool = FORKS,
) -> subprocess.CompletedProcess[str]:
    """Run ``[sys.executable, ...]`` as ``subprocess.run`` does, what it prints being captured.

    Args:
        command: this Python, ``-W`` options, then a script's path, ``-c`` and a program, or ``-m``
            and a module; then arguments.
        cwd: where; here if None.
        env: all of the environment; this process's own if None.
        timeout: seconds after which the process is ended by a signal.
        fork: False gives the command a Python of its own.
    """
    (done,) = run_together([command], cwd=cwd, envs=[env], timeout=timeout, fork=fork)
    return done


def run_together(
    commands: Sequence[Sequence[object]],
    *,
    cwd: Path | None = None,
    envs: Sequence[Mapping[str, str] | None],
    timeout: int = TIMEOUT,
    fork: bool = FORKS,
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands at the same time, each with its environment; otherwise as `run`."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            Job(
                command=list(map(str, command)),
                cwd=str(cwd or Path.cwd()),
                env=dict(os.environ if env is None else env),
                out=f"{folder}/{number}.out",
                err=f"{folder}/{number}.err",
                timeout=timeout,
            )
            for number, (command, env) in enumerate(zip(commands, envs, strict=True))
        ]
        codes = _server().run(jobs) if fork else _run_in_pythons_of_their_own(jobs)
        return [
            subprocess.CompletedProcess(
                job.command, code, Path(job.out).read_text(), Path(job.err).read_text()
            )
            for job, code in zip(jobs, codes, strict=True)
        ]


def _run_in_pythons_of_their_own(jobs: list[Job]) -> list[int]:
    processes = []
    for job in jobs:
        with open(job.out, "w") as out, open(job.err, "w") as err:
            processes.append(
                subprocess.Popen(job.command, cwd=job.cwd, env=job.env, stdout=out, stderr=err)
            )
    return [process.wait(job.timeout) for process, job in zip(processes, jobs, strict=True)]


class Server:
    """The process that is forked; it ends with this one, or when it is closed."""

    def __init__(self) -> None:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
        )

    def run(self, jobs: list[Job]) -> list[int]:
        """Run jobs at the same time and return their exit codes, -N for the signal N."""
        request, answer = self._process.stdin, self._process.stdout
        assert request is not None
        assert answer is not None
        request.write(json.dumps([asdict(job) for job in jobs]).encode() + b"\n")
        request.flush()
        return json.loads(answer.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


@functools.cache
def _server() -> Server:
    server = Server()
    atexit.register(server.close)
    return server


def serve() -> None:
    """Run the jobs of each line of the standard input, and print their exit codes."""
    context = multiprocessing.get_context("fork")
    while request := sys.stdin.buffer.readline():
        forks = [context.Process(target=become, args=(Job(**job),)) for job in json.loads(request)]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join()
        print(json.dumps([fork.exitcode for fork in forks]), flush=True)


def become(job: Job) -> None:
    """Make this process what the job's command would be, and run the command in it."""
    signal.alarm(job.timeout)
    for path, mode, stream in (
        (os.devnull, os.O_RDONLY, 0),
        (job.out, os.O_WRONLY | os.O_CREAT, 1),
        (job.err, os.O_WRONLY | os.O_CREAT, 2),
    ):
        opened = os.open(path, mode)
        os.dup2(opened, stream)
        os.close(opened)
    os.chdir(job.cwd)
    os.environ.clear()
    os.environ.update(job.env)
    _, *arguments = job.command
    while arguments[0] == "-W":
        sys.warnoptions.append(arguments[1])
        del arguments[:2]
    if sys.warnoptions:
        warnings._processoptions(sys.warnoptions)  # what Python itself calls
    sys.path[:0] = filter(None, job.env.get("PYTHONPATH", "").split(os.pathsep))
    _forget_another_package()
    if job.env.get("PYTHONPATH"):
        _import_sitecustomize()
    _leave_process_groups_to_the_system()
    try:
        _run(arguments)
    finally:
        atexit._run_exitfuncs()  # multiprocessing does so from Python 3.13 on


def _forget_another_package() -> None:
    """Let the command import its own, where its PYTHONPATH leads to another copy of the package."""
    found = importlib.machinery.PathFinder.find_spec("amp_patch")  # None: the one that is installed
    if found is not None and found.origin != sys.modules["amp_patch"].__file__:
        for name in [name for name in sys.modules if name.partition(".")[0] == "amp_patch"]:
            del sys.modules[name]


def _import_sitecustomize() -> None:
    """Do what Python's module ``site`` does when Python starts."""
    sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise


def _leave_process_groups_to_the_system() -> None:
    """End gloo's threads with the process: in a fork their destructor waits for ever, 1 in 7."""
    distributed = sys.modules["torch.distributed"]
    distributed.destroy_process_group = lambda group=None: None


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _import_most_of_the_package() -> None:
    """Import what `amp_patch.session` imports, and leave that to the commands.

    It takes longer than most of the scripts, too. What tools wait for is the session's import.
    """
    sys.path.insert(0, str(Path(__file__).parent.parent))
    importlib.import_module("amp_patch.session")
    del sys.path[0], sys.modules["amp_patch.session"]
    delattr(sys.modules["amp_patch"], "session")


if __name__ == "__main__":
    del sys.path[0]  # this file's folder
    for name in IMPORTED:
        importlib.import_module(name)
    _import_most_of_the_package()
    serve()
