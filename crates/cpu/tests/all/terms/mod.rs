//! Tests of the arithmetic with sums of bf16 terms. It must be as accurate as f32 sums of weights rounded to
//! the input type. Beyond the bounds, f32 itself is used. The tests run on [`Isa::Amx`] if the processor has
//! it, and on its counterpart in plain Rust.

use flashcore_cpu::{CpuPlan, Element, Isa, Rows};
use half::{bf16, f16};
use problem::{Band, Layout, Problem};
use proptest::prelude::*;

use crate::common::{Inputs, check, run, run_out};
use crate::narrow::{
    SPECIAL, as_accurate_as_rounding_the_weights_with, differ_from_f32, each_head_for_itself_in, normal,
    plan, with,
};

/// The instruction sets that use tiles.
fn tiles() -> impl Iterator<Item = Isa> {
    [Isa::Amx, Isa::PortableTerms].into_iter().filter(|isa| isa.is_available())
}

fn problem<T: Element>(heads: usize) -> Problem {
    Problem::new(1, heads, 100, 64, T::DTYPE)
}

/// Whether tiles were used.
fn has_tiles<T: Element>(p: &Problem, inputs: &Inputs<T>) -> bool {
    differ_from_f32(tiles(), p, inputs)
}

#[test]
fn as_accurate_as_rounding_the_weights() {
    // The ideal kernel knows a row's final maximum, whose weight is 1 and is not rounded. The kernel under
    // test uses the maximum so far.
    let plans: Vec<CpuPlan> = tiles().map(plan).collect();
    as_accurate_as_rounding_the_weights_with(&plans, 1.2);
}

#[test]
fn ordinary_inputs_use_tiles_and_others_f32() {
    // The size of Q, the size of V, and whether the inputs are ordinary. The size of K is 1.
    let sizes = [
        (1.0, 1.0, true),
        (30.0, 1.0, true),
        (0.1, 1e9, true),
        (1.0, 1e-20, true),
        (1e20, 1.0, false),
        (1.0, 1e30, false),
        (1.0, 1e-30, false),
    ];
    for (size_q, size_v, ordinary) in sizes {
        let p = problem::<bf16>(2).with_band(Band::CAUSAL);
        let inputs = normal::<bf16>(&p, 1, [size_q, size_v, 0.0]);
        assert_eq!(has_tiles(&p, &inputs), ordinary, "{size_q} {size_v}");
        // f32 cannot represent the differences of logits of 10²⁰.
        if size_q < 1e9 {
            tiles().for_each(|isa| check(&p, &inputs, &plan(isa)));
        }
    }
    let usual = |p: &Problem| normal::<f16>(p, 1, [1.0, 1.0, 0.0]);
    let mut p = problem::<f16>(1);
    assert!(has_tiles(&p, &usual(&p)));
    for bad in [f16::NAN, f16::INFINITY, f16::NEG_INFINITY] {
        let [mut q, mut k, mut v] = [usual(&p), usual(&p), usual(&p)];
        (q.q[70], k.k[70], v.v[70]) = (bad, bad, bad);
        for inputs in [q, k, v] {
            assert!(!has_tiles(&p, &inputs), "{bad}");
            tiles().for_each(|isa| check(&p, &inputs, &plan(isa)));
        }
    }
    p.score.scale = Some(1e8);
    assert!(!has_tiles(&p, &usual(&p)), "a large scale");
    let few = Problem { seq_q: 31, ..problem::<f16>(1) }.with_layout(Layout::Bhsd);
    assert!(!has_tiles(&few, &usual(&few)), "fewer rows than a panel");
}

#[test]
fn each_head_for_itself() {
    each_head_for_itself_in::<bf16>(tiles());
}

