//! Tests every feature of a problem against the oracle, on every instruction set of this machine.

use crate::common::{Inputs, check, check_everywhere, run, run_out, small_plan};
use flashcore_cpu::{CpuError, CpuPlan, Element, Isa, Lanes, Order, Rows, attention};

use oracle::{oracle, reference_in_precision};
use problem::{Band, Corner, DType, Layout, Problem, ProblemError, Strides};
use proptest::prelude::*;

fn small(seq: usize, dim: usize) -> Problem {
    Problem::new(2, 2, seq, dim, DType::F32)
}

#[test]
fn head_dims_odd_and_large() {
    let usual = [(1, 1), (2, 5), (7, 13), (16, 64), (33, 3), (64, 64), (80, 96), (127, 255), (256, 256)];
    for (dim, dim_v) in usual.into_iter().chain([(320, 320), (512, 512), (576, 512)]) {
        let mut p = small(37, dim);
        p.head_dim_v = dim_v;
        check_everywhere(&p.with_layout(Layout::Bshd), 1, 1.0);
    }
}

#[test]
fn ragged_and_unequal_sequences() {
    for (rows, keys) in [(1, 1), (1, 65), (5, 200), (63, 64), (65, 23), (130, 131), (200, 7)] {
        for mask in Band::NAMED {
            check_everywhere(&small(rows, 24).with_seq_kv(keys, Layout::Bhsd).with_band(mask), 2, 1.0);
        }
    }
}

/// Windows narrower and wider than a block of keys, at both corners, including rows that see no key.
#[test]
fn windows() {
    let left = Band { corner: Corner::BottomRight, before: Some(20), after: None };
    for (rows, keys) in [(1, 200), (65, 65), (130, 23), (23, 130), (150, 300)] {
        for band in [Band::window(0, 0), Band::window(17, 0), Band::window(70, 5), Band::window(3, 90), left]
        {
            for corner in [Corner::BottomRight, Corner::TopLeft] {
                let p = small(rows, 24).with_seq_kv(keys, Layout::Bhsd).with_band(band.aligned(corner));
                check_everywhere(&p, 2, 1.0);
            }
        }
    }
}

#[test]
fn softcaps() {
    for softcap in [0.5, 15.0, 50.0] {
        for (rows, keys) in [(1, 65), (70, 70), (65, 130)] {
            let p = small(rows, 24).with_seq_kv(keys, Layout::Bhsd).with_softcap(softcap);
            check_everywhere(&p, 2, 4.0);
            let mut p = p.with_band(Band::window(40, 0));
            check_everywhere(&p, 2, 4.0);
            p.score.scale = Some(-0.3);
            check_everywhere(&p, 2, 4.0);
        }
    }
}

#[test]
fn no_keys_give_zero_and_minus_infinity() {
    let p = small(19, 8).with_seq_kv(0, Layout::Bhsd);
    check_everywhere(&p, 3, 1.0);
    let (out, lse) = run(&p, &Inputs::<f32>::random(&p, 3, 1.0), &small_plan(Isa::best()));
    assert!(out.iter().all(|&x| x == 0.0) && lse.iter().all(|&x| x == f32::NEG_INFINITY));
}

#[test]
fn grouped_query_heads() {
    for seq in [1, 3, 50] {
        let mut p = Problem::new(2, 6, seq, 20, DType::F32).with_seq_kv(77, Layout::Bshd);
        for heads_kv in [1, 2, 3] {
            p = p.with_heads_kv(heads_kv, Layout::Bshd);
            check_everywhere(&p, 4, 1.0);
            check_everywhere(&p.clone().with_band(Band::CAUSAL), 4, 1.0);
            check_everywhere(&p.clone().with_band(Band::CAUSAL_TOP_LEFT), 4, 1.0);
        }
    }
}

#[test]
fn strides_zero_negative_and_padded() {
    let mut p = small(45, 16);
    p.k = Strides { batch: 0, head: 0, row: -19 };
    p.v = Strides { batch: 45 * 16, head: 0, row: 0 };
    p.q = Strides { batch: 0, head: 45 * 20, row: 20 };
    p.out = Strides { batch: -4000, head: 17, row: 40 };
    check_everywhere(&p, 5, 1.0);
    check_everywhere(&p.clone().with_band(Band::CAUSAL), 5, 1.0);
    // Keys that no row sees are stored after the others in memory, before them, or in the same place.
    for row in [19, -19, 0] {
        (p.seq_kv, p.k.row) = (90, row);
        check_everywhere(&p.clone().with_band(Band::CAUSAL_TOP_LEFT), 5, 1.0);
    }
}

