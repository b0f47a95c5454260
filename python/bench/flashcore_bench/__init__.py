"""Races FlashCore against every other attention library that is installed: ``python -m flashcore_bench --help``.

All contestants run in one process on equal inputs, packed into CUDA graphs. FlashCore's harness launches and times them
in turn, flushes the caches, changes the inputs, and compares the outputs with attention in float64.
"""
