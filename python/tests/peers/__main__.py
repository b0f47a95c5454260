"""Runs the attention tests of other libraries against FlashCore, unchanged.

``python python/tests/peers PEER FOLDER`` takes a folder with a checkout of the peer. The names that its tests import
come from the module of the peer's name beside this file. Without a GPU, the device ``cuda`` means ``cpu``.

Each parameter passes, fails, is refused by FlashCore with an error that names the reason, or is not applicable: it
tests a feature that FlashCore does not have. The tests have some hundred thousand parameters; ``--sample N`` draws N of
each test. The tests need PyTorch, pytest, einops and what else they import.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import runner

PEERS = ("flash_attention", "flashinfer", "flex_attention", "vllm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a checkout of the peer")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="draw N parameters of each test; 0 for all")
    parser.add_argument("--longest", type=int, default=1 << 30, metavar="ROWS", help="leave out longer sequences")
    parser.add_argument("--file", action="append", metavar="FILE", help="only this file; may be repeated")
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests whose names match, as in pytest")
    args = parser.parse_args()
    peer = importlib.import_module(f"peer_{args.peer}")
    files = args.file or peer.FILES
    if missing := [file for file in files if not (args.folder / file).is_file()]:
        print(f"{args.folder} lacks {', '.join(missing)}; expected a checkout of {args.peer}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        runner.cpu_for_cuda()
    peer.install(args.folder)
    outcomes = runner.Outcomes(args.sample, args.longest, peer.NOT_APPLICABLE)
    for file in files:
        path = args.folder / file
        if hasattr(peer, "prepared"):
            path = peer.prepared(path)
        sys.path.insert(0, str(path.parent))
        options = ["-q", "-p", "no:cacheprovider", "--noconftest", "--no-header", "--tb=line"]
        options += [f"--rootdir={args.folder}", *(["-k", args.k] if args.k else [])]
        pytest.main([*options, str(path)], [outcomes, peer])
        sys.path.remove(str(path.parent))
        for name in peer.OF_A_FILE:
            sys.modules.pop(name, None)
    print(outcomes.table())
    return 1 if outcomes.failures else 0


if __name__ == "__main__":
    sys.exit(main())
