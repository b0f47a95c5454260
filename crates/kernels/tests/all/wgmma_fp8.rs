//! Tests of the `wgmma` family with 8-bit inputs, on the emulator: no hazards with every check on, and
//! results within the rounding of P and O.

use crate::common::factors::{self, capped, with_factors, with_strides};
use crate::common::fp8::{self, SHAPES, WINDOW, edit_text, lines, problem};
use crate::common::wgmma_plan::SMALL;
use crate::tools;
use attend::{Order, OutputSums, Packing, Tiles};
use flashcore_kernels::forward::mma::MmaPlan;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Share, Store, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, Program, emit};
use problem::{Band, DType, DTypes, Layout, Problem, ScaleLayout};
use ptx::Kernel;
use tile::{Handout, Tail, TileOrder, Turns};

/// The simplest plan for 8-bit values.
fn base() -> WgmmaPlan {
    WgmmaPlan {
        block_n: 64,
        rescale: Rescaling::Beyond(0),
        output_sums: OutputSums::ByBlock,
        ..WgmmaPlan::PLAIN
    }
}

fn check(problem: &Problem, plan: WgmmaPlan, seed: u64) {
    fp8::run(problem, &Plan::Wgmma(plan), &SMALL, seed, |_| {}).check();
}

/// Both 8-bit types, ragged ends, each mask, each kind of row width.
#[test]
fn shapes_and_types() {
    let own = [(90, 37, 16, "e4m3", Band::CAUSAL), (65, 129, 192, "e4m3", Band::CAUSAL)];
    for (i, (seq_q, seq_kv, dim, types, band)) in SHAPES.into_iter().chain(own).enumerate() {
        let problem = problem(seq_q, seq_kv, dim, types, band);
        let output_sums = if dim > 128 { OutputSums::Running } else { OutputSums::ByBlock };
        check(&problem, WgmmaPlan { output_sums, ..base() }, i as u64);
    }
}

/// Q and K in 8 bits, V in 16 bits.
#[test]
fn mixed_types() {
    for (types, band) in [("e4m3/e4m3/bf16", Band::CAUSAL), ("e5m2/e4m3/f16", Band::FULL)] {
        for output_sums in [OutputSums::Running, OutputSums::ByBlock] {
            let plan = WgmmaPlan { block_n: 48, output_sums, ..WgmmaPlan::PLAIN };
            check(&problem(70, 133, 64, types, band), plan, 3);
        }
    }
}

/// Gene values that affect the product of 8-bit P and V.
#[test]
fn genes() {
    let two = WgmmaPlan { consumers: 2, ..base() };
    let plans = [
        WgmmaPlan { block_n: 96, stages: 1, ..base() },
        WgmmaPlan { block_n: 160, exps_by_fma: 3, ..base() },
        WgmmaPlan { output_sums: OutputSums::Running, rescale: Rescaling::Always, ..base() },
        WgmmaPlan { output_sums: OutputSums::Running, rescale: Rescaling::Beyond(2), ..base() },
        WgmmaPlan { rescale: Rescaling::Always, products: Order::InTurn, ..base() },
        WgmmaPlan { rescale: Rescaling::Speculative { beyond: 5, limit: 8 }, exps_by_fma: 2, ..two.clone() },
        WgmmaPlan { turns: Turns::PingPong, tiles: Tiles::Overlapped, ..two.clone() },
        WgmmaPlan { handout: Handout::Dynamic, tile_order: TileOrder::LongestFirst, ..two.clone() },
        WgmmaPlan { ends: Ends::Own, diagonal: Diagonal::Halved, block_n: 128, ..two.clone() },
        WgmmaPlan { store: Store::Bulk, cluster: 2, ..two.clone() },
        WgmmaPlan { consumers: 3, block_n: 96, ..base() },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        let band = if i % 2 == 0 { Band::CAUSAL } else { Band::FULL };
        check(&problem(200, 200, 64, "e4m3", band), plan, i as u64);
    }
}

