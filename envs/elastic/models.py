"""Models of published traces that neither transformers nor torch alone has."""

from __future__ import annotations

from torch import nn

from planner.capture.inputs import InputShape

__all__ = ["vgg16"]

#: Channels of the convolutions of each stage, which a pooling ends.
_VGG16 = ((64, 64), (128, 128), (256,) * 3, (512,) * 3, (512,) * 3)


def vgg16() -> tuple[nn.Module, dict[str, InputShape]]:
    """Make VGG-16 with the shape of its input.

    Source: Simonyan and Zisserman 2015 (arXiv:1409.1556), table 1, configuration D.
    """
    layers: list[nn.Module] = []
    entering = 3
    for stage in _VGG16:
        for channels in stage:
            layers += [nn.Conv2d(entering, channels, 3, padding=1), nn.ReLU()]
            entering = channels
        layers.append(nn.MaxPool2d(2))
    layers.append(nn.Flatten())
    for inside, outside in ((512 * 7 * 7, 4096), (4096, 4096)):
        layers += [nn.Linear(inside, outside), nn.ReLU(), nn.Dropout()]
    model = nn.Sequential(*layers, nn.Linear(4096, 1000))
    return model, {"input": InputShape(shape=(1, 3, 224, 224), dtype="float32")}
