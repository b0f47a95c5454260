"""Runs FlashAttention's own tests of the forward pass against FlashCore.

``python python/tests/flash_attention FOLDER`` takes a folder with a checkout of flash-attention, whose tests are run
unchanged. The names that they import come from :mod:`shim`. Without a GPU, the device ``cuda`` means ``cpu``.

Each parameter passes, fails, or is not applicable, with the reason: dropout, the backward pass, caches and paged keys,
and tests of FlashAttention's compiler are no part of FlashCore's forward pass. Where a test compares gradients
after it has compared outputs, all gradients are zero on both sides, so that they say nothing. The tests have some
hundred thousand parameters; ``--sample N`` draws N of each test.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import shim

FILES = (
    "tests/test_flash_attn.py",
    "hopper/test_flash_attn.py",
    "tests/cute/test_score_mod.py",
    "tests/cute/test_mask_mod.py",
    "tests/cute/test_flash_attn_varlen.py",
)

# Words in the names of tests of features that FlashCore's forward pass does not have.
NOT_APPLICABLE = {
    "kvcache": "keys appended to a cache",
    "paged": "paged keys",
    "splitkv": "FlashAttention-2's split of keys, which its test asks for through its cache",
    "combine": "FlashAttention's kernel that merges parts",
    "bwd": "backward pass",
    "backward": "backward pass",
    "deterministic": "backward pass",
    "dq_write_order": "backward pass",
    "race_condition": "backward pass",
    "bw_compatibility": "PyTorch's stable ABI",
    "cache_separates": "FlashAttention-4's compiler",
    "recompilation": "FlashAttention-4's compiler",
    "compute_block_sparsity": "FlashAttention-4's kernel that builds block lists",
    "compact_block_sparse": "FlashAttention-4's kernel that builds block lists",
    "sm90_block_sparse": "FlashAttention-4's choice of tiles",
    "sm100": "FlashAttention-4's choice of tiles",
    "cluster": "FlashAttention-3's choice of tiles",
    "generator_arg": "dropout",
}


class Outcomes:
    """A pytest plugin: samples parameters, counts outcomes."""

    def __init__(self, sample: int, most: int) -> None:
        self.sample, self.most = sample, most
        self.counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.reasons: collections.Counter[str] = collections.Counter()
        self.failures: list[str] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        tests: dict[tuple[str, str], list[pytest.Function]] = collections.defaultdict(list)
        for item in items:
            tests[_test(item)].append(item)
        kept = []
        for test, parameters in tests.items():
            self.counts[test]["parameters"] = len(parameters)
            reason = next((why for word, why in NOT_APPLICABLE.items() if word in test[1]), None)
            if reason is not None:
                self.counts[test]["not applicable"] = len(parameters)
                self.reasons[reason] += len(parameters)
                continue
            small = [item for item in parameters if _rows(item) <= self.most]
            if len(small) < len(parameters):
                self.counts[test]["longer"] = len(parameters) - len(small)
            drawn = small
            if self.sample and len(small) > self.sample:
                drawn = random.Random(str(test)).sample(small, self.sample)
            kept += drawn
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Function):
        try:
            return (yield)
        except shim.ForwardDone:
            return None
        except NotImplementedError as error:
            # PyTorch's FlexAttention, with which a test compares gradients after the outputs.
            if "does not support backward on CPU" not in str(error):
                raise
            return None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Function, call: pytest.CallInfo):
        report = yield
        counts = self.counts[_test(item)]
        if report.skipped:
            why = str(call.excinfo.value) if call.excinfo else ""
            reason = why.removeprefix(shim.NOT_APPLICABLE) if why.startswith(shim.NOT_APPLICABLE) else "skips itself"
            counts["not applicable"] += 1
            self.reasons[reason] += 1
        elif report.failed:
            counts["failed"] += 1
            self.failures.append(f"{item.nodeid}\n    {type(call.excinfo.value).__name__}: {call.excinfo.value}"[:600])
        elif report.when == "call":
            counts["passed"] += 1
        return report

    def table(self) -> str:
        """Counts by test, the reasons, and what failed."""
        columns = ("parameters", "passed", "failed", "not applicable", "longer")
        lines = [f"| test | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        total: collections.Counter[str] = collections.Counter()
        for (file, name), counts in sorted(self.counts.items()):
            lines.append(f"| {file} {name} | " + " | ".join(str(counts[column]) for column in columns) + " |")
            total.update(counts)
        lines.append("| **all** | " + " | ".join(str(total[column]) for column in columns) + " |")
        lines.append("")
        lines += [f"- not applicable, {count}: {reason}" for reason, count in self.reasons.most_common()]
        lines += [f"- FAILED {failure}" for failure in self.failures]
        return "\n".join(lines)


def _test(item: pytest.Function) -> tuple[str, str]:
    return "/".join(item.path.parts[-2:]), item.originalname


def _rows(item: pytest.Function) -> int:
    values = getattr(item, "callspec", None)
    names = ("seqlen", "seqlen_q", "seqlen_k", "seqlen_kv", "max_seq_len")
    return max([values.params[name] for name in names if values and name in values.params], default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of flash-attention")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="draw N parameters of each test; 0 for all")
    parser.add_argument("--longest", type=int, default=1 << 30, metavar="ROWS", help="leave out longer sequences")
    parser.add_argument("--file", action="append", choices=FILES, help="only this file; may be repeated")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match, as in pytest")
    args = parser.parse_args()
    if missing := [file for file in FILES if not (args.folder / file).is_file()]:
        print(f"{args.folder} lacks {', '.join(missing)}; expected a checkout of flash-attention", file=sys.stderr)
        return 2
    os.environ["FLASH_ATTENTION_DISABLE_BACKWARD"] = "TRUE"
    shim.install(args.folder)
    outcomes = Outcomes(args.sample, args.longest)
    for file in args.file or FILES:
        path = args.folder / file
        sys.path.insert(0, str(path.parent))
        options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--no-header", "--tb=no"]
        pytest.main([*options, f"--rootdir={args.folder}", *(["-k", args.k] if args.k else []), str(path)], [outcomes])
        sys.path.remove(str(path.parent))
        for name in ("test_flash_attn", "test_util", "padding"):
            sys.modules.pop(name, None)
    print(outcomes.table())
    return 1 if outcomes.failures else 0


if __name__ == "__main__":
    sys.exit(main())
