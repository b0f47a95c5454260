//! Tests of the `mma` family with 8-bit inputs, on the emulator: no hazards with every check on, and results
//! within the rounding of P and O.

use std::collections::BTreeSet;

use crate::common::factors::{self, capped, with_factors, with_strides};
use crate::common::fp8::{self, SHAPES, WINDOW, edit_text, lines, problem};
use crate::tools::{self, Facts};
use attend::{Order, OutputSums, Rescale};
use flashcore_kernels::forward::mma::{CtaOrder, MmaPlan, QueryHome};
use flashcore_kernels::{Arch, Family, Plan, Program, emit};
use problem::{Band, DType, DTypes, Layout, Problem, ScaleLayout, Strides};
use ptx::Kernel;
use tile::CopyMode;

/// The architectures with products of 8-bit floats.
const ARCHS: [Arch; 3] = [Arch::SM_89, Arch::SM_90, Arch::SM_120];

/// The simplest plan, with small tiles.
fn base(problem: &Problem) -> MmaPlan {
    let plan = MmaPlan::default_for(problem, &Arch::SM_89);
    MmaPlan {
        block_m: 32,
        block_n: 32,
        warps: 2,
        kv_warps: 1,
        splits: 1,
        stages: 2,
        products: Order::InTurn,
        queries: QueryHome::Shared,
        rescale: Rescale::Beyond(0),
        ..plan
    }
}

fn check(problem: &Problem, plan: MmaPlan, arch: &Arch, seed: u64) {
    fp8::run(problem, &Plan::Mma(plan), arch, seed, |_| {}).check();
}

/// Both 8-bit types, ragged ends, each mask, each kind of row width, each type of O.
#[test]
fn shapes_and_types() {
    let own = [
        (90, 37, 16, "e4m3:f32", Band::CAUSAL),
        (65, 129, 192, "e4m3:f32", Band::CAUSAL),
        (33, 70, 256, "e5m2", WINDOW),
        (1, 300, 128, "e4m3", Band::CAUSAL),
        (90, 37, 64, "e4m3", Band::CAUSAL),
    ];
    for (i, (seq_q, seq_kv, dim, types, band)) in SHAPES.into_iter().chain(own).enumerate() {
        let problem = problem(seq_q, seq_kv, dim, types, band);
        check(&problem, base(&problem), &ARCHS[i % 3], i as u64);
    }
}

/// The default plans for grids that fill a device and for small grids.
#[test]
fn default_plans() {
    for (i, (heads, seq, dim, band)) in [
        (1, 200, 64, Band::CAUSAL),
        (60, 70, 64, Band::FULL),
        (1, 150, 128, Band::FULL),
        (30, 140, 128, Band::CAUSAL),
        (1, 130, 256, Band::CAUSAL),
        (1, 2048, 64, Band::FULL),
    ]
    .into_iter()
    .enumerate()
    {
        let rows = if seq > 1000 { 16 } else { seq };
        let problem = Problem::new(1, heads, rows, dim, DType::E4m3).with_band(band);
        let problem = problem.with_seq_kv(seq, Layout::Bhsd);
        let arch = &ARCHS[i % 3];
        let plan = MmaPlan::default_for(&problem, arch);
        assert!(seq < 1000 || plan.splits > 1, "{plan:?}");
        check(&problem, plan, arch, i as u64);
    }
}

/// Q and K in 8 bits, V in 16 bits.
#[test]
fn mixed_types() {
    for (types, band, dim) in [
        ("e4m3/e4m3/bf16", Band::CAUSAL, 64),
        ("e5m2/e4m3/f16:bf16", Band::FULL, 64),
        ("e4m3/e4m3/bf16:f32", Band::FULL, 40),
    ] {
        let problem = problem(70, 133, dim, types, band);
        let plan = MmaPlan { block_n: 48, rescale: Rescale::Beyond(8), ..base(&problem) };
        check(&problem, plan, &Arch::SM_89, 3);
    }
}

