"""The evolution on a local cluster of two nodes: whole runs, and runs that lose workers and nodes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import flashcore_attn
from flashcore_attn import _flashcore

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install ray")

from ray.cluster_utils import Cluster  # noqa: E402

import flashcore_attn.ray  # noqa: E402

PROBLEM = "1,1,64,64,f16"


@pytest.fixture(scope="module")
def cluster():
    # On a busy machine the raylet starts slowly.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")
    # The loss of a node must be noticed within seconds.
    health = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    head = {"num_cpus": 1, "include_dashboard": False, "_system_config": health}
    nodes = Cluster(initialize_head=True, head_node_args=head)
    nodes.add_node(num_cpus=1)
    nodes.connect()
    yield nodes
    ray.shutdown()
    nodes.shutdown()


# Two copies of SQLite in one process undo each other's locks, so Python's own copy runs in another process.
LOOK = """
import json, sqlite3, sys
facts = sqlite3.connect(sys.argv[1])
rows = lambda sql: [row[0] for row in facts.execute(sql)]
print(json.dumps({
    "no_end": rows("SELECT id FROM candidate c WHERE NOT EXISTS (SELECT 1 FROM rejection WHERE candidate = c.id)"
                   " AND NOT EXISTS (SELECT 1 FROM measurement WHERE candidate = c.id)"),
    "twice": rows("SELECT candidate FROM outcome GROUP BY candidate, stage, problem HAVING count(*) > 1"),
    "reasons": rows("SELECT DISTINCT reason FROM rejection"),
}))
"""


def counted(ledger):
    """Asserts that a ledger is sound, with one end per candidate and no repeated answer; returns its counts."""
    check = json.loads(_flashcore.ledger_check(os.fspath(ledger)))
    assert check["sound"], check["found"]
    look = subprocess.run([sys.executable, "-c", LOOK, os.fspath(ledger)], capture_output=True, text=True, check=True)
    found = json.loads(look.stdout)
    assert found["no_end"] == [] and found["twice"] == []
    assert not {"crashed", "hangs"} & set(found["reasons"]), found
    return check


def test_a_run_that_is_stopped_goes_on(cluster, tmp_path):
    ledger = tmp_path / "flashcore.ledger"

    def stop(state):
        if state["candidates"] >= 3:
            raise KeyboardInterrupt

    wanted = {"candidates": 6, "held_out": [], "early_stop": False, "num_workers": 1}
    with pytest.raises(KeyboardInterrupt):
        flashcore_attn.ray.evolve(PROBLEM, "h200", ledger=ledger, progress=stop, **wanted)
    (line,) = json.loads(_flashcore.ledger_check(os.fspath(ledger)))["runs"]
    assert line["last"][1] == "stopped"
    report = flashcore_attn.ray.evolve(PROBLEM, "h200", ledger=ledger, resume=True)
    assert report["run"] == line["id"]
    (line,) = counted(ledger)["runs"]
    assert line["last"][1] == "finished" and line["candidates"] >= 6


def test_what_cannot_be_run_is_refused(cluster, tmp_path):
    for wanted, says in [
        ({"device": "h300", "candidates": 1}, "h200"),
        ({"problem": "1,2,3", "candidates": 1}, "BATCH,HEADS"),
        ({"configuration": "none", "candidates": 1}, "guided"),
        ({}, "budget"),
        ({"candidates": 0}, "1 and more"),
        ({"candidates": "3"}, "^invalid value '3' for candidates: expected a whole number, 1 and more, not a string"),
        ({"candidates": 1, "num_workers": -1}, "invalid value '-1' for num_workers"),
        ({"candidates": 1, "num_gpus": 0}, "invalid value '0' for num_gpus"),
        ({"candidates": 1, "held_out": PROBLEM}, f"invalid value '{PROBLEM}' for held_out: expected a list of texts"),
        ({"candidates": 1, "held_out": [1]}, "for held_out: expected"),
        ({"candidates": 1, "held_out": ["1,2"]}, "for held_out: expected BATCH,HEADS"),
        ({"candidates": 1, "families": ["wmma"]}, "invalid value 'wmma' for families: expected .*mma, wgmma, small"),
        ({"candidates": 1, "families": "mma"}, "invalid value 'mma' for families"),
        ({"candidates": 1, "seed": -1}, "invalid value '-1' for seed"),
        ({"candidates": 1, "retries": 1.5}, "invalid value '1.5' for retries"),
        ({"candidates": 1, "price_per_hour": -1}, "invalid value '-1' for price_per_hour"),
        ({"minutes": float("nan")}, "invalid value 'nan' for minutes"),
        ({"candidates": 1, "problem": "1,8,99999999999,64,f16"}, "invalid value '1,8,99999999999,64,f16' for problem"),
    ]:
        with pytest.raises(flashcore_attn.ArgumentError, match=says):
            flashcore_attn.ray.evolve(ledger=tmp_path / "flashcore.ledger", **wanted)
    with pytest.raises(flashcore_attn.LedgerError, match="there is no ledger"):
        flashcore_attn.ray.evolve(ledger=tmp_path / "flashcore.ledger", resume=7)
    assert not (tmp_path / "flashcore.ledger").exists()
    with pytest.raises(flashcore_attn.UnsupportedError, match="no GPU"):
        flashcore_attn.ray.evolve(device="cuda", candidates=1, ledger=tmp_path / "flashcore.ledger")
    text = tmp_path / "text"
    text.write_text("hello")
    with pytest.raises(flashcore_attn.LedgerError, match="not a FlashCore ledger"):
        flashcore_attn.ray.evolve(candidates=1, ledger=text)


TASK = {
    "candidate": 3,
    "stage": "check",
    "target": {"model": {"machine": "h200"}},
    "problem": {
        "batch": 1, "heads_q": 1, "heads_kv": 1, "seq_q": 64, "seq_kv": 64, "head_dim": 64, "head_dim_v": 64,
        "dtype": "f16", "mask": "none",
    },
    "subject": {"kernel": {"language": "ptx", "text": "", "launch": ""}},
    "incumbent": None,
    "seconds": 0.0,
}  # fmt: skip


def test_an_evaluation_that_never_comes_back_is_an_answer():
    outcome = json.loads(_flashcore.lost(json.dumps(TASK), "hangs", "no answer", 2.0))
    assert outcome["finding"]["rejected"] == {"stage": "check", "reason": "hangs", "detail": "no answer"}
    outcome = json.loads(_flashcore.evaluate(json.dumps(TASK)))
    assert "rejected" in outcome["finding"] and outcome["candidate"] == 3


class Slow:
    """A cluster on which a task waits for a worker, and then never ends."""

    def __init__(self):
        self.ray, self.begins, self.ended = self, [], []

    def submit(self, task, number, device):
        return number

    def wait(self, references, num_returns, timeout):
        return [], references

    def begun(self):
        return self.begins

    def cancel(self, reference, force):
        self.ended.append(reference)


class Run:
    def __init__(self):
        self.told = []

    def tell(self, outcome):
        self.told.append(json.loads(outcome)["finding"]["rejected"]["reason"])


def test_only_a_task_that_has_begun_can_hang(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(flashcore_attn.ray.time, "monotonic", lambda: clock[0])
    slow, run = Slow(), Run()
    drive = flashcore_attn.ray._Drive(run, slow, 600.0, None)
    drive.pending[1] = flashcore_attn.ray._Pending(json.dumps(TASK), 1)
    for clock[0], begins, ended in [(1e4, [], []), (1e4, [1], []), (1e4 + 600, [], []), (1e4 + 601, [], [1])]:
        slow.begins = begins
        drive.wait()
        assert slow.ended == ended
    assert run.told == ["hangs"] and drive.pending == {}


def test_a_card_is_used_by_a_process_of_its_own_for_each_task(cluster, monkeypatch):
    """A process keeps the GPU that it saw first, and Ray may give the next task another GPU."""

    def where(task, number, begun, version):
        return json.dumps([os.getpid(), ray.get_runtime_context().get_accelerator_ids()["GPU"]])

    monkeypatch.setattr(flashcore_attn.ray, "evaluate", where)
    node = cluster.add_node(num_cpus=1, num_gpus=2)
    try:
        place = flashcore_attn.ray._Cluster("cuda", None, 0)
        found = [json.loads(ray.get(place.submit("", number, True))) for number in range(4)]
        assert len({pid for pid, _ in found}) == 4
        assert all(len(cards) == 1 for _, cards in found)
        # Processes are reused for tasks that need no GPU.
        host = [json.loads(ray.get(place.submit("", number, False))) for number in range(6)]
        assert len({pid for pid, _ in host}) < 6 and all(cards == [] for _, cards in host)
    finally:
        cluster.remove_node(node)


def test_a_wheel_without_the_search_says_how_to_build_one(monkeypatch, tmp_path):
    monkeypatch.setattr(_flashcore, "HAS_SEARCH", False)
    with pytest.raises(flashcore_attn.UnsupportedError, match="cargo xtask wheel --evolve"):
        flashcore_attn.ray.evolve(candidates=1, ledger=tmp_path / "flashcore.ledger")


def test_a_node_of_another_version_is_told():
    with pytest.raises(flashcore_attn.UnsupportedError, match="the driver's node has 0.0.0"):
        flashcore_attn.ray.evaluate("{}", 1, None, "0.0.0")


def workers():
    """The processes that evaluate a task at this moment."""
    titles = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                titles[int(process.name)] = (process / "cmdline").read_bytes()
            except OSError:
                continue  # It has ended.
    return [pid for pid, title in titles.items() if title.startswith(b"ray::evaluate")]


def test_a_run_survives_its_workers_and_a_node(cluster, tmp_path):
    """Must be the last test, because the cluster has one node less afterwards."""
    ledger = tmp_path / "flashcore.ledger"
    (second,) = cluster.worker_nodes
    fallen = []

    def fell(state):
        if state["candidates"] >= 2 and "worker" not in fallen:
            for pid in workers()[:1]:
                os.kill(pid, signal.SIGKILL)
                fallen.append("worker")
        elif "worker" in fallen and state["candidates"] >= 5 and "node" not in fallen:
            cluster.remove_node(second, allow_graceful=False)
            fallen.append("node")

    report = flashcore_attn.ray.evolve(
        PROBLEM, "h200", candidates=10, ledger=ledger, num_workers=2, held_out=[], early_stop=False, progress=fell
    )
    assert fallen == ["worker", "node"]
    assert report["kind"] == "predicted" and report["baseline"]["us"] > 0
    check = counted(ledger)
    (line,) = check["runs"]
    assert line["last"][1] == "finished" and line["candidates"] >= 10
    # A repeated answer is not recorded again.
    tasks = check["facts"]["outcome"]
    again = flashcore_attn.ray.evolve(PROBLEM, "h200", ledger=ledger, resume=line["id"])
    assert again["baseline"] == report["baseline"]
    assert counted(ledger)["facts"]["outcome"] == tasks
