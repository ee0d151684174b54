"""Structures that real models have, built of plain PyTorch, each with the blocks that it is to be found to have."""

from torch import nn


class Parts(nn.Module):
    """A module of named children that can run."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return x


class Attention(Parts):
    def __init__(self, width: int = 4) -> None:
        super().__init__(qkv=nn.Linear(width, 3 * width), proj=nn.Linear(width, width))


class Mlp(Parts):
    def __init__(self, width: int = 4, hidden: int = 16) -> None:
        super().__init__(up=nn.Linear(width, hidden), down=nn.Linear(hidden, width))


class Block(Parts):
    def __init__(self, width: int = 4) -> None:
        super().__init__(norm=nn.LayerNorm(width), attention=Attention(width), mlp=Mlp(width))


class Mamba(Parts):
    def __init__(self, width: int = 4) -> None:
        super().__init__(norm=nn.LayerNorm(width), mixer=Mlp(width))


class Projection(Parts):
    def __init__(self) -> None:
        super().__init__(up=nn.Linear(4, 4), down=nn.Linear(4, 4))


class MoeMlp(Parts):
    def __init__(self, experts: int) -> None:
        super().__init__(router=nn.Linear(4, experts), experts=nn.ModuleList(Mlp() for _ in range(experts)))


class MoeBlock(Parts):
    def __init__(self, experts: int = 8) -> None:
        super().__init__(attention=Attention(), mlp=MoeMlp(experts) if experts else Mlp())


class DirectMoeBlock(Parts):
    def __init__(self, experts: int = 8) -> None:
        super().__init__(attention=Attention(), experts=nn.ModuleList(Mlp() for _ in range(experts)))


class TwoLists(Parts):
    """A stage whose blocks of two types take turns, as in the U-Nets of diffusion models."""

    def __init__(self, width: int) -> None:
        super().__init__(
            attentions=nn.ModuleList(Attention(width) for _ in range(2)),
            resnets=nn.ModuleList(Mlp(width) for _ in range(2)),
        )


class TextTower(Parts):
    pass


class Stage(Parts):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__(
            blocks=nn.Sequential(*(Block(width) for _ in range(depth))), downsample=nn.Linear(width, 2 * width)
        )


class ConvBlock(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(nn.Conv2d(before, after, 3), nn.BatchNorm2d(after), nn.ReLU())


class Inverted(Parts):
    """A block made of a list of its own, of which the first in a stage has other widths."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__(convs=nn.Sequential(ConvBlock(before, 2 * after), ConvBlock(2 * after, after)))


def residual_stage(before: int, after: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(Inverted(before if k == 0 else after, after) for k in range(depth)))


def blocks(number: int, kind=Block) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(number))


shared = Block()

PLAIN = {
    "layers between embedding and head": (
        Parts(embed=nn.Embedding(9, 4), layers=blocks(12), head=nn.Linear(4, 9)),
        {"layers.*": 12},
    ),
    "the model is the list": (nn.Sequential(*blocks(3)), {"*": 3}),
    "one block, six times": (Parts(layers=nn.ModuleList([shared] * 6)), {"layers.*": 1}),
    "a last block of another type": (Parts(layers=nn.ModuleList([*blocks(3, Mlp), Projection()])), {"layers.*": 4}),
    "layers that a stage of a pipeline does not have": (
        Parts(layers=nn.ModuleList([nn.Identity(), nn.Identity(), *blocks(2)])),
        {"layers.*": 2},
    ),
    "experts in the block itself": (Parts(layers=blocks(2, DirectMoeBlock)), {"layers.*": 2}),
}

STAGES = {
    "stages that hold blocks": (
        Parts(layers=nn.ModuleList(Stage(4 << k, depth) for k, depth in enumerate([2, 2, 6, 2]))),
        {"layers.*.blocks.*": 12},
    ),
    "stages and what lies between": (
        Parts(
            features=nn.Sequential(
                ConvBlock(3, 4),
                nn.Sequential(*(Block(4) for _ in range(3))),
                nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8)),
                nn.Sequential(*(Block(8) for _ in range(3))),
                nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16)),
                nn.Sequential(*(Block(16) for _ in range(9))),
            )
        ),
        {"features.*.*": 15, "features.*": 3},
    ),
    "lists of lists": (
        Parts(block=nn.ModuleList(nn.ModuleList(Block(4 << k) for _ in range(2)) for k in range(4))),
        {"block.*.*": 8},
    ),
    "stages with two lists each": (
        Parts(down=nn.ModuleList(TwoLists(4 << k) for k in range(3))),
        {"down.*.attentions.*": 6, "down.*.resnets.*": 6},
    ),
    "towers by name": (
        Parts(
            towers=nn.ModuleList(
                [nn.ModuleDict({"a": Parts(net=Parts(of=blocks(3))), "b": TextTower(net=Parts(of=blocks(2, Mamba)))})]
            )
        ),
        {"towers.*.a.net.of.*": 3, "towers.*.b.net.of.*": 2},
    ),
    "stages, most of one block, which are blocks themselves": (
        nn.Sequential(
            ConvBlock(3, 4),
            residual_stage(4, 8, 1),
            residual_stage(8, 12, 3),
            residual_stage(12, 16, 1),
            ConvBlock(16, 9),
        ),
        {"*": 5},
    ),
    "equal stages are blocks": (Parts(groups=nn.ModuleList(Stage(4, 3) for _ in range(6))), {"groups.*": 6}),
}

LEAVES = {
    "linear layers": (nn.Sequential(*(nn.Linear(4, 4) for _ in range(12))), {"*": 12}),
    "linear layers deeper in": (
        Parts(encoder=nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), head=nn.Linear(2, 1)),
        {"encoder.*": 3, "head": 1},
    ),
    "parametrized leaves are leaves": (
        Parts(
            convs=nn.ModuleList(
                nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 2, 1), name="weight") for _ in range(9)
            ),
            layers=blocks(3),
        ),
        {"layers.*": 3, "convs.*": 9},
    ),
}
