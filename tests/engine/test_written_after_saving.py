"""Operators that write to a tensor after autograd has saved it."""

import pytest
import torch
from helpers import nothing_held
from recomputing import ROWS, WIDTH, Net, train
from torch import Tensor, nn
from torch.nn import functional as F
from whole_model import equal, offload

aten = torch.ops.aten


def noise(x):
    return torch.full_like(x, 0.5)


def statistics():
    return torch.zeros(WIDTH), torch.ones(WIDTH)


def fill_halves(x):
    out = torch.zeros(ROWS, WIDTH)
    out[: ROWS // 2] = torch.sin(x[: ROWS // 2])
    out[ROWS // 2 :] = torch.cos(x[ROWS // 2 :])
    return out


class Rnn(nn.Module):
    """A recurrent layer with dropout between its two levels."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


OPERATORS = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "rrelu in place": lambda x: F.rrelu_(x * 1.0, training=True),
    "rrelu with noise": lambda x: aten.rrelu_with_noise(x, noise(x), 0.1, 0.4, True),
    "native_dropout": lambda x: aten.native_dropout(x, 0.5, True)[0],
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "fractional_max_pool2d": lambda x: F.fractional_max_pool2d(x.view(1, 1, ROWS, WIDTH), 2, 4),
    "fractional_max_pool3d": lambda x: F.fractional_max_pool3d(x.view(1, 1, 8, 8, 8), 2, 2),
    "batch_norm": lambda x: F.batch_norm(x, *statistics(), training=True),
    "batch_norm_with_update": lambda x: aten._batch_norm_with_update(x, x[0].exp(), x[1], *statistics(), 0.1, 1e-5)[0],
    "instance_norm": lambda x: F.instance_norm(x.view(1, WIDTH, ROWS), *statistics()),
    "gamma": lambda x: aten._standard_gamma(x.exp()),
    "normal": lambda x: torch.normal(x, 1.0) + x,
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "logsigmoid": F.logsigmoid,
    # Operators in place that autograd allows are no false alarm.
    "relu_": lambda x: torch.relu_(x * 2.0),
    "in place before saving": lambda x: torch.sin((x * 1.0).add_(1.0)),
    "in place on the result": lambda x: (x * torch.ones(ROWS, WIDTH)).mul_(torch.full((ROWS, WIDTH), 2.0)),
    "in place on a copy": lambda x: torch.sin(x) + x.clone().add_(1.0),
    "masked_fill_": lambda x: torch.softmax((x * 1.0).masked_fill_(x > 0.5, 0.5), -1),
    "halves of a buffer": lambda x: fill_halves(x),
    "dropout in place": lambda x: F.dropout(x * 1.0, 0.5, inplace=True),
}
each_operator = pytest.mark.parametrize("name", [*OPERATORS, "lstm", "gru"])


class Block(nn.Module):
    """A linear, an operator, and something behind it that saves."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        rnns = {"lstm": nn.LSTM, "gru": nn.GRU}
        self.operator = Rnn(rnns[name]) if name in rnns else OPERATORS[name]

    def forward(self, x: Tensor) -> Tensor:
        y = self.operator(self.linear(x).sin())
        return x + y.sum() + F.pad(y.flatten(), (0, ROWS * WIDTH - y.numel())).view(ROWS, WIDTH).cos()


@each_operator
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "recompute": False},
        {"fraction": 1.0, "recompute": True},
        {"memory_budget": "1 KiB"},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_gradients_of_a_model(name, options):
    torch.manual_seed(0)
    model = Net(lambda: Block(name))
    want = train(model, 4)
    with offload(model, layers="blocks.?", min_bytes=0, **options) as handle:
        equal(train(model, 4), want)
        nothing_held(handle)