/// Groups of heads, packed or not, with a softcap, sinks and descale factors.
#[test]
fn features() {
    for (i, packing) in [Packing::Apart, Packing::Packed].into_iter().enumerate() {
        let mut p = Problem::new(2, 4, 50, 64, DType::E4m3).with_band(WINDOW).with_heads_kv(2, Layout::Bshd);
        p.score.softcap = (i == 1).then_some(2.0);
        p.score.sink = i == 0;
        p.scales.q = Some(ScaleLayout::TENSOR);
        p.scales.k = Some(ScaleLayout::per_head(2));
        p.scales.v = Some(ScaleLayout { batch: 0, ..ScaleLayout::per_head(2) });
        check(&p, WgmmaPlan { packing, ..base() }, 5);
    }
}

/// Factors per block of 64 and of 128 rows, in each tensor and in some: both types, each mask, groups of
/// heads, packed or not, a softcap, sinks, overlapping tiles, a shared tail, factors that repeat and that lie
/// apart.
#[test]
fn factors_per_block_of_rows() {
    let p = |types, band| problem(200, 300, 64, types, band);
    let grouped = |heads: usize, problem: Problem| {
        Problem { heads_q: 2 * heads, ..problem }.with_heads_kv(2, Layout::Bshd)
    };
    let two = WgmmaPlan { consumers: 2, ..base() };
    let wide = WgmmaPlan { block_n: 128, ..base() };
    let speculative = Rescaling::Speculative { beyond: 2, limit: 8 };
    let overlapped = WgmmaPlan { tiles: Tiles::Overlapped, rescale: speculative, stages: 3, ..two.clone() };
    let cases = [
        (with_factors(p("e4m3", Band::FULL), [Some(64); 3]), base()),
        (with_factors(p("e5m2", Band::CAUSAL), [Some(128); 3]), wide.clone()),
        (
            with_factors(p("e4m3", WINDOW), [Some(128), Some(64), Some(64)]),
            WgmmaPlan { ends: Ends::Own, ..two.clone() },
        ),
        // The keys of a block have two factors.
        (with_factors(p("e5m2", Band::CAUSAL), [Some(64), Some(64), Some(0)]), wide.clone()),
        (with_factors(grouped(5, p("e4m3", WINDOW)), [Some(64), None, Some(64)]), {
            WgmmaPlan { packing: Packing::Packed, ..two.clone() }
        }),
        (
            with_factors(capped(grouped(2, p("e4m3", Band::CAUSAL))), [Some(64), Some(64), Some(128)]),
            two.clone(),
        ),
        (with_factors(p("e4m3", Band::FULL), [Some(64); 3]), overlapped.clone()),
        (with_factors(p("e5m2", Band::FULL), [None, Some(64), Some(64)]), {
            WgmmaPlan { tail: Tail::Shared, ..overlapped }
        }),
        (
            with_factors(p("e4m3/e4m3/bf16", WINDOW), [Some(0), Some(64), None]),
            WgmmaPlan { block_n: 32, ..WgmmaPlan::PLAIN },
        ),
        (with_factors(p("e4m3/e4m3/bf16", Band::FULL), [Some(64), Some(64), None]), {
            WgmmaPlan {
                block_n: 128,
                rescale: Rescaling::Speculative { beyond: 8, limit: 15 },
                ..WgmmaPlan::PLAIN
            }
        }),
        (with_strides(p("e4m3", Band::FULL), 0), WgmmaPlan { rescale: Rescaling::Always, ..base() }),
        (with_strides(p("e4m3", Band::CAUSAL), 5), {
            WgmmaPlan { ends: Ends::Own, diagonal: Diagonal::Halved, products: Order::InTurn, ..two }
        }),
    ];
    for (i, (problem, plan)) in cases.into_iter().enumerate() {
        check(&problem, plan, i as u64);
    }
}

/// The default plans with factors per block of rows.
#[test]
fn default_plans_with_factors_per_block() {
    for (i, (dim, rows, band)) in
        [(64, 64, Band::CAUSAL), (64, 128, Band::FULL), (128, 64, Band::FULL), (128, 128, Band::CAUSAL)]
            .into_iter()
            .enumerate()
    {
        let problem = with_factors(problem(260, 260, dim, "e4m3", band), [Some(rows); 3]);
        check(&problem, WgmmaPlan::default_for(&problem, &SMALL), i as u64);
    }
}

#[test]
fn bad_factors_of_blocks() {
    factors::bad_factors_of_blocks(|i, _, block_n| {
        let rescale = match i % 2 {
            0 => Rescaling::Speculative { beyond: 5, limit: 8 },
            _ => Rescaling::Beyond(0),
        };
        (Plan::Wgmma(WgmmaPlan { block_n, rescale, ..base() }), SMALL)
    });
}