/// Head dims that no step of a product divides, values of another width, and rows with any alignment.
#[test]
fn widths_and_strides() {
    for (i, (dim, dim_v)) in
        [(8, 24), (77, 77), (64, 128), (192, 128), (100, 51), (1, 1)].into_iter().enumerate()
    {
        let mut problem = Problem { head_dim_v: dim_v, ..problem(50, 70, dim, "e4m3", Band::CAUSAL) };
        let row = |dim: usize| (dim.next_multiple_of(16) + 16) as i64;
        let strides =
            |rows: i64, dim| Strides { batch: 2 * rows * row(dim), head: rows * row(dim), row: row(dim) };
        (problem.q, problem.k) = (strides(50, dim), strides(70, dim));
        (problem.v, problem.out) = (strides(70, dim_v), strides(50, dim_v));
        for copy in [CopyMode::Async16, CopyMode::Async8, CopyMode::Async4, CopyMode::Elements] {
            let plan = MmaPlan { copy, ..base(&problem) };
            let odd = dim % 2 == 1 || dim_v % 2 == 1;
            if copy == CopyMode::Elements && odd {
                let refused = Plan::Mma(plan).check(&problem, &Arch::SM_89).expect_err("refused").to_string();
                assert!(refused.contains("even numbers with 8-bit inputs and copy = elements"), "{refused}");
                continue;
            }
            check(&problem, plan, &ARCHS[i % 3], i as u64);
        }
    }
}

/// Gene values that affect the 8-bit products.
#[test]
fn genes() {
    let p = problem(130, 200, 64, "e4m3", Band::CAUSAL);
    let full = Problem { band: Band::FULL, ..p.clone() };
    let base = base(&p);
    let plans = [
        MmaPlan { block_n: 96, stages: 1, ..base.clone() },
        MmaPlan { block_m: 64, queries: QueryHome::Registers, warps: 4, ..base.clone() },
        MmaPlan { block_m: 64, block_n: 64, stages: 3, ..base.clone() },
        MmaPlan { output_sums: OutputSums::Running, rescale: Rescale::Always, ..base.clone() },
        MmaPlan { output_sums: OutputSums::Running, rescale: Rescale::Beyond(5), ..base.clone() },
        MmaPlan { products: Order::ScoresAhead, ..base.clone() },
        MmaPlan { kv_warps: 2, warps: 4, block_n: 64, ..base.clone() },
        MmaPlan { kv_warps: 4, warps: 4, block_n: 128, products: Order::ScoresAhead, ..base.clone() },
        MmaPlan { splits: 3, ..base.clone() },
        MmaPlan { splits: 2, kv_warps: 2, block_n: 64, ..base.clone() },
        MmaPlan { tile_order: CtaOrder::RowsFirst, rescale: Rescale::Always, ..base },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        check(if i % 2 == 0 { &p } else { &full }, plan.clone(), &ARCHS[i % 3], i as u64);
    }
}

/// Groups of heads with a softcap, sinks and descale factors, also with keys divided among CTAs; scales of
/// either sign and 0.
#[test]
fn features() {
    for i in 0..6 {
        let heads = [(4, 2), (8, 1), (2, 2)][i % 3];
        let mut p = Problem::new(2, heads.0, 50, 64, DType::E4m3).with_band([WINDOW, Band::FULL][i % 2]);
        p = p.with_heads_kv(heads.1, Layout::Bshd).with_lse(i % 2 == 0);
        p.score.softcap = (i % 2 == 1).then_some(2.0);
        p.score.sink = i < 3;
        p.score.scale = [None, Some(-0.1), Some(0.0)][i % 3];
        p.scales.q = Some(ScaleLayout::TENSOR);
        p.scales.k = (i != 4).then(|| ScaleLayout::per_head(heads.1));
        p.scales.v = Some(ScaleLayout { batch: 0, ..ScaleLayout::per_head(heads.1) });
        let splits = [1, 2][i / 3];
        check(&p, MmaPlan { splits, ..base(&p) }, &ARCHS[i % 3], 5);
    }
}