#[test]
fn keys_that_no_row_sees_are_not_touched() {
    let p =
        Problem::new(1, 1, 40, 8, DType::F32).with_seq_kv(300, Layout::Bhsd).with_band(Band::CAUSAL_TOP_LEFT);
    let mut inputs = Inputs::<f32>::random(&p, 8, 1.0);
    inputs.k[40 * 8..].fill(f32::NAN);
    inputs.v[40 * 8..].fill(f32::INFINITY);
    for isa in Isa::available() {
        check(&p, &inputs, &small_plan(isa));
    }
    // The result equals that of the square problem bit for bit, with the same plan.
    let square = Problem::new(1, 1, 40, 8, DType::F32).with_band(Band::CAUSAL);
    let plan = CpuPlan::for_problem(&p);
    assert_eq!(plan, CpuPlan::for_problem(&square));
    let seen =
        Inputs::<f32> { k: inputs.k[..40 * 8].to_vec(), v: inputs.v[..40 * 8].to_vec(), ..inputs.clone() };
    assert!(run(&p, &inputs, &plan) == run(&square, &seen, &plan));
}

#[test]
fn scales_negative_zero_and_large() {
    for scale in [-0.7, 0.0, 3.0] {
        let mut p = small(40, 8);
        p.score.scale = Some(scale);
        check_everywhere(&p, 6, 1.0);
        check_everywhere(&p.with_band(Band::CAUSAL), 6, 1.0);
    }
}

#[test]
fn logits_of_ten_thousand() {
    let mut p = small(50, 32);
    p.score.scale = Some(100.0); // f32 sums of ±300 · 100
    check_everywhere(&p, 7, 3.0);
    check_everywhere(&p.with_band(Band::CAUSAL), 7, 3.0);
}

/// Logits that are equal, or differ by more than a float's exponent has room for. Integers as inputs keep
/// the products exact in every arithmetic, so only the softmax can err.
#[test]
fn logits_of_any_finite_size() {
    fn check<T: Element>(scale: f32, band: Band, plan: &CpuPlan) {
        let mut p = Problem::new(1, 1, 61, 8, T::DTYPE).with_band(band);
        p.score.scale = Some(scale);
        let mut inputs = Inputs::<T>::random(&p, 11, 1.0);
        for (i, x) in inputs.q.iter_mut().chain(&mut inputs.k).enumerate() {
            *x = T::from_f32([1.0, -1.0, 2.0, 0.0, 1.0][i % 5 * (i / 40 % 3) % 5]);
        }
        let want = oracle(&p, &inputs.q, &inputs.k, &inputs.v).unwrap();
        let (out, lse) = run(&p, &inputs, plan);
        let tolerance = 4.0 * p.dtypes.out.unit_roundoff() + 1e-6;
        for out in [out, run_out(&p, &inputs, plan)] {
            for (i, (got, want)) in out.iter().zip(&want.out).enumerate() {
                assert!((got - want).abs() <= tolerance, "{scale:e} {plan:?}: O[{i}] = {got}, not {want}");
            }
        }
        for (i, (&got, want)) in lse.iter().zip(&want.lse).enumerate() {
            // Kernels compute it in base 2, so it is at most f32::MAX · ln 2 in size.
            let largest = f64::from(f32::MAX) * std::f64::consts::LN_2;
            let want = want.clamp(-largest, largest);
            let close = (f64::from(got) - want).abs() <= 1e-6 * want.abs().max(1.0);
            assert!(close, "{scale:e} {plan:?}: LSE[{i}] = {got}, not {want}");
        }
    }
    for isa in Isa::available() {
        let plan = small_plan(isa);
        let dims = isa.has_dims().then_some(CpuPlan { lanes: Lanes::Dims, ..plan });
        for plan in [plan, CpuPlan { splits: 3, ..plan }].into_iter().chain(dims) {
            // Parts of a row are compared by shifts, which exceed no finite number.
            let largest = if plan.splits == 1 { -2.3e38 } else { -1e36 };
            for scale in [1e3, 2e4, 3e9, -1e10, 1.1e20, 1e36, largest] {
                for band in [Band::FULL, Band::CAUSAL] {
                    check::<f32>(scale, band, &plan);
                    check::<half::f16>(scale, band, &plan);
                    check::<half::bf16>(scale, band, &plan);
                }
            }
        }
    }
}

