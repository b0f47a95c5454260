"""Trains a small GPT whose sequences are sharded over ranks, and compares its loss with that of one rank.

    torchrun --nproc-per-node 2 examples/train_sharded.py

needs `flashcore-attn` and PyTorch. It runs on GPUs, one for each rank, or on the CPU. The text is the source of
PyTorch's optimizers. The model has no line about ranks but two: its attention and the positions of its rows.
"""

import argparse
import inspect

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from flashcore_attn import flash_attn_func, parallel


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, rotate, attend):
        q, k, v = (part.unflatten(2, (self.heads, -1)) for part in self.qkv(self.norms[0](x)).chunk(3, 2))
        x = x + self.out(attend(rotate(q), rotate(k), v).flatten(2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self, width=128, heads=4, layers=2):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.dim = width // heads

    def forward(self, tokens, positions, attend):
        angles = positions[:, None] * 1000.0 ** (-torch.arange(0, self.dim, 2, device=tokens.device) / self.dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]

        def rotate(x):
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)

        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, rotate, attend)
        return self.head(x)


def text():
    """Bytes of source code that every installation has."""
    source = "".join(inspect.getsource(getattr(torch.optim, name)) for name in ("SGD", "Adam", "RMSprop", "LBFGS"))
    return torch.tensor(list(source.encode()))


def train(steps, rows, device, group):
    """The loss of each step. Without a group, of one rank that has whole sequences."""
    torch.manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data, draw = text(), torch.Generator().manual_seed(1)
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if group else (1, 0)
    split = parallel.split_sequence(rows, ranks)

    def attend(q, k, v):
        if group is None:
            return flash_attn_func(q, k, v, causal=True)
        return parallel.context_parallel_attn_func(q, k, v, group, split, causal=True)

    positions = parallel.positions(split, rank, device)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(data) - rows - 1, (4,), generator=draw)
        batch = torch.stack([data[start : start + rows + 1] for start in starts.tolist()]).to(device)
        # Labels are shifted before they are sharded.
        tokens, labels = (parallel.shard(x, split, rank) for x in (batch[:, :-1], batch[:, 1:]))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(tokens, positions, attend)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / (4 * rows)
        optimizer.zero_grad()
        loss.backward()
        told = loss.detach()
        if group:  # the loss and the gradients are sums over the rows of all ranks
            for x in (told, *(p.grad for p in model.parameters())):
                dist.all_reduce(x, group=group)
        optimizer.step()
        losses.append(told)
    return torch.stack(losses).tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", type=int, default=512, help="tokens of a sequence, a multiple of the ranks")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if has_gpu else "gloo")
    rank, device = dist.get_rank(), torch.device("cpu")
    if has_gpu:
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    sharded = train(args.steps, args.rows, device, dist.group.WORLD)
    if rank == 0:
        whole = train(args.steps, args.rows, device, None)
        print("step  sharded  one rank")
        for step in range(0, args.steps, max(1, args.steps // 6)):
            print(f"{step:4}  {sharded[step]:7.4f}  {whole[step]:7.4f}")
        worst = max(abs(a - b) for a, b in zip(sharded, whole))
        accepted = 0.02 if has_gpu else 0.002
        print(f"first and last loss {sharded[0]:.4f} and {sharded[-1]:.4f}; largest difference {worst:.1e}")
        if worst > accepted or sharded[-1] >= sharded[0]:
            raise SystemExit(f"the losses differ by more than {accepted}, or the model did not learn")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
