"""Models of common designs, small, with forwards that are those of the originals in what they save."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.heads = heads
        self.to_qkv = nn.Linear(width, 3 * width, bias=False)
        self.to_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.to_qkv(self.norm(x)).chunk(3, -1))
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


def feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = feed_forward(width)

    def forward(self, x):
        return self.net(x)


class Pairs(nn.Module):
    """Blocks that are lists of two modules, as in vit_pytorch."""

    def __init__(self, width: int, depth: int, ff=FeedForward) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(width), ff(width)]) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for attention, ff in self.layers:
            x = attention(x) + x
            x = ff(x) + x
        return self.norm(x)


class VisionTransformer(nn.Module):
    def __init__(self, width: int = 32, depth: int = 6, ff=FeedForward) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(48), nn.Linear(48, width), nn.LayerNorm(width))
        self.transformer = Pairs(width, depth, ff)
        self.linear_head = nn.Linear(width, 10)

    def forward(self, image):
        patches = F.unfold(image, 4, stride=4).transpose(1, 2)
        return self.linear_head(self.transformer(self.to_patch_embedding(patches)).mean(1))


class Residual(nn.Module):
    def forward(self, x, residual):
        return x + residual


class Decoder(nn.Module):
    """Layers that are lists of norms, a block and a residual, as in x-transformers."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        kinds = [Attention, FeedForward] * depth
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.ModuleList([nn.LayerNorm(width), None, None]), kind(width), Residual()]) for kind in kinds
        )
        self.final_norm = nn.LayerNorm(width)
        self.to_logits = nn.Linear(width, 64, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for (norm, _, _), block, residual in self.layers:
            x = residual(block(norm(x)), x)
        return self.to_logits(self.final_norm(x))


# UNets


class ResnetBlock(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(4, before), nn.Conv2d(before, after, 3, padding=1)
        self.time = nn.Linear(16, after)
        self.norm2, self.conv2 = nn.GroupNorm(4, after), nn.Conv2d(after, after, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x, time):
        h = self.conv1(self.nonlinearity(self.norm1(x))) + self.time(self.nonlinearity(time))[:, :, None, None]
        h = self.conv2(self.nonlinearity(self.norm2(h)))
        return h + (x if self.shortcut is None else self.shortcut(x))


class Transformer2D(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.proj_in = nn.GroupNorm(4, width), nn.Conv2d(width, width, 1)
        self.transformer_blocks = nn.ModuleList([nn.Sequential(Attention(width), FeedForward(width))])
        self.proj_out = nn.Conv2d(width, width, 1)

    def forward(self, x):
        h = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            h = block(h)
        return self.proj_out(h.transpose(1, 2).reshape(x.shape)) + x


class CrossAttnBlock(nn.Module):
    """A stage of a UNet: it is given the outputs of the way down, or returns them."""

    attends = True

    def __init__(self, widths: list[int], skips: list[int], sample: nn.Module | None) -> None:
        super().__init__()
        after = widths[1:]
        pairs = zip(widths, skips, after, strict=False)
        self.resnets = nn.ModuleList(ResnetBlock(before + skip, out) for before, skip, out in pairs)
        self.attentions = nn.ModuleList(Transformer2D(out) for out in after if self.attends)
        self.samplers = None if sample is None else nn.ModuleList([sample])

    def forward(self, x, time, skips=None):
        outputs = []
        for k, resnet in enumerate(self.resnets):
            x = resnet(x if skips is None else torch.cat([x, skips.pop()], 1), time)
            x = self.attentions[k](x) if self.attends else x
            outputs.append(x)
        for sample in self.samplers or ():
            x = sample(x)
            outputs.append(x)
        return x, outputs


class PlainBlock(CrossAttnBlock):
    attends = False


class UNet(nn.Module):
    """As `UNet2DConditionModel` of diffusers: stages of several types, each with lists of resnets and attentions."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 32)) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(3, widths[0], 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 16))
        self.down_blocks, self.up_blocks, last = nn.ModuleList(), nn.ModuleList(), len(widths) - 1
        skips = [widths[0]]
        for k, width in enumerate(widths):
            kind = PlainBlock if k == last else CrossAttnBlock
            sample = None if k == last else nn.Conv2d(width, width, 3, stride=2, padding=1)
            self.down_blocks.append(kind([widths[max(k - 1, 0)], width, width], [0, 0], sample))
            skips += [width] * (2 if sample is None else 3)
        self.mid_block = CrossAttnBlock([widths[-1]] * 3, [0, 0], None)
        for k, width in reversed(list(enumerate(widths))):
            kind = PlainBlock if k == last else CrossAttnBlock
            up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)) if k else None
            before = [widths[min(k + 1, last)], width, width, width]
            self.up_blocks.append(kind(before, [skips.pop() for _ in range(3)], up))
        self.conv_norm_out, self.conv_out = nn.GroupNorm(4, widths[0]), nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, x):
        x, time = self.conv_in(x), self.time_embedding(x.new_ones(len(x), 1))
        skips = [x]
        for block in self.down_blocks:
            x, outputs = block(x, time)
            skips += outputs
        x, _ = self.mid_block(x, time)
        for block in self.up_blocks:
            x, _ = block(x, time, skips)
        return self.conv_out(F.silu(self.conv_norm_out(x)))


class DoubleConv(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        for k, (width, out) in enumerate([(before, after // 2), (after // 2, after)]):
            self.add_module(
                f"conv{k}", nn.Sequential(nn.Conv3d(width, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU())
            )


class Coder(nn.Module):
    def __init__(self, before: int, after: int, down: bool) -> None:
        super().__init__()
        self.pooling = nn.MaxPool3d(2) if down else None
        self.basic_module = DoubleConv(before, after)

    def forward(self, x, skip=None):
        if skip is not None:
            x = torch.cat([skip, F.interpolate(x, skip.shape[2:])], 1)
        return self.basic_module(x if self.pooling is None else self.pooling(x))


class UNet3D(nn.Module):
    """As in segmentation of volumes: encoders and decoders that all differ, the first ones by far the largest."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        sizes = [1, width, 2 * width, 4 * width]
        self.encoders = nn.ModuleList(Coder(a, b, k > 0) for k, (a, b) in enumerate(pairwise(sizes)))
        self.decoders = nn.ModuleList(Coder(a + b, b, False) for a, b in [(sizes[3], sizes[2]), (sizes[2], sizes[1])])
        self.final_conv = nn.Conv3d(width, 2, 1)

    def forward(self, x):
        skips = []
        for encoder in self.encoders:
            x = encoder(x)
            skips.insert(0, x)
        for decoder, skip in zip(self.decoders, skips[1:], strict=True):
            x = decoder(x, skip)
        return self.final_conv(x)


# Convolutional networks, as in torchvision


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