#[test]
fn nan_and_infinity_stay_in_their_rows() {
    for isa in Isa::available() {
        for (bad_k, bad_v) in [(f32::NAN, 0.5), (0.5, f32::NAN), (f32::INFINITY, 0.5), (0.5, f32::INFINITY)] {
            // The last key, which only the last causal row sees.
            let p = Problem::new(1, 1, 70, 8, DType::F32).with_band(Band::CAUSAL);
            let mut inputs = Inputs::<f32>::random(&p, 8, 1.0);
            inputs.k[69 * 8 + 3] = bad_k;
            inputs.v[69 * 8 + 3] = bad_v;
            let (out, _) = run(&p, &inputs, &small_plan(isa));
            assert!(out[..69 * 8].iter().all(|x| x.is_finite()), "{isa}: {bad_k} {bad_v} leaked");
            check(&p, &inputs, &small_plan(isa));
        }
        // A NaN query makes only its own row NaN. A row of −∞ logits has no mass.
        let p = Problem::new(1, 1, 30, 4, DType::F32);
        let mut inputs = Inputs::<f32>::random(&p, 9, 1.0);
        inputs.q[4 * 4] = f32::from_bits(0x7fc0_0001);
        inputs.q[7 * 4] = f32::NEG_INFINITY;
        inputs.k.iter_mut().step_by(4).for_each(|x| *x = x.abs() + 0.1);
        let (out, lse) = run(&p, &inputs, &small_plan(isa));
        assert!(lse[4].is_nan() && out[16..20].iter().all(|x| x.is_nan()));
        assert!(lse[7] == f32::NEG_INFINITY && out[28..32].iter().all(|&x| x == 0.0));
        check(&p, &inputs, &small_plan(isa));
    }
}

#[test]
fn default_plans_agree_with_the_oracle() {
    for isa in Isa::available() {
        let p = Problem::new(1, 2, 300, 64, DType::F32).with_band(Band::CAUSAL);
        check(&p, &Inputs::<f32>::random(&p, 10, 1.0), &CpuPlan::with_isa(&p, isa));
    }
}

/// Each problem has more than one block of keys and of rows. With lanes along the head dim, its rows are not
/// whole vectors.
fn problems_of_genes() -> Vec<Problem> {
    let short =
        Problem::new(2, 6, 3, 24, DType::F32).with_seq_kv(131, Layout::Bhsd).with_heads_kv(2, Layout::Bhsd);
    let long = Problem::new(1, 4, 97, 33, DType::F32).with_heads_kv(2, Layout::Bhsd).with_band(Band::CAUSAL);
    vec![short.clone().with_band(Band::CAUSAL), short, long]
}

#[test]
fn every_gene_keeps_the_answer() {
    for isa in Isa::available() {
        let plan = small_plan(isa);
        let mut plans = vec![
            CpuPlan { rows: Rows::Head, ..plan },
            CpuPlan { order: Order::Heads, ..plan },
            CpuPlan { splits: 2, ..plan },
            CpuPlan { splits: 64, ..plan },
        ];
        for vectors in 1..=isa.tile().0 {
            let most = isa.tile_rows(vectors);
            let tile_rows = [1, 4.min(most), most];
            plans.extend(tile_rows.map(|tile_rows| CpuPlan { vectors, tile_rows, ..plan }));
        }
        if isa.has_dims() {
            plans.extend([1, 2].map(|splits| CpuPlan { lanes: Lanes::Dims, splits, ..plan }));
            plans.push(CpuPlan { lanes: Lanes::Dims, vectors: 1, block_kv: 7, rows: Rows::Head, ..plan });
        }
        for p in problems_of_genes() {
            for plan in &plans {
                let mut half = p.clone();
                check(&p, &Inputs::<f32>::random(&p, 12, 2.0), plan);
                half.dtypes = DType::F16.into();
                check(&half, &Inputs::<half::f16>::random(&half, 12, 2.0), plan);
            }
        }
    }
}

