//! Sums of bf16 terms on AMX: as accurate as f32 sums of weights rounded to the input type, and f32 itself beyond the bounds.
//!
//! Where the processor lacks [`Isa::Amx`] there is nothing to test.

use flashcore_cpu::{CpuPlan, Element, Isa, Rows};
use half::{bf16, f16};
use problem::{Layout, Mask, Problem};
use proptest::prelude::*;

use crate::common::{Inputs, check, run, run_out};
use crate::narrow::{as_accurate_as_rounding_the_weights_with, normal, with};

fn plan(isa: Isa) -> CpuPlan {
    CpuPlan::widest(isa, 2, 100, 72)
}

fn problem<T: Element>(heads: usize) -> Problem {
    Problem::new(1, heads, 100, 64, T::DTYPE)
}

/// O as bits.
fn bits<T: Element>(p: &Problem, inputs: &Inputs<T>, isa: Isa) -> Vec<u64> {
    run_out(p, inputs, &plan(isa)).into_iter().map(f64::to_bits).collect()
}

/// Whether tiles were used: then some output has other bits than with f32.
fn has_tiles<T: Element>(p: &Problem, inputs: &Inputs<T>) -> bool {
    bits(p, inputs, Isa::Amx) != bits(p, inputs, Isa::Avx512)
}

#[test]
fn as_accurate_as_rounding_the_weights() {
    if Isa::Amx.is_available() {
        // The ideal kernel knows a row's maximum, whose weight is 1 and not rounded; ours is the maximum of what it has seen.
        as_accurate_as_rounding_the_weights_with(&plan(Isa::Amx), 1.2);
    }
}

#[test]
fn ordinary_inputs_use_tiles_and_others_f32() {
    if !Isa::Amx.is_available() {
        return;
    }
    // Q's size, V's size, and whether they are ordinary; K's is 1.
    let sizes = [
        (1.0, 1.0, true),
        (30.0, 1.0, true),
        (1e-9, 1e9, true),
        (1.0, 1e-20, true),
        (1e20, 1.0, false),
        (1.0, 1e30, false),
        (1.0, 1e-30, false),
    ];
    for (size_q, size_v, ordinary) in sizes {
        let p = problem::<bf16>(2).with_mask(Mask::Causal);
        let inputs = normal::<bf16>(&p, 1, [size_q, size_v, 0.0]);
        assert_eq!(has_tiles(&p, &inputs), ordinary, "{size_q} {size_v}");
        // Logits of 10²⁰ are beyond what f32 can take differences of.
        if size_q < 1e9 {
            check(&p, &inputs, &plan(Isa::Amx));
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
            check(&p, &inputs, &plan(Isa::Amx));
        }
    }
    p.scale = Some(1e8);
    assert!(!has_tiles(&p, &usual(&p)), "a large scale");
    let few = Problem { seq_q: 31, ..problem::<f16>(1) }.with_layout(Layout::Bhsd);
    assert!(!has_tiles(&few, &usual(&few)), "fewer rows than a panel");
}

#[test]
fn each_head_for_itself() {
    if !Isa::Amx.is_available() {
        return;
    }
    let (one, two) = (problem::<bf16>(1), problem::<bf16>(2));
    let good = normal::<bf16>(&one, 1, [1.0, 1.0, 0.0]);
    let mut bad = normal::<bf16>(&one, 2, [1.0, 1.0, 0.0]);
    bad.k[5] = bf16::INFINITY;
    let join = |a: &[bf16], b: &[bf16]| [a, b].concat();
    let both = Inputs { q: join(&good.q, &bad.q), k: join(&good.k, &bad.k), v: join(&good.v, &bad.v) };
    let alone = [bits(&one, &good, Isa::Amx), bits(&one, &bad, Isa::Avx512)];
    assert!(bits(&two, &both, Isa::Amx) == alone.concat());
}

#[test]
fn an_lse_changes_nothing() {
    if !Isa::Amx.is_available() {
        return;
    }
    let p = problem::<f16>(2);
    let inputs = normal::<f16>(&p, 1, [1.0, 1.0, 0.0]);
    assert_eq!(run(&p, &inputs, &plan(Isa::Amx)).0, run_out(&p, &inputs, &plan(Isa::Amx)));
}

#[test]
fn genes_change_no_bits_but_by_the_blocks() {
    if !Isa::Amx.is_available() {
        return;
    }
    let p = Problem::new(1, 4, 97, 33, bf16::DTYPE).with_heads_kv(2, Layout::Bhsd).with_mask(Mask::Causal);
    let inputs = Inputs::<bf16>::random(&p, 13, 2.0);
    let plan = CpuPlan { block_kv: 96, ..plan(Isa::Amx) };
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
        assert!(run(&p, &inputs, same) == bits, "{i}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Any sizes, among them those beyond the bounds, with a number here and there replaced.
    #[test]
    fn any_inputs(
        heads_kv in 1usize..3, group in 1usize..3, seq_q in 32usize..140, seq_kv in 0usize..300, dim in 1usize..140,
        dim_v in 1usize..140, mask in 0usize..3, seed: u64, half: bool,
        (block_q, block_kv, vectors, tile_rows, splits, grouped) in
            (1usize..200, 1usize..300, 1usize..3, 1usize..3, 1usize..4, any::<bool>()),
        size_q in -8.0f64..3.0, size_v in -8.0f64..4.0, mean_v in -2.0f64..2.0,
        replaced in proptest::collection::vec((0usize..3, any::<prop::sample::Index>(), 0usize..5), 0..3),
    ) {
        let isa = if Isa::Amx.is_available() { Isa::Amx } else { Isa::Portable };
        let rows = if grouped { Rows::Group } else { Rows::Head };
        let plan = CpuPlan { vectors, tile_rows, rows, splits, ..CpuPlan::widest(isa, 2, block_q, block_kv) };
        let dtype = if half { f16::DTYPE } else { bf16::DTYPE };
        let mut p = Problem::new(2, heads_kv * group, seq_q, dim, dtype);
        (p.heads_kv, p.seq_kv, p.head_dim_v) = (heads_kv, seq_kv, dim_v);
        p = p.with_layout(Layout::Bshd).with_mask(Mask::ALL[mask]);
        let sizes = [size_q.exp2(), size_v.exp2(), mean_v];
        if half {
            check(&p, &with(normal::<f16>(&p, seed, sizes), &replaced), &plan);
        } else {
            check(&p, &with(normal::<bf16>(&p, seed, sizes), &replaced), &plan);
        }
    }
}
