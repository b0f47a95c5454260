"""FlashCore and every other attention present, in one race: ``python -m flashcore.bench --help``.

All run in one process on the same inputs, packed into CUDA graphs; FlashCore's own harness launches and times them in
turn, flushes the caches, feeds fresh inputs, and holds what they write against attention in float64.
"""
