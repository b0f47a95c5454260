"""The suite ``gpt``: training steps of a GPT model on random tokens, with each library's attention."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashcore_attn import flash_attn_func

from ._features import Call, Work, _flash_attention
from ._problem import OURS
from ._training import _distance, pair

#: Attention of ``(batch, sequence, heads, dim)``, causal.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):  # type: ignore[misc]
    """Attention and a feed-forward network, each after a layer norm and beside a residual."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.out(attention(q, k, v).flatten(2))
        made: Tensor = x + self.down(F.gelu(self.up(self.norms[1](x)), approximate="tanh"))
        return made


class Gpt(nn.Module):  # type: ignore[misc]
    """GPT-3's shape; the last map is the embedding."""

    def __init__(self, layers: int, hidden: int, heads: int, words: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList([Block(hidden, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(hidden)
        for x in self.parameters():
            if x.ndim == 2:
                nn.init.normal_(x, std=0.02)

    def loss(self, tokens: Tensor, attention: Attention) -> Tensor:
        """The cross-entropy of each token's successor."""
        x = self.words(tokens[:, :-1]) + self.places.weight
        for block in self.blocks:
            x = block(x, attention)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


@dataclasses.dataclass
class Steps(Work):
    """Forward pass, backward pass and AdamW. A call returns the gradient of the first block's map to q, k and v.

    The learning rate is 0, so that all contestants train equal weights; the optimiser does all of its work.
    """

    model: Any = None
    tokens: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    graphs = False
    mode = staticmethod(torch.enable_grad)

    def prepared(self, attention: Attention) -> Call:
        probe = self.model.blocks[0].qkv.weight
        is_cuda = self.tokens.is_cuda
        optimiser = torch.optim.AdamW(self.model.parameters(), lr=0.0, fused=is_cuda)

        def step() -> Tensor:
            self.model.loss(self.tokens, attention).backward()
            gradient: Tensor = probe.grad
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            return gradient

        return step

    @property
    def flops(self) -> float:
        """FLOP of the linear maps, 6 for each weight and token, and of attention in both passes."""
        weights = sum(x.numel() for x in self.model.parameters()) - self.model.places.weight.numel()
        of_attention = 3.5 * 2.0 * self.pairs * 2 * self.model.norm.weight.numel() * len(self.model.blocks)
        return 6.0 * weights * self._count() + of_attention

    def _count(self) -> int:
        return self.tokens.shape[0] * (self.tokens.shape[1] - 1)

    def rates(self, us: float) -> dict[str, float]:
        return super().rates(us) | {"tokens_per_s": self._count() / us * 1e6}

    def error(self, out: Tensor, rows: int = 32) -> tuple[float, float]:
        """The relative error (Frobenius norm) of the gradient against a model in float32 with PyTorch's attention,
        and that of PyTorch's attention in the model's type."""
        exact, plain = self._reference
        return _distance(out, exact), _distance(plain, exact)

    @property
    def _reference(self) -> tuple[Tensor, Tensor]:
        if "reference" not in self.__dict__:
            dtype = self.model.norm.weight.dtype
            plain = self._gradient()
            with torch.no_grad():
                self.model.float()
            exact = self._gradient().double()
            with torch.no_grad():
                self.model.to(dtype)  # which loses nothing: the weights were of that type
            self.__dict__["reference"] = exact, plain
        found: tuple[Tensor, Tensor] = self.__dict__["reference"]
        return found

    def _gradient(self) -> Tensor:
        weight = self.model.blocks[0].qkv.weight
        (made,) = torch.autograd.grad(self.model.loss(self.tokens, _sdpa(None)), (weight,))
        return made.detach()


def _sdpa(backend: str | None) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen = backend is not None and q.is_cuda
        with sdpa_kernel(getattr(SDPBackend, backend or "MATH")) if chosen else contextlib.nullcontext():
            heads_first = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    return attend


def _of(function: Any) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = function(q, k, v, causal=True)
        made: Tensor = result[0] if isinstance(result, tuple) else result
        return made

    return attend


def works(device: str, dtype: torch.dtype, shrunk: int) -> Iterator[Work]:
    """1.3 billion parameters: 24 layers, 16 heads of 128, 4096 tokens."""
    layers, heads, words, length = (24, 16, 50304, 4096) if shrunk == 1 else (2, 2, 64, max(4096 // shrunk, 8))
    torch.manual_seed(0)
    with torch.device(device):
        model = Gpt(layers, 128 * heads, heads, words, length).to(dtype)
        tokens = torch.randint(words, (1, length + 1))
    count = sum(x.numel() for x in model.parameters())
    name = f"gpt {count / 1e9:.2g} B parameters, {layers} layers H{heads} S{length} D128"
    none = torch.empty(0, device=device)
    work = Steps(name, none, none, none, {}, model=model, tokens=tokens, pairs=length * (length + 1) / 2)
    attentions: dict[str, Callable[[], Attention]] = {
        OURS: lambda: _of(flash_attn_func),
        "fa4": lambda: _of(_flash_attention(4)),
        "fa3+fa4": lambda: _of(pair),
    }
    for backend in ("CUDNN", "FLASH", "EFFICIENT"):
        attentions[f"sdpa-{backend.lower()}"] = lambda backend=backend: _sdpa(f"{backend}_ATTENTION")  # type: ignore[misc]
    for who, attention in attentions.items():
        work.calls[who] = lambda attention=attention: work.prepared(attention())  # type: ignore[misc]
    yield work
