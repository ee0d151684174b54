"""Convolutional networks of common designs, small, and Swin, which has their structure."""

from __future__ import annotations

import torch
from designs import Attention, UNet, VisionTransformer, feed_forward
from torch import nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        same = before == after and stride == 1
        self.downsample = None if same else nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...] = (2, 2, 2, 2), width: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        for k, depth in enumerate(depths):
            first = BasicBlock(width * 2 ** max(k - 1, 0), width * 2**k, 1 + (k > 0))
            rest = (BasicBlock(width * 2**k, width * 2**k) for _ in range(depth - 1))
            self.add_module(f"layer{k + 1}", nn.Sequential(first, *rest))
        self.fc = nn.Linear(width * 2 ** (len(depths) - 1), 10)

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3)))


class Vgg(nn.Module):
    def __init__(self, plan: tuple[int, ...] = (8, 0, 16, 0, 32, 32, 0)) -> None:
        super().__init__()
        layers, before = [], 3
        for width in plan:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(True)] if width else [nn.MaxPool2d(2)]
            before = width or before
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(4 * before, 64), nn.ReLU(True), nn.Dropout(), nn.Linear(64, 10))

    def forward(self, x):
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


class DenseLayer(nn.Module):
    def __init__(self, before: int, growth: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(before), nn.Conv2d(before, 4 * growth, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, features):
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseBlock(nn.ModuleDict):
    def __init__(self, before: int, growth: int, depth: int) -> None:
        super().__init__({f"denselayer{k}": DenseLayer(before + k * growth, growth) for k in range(depth)})

    def forward(self, x):
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(growth: int = 8, depths: tuple[int, ...] = (3, 6)) -> nn.Module:
    parts, width = [nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(True)], 16
    for depth in depths:
        parts.append(DenseBlock(width, growth, depth))
        width += depth * growth
        parts.append(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(True), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2))
        )
        width //= 2
    return nn.Sequential(nn.Sequential(*parts), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class SqueezeExcitation(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(width, width // 4, 1), nn.Conv2d(width // 4, width, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(F.silu(self.fc1(x.mean((2, 3), keepdim=True)))))


def conv_norm(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.SiLU())


class InvertedResidual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        wide = 4 * before
        inner = [conv_norm(before, wide, 1), conv_norm(wide, wide, 3, stride, wide), SqueezeExcitation(wide)]
        self.block = nn.Sequential(*inner, nn.Conv2d(wide, after, 1), nn.BatchNorm2d(after))
        self.residual = stride == 1 and before == after

    def forward(self, x):
        return x + self.block(x) if self.residual else self.block(x)


def efficientnet() -> nn.Module:
    sizes = [(8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2), (16, 16, 1), (16, 24, 2)]
    blocks = [InvertedResidual(*size) for size in sizes]
    features = nn.Sequential(conv_norm(3, 8, 3, 2), *blocks, conv_norm(24, 96, 1))
    return nn.Sequential(features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = feed_forward(width)
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x):
        return x + (self.scale * self.mlp(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)


def convnext(width: int = 8, depths: tuple[int, ...] = (2, 2, 3)) -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, width, 4, 4)]
    for k, depth in enumerate(depths):
        if k:
            parts.append(nn.Sequential(nn.GroupNorm(1, width), nn.Conv2d(width, 2 * width, 2, 2)))
            width *= 2
        parts.append(nn.Sequential(*(ConvNextBlock(width) for _ in range(depth))))
    return nn.Sequential(nn.Sequential(*parts), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.shift = shift
        self.attn, self.norm2, self.mlp = Attention(width), nn.LayerNorm(width), feed_forward(width)

    def forward(self, x):
        windows = x.roll((self.shift, self.shift), (1, 2)).unfold(1, 4, 4).unfold(2, 4, 4)  # n, h, w, c, 4, 4
        n, h, w, c = windows.shape[:4]
        out = self.attn(windows.permute(0, 1, 2, 4, 5, 3).reshape(-1, 16, c)).view(n, h, w, 4, 4, c)
        x = x + out.transpose(2, 3).reshape(n, 4 * h, 4 * w, c).roll((-self.shift, -self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        return self.reduction(self.norm(torch.cat([x[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1)))


class Swin(nn.Module):
    def __init__(self, width: int = 8, depths: tuple[int, ...] = (2, 4)) -> None:
        super().__init__()
        self.patch, parts = nn.Conv2d(3, width, 4, 4), list[nn.Module]()
        for k, depth in enumerate(depths):
            parts += [PatchMerging(width)] if k else []
            width *= 2 if k else 1
            parts.append(nn.Sequential(*(SwinBlock(width, 2 * (j % 2)) for j in range(depth))))
        self.features, self.head = nn.Sequential(*parts), nn.Linear(width, 10)

    def forward(self, x):
        return self.head(self.features(self.patch(x).permute(0, 2, 3, 1)).mean((1, 2)))


IMAGES = {
    "VisionTransformer": VisionTransformer,
    "VisionTransformer of lists": lambda: VisionTransformer(ff=feed_forward),
    "UNet": UNet,
    "ResNet": ResNet,
    "Vgg": Vgg,
    "densenet": densenet,
    "efficientnet": efficientnet,
    "convnext": convnext,
    "Swin": Swin,
}
"""Models of images of shape [2, 3, 32, 32], by name."""