/// The comparison detects kernels with one fault each.
#[test]
fn faults_are_seen() {
    let problem = problem(64, 300, 64, "e4m3", Band::FULL);
    let plan = Plan::Mma(MmaPlan { block_n: 64, rescale: Rescale::Always, ..base(&problem) });
    // O keeps only the last block, because the sums of a block replace those of all blocks.
    let never_add = |program: &mut Program| {
        edit_text(program, |text| {
            let products = text.lines().filter(|line| line.trim().starts_with("mma.sync"));
            let results: BTreeSet<&str> = products
                .flat_map(|line| line.split(['{', '}']).nth(1).into_iter().flat_map(|list| list.split(", ")))
                .collect();
            lines(text, |line, _| {
                let operands = line.trim().strip_prefix("add.rn.f32 ").unwrap_or_default();
                let of: Vec<&str> = operands.trim_end_matches(';').split(", ").collect();
                match of[..] {
                    [to, a, b] if to == a && results.contains(b) => Some(format!("mov.f32 {to}, {b};")),
                    _ => Some(line.to_owned()),
                }
            })
        });
    };
    // Odd columns of O are computed from the even columns of V.
    let even_columns = |program: &mut Program| {
        edit_text(program, |text| text.replace(", 30001;", ", 25632;").replace(", 0x7531;", ", 0x6420;"));
    };
    fp8::faults_are_seen(
        |edit| fp8::run(&problem, &plan, &Arch::SM_89, 9, edit),
        &[
            ("scale twice", &fp8::scale_twice),
            ("P's factor forgotten in the sum", &fp8::forget_the_factor_of_p),
            ("blocks not added", &never_add),
            ("even columns of V for odd ones", &even_columns),
        ],
    );
}

#[test]
fn what_cannot_be_computed_is_refused_with_the_reason() {
    let good = problem(64, 64, 64, "e4m3", Band::FULL);
    let reason = |problem: &Problem, change: &dyn Fn(&mut MmaPlan), arch: &Arch| {
        let mut plan = base(&good);
        change(&mut plan);
        Plan::Mma(plan).check(problem, arch).expect_err("refused").to_string()
    };
    let same = |_: &mut MmaPlan| {};
    for arch in [Arch::SM_80, Arch::SM_86] {
        assert_eq!(
            reason(&good, &same, &arch),
            format!("invalid value '{}' for sm: expected 89 and later with 8-bit inputs", arch.sm)
        );
        assert!(Plan::default_for(&good, &arch).is_err());
    }
    let keys = reason(&good, &|p| p.block_n = 48, &Arch::SM_89);
    assert_eq!(keys, "invalid value '48' for block_n: expected multiples of 32 · kv_warps up to 512");
    let warps = reason(&good, &|p| (p.dim_warps, p.block_m) = (2, 16), &Arch::SM_89);
    assert_eq!(warps, "invalid value '2' for dim_warps: expected 1 with 8-bit inputs");
    let wide = Problem::new(1, 1, 64, 320, DType::E4m3);
    let wide = reason(&wide, &same, &Arch::SM_89);
    assert_eq!(wide, "invalid value '320' for head_dim: expected 1 to 256 with 8-bit inputs");
    let halves = Problem::new(1, 1, 64, 64, DType::F16);
    assert_eq!(
        reason(&halves, &same, &Arch::SM_89),
        "invalid value 'by_block' for output_sums with family mma: expected running without 8-bit values"
    );
    let blocks = with_factors(good.clone(), [None, Some(64), Some(128)]);
    assert_eq!(
        reason(&blocks, &|p| p.block_n = 96, &Arch::SM_89),
        "invalid value '96' for block_n / kv_warps: expected divisors of 128 with descale_v per 128 rows"
    );
    let keys = with_factors(good.clone(), [None, Some(64), Some(0)]);
    assert_eq!(
        reason(&keys, &|p| p.block_n = 96, &Arch::SM_89),
        "invalid value '96' for block_n / kv_warps: expected divisors and multiples of 64 with descale_k per 64 \
         rows"
    );
    assert_eq!(
        reason(&blocks, &|p| p.output_sums = OutputSums::Running, &Arch::SM_89),
        "invalid value 'running' for output_sums with family mma: expected by_block with descale_v per block of \
         rows"
    );
}

