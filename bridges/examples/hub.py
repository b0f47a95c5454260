"""Attention from a folder of the kernels hub, without a network:

cargo xtask hub --out target/hub
python hub.py target/hub
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from kernels import get_local_kernel


def main():
    kernel = get_local_kernel(Path(sys.argv[1]))
    q, k, v = (torch.randn(2, 64, heads, 32, requires_grad=True) for heads in (8, 2, 2))
    out = kernel.flash_attn_func(q, k, v, causal=True)
    out.square().sum().backward()

    heads_first = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    theirs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    difference = (out - theirs.transpose(1, 2)).abs().max().item()
    print(f"the largest difference from PyTorch is {difference:.1e}; q has a gradient of shape {tuple(q.grad.shape)}")
    if difference > 1e-5:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
