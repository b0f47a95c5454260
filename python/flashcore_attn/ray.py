"""The evolution on a Ray cluster: one process holds the run and its ledger, evaluations are Ray tasks on any node.

::

    import flashcore_attn.ray

    report = flashcore_attn.ray.evolve(problem="1,8,512,64,f16", device="h200", candidates=500)

or ``python -m flashcore_attn.ray --problem 1,8,512,64,f16 --device h200 --candidates 500``. What a run is, and what its
report says, is as of the command ``flashcore evolve``; the ledger is the same, so pages, ``topk`` and ``--resume`` work
on it.

Where evaluations go:

- ``device="h200"`` (or another machine of the time model's table): predicted, on any processor of the cluster.
- ``device="cuda"``: timings with ``num_gpus=1`` each, one at a time on a GPU; candidates are built and checked by
  tasks that need no GPU.
- ``device="cpu"``: measured on the processor of the driver's own node, one at a time; times of different machines do
  not compare.

A task whose worker or node dies is tried again elsewhere, at most ``retries`` times; after that the candidate is
rejected as ``crashed``. An answer that comes twice counts once, by the ledger's key (candidate, stage, problem).
Whatever happens to the driver, the ledger has every answer that it was told, and ``resume=True`` goes on from there.

Every node needs this package installed in the same version; a task on a node that has another ends the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import _flashcore
from ._errors import ArgumentError, UnsupportedError, invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["evolve"]

# Seconds after which a task that has begun counts as hanging. An evaluator ends hanging kernels itself, much
# earlier.
PATIENCE = 600.0
# Longest wait for an answer, in seconds, before times are checked.
LOOK = 0.5


def evolve(
    problem: str | Iterable[str] = "1,8,512,64,f16", device: str = "h200", *, candidates: int | None = None,
    minutes: float | None = None, ledger: str | os.PathLike[str] = "flashcore.ledger", num_workers: int | None = None,
    num_gpus: int | None = None, accelerator_type: str | None = None, held_out: Sequence[str] | None = None,
    configuration: str = "full", seed: int = 1, random_share: float = 0.5, families: Sequence[str] = (),
    early_stop: bool = True, price_per_hour: float | None = None, resume: bool | int = False, retries: int = 2,
    patience: float = PATIENCE, progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs an evolution with its evaluations as Ray tasks, and returns its report.

    Connects to the cluster that ``RAY_ADDRESS`` names, or starts a local one, unless :func:`ray.init` was called
    before.

    Args:
        problem: ``BATCH,HEADS,SEQ,DIM,DTYPE[,MASK]``, as ``flashcore evolve --problem`` takes it, or several of these.
        device: ``"cpu"``, ``"cuda"``, or a machine of the time model's table, as in ``"h200"``.
        candidates, minutes: the budget; at least one of them.
        ledger: the ledger's file, on a disk of this process's node. Network file systems do not lock as SQLite needs.
        num_workers: evaluations side by side that need no GPU; default: the cluster's processors less one.
        num_gpus: GPUs that measure; default: all of the cluster.
        accelerator_type: of a cluster with several kinds of GPU, the one that measures (Ray's name for it): times of
            different kinds do not compare.
        held_out: problems that the search does not see; default: the neighbours of each problem.
        configuration: ``"free"``, ``"guided"`` or ``"full"``.
        seed: what chance begins with.
        random_share: part of the candidates that are random samples, above 0 and at most 0.9.
        families: kernel families to draw from; all where none is named.
        early_stop: whether the run may end before its budget when nothing more is to be expected.
        price_per_hour: of the device, for the ledger's account.
        resume: ``True`` goes on with the latest run of the ledger that is not finished, a number with that run; the
            budget is then the run's own.
        retries: how often a task whose worker died is tried again.
        patience: seconds after which a task that has begun is given up as hanging.
        progress: called with the state of the run after each answer.

    Returns:
        The report that ``flashcore evolve --json`` prints.

    Raises:
        ArgumentError: for a value that no run could have.
        LedgerError: when the ledger cannot be read or written.
        UnsupportedError: when Ray is not installed, or the cluster has no GPU for ``device="cuda"``.
    """
    if resume is False and candidates is None and minutes is None:
        raise ArgumentError("no budget: expected candidates, minutes, or both")
    _check("minutes", minutes, minutes is None or (_number(minutes) and minutes > 0), "a number above 0")
    _check("random_share", random_share, _number(random_share) and 0 < random_share <= 0.9, "above 0, at most 0.9")
    _check("patience", patience, _number(patience) and patience > 0, "a number above 0")
    price = price_per_hour
    _check("price_per_hour", price, price is None or (_number(price) and price >= 0), "a number of at least 0")
    counts = {"candidates": candidates, "num_workers": num_workers, "num_gpus": num_gpus}
    for name, count in counts.items():
        _check(name, count, count is None or (_whole(count) and count >= 1), "a whole number, 1 and more")
    for name, count in {"seed": seed, "retries": retries}.items():
        _check(name, count, _whole(count) and 0 <= count < 2**64, "a whole number, 0 and more")
    _check("resume", resume, isinstance(resume, bool) or (_whole(resume) and resume >= 1), "a bool, or a run's number")
    problems = _words("problem", [problem] if isinstance(problem, str) else problem)
    unseen = None if held_out is None else _words("held_out", held_out)
    drawn = _words("families", families)
    # Checked before a cluster is started, because starting one takes long.
    if not _flashcore.HAS_SEARCH:
        raise UnsupportedError("this wheel has no search; `cargo xtask wheel --evolve` builds one that has it")
    _flashcore.check_problems("problem", problems)
    _flashcore.check_problems("held_out", unseen or [])
    cluster = _Cluster(device, accelerator_type, retries)
    wanted = {
        "ledger": os.fspath(Path(ledger).absolute()),
        "device": device,
        "card": cluster.card(),
        "problems": problems,
        "held_out": unseen,
        "candidates": candidates,
        "minutes": minutes,
        "seed": seed,
        "configuration": configuration,
        "random_share": random_share,
        "families": drawn,
        "early_stop": early_stop,
        "price_per_hour": price_per_hour,
        "workers": max(1, cluster.processors() - 1) if num_workers is None else num_workers,
        "devices": max(1, cluster.gpus()) if num_gpus is None else num_gpus,
        "resume": None if resume is False else (0 if resume is True else resume),
    }
    run = _flashcore.Evolution(json.dumps(wanted))
    return _Drive(run, cluster, patience, progress).to_the_end()


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _words(name: str, value: object) -> list[str]:
    """A list of strings. A single string is rejected, because it would be read as a list of its letters."""
    words = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else None
    fits = words is not None and all(isinstance(word, str) for word in words)
    _check(name, value, fits, "a list of texts, also of one")
    return words or []