/// Factors per block of 64 and of 128 rows, in each tensor and in some: both types, each mask, groups of
/// heads, a softcap, sinks, warps and CTAs that divide the keys, factors that repeat and that lie apart.
#[test]
fn factors_per_block_of_rows() {
    let p = |types, band| problem(200, 300, 64, types, band);
    let grouped = |problem: Problem| Problem { heads_q: 4, ..problem }.with_heads_kv(2, Layout::Bshd);
    let base = base(&p("e4m3", Band::FULL));
    let cases = [
        (with_factors(p("e4m3", Band::FULL), [Some(64); 3]), base.clone()),
        (with_factors(p("e5m2", Band::CAUSAL), [Some(128); 3]), MmaPlan { block_n: 128, ..base.clone() }),
        (
            with_factors(p("e4m3", WINDOW), [Some(128), Some(64), Some(64)]),
            MmaPlan { block_n: 64, products: Order::ScoresAhead, ..base.clone() },
        ),
        // The keys of a block have two factors.
        (
            with_factors(p("e5m2", Band::CAUSAL), [Some(64), Some(64), Some(0)]),
            MmaPlan { block_n: 128, ..base.clone() },
        ),
        // A warp has rows of two blocks of queries.
        (with_factors(p("e4m3", Band::CAUSAL), [Some(64); 3]), MmaPlan { block_m: 96, ..base.clone() }),
        (with_factors(grouped(p("e4m3", WINDOW)), [Some(64), None, Some(64)]), base.clone()),
        (
            with_factors(capped(grouped(p("e4m3", Band::CAUSAL))), [Some(64), Some(64), Some(128)]),
            MmaPlan { products: Order::ScoresAhead, ..base.clone() },
        ),
        (
            with_factors(p("e4m3", Band::CAUSAL), [Some(64); 3]),
            MmaPlan { kv_warps: 4, warps: 4, block_n: 256, products: Order::ScoresAhead, ..base.clone() },
        ),
        (
            with_factors(p("e5m2", Band::FULL), [None, Some(64), Some(64)]),
            MmaPlan { splits: 3, ..base.clone() },
        ),
        (
            with_factors(p("e4m3/e4m3/bf16", WINDOW), [Some(0), Some(64), None]),
            MmaPlan { block_n: 16, output_sums: OutputSums::Running, ..base.clone() },
        ),
        (with_strides(p("e4m3", Band::FULL), 0), MmaPlan { rescale: Rescale::Always, ..base.clone() }),
        (with_strides(p("e4m3", Band::FULL), 5), MmaPlan { rescale: Rescale::Beyond(3), ..base.clone() }),
    ];
    for (i, (problem, plan)) in cases.into_iter().enumerate() {
        check(&problem, plan, &ARCHS[i % 3], i as u64);
    }
}

/// The default plans with factors per block of rows, for grids that fill a device and for small grids.
#[test]
fn default_plans_with_factors_per_block() {
    for (i, (heads, seq, dim, rows)) in
        [(1, 200, 64, 64), (60, 140, 64, 128), (1, 300, 128, 64), (1, 130, 256, 64), (1, 2048, 64, 64)]
            .into_iter()
            .enumerate()
    {
        let queries = if seq > 1000 { 16 } else { seq };
        let problem = Problem::new(1, heads, queries, dim, DType::E4m3).with_band(Band::CAUSAL);
        let problem = with_factors(problem.with_seq_kv(seq, Layout::Bhsd), [Some(rows); 3]);
        let arch = &ARCHS[i % 3];
        let plan = MmaPlan::default_for(&problem, arch);
        assert!(seq < 1000 || plan.splits > 1, "{plan:?}");
        check(&problem, plan, arch, i as u64);
    }
}