#[test]
fn bad_factors_of_heads() {
    factors::bad_factors_of_heads(|_, _| Plan::Wgmma(base()), &SMALL);
}

#[test]
fn faults_of_factors_are_seen() {
    factors::faults_are_seen(|_| Plan::Wgmma(base()), &SMALL);
}

/// Plans whose blocks of keys do not fit the blocks of factors, and searches.
#[test]
fn plans_fit_the_blocks_of_factors() {
    let good = with_factors(problem(64, 64, 64, "e4m3", Band::FULL), [Some(64); 3]);
    let reason = |problem: &Problem, plan: WgmmaPlan| {
        Plan::Wgmma(plan).check(problem, &Arch::SM_90).expect_err("refused").to_string()
    };
    assert_eq!(
        reason(&good, WgmmaPlan { block_n: 128, ..base() }),
        "invalid value '128' for block_n: expected divisors of 64 with descale_v per 64 rows"
    );
    assert_eq!(
        reason(&good, WgmmaPlan { output_sums: OutputSums::Running, ..base() }),
        "invalid value 'running' for output_sums with family wgmma: expected by_block with descale_v per block \
         of rows"
    );
    let keys = with_factors(good.clone(), [None, Some(128), None]);
    assert_eq!(
        reason(&keys, WgmmaPlan { block_n: 96, ..base() }),
        "invalid value '96' for block_n: expected divisors and multiples of 128 with descale_k per 128 rows"
    );
    let wide = with_factors(Problem::new(2, 16, 4096, 256, DType::E4m3), [Some(64); 3]);
    assert_eq!(
        reason(&wide, base()),
        "invalid value '256' for head_dim_v: expected up to 144 with descale_v per block of rows"
    );
    assert_eq!(Plan::default_for(&wide, &Arch::SM_90).expect("a plan").family(), "mma");
    for rows in [64, 128] {
        let long = with_factors(Problem::new(2, 16, 4096, 128, DType::E4m3), [Some(rows); 3]);
        assert_eq!(WgmmaPlan::default_for(&long, &Arch::SM_90).block_n, rows);
    }
    for family in [Family::Mma, Family::Wgmma] {
        let plan = family.default_for(&good, &Arch::SM_90).expect("a default plan");
        for gene in family.genes(&good) {
            for value in gene.searched.iter().filter(|_| ["block_n", "output_sums"].contains(&gene.name)) {
                let mut fields = serde_json::to_value(&plan).expect("a plan is JSON");
                fields[gene.name] = value.clone();
                // In `mma`, the number of warps that divide the keys decides, too.
                let fits = [1, 2, 4].into_iter().any(|warps| {
                    if family == Family::Mma {
                        (fields["kv_warps"], fields["warps"], fields["block_m"]) =
                            (warps.into(), warps.into(), 16.into());
                    }
                    let plan: Plan = serde_json::from_value(fields.clone()).expect("a plan");
                    plan.check(&good, &Arch::SM_90).err().is_none_or(|e| !e.to_string().contains("descale"))
                });
                assert!(fits, "{family:?} {} = {value}", gene.name);
            }
        }
    }
}

/// Warpgroups that divide the head dim support only 16-bit inputs, and `mma` has no 8-bit rows beyond 256.
#[test]
fn combinations_without_a_kernel_are_refused() {
    let wide = Problem { head_dim_v: 512, ..Problem::new(1, 1, 64, 64, DType::E4m3) };
    let refused = |plan: Plan| plan.check(&wide, &Arch::SM_90).expect_err("refused").to_string();
    let divided = WgmmaPlan { share: Share::HeadDim, consumers: 2, ..base() };
    let refused_share = refused(Plan::Wgmma(divided));
    assert!(
        refused_share.starts_with("invalid value 'e4m3' for types")
            && refused_share.contains("16-bit inputs with share = head_dim"),
        "{refused_share}"
    );
    let refused_dim = refused(Plan::Wgmma(base()));
    assert!(refused_dim.contains("head_dim_v: expected 1 to 256 with share = rows"), "{refused_dim}");
    let refused_type = refused(Plan::Mma(MmaPlan::default_for(&wide, &Arch::SM_90)));
    assert!(refused_type.contains("head_dim_v: expected 1 to 256 with 8-bit inputs"), "{refused_type}");
    let genes = Family::Wgmma.genes(&wide);
    let share = genes.iter().find(|gene| gene.name == "share").expect("a gene");
    assert!(share.searched.is_empty(), "{share:?}");
}

