//! Tests of the gate with tables that `wgmma` reads from tiles in shared memory.

use crate::common::{self, SMALL, plain_wgmma};
use attend::{Packing, Tiles};
use emu::{HazardKind, Schedule};
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::Plan;
use kernels::forward::wgmma::{Diagonal, Ends, Rescaling, Share, Tables, WgmmaPlan};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Layout, Lengths, Problem, Program, Programs, SideLengths, Table};
use tile::{Tail, Turns};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// The problem with a bias, whose rows are aligned to 16 bytes. The bias is one for all batch entries.
fn biased(problem: Problem, dtype: ElementType) -> Problem {
    let Problem { batch, heads_q, seq_q, seq_kv, .. } = problem;
    let row = seq_kv.next_multiple_of(8);
    let strides = [0, seq_q * row, row, 1].map(|stride| stride as i64).to_vec();
    let table = Table { dtype, extents: vec![batch, heads_q, seq_q, seq_kv], strides };
    let score = Some(Program::new(&lib::bias(0)).unwrap());
    Problem { programs: Programs { score, tables: vec![table], ..problem.programs }, ..problem }
}

fn problem(band: Band) -> Problem {
    Problem::new(2, 4, 150, 64, DType::Bf16)
        .with_seq_kv(261, Layout::Bshd)
        .with_heads_kv(2, Layout::Bshd)
        .with_band(band)
        .with_lse(true)
}

/// The simplest plan with two consumers, and with tables in shared memory.
fn plain(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan { packing: Packing::Apart, tables: Tables::Shared, ..plain_wgmma(problem) }
}

/// The default plan, with rows of one head in a tile, and with tables in shared memory.
fn shared(problem: &Problem) -> WgmmaPlan {
    let plan = WgmmaPlan::default_for(problem, &SMALL);
    WgmmaPlan { packing: Packing::Apart, tables: Tables::Shared, block_n: plan.block_n.min(64), ..plan }
}

fn bound(problem: &Problem, plan: &WgmmaPlan) -> Bound {
    let plan = Plan::Wgmma(plan.clone());
    plan.check(problem, &SMALL).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let bound = bind(&plan, problem, &SMALL).unwrap();
    assert!(bound.kernel.module.to_string().contains("ldmatrix"), "{plan:?}: no tiles of tables");
    bound
}

fn passes(problem: &Problem, plan: &WgmmaPlan, styles: &[Style], number: usize) {
    let bound = bound(problem, plan);
    let schedule = |i: usize| SCHEDULES[(number + i) % 3];
    let runs = styles.iter().enumerate().map(|(i, &style)| (style, (number + i) as u64, schedule(i)));
    let settings = Settings { runs: runs.collect(), lagging: false, ..Settings::quick() };
    common::passes(&check_kernel(&bound, &settings).unwrap(), &(problem, plan));
}

#[test]
fn defaults_pass_with_every_band_and_type() {
    let bands = [Band::FULL, Band::CAUSAL, Band::CAUSAL_TOP_LEFT, Band::window(70, 20)];
    for (i, band) in bands.into_iter().enumerate() {
        for (j, dtype) in [ElementType::Bf16, ElementType::F16].into_iter().enumerate() {
            let problem = biased(problem(band), dtype);
            passes(&problem, &shared(&problem), &[[Style::Normal, Style::NonFinite][(i + j) % 2]], 2 * i + j);
        }
    }
}

#[test]
fn variants_of_plans_pass() {
    for (i, band) in [Band::FULL, Band::CAUSAL, Band::window(40, 0)].into_iter().enumerate() {
        let problem = biased(problem(band), ElementType::Bf16);
        let speculative = Rescaling::Speculative { beyond: 0, limit: 7 };
        let plain = plain(&problem);
        let mut plans = vec![
            WgmmaPlan { rescale: speculative, tiles: Tiles::Overlapped, ..plain.clone() },
            WgmmaPlan { turns: Turns::PingPong, tiles: Tiles::Overlapped, stages: 1, ..plain.clone() },
            WgmmaPlan { turns: Turns::PingPong, stages: 1, consumers: 3, block_n: 48, ..plain.clone() },
            WgmmaPlan { cluster: 2, rescale: Rescaling::Always, ..plain.clone() },
        ];
        if band.is_full() {
            plans.push(WgmmaPlan { tail: Tail::Shared, ends: Ends::Common, block_n: 32, ..plain.clone() });
        } else {
            plans.push(WgmmaPlan { diagonal: Diagonal::Halved, rescale: speculative, ..plain });
        }
        for (j, plan) in plans.iter().enumerate() {
            passes(&problem, plan, &[Style::Rising], i + j);
        }
    }
}