#[test]
fn bad_factors_of_blocks() {
    factors::bad_factors_of_blocks(|i, problem, block_n| {
        (Plan::Mma(MmaPlan { block_n, ..base(problem) }), ARCHS[i % 3])
    });
}

#[test]
fn bad_factors_of_heads() {
    let plans = |problem: &Problem| {
        let base = base(problem);
        [
            base.clone(),
            MmaPlan { splits: 2, ..base.clone() },
            MmaPlan { kv_warps: 2, warps: 4, block_n: 64, ..base },
        ]
    };
    factors::bad_factors_of_heads(|i, problem| Plan::Mma(plans(problem)[i % 3].clone()), &Arch::SM_89);
}

#[test]
fn faults_of_factors_are_seen() {
    let plan = |problem: &Problem| Plan::Mma(MmaPlan { block_n: 64, ..base(problem) });
    factors::faults_are_seen(plan, &Arch::SM_89);
}

/// Problems with 8-bit inputs are computed by `mma` if no other family supports them.
#[test]
fn the_family_is_chosen_by_the_architecture() {
    let family = |problem: &Problem, arch| Plan::default_for(problem, &arch).expect("a plan").family();
    let long = Problem::new(1, 8, 16, 64, DType::E4m3).with_seq_kv(8192, Layout::Bhsd);
    let odd = Problem::new(1, 8, 512, 72, DType::E4m3);
    for problem in
        [Problem::new(1, 8, 512, 64, DType::E4m3), Problem::new(8, 32, 2048, 128, DType::E5m2), long]
    {
        assert_eq!(family(&problem, Arch::SM_89), "mma");
        assert_eq!(family(&problem, Arch::SM_120), "mma");
        assert_eq!(family(&problem, Arch::SM_90), "wgmma");
    }
    assert_eq!(family(&odd, Arch::SM_90), "mma");
}

/// The default plans in ptxas, without factors and with those per block of rows (0: without): nothing spills,
/// except for the widest heads on sm_90, whose operands ptxas converts to f16. `wgmma` has plans for such
/// heads if they are a multiple of 16.
#[test]
fn default_plans_do_not_spill() {
    let mut cases = Vec::new();
    for (dim, types, rows) in [
        (64, "e4m3", 0),
        (128, "e4m3", 0),
        (128, "e5m2:f16", 0),
        (256, "e4m3", 0),
        (96, "e4m3:f32", 0),
        (192, "e4m3", 0),
        (40, "e5m2", 0),
        (64, "e4m3/e4m3/bf16", 0),
        (128, "e4m3/e4m3/bf16", 0),
        (64, "e4m3", 64),
        (128, "e5m2", 64),
        (128, "e4m3/e4m3/bf16", 128),
        (256, "e4m3", 64),
    ] {
        for arch in ARCHS {
            for band in [Band::FULL, Band::CAUSAL, Band::window(1023, 0)] {
                for (batch, heads, seq) in [(2, 16, 8192), (1, 8, 512), (1, 4, 256)] {
                    let dtypes: DTypes = types.parse().expect("types");
                    let mut problem = Problem::new(batch, heads, seq, dim, dtypes).with_band(band);
                    if rows > 0 {
                        let of_values = dtypes.v.is_fp8().then_some(rows);
                        problem = with_factors(problem, [Some(rows), Some(rows), of_values]);
                    }
                    let plan = Family::Mma.default_for(&problem, &arch).expect("a default plan");
                    let program = emit(&problem, &plan, &arch).expect("a default plan");
                    let most = if arch.sm == 90 && dim > 192 { 128 } else { 0 };
                    let what = format!("sm_{} {dim} {types} {rows} {band} S{seq}", arch.sm);
                    cases.push((what, plan, program.kernel(0), most));
                }
            }
        }
    }
    let kernels: Vec<&Kernel> = cases.iter().map(|(.., kernel, _)| kernel).collect();
    let Some(facts) = tools::facts(&kernels) else { return };
    for ((what, plan, _, most), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        println!("{what}: {registers} registers, {spills} spilled");
        assert!(spills <= *most, "{plan:?}");
    }
}