/// The comparison detects kernels with one fault each.
#[test]
fn faults_are_seen() {
    // Three panels of keys. The keys of the first panels have small weights but the same total weight as the
    // others.
    let problem = problem(64, 300, 64, "e4m3", Band::FULL);
    let plan = WgmmaPlan { block_n: 128, rescale: Rescaling::Always, ..base() };
    let plan = Plan::Wgmma(plan);
    // The second panel instead of the first, and so on; the last panel is zero.
    let off_by_a_panel = |program: &mut Program| {
        let maps = &mut program.contracts.steps[1].tensor_maps;
        let map = maps.iter_mut().find(|map| map.offset == 0 && map.extents[0] == 304);
        let map = map.expect("the map of the transposed values");
        map.offset += 128;
        map.extents[0] -= 128;
    };
    // O keeps only the last block.
    let never_add = |program: &mut Program| {
        edit_text(program, |text| {
            lines(text, |line, next| {
                let added = line.trim().strip_prefix("fma.rn.f32 ").is_some_and(|operands| {
                    let of: Vec<&str> = operands.split(", ").collect();
                    of[0] == of[1]
                });
                let exponent = next.is_some_and(|next| next.trim().starts_with("ex2"));
                (!added || exponent).then(|| line.to_owned())
            })
        });
    };
    fp8::faults_are_seen(
        |edit| fp8::run(&problem, &plan, &SMALL, 9, edit),
        &[
            ("scale twice", &fp8::scale_twice),
            ("P's factor forgotten in the sum", &fp8::forget_the_factor_of_p),
            ("V off by a panel", &off_by_a_panel),
            ("blocks not added", &never_add),
        ],
    );
}

/// The default plans of long problems in ptxas: nothing spills, and the waits for products are where the code
/// places them, not after each product, as when ptxas serialises products.
#[test]
fn default_plans_are_not_serialised() {
    let mut cases = Vec::new();
    for (dim, types, rows) in [
        (64, "e4m3", [None; 3]),
        (128, "e4m3", [None; 3]),
        (128, "e5m2:f16", [None; 3]),
        (256, "e4m3", [None; 3]),
        (128, "e4m3/e4m3/bf16", [None; 3]),
        (64, "e4m3", [Some(64); 3]),
        (128, "e4m3", [Some(64); 3]),
        (128, "e5m2", [Some(128); 3]),
        (128, "e4m3", [Some(64), Some(64), Some(0)]),
        (144, "e4m3", [Some(64); 3]),
        (256, "e4m3", [Some(64), Some(64), Some(0)]),
        (128, "e4m3/e4m3/bf16", [Some(64), Some(64), None]),
    ] {
        for band in [Band::FULL, Band::CAUSAL, Band::window(1023, 0)] {
            let dtypes: DTypes = types.parse().expect("types");
            let problem = Problem::new(2, 16, 8192, dim, DType::E4m3).with_dtypes(dtypes).with_band(band);
            let problem = with_factors(problem, rows);
            let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
            let program = emit(&problem, &Plan::Wgmma(plan.clone()), &Arch::SM_90).expect("a default plan");
            cases.push((format!("{dim} {types} {rows:?} {band}"), plan, program.kernel(0)));
        }
    }
    let kernels: Vec<&Kernel> = cases.iter().map(|(.., kernel)| kernel).collect();
    let Some(facts) = tools::facts(&kernels) else { return };
    for ((what, plan, kernel), facts) in cases.iter().zip(facts) {
        println!("{what}: {} registers, {} spilled", facts.registers, facts.spills);
        assert_eq!(facts.spills, 0, "{plan:?}");
        let counts = ["HGMMA", "QGMMA", "WARPGROUP.DEPBAR"].map(|instruction| facts.count(instruction));
        let [Some(of_16_bits), Some(of_8_bits), Some(waits)] = counts else { continue };
        let text = kernel.module.to_string();
        assert_eq!(of_16_bits + of_8_bits, text.matches("wgmma.mma_async").count(), "{plan:?}");
        assert_eq!(waits, text.matches("wgmma.wait_group").count(), "{plan:?}");
    }
}