/// Warpgroups that divide the head dim read the same rows of a table.
#[test]
fn warpgroups_with_the_same_rows_read_the_same_elements() {
    let wide = Problem::new(1, 2, 100, 64, DType::F16).with_seq_kv(90, Layout::Bshd).with_lse(true);
    let problem = biased(wide, ElementType::F16);
    let plan = WgmmaPlan { share: Share::HeadDim, ends: Ends::Common, ..plain(&problem) };
    passes(&problem, &plan, &[Style::Normal], 1);
}

#[test]
fn other_features_beside_a_bias_pass() {
    let mut all = Vec::new();
    let mut sinks = problem(Band::CAUSAL);
    sinks.score.sink = true;
    sinks.score.softcap = Some(2.0);
    all.push(biased(sinks, ElementType::Bf16));
    // Blocks from a list, and a mask program in partial blocks alone.
    let mut documents = biased(problem(Band::CAUSAL), ElementType::Bf16);
    documents.programs.tables.push(Table::dense(ElementType::I32, &[2, 261]));
    documents.programs.mask = Some(Program::new(&lib::document(1)).unwrap());
    all.push(documents);
    // A boolean mask beside the bias.
    let mut masked = biased(problem(Band::FULL), ElementType::F16);
    masked.programs.tables.push(Table::dense(ElementType::U8, &[2, 4, 150, 261]));
    masked.programs.mask = Some(Program::new(&lib::mask_tensor(1)).unwrap());
    all.push(masked);
    for lengths in [
        Lengths { kv: SideLengths { packed: None, used: true }, ..Lengths::default() },
        Lengths {
            q: SideLengths { packed: Some(170), used: false },
            kv: SideLengths { packed: Some(300), used: true },
            left_padded: false,
        },
        Lengths { left_padded: true, ..Lengths::default() },
    ] {
        let mut uneven = problem(Band::CAUSAL);
        uneven.lengths = lengths;
        all.push(biased(uneven.with_layout(Layout::Bshd), ElementType::Bf16));
    }
    for (i, problem) in all.iter().enumerate() {
        let plan = WgmmaPlan { block_n: 48, ..shared(problem) };
        passes(problem, &plan, &[Style::Normal, Style::NonFinite], i);
    }
}

/// The kernel whose warps release each tile of a table before they read it.
fn released_too_early(bound: &Bound) -> Bound {
    let text = bound.kernel.module.to_string();
    let mut lines: Vec<String> = Vec::new();
    let mut held: Vec<String> = Vec::new();
    for line in text.lines().map(str::to_owned) {
        let releases = line.contains("mbarrier.arrive");
        if line.contains("ldmatrix") {
            held.push(line);
        } else {
            lines.push(line);
        }
        if releases {
            lines.append(&mut held);
        }
    }
    assert!(held.is_empty() && lines.join("\n") != text.trim_end());
    with_text(bound, &lines)
}

/// The kernel whose warps put no proxy fence between their reads of a tile and the release.
fn released_without_a_fence(bound: &Bound) -> Bound {
    let text = bound.kernel.module.to_string();
    let lines: Vec<String> = text
        .lines()
        .filter(|line| !line.contains("fence.proxy.async.shared::cta"))
        .map(str::to_owned)
        .collect();
    assert!(lines.len() < text.lines().count());
    with_text(bound, &lines)
}

fn with_text(bound: &Bound, lines: &[String]) -> Bound {
    let mut mutant = bound.clone();
    mutant.kernel.module = ptx::parse(&lines.join("\n")).unwrap().verify().unwrap();
    mutant
}

/// A warp that releases a tile before it reads it, or without a proxy fence after it has read it, races with
/// the copy of the next tile. On an H200, outputs were wrong without the fence.
#[test]
fn tiles_that_are_released_too_early_are_found() {
    let problem = biased(problem(Band::FULL), ElementType::Bf16);
    let plan = WgmmaPlan { stages: 1, ..plain(&problem) };
    let right = bound(&problem, &plan);
    let settings = Settings { runs: vec![(Style::Normal, 1, Schedule::Early)], ..Settings::quick() };
    assert_eq!(check_kernel(&right, &settings).unwrap().verdict, Verdict::Passed);
    let mutants = [
        (released_too_early(&right), HazardKind::Race),
        (released_without_a_fence(&right), HazardKind::MissingProxyFence),
    ];
    for (mutant, kind) in mutants {
        let report = check_kernel(&mutant, &settings).unwrap();
        assert_eq!(report.verdict, Verdict::Failed);
        let found = report.hazards.iter().any(|hazard| hazard.kind == kind);
        assert!(found, "{kind:?}: {:?} {:?}", report.reasons, report.hazards);
    }
}