#[test]
fn an_lse_changes_nothing() {
    let p = problem::<f16>(2);
    let inputs = normal::<f16>(&p, 1, [1.0, 1.0, 0.0]);
    for isa in tiles() {
        assert_eq!(run(&p, &inputs, &plan(isa)).0, run_out(&p, &inputs, &plan(isa)), "{isa}");
    }
}

#[test]
fn genes_change_no_bits_but_by_the_blocks() {
    let p = Problem::new(1, 4, 97, 33, bf16::DTYPE).with_heads_kv(2, Layout::Bhsd).with_band(Band::CAUSAL);
    let inputs = Inputs::<bf16>::random(&p, 13, 2.0);
    for isa in tiles() {
        let plan = CpuPlan { block_kv: 96, ..plan(isa) };
        let bits = run(&p, &inputs, &plan);
        assert!(run(&p, &inputs, &CpuPlan { block_kv: 41, ..plan }) != bits);
        let same = [
            CpuPlan { vectors: 1, ..plan },
            CpuPlan { tile_rows: 1, ..plan },
            CpuPlan { rows: Rows::Group, ..plan },
            CpuPlan { block_q: 5, ..plan },
            CpuPlan { threads: 1, ..plan },
        ];
        for (i, same) in same.iter().enumerate() {
            assert!(run(&p, &inputs, same) == bits, "{isa} {i}");
        }
    }
}

/// Elements of V below 2⁻⁸⁰, which tiles might flush, are computed in f32, even if other elements of V, which
/// a mask hides from some rows, are ordinary.
#[test]
fn tiny_values_are_computed_in_f32() {
    let p = problem::<bf16>(1).with_band(Band::CAUSAL);
    let mut inputs = normal::<bf16>(&p, 1, [1.0, 1e-37, 0.0]);
    assert!(!has_tiles(&p, &inputs));
    inputs.v[99 * 64..].fill(bf16::ONE);
    assert!(!has_tiles(&p, &inputs));
    tiles().for_each(|isa| check(&p, &inputs, &plan(isa)));
    // Zeros are not affected by flushing.
    let mut zeros = normal::<bf16>(&p, 1, [1.0, 1.0, 0.0]);
    zeros.v[..64].fill(bf16::ZERO);
    assert!(has_tiles(&p, &zeros));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Inputs of any size, including those beyond the bounds, with some numbers replaced.
    #[test]
    fn any_inputs(
        heads_kv in 1usize..3, group in 1usize..3, seq_q in 32usize..140, seq_kv in 0usize..300, dim in 1usize..140,
        dim_v in 1usize..140, mask in 0usize..3, seed: u64, half: bool,
        (block_q, block_kv, vectors, tile_rows, splits, grouped) in
            (1usize..200, 1usize..300, 1usize..3, 1usize..3, 1usize..4, any::<bool>()),
        size_q in -8.0f64..3.0, size_v in -8.0f64..4.0, mean_v in -2.0f64..2.0,
        replaced in proptest::collection::vec((0usize..3, any::<prop::sample::Index>(), 0..SPECIAL.len()), 0..3),
    ) {
        let rows = if grouped { Rows::Group } else { Rows::Head };
        let dtype = if half { f16::DTYPE } else { bf16::DTYPE };
        let mut p = Problem::new(2, heads_kv * group, seq_q, dim, dtype);
        (p.heads_kv, p.seq_kv, p.head_dim_v) = (heads_kv, seq_kv, dim_v);
        p = p.with_layout(Layout::Bshd).with_band(Band::NAMED[mask]);
        let sizes = [size_q.exp2(), size_v.exp2(), mean_v];
        for isa in tiles() {
            let widest = CpuPlan::widest(isa, 2, block_q, block_kv);
            let plan = CpuPlan { vectors, tile_rows, rows, splits, ..widest };
            if half {
                check(&p, &with(normal::<f16>(&p, seed, sizes), &replaced), &plan);
            } else {
                check(&p, &with(normal::<bf16>(&p, seed, sizes), &replaced), &plan);
            }
        }
    }
}
