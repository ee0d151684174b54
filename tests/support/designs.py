"""Models of common designs, small, with forwards that are those of the originals in what they save."""

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
