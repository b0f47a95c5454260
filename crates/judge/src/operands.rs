//! Values of a problem's inputs beside Q, K and V.

use half::{bf16, f16};
use problem::{
    ElementType, LengthArray, Operand, OperandMap, OperandSpec, Problem, Sequence, SideLengths, Tensor,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::values::{Inputs, Values};

/// Random values of the inputs beside Q, K and V. Lengths are uneven: a length of no rows is followed by the
/// maximum length and, if the batch has room, by a length of one row. Pages are in random order, each at most
/// once if the pool has enough; entries of the page table that no sequence needs are no pages.
pub fn draw_others(problem: &Problem, seed: u64) -> OperandMap<Values> {
    let mut rng = SmallRng::seed_from_u64(seed ^ 0x6c65_6e67_7468_7321);
    let mut drawn: OperandMap<Values> =
        problem.other_inputs().map(|spec| (spec.operand, draw(problem, spec, &mut rng))).collect();
    if let Some(pages) = problem.storage.pages() {
        let mut order: Vec<i32> = (0..pages.count as i32).collect();
        (1..order.len()).rev().for_each(|last| order.swap(last, rng.random_range(0..=last)));
        let entries = problem.batch * pages.per_sequence;
        let table: Vec<i32> = order.into_iter().cycle().take(entries).collect();
        drawn.insert(Operand::PageTable, Values::I32(table));
        replace_pages(problem, &mut drawn, |needed| !needed);
    }
    drawn
}

/// Replaces half of the entries of the page table that sequences need by entries that are no pages.
pub fn spoil_pages(problem: &Problem, inputs: &mut OperandMap<Values>, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    replace_pages(problem, inputs, |needed| needed && rng.random_bool(0.5));
}

/// Replaces entries of the page table by negative and large numbers. `replaces` gets whether a sequence needs
/// an entry.
fn replace_pages(problem: &Problem, drawn: &mut OperandMap<Values>, mut replaces: impl FnMut(bool) -> bool) {
    let Some(pages) = problem.storage.pages() else { return };
    let sequences = Inputs { operands: drawn.clone() }.sequences(problem);
    let Some(Values::I32(table)) = drawn.get_mut(Operand::PageTable) else { return };
    let wrong = [-1, i32::MAX, pages.count as i32, i32::MIN, 2_147_480_000];
    for (of_sequence, Sequence { kv, .. }) in table.chunks_mut(pages.per_sequence.max(1)).zip(sequences) {
        let needed = kv.start / pages.rows..(kv.start + kv.len).div_ceil(pages.rows);
        for (index, entry) in of_sequence.iter_mut().enumerate() {
            if replaces(kv.len > 0 && needed.contains(&index)) {
                *entry = wrong[index % wrong.len()];
            }
        }
    }
}

fn draw(problem: &Problem, spec: OperandSpec, rng: &mut SmallRng) -> Values {
    let OperandSpec { operand, dtype, elements } = spec;
    let mut floats = |low: f32, high: f32| (0..elements).map(|_| rng.random_range(low..high)).collect();
    match (operand, dtype) {
        (Operand::Lengths(array), _) => Values::I32(lengths(problem, array, rng)),
        (Operand::RngState, _) => Values::I32((0..elements).map(|_| rng.random()).collect()),
        (Operand::Sinks, _) => Values::F32(floats(-3.0, 3.0)),
        // Rows without a key, and rows with most of their weight on either side.
        (Operand::LseBefore, _) => {
            let without = |x: f32| if x > 7.0 { f32::NEG_INFINITY } else { x };
            Values::F32(floats(-8.0, 9.0).into_iter().map(without).collect())
        }
        _ if operand.is_factor() => Values::F32(floats(0.3, 2.0)),
        (_, ElementType::I32) => Values::I32((0..elements).map(|_| rng.random_range(0..4)).collect()),
        (_, ElementType::U8) => Values::U8((0..elements).map(|_| rng.random_range(0..2)).collect()),
        (_, ElementType::F16) => Values::F16(floats(-2.0, 2.0).into_iter().map(f16::from_f32).collect()),
        (_, ElementType::Bf16) => Values::Bf16(floats(-2.0, 2.0).into_iter().map(bf16::from_f32).collect()),
        (_, ElementType::F32 | ElementType::E4m3 | ElementType::E5m2) => Values::F32(floats(-2.0, 2.0)),
    }
}

fn lengths(problem: &Problem, array: LengthArray, rng: &mut SmallRng) -> Vec<i32> {
    let (q, kv) = (problem.lengths.q, problem.lengths.kv);
    let mut used = |most: usize| {
        let mut drawn: Vec<i32> = (0..problem.batch).map(|_| rng.random_range(0..=most as i32)).collect();
        set_extremes(&mut drawn, most as i32, rng);
        drawn
    };
    match array {
        LengthArray::CumulativeQ => cumulative(problem.batch, q, problem.seq_q, rng),
        LengthArray::CumulativeKv => cumulative(problem.batch, kv, problem.seq_kv, rng),
        LengthArray::UsedQ => used(problem.seq_q),
        LengthArray::UsedKv => used(problem.seq_kv),
        LengthArray::LeftPad => used(problem.seq_kv / 3),
    }
}

/// Makes a factor of Q and one of K 0, negative, infinite or NaN. If a tensor has only one factor, it becomes
/// 0, so that some outputs stay finite.
pub fn spoil_factors(inputs: &mut OperandMap<Values>, seed: u64) {
    const BAD: [f32; 4] = [f32::NAN, -1.0, f32::INFINITY, 0.0];
    for (i, tensor) in [Tensor::Q, Tensor::K].into_iter().enumerate() {
        let Some(Values::F32(factors)) = inputs.get_mut(Operand::Descale(tensor)) else { continue };
        let (len, turn) = (factors.len(), (seed as usize).wrapping_add(i));
        if len > 0 {
            factors[turn % len] = if len == 1 { 0.0 } else { BAD[turn % 4] };
        }
    }
}

/// Cumulative lengths of sequences of at most `seq` rows in a packed tensor; empty if it is not packed. Rows
/// at the end may belong to no sequence.
fn cumulative(batch: usize, side: SideLengths, seq: usize, rng: &mut SmallRng) -> Vec<i32> {
    let Some(rows) = side.packed else { return Vec::new() };
    let mut lengths: Vec<i32> = (0..batch).map(|_| rng.random_range(0..=seq as i32)).collect();
    set_extremes(&mut lengths, seq as i32, rng);
    let mut ends = vec![0];
    for length in lengths {
        let end = ends[ends.len() - 1] + length;
        ends.push(end.min(rows as i32));
    }
    ends
}

fn set_extremes(lengths: &mut [i32], longest: i32, rng: &mut SmallRng) {
    if let [_, _, ..] = lengths {
        let at = rng.random_range(0..lengths.len() - 1);
        lengths[at] = 0;
        lengths[at + 1] = longest;
        let after = (at + 2) % lengths.len();
        if after != at {
            lengths[after] = longest.min(1);
        }
    }
}
