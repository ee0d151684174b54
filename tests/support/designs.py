"""Models of common designs, small, with forwards that are those of the originals in what they save."""

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
