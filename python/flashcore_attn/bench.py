"""The benchmark is the package ``flashcore-bench`` now: ``python -m flashcore_bench``."""

import sys

MOVED = (
    "flashcore_attn.bench is the package flashcore-bench now: `pip install flashcore-bench`, then "
    "`python -m flashcore_bench` with the same arguments"
)
if __name__ == "__main__":
    sys.exit(MOVED)
raise ImportError(MOVED)
