"""Stands in for ``torch.cuda`` where a step is captured in a graph, on the CPU.

Nothing of a recorded step counts until it is replayed: then the same operations run again on the
same memory, without Python around them.
"""

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_patch.kernels.graph_capture import Captures
from amp_patch.kernels.host_copy import HostCopy
from amp_patch.scaling import device_scaler
from amp_patch.step import loss_scaling, skip


class Recorded:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.operations: list[Callable[[], None]] = []

    def replay(self) -> None:
        with torch.no_grad():
            for operation in self.operations:
                operation()


class Recorder(TorchDispatchMode):
    """Runs operations, and notes how to run each again with the results in the same place."""

    def __init__(self, graph: Recorded) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        places = {one.untyped_storage()._cdata for one in given}
        made = [one for one in tree_leaves(result) if isinstance(one, Tensor)]
        news = [one.untyped_storage()._cdata not in places for one in made]
        again = functools.partial(run_again, func, args, kwargs or {}, given, made, news)
        self._graph.operations.append(again)
        return result


def run_again(
    func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], news: list[bool]
) -> None:
    versions = [one._version for one in given]
    results = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
    for target, result, is_new in zip(made, results, news, strict=True):
        if is_new:
            target.untyped_storage().copy_(result.untyped_storage())
    # a replay tells autograd nothing
    for one, version in zip(given, versions, strict=True):
        set_version(one, version)


def set_version(tensor: Tensor, version: int) -> None:
    """Set a tensor's version counter; before torch 2.7 this takes no tuples."""
    setter = torch._C._autograd._unsafe_set_version_counter
    try:
        setter((tensor,), (version,))
    except TypeError:
        setter(tensor, version)


class FakeCuda:
    """What `amp_patch.cuda_graph` asks of ``torch.cuda``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modules: Any) -> None:
        self.is_capturing = False
        self._modules = modules
        stream = type("Stream", (), {"wait_stream": lambda self, other: None})
        self.device, self.error_mode = 0, ""
        fakes: dict[str, Any] = {
            "is_available": lambda: True,
            "Stream": stream,
            "current_stream": stream,
            "stream": lambda one: contextlib.nullcontext(),
            "CUDAGraph": Recorded,
            "graph": self.graph,
            "device": self.on_device,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(Captures, "are_made", lambda _, device: self.is_capturing)
        monkeypatch.setattr(loss_scaling, "RUNS_AHEAD", {"cpu"})
        cuda = self

        class Guarded(HostCopy):
            """A copy that a capture forbids, as events and pinned memory are then."""

            def __init__(self, source: Tensor) -> None:
                assert not cuda.is_capturing
                super().__init__(source)

            def ready(self) -> bool:
                assert not cuda.is_capturing
                return super().ready()

            def wait(self) -> Tensor:
                assert not cuda.is_capturing
                return super().wait()

            def __del__(self) -> None:
                assert not cuda.is_capturing

        monkeypatch.setattr(device_scaler, "HostCopy", Guarded)
        monkeypatch.setattr(skip, "HostCopy", Guarded)

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, index = self.device, device if isinstance(device, int) else device.index
        self.device = before if index < 0 else index
        yield
        self.device = before

    @contextlib.contextmanager
    def graph(
        self, graph: Recorded, pool: Any, stream: Any, capture_error_mode: str = "global"
    ) -> Iterator[None]:
        self.error_mode = capture_error_mode
        # Tensors of other tests, sparse or fake ones say, may live still.
        found = [one for one in gc.get_objects() if issubclass(type(one), Tensor)]
        tensors = [one for one in found if not is_lazy(one)]  # which has no memory yet
        for one in tensors:
            one._fix_weakref()  # torch asks for it of whoever finds a tensor that it owns alone
        storages = {}
        for one in tensors:
            # some of torch 2.6 have none: they are gradients that are not defined
            with contextlib.suppress(NotImplementedError):
                if one.layout is torch.strided and one.untyped_storage().device.type == "cpu":
                    storages[one.untyped_storage()._cdata] = one.untyped_storage()
        saved = [(storage, storage.clone()) for storage in storages.values()]
        self.is_capturing = True
        try:
            with Recorder(graph), self._recorded_launches(graph):
                yield
        finally:
            self.is_capturing = False
        for storage, values in saved:
            storage.copy_(values)

    @contextlib.contextmanager
    def _recorded_launches(self, graph: Recorded) -> Iterator[None]:
        if self._modules is None:
            yield
            return
        launch = self._modules.launch

        def launch_and_note(*arguments: Any) -> None:
            launch(*arguments)
            graph.operations.append(functools.partial(launch, *arguments))

        self._modules.launch = launch_and_note
        yield
        del self._modules.launch