#[test]
fn genes_change_what_is_summed_with_what_and_nothing_else() {
    let isa = Isa::available().into_iter().find(|isa| isa.has_dims()).unwrap();
    let p = &problems_of_genes()[2];
    let inputs = Inputs::<f32>::random(p, 13, 2.0);
    let plan = CpuPlan { block_kv: 24, ..small_plan(isa) };
    let bits = run(p, &inputs, &plan);
    // Plans that sum in another order.
    let others = [
        CpuPlan { lanes: Lanes::Dims, ..plan },
        CpuPlan { splits: 2, ..plan },
        CpuPlan { block_kv: 25, ..plan },
    ];
    assert!(others.iter().all(|other| run(p, &inputs, other) != bits));
    // Plans with the same sums, executed in another order or on other threads.
    let same = [
        CpuPlan { vectors: 1, tile_rows: 1, ..plan },
        CpuPlan { rows: Rows::Head, ..plan },
        CpuPlan { order: Order::Heads, ..plan },
        CpuPlan { block_q: 5, ..plan },
        CpuPlan { threads: 1, ..plan },
    ];
    assert!(same.iter().all(|same| run(p, &inputs, same) == bits));
}

#[test]
fn nan_and_infinity_stay_in_their_rows_whatever_the_lanes_and_parts() {
    let isa = Isa::available().into_iter().find(|isa| isa.has_dims()).unwrap();
    for (lanes, splits) in [(Lanes::Dims, 1), (Lanes::Dims, 3), (Lanes::Queries, 3)] {
        for (bad_k, bad_v) in
            [(f32::NAN, 0.5), (0.5, f32::NAN), (f32::INFINITY, 0.5), (0.5, f32::NEG_INFINITY)]
        {
            let p = Problem::new(1, 1, 70, 8, DType::F32).with_band(Band::CAUSAL);
            let mut inputs = Inputs::<f32>::random(&p, 8, 1.0);
            inputs.k[69 * 8 + 3] = bad_k;
            inputs.v[69 * 8 + 3] = bad_v;
            let plan = CpuPlan { lanes, splits, ..small_plan(isa) };
            assert!(run(&p, &inputs, &plan).0[..69 * 8].iter().all(|x| x.is_finite()));
            check(&p, &inputs, &plan);
        }
    }
}

#[test]
fn results_do_not_depend_on_threads_or_neighbours() {
    let p = small(150, 32).with_band(Band::CAUSAL);
    let inputs = Inputs::<f32>::random(&p, 11, 4.0);
    let plan = CpuPlan { threads: 1, ..small_plan(Isa::best()) };
    let one = run(&p, &inputs, &plan);
    for threads in [2, 3, 8] {
        assert!(run(&p, &inputs, &CpuPlan { threads, ..plan }) == one, "{threads} threads give other bits");
    }
    // The result does not depend on which rows share a panel.
    assert!(run(&p, &inputs, &CpuPlan { block_q: 7, ..plan }) == one);
}

#[test]
fn the_references_agree_on_a_hand_computed_case() {
    // Two keys with logits 0 and ln 3: weights 1/4 and 3/4.
    let mut p = Problem::new(1, 1, 1, 1, DType::F32).with_seq_kv(2, Layout::Bhsd);
    p.score.scale = Some(1.0);
    let (q, k, v) = ([1.0f32], [0.0, 3.0f32.ln()], [4.0, 8.0]);
    for reference in [oracle(&p, &q, &k, &v), reference_in_precision(&p, &q, &k, &v)] {
        let reference = reference.unwrap();
        assert!((reference.out[0] - 7.0).abs() < 1e-6 && (reference.lse[0] - 4.0f64.ln()).abs() < 1e-6);
    }
}

