"""Threads of a call on the CPU: their number, calls after a fork, PyTorch's own threads, and Ctrl-C."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TWO = {"RAYON_NUM_THREADS": "2"}

TENSOR = "__import__('torch').from_numpy(draw(512))"

START = """
import os, signal, sys, threading, time
import numpy as np
import flashcore_attn
F = flashcore_attn.flash_attn_func
def draw(rows):
    return np.random.default_rng(1).standard_normal((1, rows, 8, 32), dtype="float32")
def tasks():
    return len(os.listdir("/proc/self/task"))
"""


def ran(code, **environment):
    """The output of a program that begins with ``START``."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", START + code],
        env={**os.environ, **TWO, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_process_gets_as_many_threads_as_share_a_call(threads):
    code = "before = tasks(); q = draw(512); F(q, q, q); F(q, q, q); print(tasks() - before)"
    assert ran(code, RAYON_NUM_THREADS=str(threads)) == [str(threads - 1)], "the calling thread is one of them"


def test_a_short_call_and_doctor_start_no_thread():
    # By name: CUDA's driver, which `doctor` opens, starts threads of its own.
    code = """
q = draw(8)
F(q, q, q)
flashcore_attn.doctor(sys.stderr)
named = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(sum(name.startswith("flashcore") for name in named))
q = draw(512)
F(q, q, q)
named = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
print(sum(name.startswith("flashcore") for name in named))
"""
    assert ran(code) == ["0", "1"]


@pytest.mark.skipif(os.getuid() != 0, reason="the test needs root to switch to a user with a thread limit")
@pytest.mark.parametrize("torch", [False, True])
def test_without_threads_one_computes(torch):
    if torch:
        pytest.importorskip("torch")
    code = """
import resource
q = draw(512)
F(q[:, :4], q[:, :4], q[:, :4])
before = tasks()
os.setgid(65534)
os.setuid(65534)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
out = F(q, q, q)
print(np.isfinite(np.asarray(out)).all(), tasks() - before)
"""
    assert ran(code if not torch else code.replace("draw(512)", TENSOR)) == ["True", "0"]


FORKS = """
hung = 0
for attempt in range(int(sys.argv[1])):
    middle = os.fork()
    if middle == 0:
        signal.alarm(60)
        q = draw(128)
        first = threading.Thread(target=lambda: F(q, q, q))
        first.start()
        time.sleep(0.00002 * (attempt % 20))
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            F(q, q, q)
            os._exit(0)
        hung = os.waitpid(child, 0)[1]
        first.join()
        os._exit(1 if hung else 0)
    hung += os.waitpid(middle, 0)[1] != 0
print(hung)
"""


def test_a_fork_during_the_first_call_leaves_a_child_that_computes():
    """``FLASHCORE_FORKS=200`` makes more attempts."""
    attempts = os.environ.get("FLASHCORE_FORKS", "24")
    assert ran(FORKS.replace("sys.argv[1]", attempts)) == ["0"]


def test_a_fork_between_calls_of_pytorch_leaves_a_child_that_computes():
    pytest.importorskip("torch")
    code = """
import torch
torch.set_num_threads(2)
q = torch.from_numpy(draw(512))
torch.randn(512, 512) @ torch.randn(512, 512)
out = F(q, q, q)
child = os.fork()
if child == 0:
    signal.alarm(60)
    # The child has none of OpenMP's threads; its plan may be another one.
    os._exit(0 if np.abs(F(q, q, q).numpy() - out.numpy()).max() < 1e-6 else 1)
print(os.waitpid(child, 0)[1])
"""
    assert ran(code) == ["0"]


def test_tensors_are_computed_on_pytorchs_threads():
    pytest.importorskip("torch")
    code = """
import torch
torch.set_num_threads(3)
q = torch.from_numpy(draw(512))
for _ in range(3):
    (torch.randn(512, 512) @ torch.randn(512, 512)).exp()
before = tasks()
outs = [F(q, q, q)]
print(tasks() - before)
def alone():
    torch.set_num_threads(1)
    outs.append(F(q, q, q))
others = [threading.Thread(target=lambda: outs.append(F(q, q, q))) for _ in range(8)]
others.append(threading.Thread(target=alone))
[thread.start() for thread in others]
[thread.join() for thread in others]
print(len(outs), all(torch.allclose(out, outs[0], atol=1e-6) for out in outs))
"""
    assert ran(code) == ["0", "10", "True"]


CTRL_C = """
# Python ignores Ctrl-C if the process that started the tests did, as `nohup` in a script does.
signal.signal(signal.SIGINT, signal.default_int_handler)
def press():
    time.sleep(0.5)
    pressed.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
pressed = []
short = [x[:, :512] for x in (q, k, v)]
F(*short)
threading.Thread(target=press).start()
try:
    F(q, k, v)
    print("computed")
except KeyboardInterrupt:
    print("ended", time.monotonic() - pressed[0] < 60)
print(np.isfinite(np.asarray(F(*short))).all())
"""


@pytest.mark.parametrize("torch", [False, True])
def test_ctrl_c_ends_a_call_that_would_take_hours(torch):
    expanded = "q = k = v = np.broadcast_to(draw(1), (1, 1 << 22, 8, 32))"
    if torch:
        pytest.importorskip("torch")
        expanded = "import torch; q = k = v = torch.from_numpy(draw(1)).expand(1, 1 << 22, 8, 32)"
    assert ran(expanded + CTRL_C) == ["ended", "True", "True"]


def test_ctrl_c_is_seen_while_another_thread_computes_the_last_task():
    """One query row whose keys form two tasks of some minutes each."""
    expanded = "q = draw(1)[:, :, :1]; k = v = np.broadcast_to(q, (1, 1 << 34, 1, 32))"
    short = CTRL_C.replace("x[:, :512]", "x[:, :1]")
    assert ran(expanded + short) == ["ended", "True", "True"]


def test_a_signal_handler_may_compute_and_the_call_goes_on():
    code = """
q = draw(2048)
expected = F(q, q, q)
inner = []
signal.signal(signal.SIGALRM, lambda *_: inner.append(F(q[:, :64], q[:, :64], q[:, :64])))
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
same = all(np.array_equal(F(q, q, q), expected) for _ in range(4))
signal.setitimer(signal.ITIMER_REAL, 0)
print(same, all(np.array_equal(part, inner[0]) for part in inner), len(inner) > 0)
"""
    assert ran(code) == ["True", "True", "True"]


def test_a_handlers_exception_is_the_calls():
    code = """
q = np.broadcast_to(draw(1), (1, 1 << 22, 8, 32))
def late(*_):
    raise TimeoutError("late")
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, 0.2)
try:
    F(q, q, q)
except TimeoutError as error:
    print(error)
"""
    assert ran(code) == ["late"]


def test_many_threads_at_once_agree():
    code = """
q = draw(256)
expected = F(q, q, q)
wrong = []
def often():
    wrong.extend(not np.array_equal(F(q, q, q), expected) for _ in range(10))
threads = [threading.Thread(target=often) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(len(wrong), any(wrong))
"""
    assert ran(code) == ["160", "False"]
