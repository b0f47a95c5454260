"""Attention of sequences that are sharded over several GPUs, or over processes on a CPU.

>>> from flashcore_attn import parallel
>>> x, split = parallel.shard_zigzag(tokens, group)  # this rank's rows
>>> out = parallel.context_parallel_attn_func(q, k, v, group, split, causal=True)

Everything runs over a process group of ``torch.distributed``: NCCL on GPUs, gloo on CPUs. Importing this module imports
PyTorch.
"""

from .. import _torch as _torch  # before `_autograd`, which it imports in turn
from ._attention import SCHEDULES, context_parallel_attn_func, explain
from ._cost import Costs, ScheduleForecast, chosen, decode_forecast, forecasts
from ._decode import decode_attn_func, merge_over_group
from ._plan import GlobalBand
from ._sdpa import sharded_sdpa
from ._split import SequenceSplit, positions, shard, shard_zigzag, split_sequence, unshard

__all__ = [
    "SCHEDULES",
    "Costs",
    "GlobalBand",
    "ScheduleForecast",
    "SequenceSplit",
    "chosen",
    "context_parallel_attn_func",
    "decode_attn_func",
    "decode_forecast",
    "explain",
    "forecasts",
    "merge_over_group",
    "positions",
    "shard",
    "shard_zigzag",
    "sharded_sdpa",
    "split_sequence",
    "unshard",
]
