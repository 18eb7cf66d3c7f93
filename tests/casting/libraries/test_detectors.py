"""torchvision's operators on boxes take half tensors, and its detectors train at every level.

With torchvision where it is at hand; the rows about it are tested on a stand-in as well, for there
is no torchvision for the torch of each test run.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

LEVELS = ("O1", "O2", "O4", "O5")

#: Operators that take float32 alone, as torchvision's on a CPU do, bound as it binds them.
STAND_IN = {
    "torchvision/ops/boxes.py": """
import torch

def nms(boxes, scores, iou_threshold):
    assert boxes.dtype is scores.dtype is torch.float32, (boxes.dtype, scores.dtype)
    return torch.argsort(scores, descending=True)

def batched_nms(boxes, scores, idxs, iou_threshold):
    assert boxes.dtype is torch.float32
    return nms(boxes + idxs[:, None] * 5000.5, scores, iou_threshold)
""",
    "torchvision/ops/roi_align.py": """
import torch

def roi_align(input, boxes, output_size):
    boxes = torch.cat(boxes)
    assert input.dtype is boxes.dtype is torch.float32
    return input.mean((2, 3)) + boxes.mean()
""",
    "torchvision/ops/poolers.py": """
from .roi_align import roi_align

def pool(features, boxes):
    return roi_align(features, boxes, 7)
""",
    "torchvision/ops/__init__.py": "from .boxes import nms, batched_nms\nfrom . import poolers\n",
    "torchvision/__init__.py": "",
}


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `import torchvision` find the stand-in, and forget it afterwards."""
    for path, text in STAND_IN.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_torchvisions(name)}
    yield
    for name in list(sys.modules):
        if _is_torchvisions(name):
            del sys.modules[name]
    sys.modules.update(kept)


def _is_torchvisions(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"


class Detector(nn.Module):
    """Chooses boxes, and samples features there."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.scores = nn.Conv2d(3, 4, 3), nn.Linear(4, 1)

    def forward(self, images: Tensor, boxes: Tensor) -> Tensor:
        from torchvision import ops  # it may come after initialize

        features = self.features(images)
        scores = self.scores(boxes).squeeze(1)
        ids = torch.arange(len(scores)) % 2
        boxes = boxes[ops.batched_nms(boxes, scores, ids, 0.5)]
        self.kept = ops.nms(boxes.to(scores.dtype), scores, 0.5)
        self.pooled: Tensor = ops.poolers.pool(features, [boxes[self.kept]])
        assert self.pooled.dtype is features.dtype
        return self.pooled


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("imported", ["before", "after"])
@pytest.mark.parametrize("level", LEVELS)
def test_operators_on_boxes_take_half_and_float32_tensors(
    amp: ModuleType, level: str, imported: str
) -> None:
    torch.manual_seed(0)
    model, images, boxes = Detector(), torch.rand(2, 3, 8, 8), torch.rand(5, 4) * 4
    if imported == "before":
        import torchvision.ops
    expected = copy.deepcopy(model)(images, boxes)
    original = torchvision.ops.poolers.roi_align if imported == "before" else None
    model = amp.initialize(model, opt_level=level, verbosity=0)
    torch.testing.assert_close(model(images, boxes).float(), expected, rtol=0.05, atol=0.05)
    amp.deactivate()
    if original is not None:
        assert torchvision.ops.poolers.roi_align is original
    with pytest.raises(AssertionError):
        sys.modules["torchvision.ops"].nms(boxes.half(), boxes[:, 0].half(), 0.5)


@pytest.mark.usefixtures("stand_in")
def test_features_of_a_half_region_are_sampled_in_float32(amp: ModuleType) -> None:
    import torchvision.ops

    amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
    features, boxes = torch.rand(1, 4, 8, 8).half(), [torch.rand(2, 4), torch.rand(1, 4)]
    with amp.half_region():
        found = torchvision.ops.poolers.pool(features, boxes)
    assert found.dtype is torch.float16


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_code_that_calls_them_is_scripted_as_before(amp: ModuleType, level: str) -> None:
    ops: Any = pytest.importorskip("torchvision.ops")

    def chosen(boxes: Tensor, scores: Tensor) -> Tensor:
        found: Tensor = ops.nms(boxes, scores, 0.5)
        return found

    boxes, scores = torch.rand(3, 4), torch.rand(3)
    expected = chosen(boxes, scores)
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)
    assert torch.equal(torch.jit.script(chosen)(boxes, scores), expected)


def targets_of(images: list[Tensor]) -> list[dict[str, Tensor]]:
    boxes = torch.tensor([[5.0, 5.0, 40.0, 40.0], [10.0, 12.0, 50.0, 55.0]])
    return [{"boxes": boxes.clone(), "labels": torch.tensor([1, 2])} for _ in images]


@pytest.mark.parametrize("level", LEVELS)
def test_a_detector_of_torchvision_trains_as_in_float32(amp: ModuleType, level: str) -> None:
    detection: Any = pytest.importorskip("torchvision.models.detection")
    torch.manual_seed(0)
    model = detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, min_size=64, max_size=96
    )
    images = [torch.rand(3, 64, 64), torch.rand(3, 72, 64)]
    expected = copy.deepcopy(model)(images, targets_of(images))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    losses = model(images, targets_of(images))
    for name, loss in losses.items():
        torch.testing.assert_close(loss.float(), expected[name], rtol=0.05, atol=0.05)
    with amp.scale_loss(sum(loss.float() for loss in losses.values()), optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.eval()(images)