def _check(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise invalid(name, value, f"{expected}, not a string" if isinstance(value, str) else expected)


def evaluate(task: str, number: int, begun: Any, version: str) -> str:
    """Evaluates a task in a Ray worker process: JSON in, JSON out. Reports to ``begun`` first."""
    if version != _flashcore.__version__:
        raise UnsupportedError(f"a node has flashcore-attn {_flashcore.__version__}, the driver's node has {version}")
    begun.tell.remote(number)
    return _flashcore.evaluate(task)


class _Begun:
    """An actor that knows which tasks have begun. The time for which a task waits is not part of its run."""

    def __init__(self) -> None:
        self._numbers: list[int] = []

    def tell(self, number: int) -> None:
        self._numbers.append(number)

    def take(self) -> list[int]:
        """The numbers of the tasks that have begun since the last call."""
        numbers, self._numbers = self._numbers, []
        return numbers


class _Cluster:
    """Ray, and the placement of each kind of task."""

    def __init__(self, device: str, accelerator_type: str | None, retries: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise UnsupportedError("flashcore_attn.ray needs Ray; install it with: pip install ray", "ray") from error
        self.ray = ray
        if not ray.is_initialized():
            ray.init(log_to_driver=False)
        self.device = device
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._begun = ray.remote(_Begun).options(num_cpus=0, max_restarts=-1, scheduling_strategy=here).remote()
        host: dict[str, Any] = {"num_cpus": 1, "max_retries": retries}
        timed = dict(host)
        if device == "cuda":
            # A process keeps the GPU that it saw first, so each task gets its own process. options() would
            # set `max_calls` too late.
            timed.update(num_gpus=1, max_calls=1)
            if accelerator_type is not None:
                timed["accelerator_type"] = accelerator_type
        if device == "cpu":
            host["scheduling_strategy"] = timed["scheduling_strategy"] = here
        self._host, self._timed = ray.remote(**host)(evaluate), ray.remote(**timed)(evaluate)
        self._describe = ray.remote(**timed)(_flashcore_card)

    def processors(self) -> int:
        return int(self.ray.cluster_resources().get("CPU", 1))

    def gpus(self) -> int:
        return int(self.ray.cluster_resources().get("GPU", 0))

    def card(self) -> dict[str, Any] | None:
        """The description of the GPU to optimise for, taken on a node that has it."""
        if self.device != "cuda":
            return None
        if self.gpus() == 0:
            raise UnsupportedError('device = "cuda": the cluster has no GPU', "no_gpu")
        card: dict[str, Any] = json.loads(self.ray.get(self._describe.remote()))
        return card

    def submit(self, task: str, number: int, device: bool) -> Any:
        function = self._timed if device else self._host
        return function.remote(task, number, self._begun, _flashcore.__version__)

    def begun(self) -> list[int]:
        """Tasks that have begun, or begun again on another worker, since the last call."""
        with contextlib.suppress(self.ray.exceptions.RayError):  # the actor is being started again
            numbers: list[int] = self.ray.get(self._begun.take.remote())
            return numbers
        return []


def _flashcore_card() -> str:
    # A task sees only the GPU that Ray has assigned to it.
    return _flashcore.describe_card(0)


class _Pending:
    """A task under way, and the time since which it runs. Waiting for a worker does not count."""

    def __init__(self, task: str, number: int) -> None:
        self.task, self.number = task, number
        self.began: float | None = None

    def seconds(self, now: float) -> float:
        return 0.0 if self.began is None else now - self.began


class _Drive:
    """The loop between the engine and the cluster: tasks out, outcomes in."""

    def __init__(
        self,
        run: _flashcore.Evolution,
        cluster: _Cluster,
        patience: float,
        progress: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.run, self.cluster, self.patience, self.progress = run, cluster, patience, progress
        #: Tasks that are under way.
        self.pending: dict[Any, _Pending] = {}
        self.submitted = 0

    def to_the_end(self) -> dict[str, Any]:
        try:
            while True:
                said = json.loads(self.run.ask())
                if said == "done":
                    break
                if said == "wait":
                    self.wait()
                else:
                    self.submitted += 1
                    pending_task = _Pending(json.dumps(said["task"]), self.submitted)
                    self.pending[self.cluster.submit(pending_task.task, pending_task.number, said["device"])] = (
                        pending_task
                    )
        except BaseException:
            # The ledger has every recorded outcome. Tasks that are still under way are not waited for.
            self.abandon()
            raise
        report: dict[str, Any] = json.loads(self.run.report())
        return report

    def wait(self) -> None:
        ray = self.cluster.ray
        done, _ = ray.wait(list(self.pending), num_returns=1, timeout=LOOK)
        now, begun = time.monotonic(), set(self.cluster.begun())
        for pending_task in self.pending.values():
            if pending_task.number in begun:
                pending_task.began = now
        for reference in done:
            pending_task = self.pending.pop(reference)
            self.tell(self.outcome(reference, pending_task.task, pending_task.seconds(now)))
        for reference, pending_task in list(self.pending.items()):
            if pending_task.seconds(now) > self.patience:
                del self.pending[reference]
                ray.cancel(reference, force=True)
                detail = f"no answer within {self.patience:g} s; its worker was ended"
                self.tell(_flashcore.lost(pending_task.task, "hangs", detail, pending_task.seconds(now)))

    def outcome(self, reference: Any, task: str, seconds: float) -> str:
        ray = self.cluster.ray
        try:
            outcome: str = ray.get(reference)
            return outcome
        except ray.exceptions.RayError as error:
            if isinstance(getattr(error, "cause", None), UnsupportedError):
                raise error.cause from error  # a fault of that node, not of the candidate
            # The workers died at each attempt, or their device is unusable: this rejects the candidate and
            # does not end the run.
            why = str(getattr(error, "cause", None) or error).strip().splitlines()
            return _flashcore.lost(
                task, "crashed", f"no worker came back with it: {why[0] if why else error!r}", seconds
            )

    def tell(self, outcome: str) -> None:
        self.run.tell(outcome)
        if self.progress is not None:
            self.progress(json.loads(self.run.progress()))

    def abandon(self) -> None:
        for reference in self.pending:
            # Ray itself may have failed.
            with contextlib.suppress(Exception):
                self.cluster.ray.cancel(reference, force=True)
        self.pending.clear()
        self.run.stop()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flashcore_attn.ray",
        description="Evolve kernels on a Ray cluster: the cluster that RAY_ADDRESS names, or a local one.",
    )
    parser.add_argument(
        "--problem",
        action="append",
        help="as `flashcore evolve --problem` takes it, such as 1,8,512,64,f16; may be repeated",
    )
    parser.add_argument("--device", default="h200", help="cpu, cuda, or a machine that is predicted, as in h200")
    parser.add_argument("--candidates", type=int, help="budget: candidates of both arms")
    parser.add_argument("--minutes", type=float, help="budget: minutes")
    parser.add_argument("--ledger", default="flashcore.ledger", help="the ledger's file, on this node's own disk")
    parser.add_argument("--num-workers", type=int, help="evaluations side by side that need no GPU")
    parser.add_argument("--num-gpus", type=int, help="GPUs that measure")
    parser.add_argument("--accelerator-type", help="the kind of GPU that measures, as Ray names it")
    parser.add_argument("--held-out", action="append", help="a problem that the search does not see")
    parser.add_argument("--configuration", default="full", help="free, guided or full")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--random-share", type=float, default=0.5, help="part of the candidates that are random samples"
    )
    parser.add_argument("--family", action="append", default=[], help="a kernel family to draw from")
    parser.add_argument("--no-early-stop", action="store_true", help="use the whole budget")
    parser.add_argument("--price", type=float, help="of an hour of the device")
    parser.add_argument(
        "--resume", nargs="?", type=int, const=True, default=False, metavar="RUN", help="go on with a run"
    )
    parser.add_argument("--json", action="store_true", help="print the whole report as one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m flashcore_attn.ray``."""
    args = _parser().parse_args(arguments)
    minutes = 2.0 if args.candidates is None and args.minutes is None and not args.resume else args.minutes
    try:
        report = evolve(
            args.problem or "1,8,512,64,f16",
            args.device,
            candidates=args.candidates,
            minutes=minutes,
            ledger=args.ledger,
            num_workers=args.num_workers,
            num_gpus=args.num_gpus,
            accelerator_type=args.accelerator_type,
            held_out=args.held_out,
            configuration=args.configuration,
            seed=args.seed,
            random_share=args.random_share,
            families=args.family,
            early_stop=not args.no_early_stop,
            price_per_hour=args.price,
            resume=args.resume,
            progress=None if args.json else _show,
        )
    except (ArgumentError, UnsupportedError, OSError) as error:
        print(f"flashcore_attn.ray: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print("flashcore_attn.ray: stopped; --resume goes on", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(report))
        return 0
    print(file=sys.stderr)
    for case in report.get("problems", [report]):
        print(_line(case))
    print(f"run {report['run']} of {report['ledger']}; flashcore report --ledger {report['ledger']} shows it")
    return 0


def _show(state: dict[str, Any]) -> None:
    best = state["best"]
    best = "none yet" if best is None else f"{best[0]:.2f} µs ({best[1]:.3f} times as fast)"
    text = (
        f"{state['candidates']} candidates, {state['rejected']} rejected, {state['under_way']} under way; best {best}"
    )
    print(f"\r{text:<100}", end="", file=sys.stderr, flush=True)


def _line(case: dict[str, Any]) -> str:
    speedup, interval = case.get("speedup"), case.get("interval")
    if speedup is None:
        return f"{case['words']} on {case['device']}: nothing raced"
    low, high = interval or (float("nan"), float("nan"))
    return (
        f"{case['words']} on {case['device']}: {speedup:.3f} times as fast ({low:.3f} to {high:.3f}), {case['verdict']}"
    )


if __name__ == "__main__":
    sys.exit(main())
