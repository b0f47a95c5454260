//! `minimal`: one query row a CTA, 2870 µs on the seeds' L4.
//!
//! What the seeds believed: a correct but naive start, "simple, fully parallel within block"; only its grid was thought
//! to be wasteful. What was really wrong: each CTA reads all keys and values of its head for a single row, so nothing
//! is used twice, and a lane walks along its own key: 32 lanes touch 32 rows, 32 sectors for 64 bytes. What the emulator
//! shows: 32 sectors a request in the score loop, and half of the block idle in the loop over values.
//!
//! The seeds give the grid and no code. Chosen: 128 threads; the row of scores in shared memory; a key a thread; maximum
//! and sum by a tree in shared memory; a column a thread for the output, `for (d = tid; d < 64; d += 128)`.

use problem::Problem;
use ptx::{Builder, CmpOp, F32, Kernel, Pointer, R32, Shared};

use super::RungPlan;
use super::common::{self, Cta, DIM, ROW_BYTES, UNROLL, exp_difference, load_half, store_half};
use crate::Arch;

const THREADS: u32 = 128;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    let seq = problem.seq_q as u32;
    common::kernel(problem, arch, RungPlan::Minimal, 1, THREADS, |k, cta| body(k, cta, seq))
}

fn body(k: &mut Builder, cta: &Cta, seq: u32) {
    let q = k.shared_array("q_row", 2, ROW_BYTES);
    let scores = k.shared_array("scores", 4, 4 * seq);
    let tree = k.shared_array("tree", 4, 4 * THREADS);
    load_query(k, cta, q);
    let largest = score_keys(k, cta, q, scores);
    let largest = block_reduce(k, cta, tree, largest, |k, a, b| k.max(a, b));
    let sum = exponentiate(k, cta, scores, largest);
    let sum = block_reduce(k, cta, tree, sum, |k, a, b| k.add(a, b));
    let has_column = k.setp_u(CmpOp::Lt, cta.thread, DIM);
    k.if_(has_column, |k| {
        let total = weigh(k, cta, scores);
        let result: F32 = k.div(total, sum);
        let to = k.index(cta.out, cta.thread, 2);
        store_half(k, to, result);
    });
}

fn load_query(k: &mut Builder, cta: &Cta, q: Shared) {
    let has_element = k.setp_u(CmpOp::Lt, cta.thread, DIM);
    k.if_(has_element, |k| {
        let (from, to) = (k.index(cta.q, cta.thread, 2), k.shared_index(q, cta.thread, 2));
        let value: ptx::R16 = k.ld(from);
        k.st(to, value);
    });
    k.bar_sync();
}

/// Scores of keys `tid`, `tid + 128`, …; the thread's largest.
fn score_keys(k: &mut Builder, cta: &Cta, q: Shared, scores: Shared) -> F32 {
    let largest: F32 = k.mov(f32::NEG_INFINITY);
    k.for_range(cta.thread, cta.seq, THREADS, |k, key| {
        let row = k.index(cta.keys, key, ROW_BYTES);
        let sum: F32 = k.mov(0.0f32);
        k.for_range(0, DIM, UNROLL, |k, d| {
            let (q, row) = (k.shared_index(q, d, 2), k.index(row, d, 2));
            for u in 0..i64::from(UNROLL) {
                let (a, b) = (load_half(k, q.at(2 * u)), load_half(k, row.at(2 * u)));
                k.mad_to(sum, a, b, sum);
            }
        });
        let score: F32 = k.mul(sum, cta.scale);
        let to = k.shared_index(scores, key, 4);
        k.st(to, score);
        k.max_to(largest, largest, score);
    });
    largest
}

/// Scores become exp(S − max) in place; the thread's sum.
fn exponentiate(k: &mut Builder, cta: &Cta, scores: Shared, largest: F32) -> F32 {
    let sum: F32 = k.mov(0.0f32);
    k.for_range(cta.thread, cta.seq, THREADS, |k, key| {
        let at = k.shared_index(scores, key, 4);
        let score: F32 = k.ld(at);
        let p = exp_difference(k, score, largest);
        k.st(at, p);
        k.add_to(sum, sum, p);
    });
    sum
}

/// Column `tid` of P V: a walk down the values, 64 neighbouring halves a step for two warps.
fn weigh(k: &mut Builder, cta: &Cta, scores: Shared) -> F32 {
    let total: F32 = k.mov(0.0f32);
    let column = k.index(cta.values, cta.thread, 2);
    k.for_range(0, cta.seq, UNROLL, |k, key| {
        let (p, value) = (k.shared_index(scores, key, 4), k.index(column, key, ROW_BYTES));
        for u in 0..i64::from(UNROLL) {
            let p: F32 = k.ld(p.at(4 * u));
            let v = load_half(k, value.at(i64::from(ROW_BYTES) * u));
            k.mad_to(total, p, v, total);
        }
    });
    total
}

/// The value of all threads combined, in all of them: `for (s = 64; s > 0; s >>= 1)` over shared memory.
fn block_reduce(
    k: &mut Builder,
    cta: &Cta,
    tree: Shared,
    value: F32,
    combine: impl FnOnce(&mut Builder, F32, F32) -> F32,
) -> F32 {
    let mine = k.shared_index(tree, cta.thread, 4);
    k.st(mine, value);
    k.bar_sync();
    let stride: R32 = k.mov(THREADS / 2);
    k.do_while(|k| {
        let adds = k.setp_u(CmpOp::Lt, cta.thread, stride);
        k.if_(adds, |k| {
            let other = k.shared_index(mine, stride, 4);
            let (a, b) = (k.ld(mine), k.ld(other));
            let both = combine(k, a, b);
            k.st(mine, both);
        });
        k.bar_sync();
        let half: R32 = k.shr_u(stride, 1);
        k.mov_to(stride, half);
        k.setp_u(CmpOp::Gt, stride, 0)
    });
    let result = k.ld(tree);
    // The tree is used again, and must not be overwritten before all have read it.
    k.bar_sync();
    result
}
