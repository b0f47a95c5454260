"""Errors, decoding, models of PyTorch, and the forecast, on several ranks."""

from __future__ import annotations

import json
import multiprocessing

import pytest

pytest.importorskip("torch")

import others
import rank_pool


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("rows", 6, "for the rows of a shard: expected"),
        ("batch", 2, "for the batch: expected"),
        ("dim", 16, "for the head_dim of q: expected"),
        ("heads", 4, "for the heads of q: expected"),
        ("dtype", "float16", "for the dtype: expected"),
        ("causal", False, "for the options: expected"),
        ("softcap", 3.0, "for the options: expected"),
        ("split", "contiguous", "for the split: expected"),
        ("schedule", "ring", "for the schedule: expected"),
    ],
)
def test_ranks_that_differ_are_an_error_on_each(ranks, what, value, words):
    for told in ranks(3, others.message_of, (1,), what, value):
        assert told is not None and told[0] == "ArgumentError" and words in told[1] and "rank 1" in told[1], told


def test_a_rank_that_refuses_is_an_error_on_each(ranks):
    told = ranks(3, others.message_of, (2,), "dtype", "float64")
    assert told[2] == ("DTypeError", "q is of torch.float64; expected torch.float16, torch.bfloat16, torch.float32")
    assert told[0] == told[1] == ("ArgumentError", "rank 2 refused its arguments; its error says why")


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("schedule", "tree", "for schedule: expected auto or all_gather or ring or ulysses or ulysses_ring"),
        ("ulysses_degree", 3, "for ulysses_degree: expected a divisor of 2, the ranks, or None"),
        ("split", "stripes", "for split: expected zigzag or contiguous or documents"),
        ("window_size", (1, 2, 3), "for window_size: expected"),
        ("head_slices", 3, "for head_slices: expected a divisor of heads_k = 2"),
        ("softmax_scale", "1", "for softmax_scale: expected"),
    ],
)
def test_bad_options_are_refused(ranks, what, value, words):
    for told in ranks(2, others.message_of, (0, 1), what, value):
        assert told is not None and told[0] == "ArgumentError" and words in told[1], told


def test_ranks_without_a_divisor_have_no_rings_of_neighbours(ranks):
    for kind, message in ranks(3, others.message_of, (0, 1, 2), "schedule", "ulysses_ring"):
        assert kind == "UnsupportedError" and "3 ranks have no divisor but 1 and themselves" in message


@pytest.mark.parametrize(("each_time", "number"), [(False, 2), (True, 3)])
def test_headers_are_compared_once_for_a_shape_on_gpus(ranks, each_time, number):
    assert ranks(2, others.agreements, each_time) == [number] * 2


def test_a_rank_that_goes_back_to_a_shape_is_an_error_on_each(ranks):
    assert ranks(2, others.message_of, (0, 1), "rows", 6) == [None, None]
    assert ranks(2, others.message_of, (), "rows", 6) == [None, None]
    for told in ranks(2, others.message_of, (1,), "rows", 6):
        assert told is not None and told[0] == "ArgumentError" and "for the rows of a shard" in told[1]


def test_a_compiled_step(ranks):
    assert ranks(2, others.of_compiled_step) == [(0.0, 2)] * 2


@pytest.mark.parametrize(("number", "ends", "call"), [(3, True, "forward"), (2, False, "backward")])
def test_a_rank_that_ends_or_is_late_is_an_error_within_the_time_out(number, ends, call):
    context = multiprocessing.get_context("spawn")
    port = rank_pool.free_port()
    pipes, processes = [], []
    for rank in range(number):
        here, there = context.Pipe()
        process = context.Process(target=others.of_failure, args=(rank, number, port, there), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    assert [pipe.recv() for pipe in pipes] == ["ready"] * number
    if ends:
        processes[-1].terminate()
        processes[-1].join()
    for pipe in pipes[:-1]:
        pipe.send(call)
    for rank, message in enumerate([pipe.recv() for pipe in pipes[:-1]]):
        assert message is not None and f"rank {rank} could not " in message and "another rank ended" in message, message
    for process in processes:
        process.terminate()
        process.join()


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_decoding(ranks, number, sink):
    told = ranks(number, others.of_decoding, (24, 5, 0), sink)
    assert max(worst for worst, _ in told) < 2e-6
    assert len({bits for _, bits in told}) == 1, "all ranks have equal bits"


def test_decoding_with_ranks_that_differ(ranks):
    for kind, message in ranks(2, others.of_decoding_that_differs):
        assert kind == "ArgumentError" and "for the rows of a shard: expected" in message


@pytest.mark.parametrize("split", ["zigzag", "contiguous", "documents"])
def test_unshard(ranks, split):
    assert ranks(3, others.of_unsharding, split) == [True] * 3


def test_dtensors(ranks):
    assert max(ranks(2, others.of_dtensor)) < 1e-5


@pytest.mark.parametrize("with_pytorch", [False, True])
def test_an_unchanged_model(ranks, with_pytorch):
    assert max(ranks(2, others.of_model, with_pytorch)) < 1e-5


def test_masks_and_dropout_of_models_are_refused(ranks):
    assert ranks(2, others.refused_sdpa) == [["attn_mask", "dropout_p"]] * 2


def test_explain(ranks):
    text, other = ranks(2, others.of_explanation)
    assert text == other
    assert text.startswith("constants: ") and text.count("*") == 1
    for schedule in ("all_gather", "ring", "ulysses"):
        assert schedule in text


def test_the_example_trains(ranks):
    for sharded, whole in ranks(2, others.of_example, 6, 64):
        assert sharded[-1] < sharded[0] - 1, "it learns"
        assert max(abs(a - b) for a, b in zip(sharded, whole)) < 1e-4


def test_the_suite_of_the_benchmark(ranks):
    pytest.importorskip("flashcore_bench")
    for number, rows, table in ranks(2, others.of_suite):
        assert len({row["problem"] for row in rows}) == number and table.count("\n") == len(rows) + 1
        for row in rows:
            assert row["fault"] is None and row["samples"] >= 5 and row["efficiency"] > 0, row
            assert row["suite"] == "parallel" and row["ranks"] == 2
            assert 0 < row["predicted_efficiency"] <= 1


def test_the_benchmark_times_calls_in_turn(ranks):
    pytest.importorskip("flashcore_bench")
    for medians, kept, made in ranks(2, others.of_clock):
        assert medians[0] == pytest.approx(medians[1], rel=0.01)
        assert kept == [39, 39] and made == [2 + 20 * (39 + 9)] * 2


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_benchmark_predicts_times_for_more_gpus(count, capsys):
    main = pytest.importorskip("flashcore_bench.__main__").main
    assert main(["--suite", "parallel", "--predict", str(count), "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["ranks"] for row in rows} == {count} and all(0 < row["predicted_efficiency"] <= 1 for row in rows)
    chosen = [(row["problem"], row["pass"]) for row in rows if row["chosen"]]
    assert sorted(chosen) == sorted({(row["problem"], row["pass"]) for row in rows})
    # One GPU reads as many bytes as all ranks together.
    decode = next(row for row in rows if row["pass"] == "decode")
    assert decode["us_predicted"] * decode["predicted_efficiency"] * count == pytest.approx(2**32 / 4.55e6)
    with pytest.raises(SystemExit):
        main(["--suite", "parallel", "--predict", "1"])
    assert "expected 2 to 1024" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--suite", "parallel", "--predict", "4", "--seconds", "3"])
    assert "--seconds" in capsys.readouterr().err
