"""Serves a small Llama-shaped model with random weights: continuous batching over a paged cache.

``python examples/serve.py`` needs PyTorch and flashcore-attn. Prompts and answers have random lengths. Each step
packs the prompts that are admitted and one token of each running request into one batch, and one call of
``flash_attn_with_kvcache`` per layer rotates the queries and keys, appends the keys and values to their pages, and
computes attention. At the end the tokens are compared with those of the same model without a cache.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import time

import torch
import torch.nn.functional as F
from torch import Tensor

import flashcore_attn


@dataclasses.dataclass(frozen=True)
class Shape:
    """The model's shape: that of Llama with fewer and narrower layers."""

    vocabulary: int = 512
    width: int = 256
    layers: int = 4
    heads: int = 8
    heads_kv: int = 2
    dim: int = 32
    inner: int = 688
    longest: int = 512


class Model:
    """Llama's layers: RMS norm, rotary embedding, grouped queries, SwiGLU."""

    def __init__(self, shape: Shape, device: str, dtype: torch.dtype) -> None:
        self.shape = shape
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=generator) * columns**-0.5).to(device, dtype)

        rows_kv = shape.heads_kv * shape.dim
        self.embedding = weight(shape.vocabulary, shape.width) * 4
        self.layers = [
            {
                "q": weight(shape.heads * shape.dim, shape.width), "k": weight(rows_kv, shape.width),
                "v": weight(rows_kv, shape.width), "o": weight(shape.width, shape.heads * shape.dim),
                "gate": weight(shape.inner, shape.width), "up": weight(shape.inner, shape.width),
                "down": weight(shape.width, shape.inner),
            }
            for _ in range(shape.layers)
        ]  # fmt: skip
        self.head = weight(shape.vocabulary, shape.width)
        frequencies = 10_000.0 ** (-torch.arange(0, shape.dim, 2) / shape.dim)
        angles = torch.arange(shape.longest)[:, None] * frequencies
        self.cos, self.sin = angles.cos().to(device, dtype), angles.sin().to(device, dtype)

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.shape.width,))

    def logits(self, tokens: Tensor, attention) -> Tensor:
        """Logits of packed tokens. ``attention(layer, q, k, v)`` rotates, remembers and attends."""
        x = F.embedding(tokens, self.embedding)
        for number, layer in enumerate(self.layers):
            normal = self.norm(x)
            q, k, v = (F.linear(normal, layer[name]).unflatten(-1, (-1, self.shape.dim)) for name in "qkv")
            x = x + F.linear(attention(number, q, k, v).flatten(-2), layer["o"])
            normal = self.norm(x)
            x = x + F.linear(F.silu(F.linear(normal, layer["gate"])) * F.linear(normal, layer["up"]), layer["down"])
        return F.linear(self.norm(x), self.head)

    def without_cache(self, tokens: Tensor) -> Tensor:
        """Logits of one sequence, by PyTorch's attention."""

        def rotated(x: Tensor) -> Tensor:
            cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
            first, second = x.chunk(2, -1)
            return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

        def attention(_: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self.shape.heads // self.shape.heads_kv
            k, v = (x.repeat_interleave(group, 1) for x in (rotated(k), v))
            out = F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in (rotated(q), k, v)), is_causal=True)
            return out.transpose(0, 1)

        return self.logits(tokens, attention)


@dataclasses.dataclass
class Request:
    prompt: list[int]
    wanted: int
    made: list[int] = dataclasses.field(default_factory=list)
    pages: list[int] = dataclasses.field(default_factory=list)
    cached: int = 0

    def new(self) -> list[int]:
        """The tokens that are not in the cache: the prompt, or the last one made."""
        return (self.prompt + self.made)[self.cached :]