#[test]
fn refusals_name_the_argument() {
    let p = small(8, 4);
    let plan = CpuPlan::for_problem(&p);
    let (full, short) = (vec![0.0f32; 128], vec![0.0f32; 127]);
    let run = |q: &[f32], out: &mut [f32], lse: Option<&mut [f32]>, plan: &CpuPlan| {
        attention(&p, q, &full, &full, out, lse, plan)
    };
    let mut out = full.clone();
    assert_eq!(run(&full, &mut out, None, &plan), Ok(()));
    assert_eq!(
        run(&short, &mut out, None, &plan),
        Err(ProblemError::OperandTooShort { argument: "q", len: 127, needed: 128 }.into())
    );
    assert_eq!(
        run(&full, &mut short.clone(), None, &plan),
        Err(ProblemError::OperandTooShort { argument: "out", len: 127, needed: 128 }.into())
    );
    let mut lse = [0.0; 31];
    assert_eq!(
        run(&full, &mut out, Some(&mut lse), &plan),
        Err(ProblemError::OperandTooShort { argument: "lse", len: 31, needed: 32 }.into())
    );
    for bad in
        [CpuPlan { block_q: 0, ..plan }, CpuPlan { block_kv: 5000, ..plan }, CpuPlan { threads: 0, ..plan }]
    {
        assert!(matches!(run(&full, &mut out, None, &bad), Err(CpuError::Plan { .. })));
    }
    for (bad, message) in [
        (CpuPlan { vectors: 5, ..plan }, "invalid value '5' for plan.vectors: expected 1 to "),
        (CpuPlan { tile_rows: 13, ..plan }, "invalid value '13' for plan.tile_rows: expected 1 to "),
        (CpuPlan { splits: 65, ..plan }, "invalid value '65' for plan.splits: expected 1 to 64"),
        (
            CpuPlan { isa: Isa::Avx512Vnni, lanes: Lanes::Dims, ..CpuPlan::widest(Isa::Avx512, 1, 1, 1) },
            "invalid value 'dims' for plan.lanes with plan.isa",
        ),
    ] {
        let error = run(&full, &mut out, None, &bad).unwrap_err().to_string();
        assert!(error.starts_with(message), "{error}");
    }
    let foreign = if cfg!(target_arch = "x86_64") { Isa::Neon } else { Isa::Avx2 };
    assert!(matches!(
        run(&full, &mut out, None, &CpuPlan { isa: foreign, ..plan }),
        Err(CpuError::Isa { .. })
    ));
    let mut other = p.clone();
    other.dtypes = DType::F16.into();
    let (dtype, expected) = ("f32", "f16");
    let error = ProblemError::OperandType { argument: "q", dtype, expected };
    assert_eq!(oracle(&other, &full, &full, &full), Err(error));
    other.seq_q = 0;
    assert_eq!(oracle(&other, &full, &full, &full), Err(ProblemError::Zero { argument: "seq_q" }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_problem_and_plan(
        batch in 1usize..3, heads_kv in 1usize..3, grouped in 1usize..4, seq_q in 1usize..90, seq_kv in 0usize..150,
        dim in 1usize..40, dim_v in 1usize..40, mask in 0usize..3, seed: u64,
        threads in 1usize..4, block_q in 1usize..200, block_kv in 1usize..80,
        dims: bool, group: bool, heads_first: bool, vectors in 1usize..5, tile_rows in 1usize..13, splits in 1usize..5,
    ) {
        let mut p = Problem::new(batch, heads_kv * grouped, seq_q, dim, DType::F32);
        (p.heads_kv, p.seq_kv, p.head_dim_v) = (heads_kv, seq_kv, dim_v);
        p = p.with_layout(Layout::Bshd).with_band(Band::NAMED[mask]);
        for isa in Isa::available() {
            let vectors = vectors.min(isa.tile().0);
            let plan = CpuPlan {
                lanes: if dims && isa.has_dims() { Lanes::Dims } else { Lanes::Queries },
                vectors,
                tile_rows: tile_rows.min(isa.tile_rows(vectors)),
                rows: if group { Rows::Group } else { Rows::Head },
                order: if heads_first { Order::Heads } else { Order::Longest },
                splits,
                ..CpuPlan::widest(isa, threads, block_q, block_kv)
            };
            check(&p, &Inputs::<f32>::random(&p, seed, 1.0), &plan);
        }
    }
}
