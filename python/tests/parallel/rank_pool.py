"""Processes that are the ranks of a group over gloo. They are started once for all tests of this folder."""

from __future__ import annotations

import importlib
import multiprocessing
import socket
import traceback

MOST = 4


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(rank, ranks, port, seconds, backend="gloo"):
    """Joins the default group of a process."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=seconds),
    )


def serve(rank, port, pipe):
    """Runs functions of modules in this folder, in groups of the first ranks."""
    import torch.distributed as dist

    join(rank, MOST, port, 120)
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, MOST + 1)}
    while (task := pipe.recv()) is not None:
        module, name, ranks, arguments = task
        try:
            function = getattr(importlib.import_module(module), name)
            pipe.send((True, function(groups[ranks], *arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    dist.destroy_process_group()


class Ranks:
    """Runs a function on each of some ranks."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(MOST):
            here, there = context.Pipe()
            process = context.Process(target=serve, args=(rank, port, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def __call__(self, ranks, function, *arguments):
        """The results of ``function(group, *arguments)``, by rank."""
        for pipe in self.pipes[:ranks]:
            pipe.send((function.__module__, function.__name__, ranks, arguments))
        told = [pipe.recv() for pipe in self.pipes[:ranks]]
        for rank, (succeeded, result) in enumerate(told):
            assert succeeded, f"rank {rank}:\n{result}"
        return [result for _, result in told]

    def close(self):
        for pipe in self.pipes:
            pipe.send(None)
        for process in self.processes:
            process.join(60)