class Server:
    """Admits requests while there are pages for all of their tokens, and computes one step for all of them."""

    def __init__(self, model: Model, pages: int, page: int, device: str, dtype: torch.dtype) -> None:
        shape = model.shape
        self.model, self.page, self.device = model, page, device
        self.cache = torch.zeros(shape.layers, 2, pages, page, shape.heads_kv, shape.dim, device=device, dtype=dtype)
        self.free = list(range(pages))
        self.running: list[Request] = []

    def admit(self, waiting: list[Request]) -> None:
        while waiting:
            needed = -(-(len(waiting[0].prompt) + waiting[0].wanted) // self.page)
            if needed > len(self.free):
                return
            request = waiting.pop(0)
            request.pages = [self.free.pop() for _ in range(needed)]
            self.running.append(request)

    def step(self) -> list[Request]:
        """Makes one token of each running request; returns those that are done."""
        batch = self.running
        rows = [request.new() for request in batch]
        starts = self.ints([0, *itertools.accumulate(map(len, rows))])
        widest = max(len(request.pages) for request in batch)
        table = self.ints([request.pages + [0] * (widest - len(request.pages)) for request in batch])
        lengths = self.ints([request.cached for request in batch])
        most = max(map(len, rows))

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashcore_attn.flash_attn_with_kvcache(
                q, *self.cache[layer], k, v, self.model.cos, self.model.sin, lengths, page_table=table,
                cu_seqlens_q=starts, cu_seqlens_k_new=starts, max_seqlen_q=most, causal=True, rotary_interleaved=False,
            )  # fmt: skip

        tokens = torch.tensor(list(itertools.chain(*rows)), device=self.device)
        last = self.model.logits(tokens, attention)[starts[1:].long() - 1]
        for request, new, token in zip(batch, rows, last.argmax(-1).tolist()):
            request.cached += len(new)
            request.made.append(token)
        done = [request for request in batch if len(request.made) == request.wanted]
        for request in done:
            self.free += request.pages
        self.running = [request for request in batch if len(request.made) < request.wanted]
        return done

    def ints(self, numbers) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)


def checked(model: Model, done: list[Request], slack: float) -> tuple[int, int]:
    """The tokens that equal those without a cache, and those whose logit is within ``slack`` of the best."""
    equal = close = 0
    for request in done:
        tokens = request.prompt + request.made
        logits = model.without_cache(torch.tensor(tokens[:-1], device=model.embedding.device)).float()
        for at, token in enumerate(request.made, len(request.prompt) - 1):
            best = int(logits[at].argmax())
            equal += token == best
            close += token != best and bool(logits[at, best] - logits[at, token] <= slack)
    return equal, close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=64, help="the most tokens of an answer")
    parser.add_argument("--pages", type=int, default=64, help="pages of the cache, which all requests share")
    parser.add_argument("--page", type=int, default=16, help="tokens of a page")
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.device.startswith("cuda") else torch.float32
    model = Model(Shape(), given.device, dtype)
    drawn = random.Random(0)
    waiting = [
        Request([drawn.randrange(model.shape.vocabulary) for _ in range(drawn.randint(1, 120))],
                drawn.randint(1, given.tokens))
        for _ in range(given.requests)
    ]  # fmt: skip
    most = max(-(-(len(x.prompt) + x.wanted) // given.page) for x in waiting)
    if given.pages < most:
        parser.error(f"--pages {given.pages} has no room for the longest request, which needs {most}")
    server = Server(model, given.pages, given.page, given.device, dtype)
    done: list[Request] = []
    steps = widest = 0
    with torch.no_grad():
        begun = time.perf_counter()
        while waiting or server.running:
            server.admit(waiting)
            steps, widest = steps + 1, max(widest, len(server.running))
            done += server.step()
        seconds = time.perf_counter() - begun
        # Logits of bfloat16 round differently where the order of sums differs.
        equal, close = checked(model, done, 0.0 if dtype == torch.float32 else 0.1)
    total = sum(len(request.made) for request in done)
    prompts = sum(len(request.prompt) for request in done)
    print(f"{len(done)} requests, {prompts} prompt tokens, {total} new tokens, {steps} steps, up to {widest} at once")
    print(f"{total / seconds:.0f} new tokens/s on {given.device} in {dtype}")
    print(f"{equal} of {total} tokens equal those without a cache; {close} more are as good within rounding")
    if equal + close != total:
        raise SystemExit("tokens differ from those without a cache")


if __name__ == "__main__":
    main()
