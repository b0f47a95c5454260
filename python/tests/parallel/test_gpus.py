"""Ranks on several GPUs of one host."""

from __future__ import annotations

import multiprocessing

import pytest

pytest.importorskip("torch")

import on_gpus
import rank_pool
import torch

pytestmark = pytest.mark.needs_cuda


def test_decoding_merges_from_the_memory_of_peers():
    ranks = torch.cuda.device_count()
    if ranks < 2:
        pytest.skip("there is one GPU")
    context, port = multiprocessing.get_context("spawn"), rank_pool.free_port()
    pipes = []
    for rank in range(ranks):
        here, there = context.Pipe()
        context.Process(target=on_gpus.serve, args=(rank, ranks, port, there), daemon=True).start()
        pipes.append(here)
    told = [pipe.recv() for pipe in pipes]
    for rank, (succeeded, found) in enumerate(told):
        assert succeeded, f"rank {rank}:\n{found}"
    for worst, bits, of_nccl in (found for _, found in told):
        assert worst < 1e-2 and bits == told[0][1][1] and not of_nccl, (worst, of_nccl)
