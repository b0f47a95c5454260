//! Tests of the `wgmma` family with 8-bit inputs, on the emulator: no hazards with every check on, and
//! results within the rounding of P and O.

use crate::common::fp8::{self, edit_text, lines};
use crate::common::wgmma_plan::plain;
use crate::tools;
use attend::{Order, OutputSums, Packing, Tiles};
use flashcore_kernels::forward::mma::MmaPlan;
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Share, Store, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, Program, emit};
use problem::{Band, DType, DTypes, Layout, Problem, ScaleLayout};
use tile::{Handout, TileOrder, Turns};

/// A device with two SMs, so that a CTA computes several tiles.
const SMALL: Arch = Arch { multiprocessors: 2, ..Arch::SM_90 };

/// The simplest plan for 8-bit values.
fn base() -> WgmmaPlan {
    WgmmaPlan { block_n: 64, rescale: Rescaling::Beyond(0), output_sums: OutputSums::ByBlock, ..plain() }
}

fn check(problem: &Problem, plan: WgmmaPlan, seed: u64) {
    fp8::run(problem, &Plan::Wgmma(plan), &SMALL, seed, |_| {}).check();
}

fn problem(seq_q: usize, seq_kv: usize, dim: usize, types: &str, band: Band) -> Problem {
    let dtypes: DTypes = types.parse().expect("types");
    let problem = Problem::new(1, 2, seq_q, dim, DType::E4m3).with_dtypes(dtypes).with_band(band);
    problem.with_seq_kv(seq_kv, Layout::Bshd).with_lse(true)
}

const WINDOW: Band = Band { before: Some(50), ..Band::CAUSAL };

/// Both 8-bit types, ragged ends, each mask, each kind of row width.
#[test]
fn shapes_and_types() {
    for (i, (seq_q, seq_kv, dim, types, band)) in [
        (64, 64, 64, "e4m3", Band::FULL),
        (70, 133, 64, "e4m3", Band::FULL),
        (100, 100, 64, "e5m2:f16", Band::CAUSAL),
        (17, 150, 128, "e4m3/e5m2/e4m3", Band::CAUSAL),
        (130, 200, 128, "e5m2/e4m3/e5m2", WINDOW),
        (90, 37, 16, "e4m3", Band::CAUSAL),
        (40, 150, 48, "e5m2", Band::FULL),
        (66, 130, 80, "e4m3:f16", Band::CAUSAL_TOP_LEFT),
        (50, 97, 96, "e4m3", Band::FULL),
        (65, 129, 192, "e4m3", Band::CAUSAL),
        (80, 160, 256, "e4m3", Band::FULL),
    ]
    .into_iter()
    .enumerate()
    {
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
            let plan = WgmmaPlan { block_n: 48, output_sums, ..plain() };
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
    let run = |edit: &dyn Fn(&mut Program)| fp8::run(&problem, &plan, &SMALL, 9, edit).error();
    let right = run(&|_| {});
    assert!(right.worst <= 1.0 && right.relative < 0.05, "{right:?}");
    let scaled_twice = run(&|program: &mut Program| {
        let factor = program.then[0].args.iter_mut().find_map(|arg| match arg {
            ptx::Arg::F32(factor) => Some(factor),
            _ => None,
        });
        *factor.expect("the factor of the scores") *= 0.125;
    });
    let factor_forgotten = run(&|program: &mut Program| {
        edit_text(program, |text| {
            lines(text, |line, _| match line.trim().strip_prefix("rcp.approx.ftz.f32 ") {
                None => Some(line.to_owned()),
                Some(operands) => {
                    let sum = operands.split(", ").nth(1)?.trim_end_matches(';');
                    Some(format!("mul.f32 {sum}, {sum}, 0f3B800000;\n{line}"))
                }
            })
        });
    });
    // The second panel instead of the first, and so on; the last panel is zero.
    let off_by_a_panel = run(&|program: &mut Program| {
        let map = program.then[0].tensor_maps.iter_mut().find(|map| map.offset == 0 && map.extents[0] == 304);
        let map = map.expect("the map of the transposed values");
        map.offset += 128;
        map.extents[0] -= 128;
    });
    // O keeps only the last block.
    let never_added = run(&|program: &mut Program| {
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
    });
    for (fault, error) in [
        ("scale twice", scaled_twice),
        ("P's factor forgotten in the sum", factor_forgotten),
        ("V off by a panel", off_by_a_panel),
        ("blocks not added", never_added),
    ] {
        assert!(error.worst > 1.0 && error.relative > 0.1, "{fault}: {error:?}");
    }
}

/// The default plans of long problems in ptxas: nothing spills, and the waits for products are where the code
/// places them, not after each product, as when ptxas serialises products.
#[test]
fn default_plans_are_not_serialised() {
    let Some(ptxas) = tools::find("FLASHCORE_PTXAS") else { return };
    let nvdisasm = tools::find("FLASHCORE_NVDISASM");
    for (dim, types) in
        [(64, "e4m3"), (128, "e4m3"), (128, "e5m2:f16"), (256, "e4m3"), (128, "e4m3/e4m3/bf16")]
    {
        for band in [Band::FULL, Band::CAUSAL, Band::window(1023, 0)] {
            let dtypes: DTypes = types.parse().expect("types");
            let problem = Problem::new(2, 16, 8192, dim, DType::E4m3).with_dtypes(dtypes).with_band(band);
            let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
            let program = emit(&problem, &Plan::Wgmma(plan.clone()), &Arch::SM_90).expect("a default plan");
            let assembled = tools::assemble(&ptxas, &program.kernel);
            println!("{dim} {types} {band}: {} registers, {} spilled", assembled.registers, assembled.spills);
            assert_eq!(assembled.spills, 0, "{plan:?}");
            let Some(nvdisasm) = &nvdisasm else { continue };
            let machine = tools::disassemble(nvdisasm, &assembled);
            let text = program.kernel.module.to_string();
            let products = machine.matches("QGMMA").count() + machine.matches("HGMMA").count();
            assert_eq!(products, text.matches("wgmma.mma_async").count(), "{plan:?}");
            let waits = machine.matches("WARPGROUP.DEPBAR").count();
            assert_eq!(waits, text.matches("wgmma.wait_group").count(), "{plan:?}");
        }
    }
}
