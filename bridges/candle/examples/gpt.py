"""The GPT of gpt.rs in PyTorch: prints the loss of each step, from equal weights and letters."""

import pathlib

import numpy
import torch
from torch.nn import functional

TEXT = (pathlib.Path(__file__).parents[3] / "LICENSE-APACHE").read_bytes()
VOCABULARY, WIDTH, HEADS, LAYERS = 128, 64, 4, 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class Gpt(torch.nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.letters, self.positions = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(rows, WIDTH)
        for i in range(LAYERS):
            setattr(self, f"layer_{i}", Layer())
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def loss(self, text: torch.Tensor) -> torch.Tensor:
        x = self.letters(text[:, :-1]) + self.positions.weight
        for i in range(LAYERS):
            x = getattr(self, f"layer_{i}")(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), text[:, 1:].flatten())


def number(place: int, count: int) -> numpy.ndarray:
    z = (numpy.arange(count, dtype=numpy.uint32) + numpy.uint32(place * 1_000_003)) * numpy.uint32(0x9E3779B1)
    z = (z ^ (z >> 15)) * numpy.uint32(0x85EBCA77)
    return (z ^ (z >> 13)) / 2.0**31 - 1.0


def train(steps: int, batch: int, rows: int) -> list[float]:
    gpt = Gpt(rows)
    with torch.no_grad():
        for place, (name, weight) in enumerate(sorted(gpt.named_parameters())):
            if weight.ndim == 1:
                weight.fill_(float("norm" in name and name.endswith("weight")))
            else:
                values = number(place, weight.numel()) / weight.shape[-1] ** 0.5
                weight.copy_(torch.from_numpy(values).view_as(weight))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=3e-3, weight_decay=0.01)
    losses = []
    for step in range(steps):
        starts = [(step * batch + i) * 613 % (len(TEXT) - rows - 1) for i in range(batch)]
        text = torch.tensor([list(TEXT[start : start + rows + 1]) for start in starts])
        loss = gpt.loss(text)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


for case in [(30, 2, 40), (100, 2, 128)]:
    print(*case, end=": ")
    print(*(f"{loss:.6f}" for loss in train(*case)))
