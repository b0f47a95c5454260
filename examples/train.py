"""Trains a small GPT on characters, with FlashCore's attention and with PyTorch's own.

``python examples/train.py`` needs PyTorch and flashcore-attn. The text is Shakespeare's *Romeo and Juliet*, which is in
the public domain. Both runs begin with equal weights and see equal batches; ``flashcore_attn.compat`` routes the
model's calls of ``scaled_dot_product_attention``, forward and backward. ``--picture FILE`` draws both loss curves.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashcore_attn import compat

PLAY = Path(__file__).with_name("romeo_and_juliet.txt")


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        # (batch, sequence, 3, heads, dim) to three of (batch, heads, sequence, dim), without copies.
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.inner(self.after(x))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int = 128, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def train(text: Tensor, vocabulary: int, given: argparse.Namespace) -> tuple[list[float], float]:
    """The loss of each step, and the seconds of all."""
    torch.manual_seed(given.seed)
    model = GPT(vocabulary, given.length).to(given.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn = torch.Generator().manual_seed(given.seed)
    autocast = torch.autocast("cuda", torch.bfloat16) if given.device == "cuda" else contextlib.nullcontext()
    losses, begun = [], time.perf_counter()
    for _ in range(given.steps):
        starts = torch.randint(len(text) - given.length - 1, (given.batch,), generator=drawn)
        rows = torch.stack([text[start : start + given.length + 1] for start in starts]).to(given.device)
        with autocast:
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, time.perf_counter() - begun


def picture(curves: dict[str, list[float]]) -> str:
    """Both curves as SVG; the second one is dashed, so that both show where they agree."""
    width, height, left, bottom, edge = 640, 320, 52, 44, 12
    steps, high = max(map(len, curves.values())), math.ceil(max(map(max, curves.values())))

    def x(step: float) -> float:
        return left + (width - left - edge) * step / steps

    def y(loss: float) -> float:
        return edge + (height - bottom - edge) * (1 - loss / high)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
    ]
    for tick in range(high + 1):
        parts.append(f'<path d="M{left} {y(tick):.1f}H{width - edge}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick}</text>')
    for i in range(5):
        at = f'x="{x(steps * i / 4):.1f}" y="{height - bottom + 16}" text-anchor="{"end" if i == 4 else "middle"}"'
        parts.append(f"<text {at}>{steps * i // 4}</text>")
    middle = (height - bottom + edge) / 2
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 8}" text-anchor="middle">step</text>')
    parts.append(
        f'<text x="16" y="{middle}" transform="rotate(-90 16 {middle})" text-anchor="middle">'
        "loss, nats a character</text>"
    )
    for i, (name, losses) in enumerate(curves.items()):
        color, dashes = (("#d95f02", ""), ("#1b4f9c", ' stroke-dasharray="6 6"'))[i]
        points = " ".join(f"{x(step + 1):.1f},{y(loss):.1f}" for step, loss in enumerate(losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"{dashes}/>')
        parts.append(f'<path d="M440 {28 + 20 * i}h36" stroke="{color}" stroke-width="1.5"{dashes}/>')
        parts.append(f'<text x="484" y="{32 + 20 * i}">{name}: {losses[-1]:.2f}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--text", type=Path, default=PLAY, help="a text file in place of the play")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="characters of a row")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, help="where to draw both curves, as SVG")
    given = parser.parse_args()
    whole = given.text.read_text(encoding="utf-8")
    letters = sorted(set(whole))
    number = {letter: i for i, letter in enumerate(letters)}
    text = torch.tensor([number[letter] for letter in whole])
    print(f"{len(whole)} characters, {len(letters)} different, on {given.device}")
    curves = {}
    for name in ("PyTorch", "FlashCore"):
        compat.reset_stats()
        with compat.enabled() if name == "FlashCore" else contextlib.nullcontext():
            losses, seconds = train(text, len(letters), given)
        curves[name] = losses
        rate = given.steps * given.batch * given.length / seconds
        print(f"{name:9} loss {losses[0]:.4f} to {losses[-1]:.4f}, {rate:.0f} characters/s")
    stats = compat.stats()
    print(f"FlashCore computed {stats['flashcore']} of {stats['calls']} calls; reasons of others: {stats['reasons']}")
    apart = max(abs(a - b) for a, b in zip(*curves.values()))
    print(f"the losses differ by at most {apart:.2e}")
    if given.picture:
        given.picture.write_text(picture(curves))


if __name__ == "__main__":
    main()
