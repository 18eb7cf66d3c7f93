"""The shapes of the parameters of well-known models; it builds none of them."""

from __future__ import annotations

Shape = tuple[int, ...]


def linear(inputs: int, outputs: int) -> list[Shape]:
    return [(outputs, inputs), (outputs,)]


def norm(width: int) -> list[Shape]:
    return [(width,), (width,)]


def resnet50() -> list[Shape]:
    """161 tensors, 25,557,032 parameters (He et al. 2015, arXiv:1512.03385, table 1)."""
    shapes: list[Shape] = [(64, 3, 7, 7), *norm(64)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            outputs = 4 * width
            shapes += [(width, inputs, 1, 1), *norm(width)]
            shapes += [(width, width, 3, 3), *norm(width)]
            shapes += [(outputs, width, 1, 1), *norm(outputs)]
            if block == 0:
                shapes += [(outputs, inputs, 1, 1), *norm(outputs)]
            inputs = outputs
    return shapes + linear(inputs, 1000)


def bert_large() -> list[Shape]:
    """391 tensors, 335,141,888 parameters, with the pooler (Devlin et al., arXiv:1810.04805)."""
    width, hidden = 1024, 4096
    shapes: list[Shape] = [(30522, width), (512, width), (2, width), *norm(width)]
    for _ in range(24):
        for _ in range(4):
            shapes += linear(width, width)
        shapes += [*norm(width), *linear(width, hidden), *linear(hidden, width), *norm(width)]
    return shapes + linear(width, width)


def gpt2() -> list[Shape]:
    """148 tensors, 124,439,808 parameters (Radford et al. 2019), output tied to the embedding."""
    width = 768
    shapes: list[Shape] = [(50257, width), (1024, width)]
    for _ in range(12):
        shapes += [*norm(width), *linear(width, 3 * width), *linear(width, width)]
        shapes += [*norm(width), *linear(width, 4 * width), *linear(4 * width, width)]
    return shapes + norm(width)


MODELS = {"ResNet-50": resnet50, "BERT-large": bert_large, "GPT-2": gpt2}
