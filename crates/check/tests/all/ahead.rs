//! Tests of the gate with tables whose elements `wgmma` reads one block ahead.

use crate::common::{self, SMALL, plain_wgmma};
use attend::Tiles;
use emu::Schedule;
use flashcore_check::gate::{Settings, bind, check_kernel};
use judge::inputs::Style;
use kernels::Plan;
use kernels::forward::wgmma::{Diagonal, Rescaling, Tables, WgmmaPlan};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Layout, Problem, Program, Programs, Table};
use tile::Turns;

const KEYS: usize = 261;

/// A problem with a bias whose rows are `stride` elements apart, 1 for each query head.
fn biased(stride: i64, dtype: ElementType, band: Band) -> Problem {
    let mut problem = Problem::new(1, 4, 150, 64, DType::Bf16)
        .with_seq_kv(KEYS, Layout::Bshd)
        .with_heads_kv(2, Layout::Bshd)
        .with_band(band)
        .with_lse(true);
    let strides = vec![0, 150 * stride, stride, 1];
    let table = Table { dtype, extents: vec![1, 4, 150, KEYS], strides };
    let score = Some(Program::new(&lib::bias(0)).unwrap());
    problem.programs = Programs { score, tables: vec![table], ..problem.programs };
    problem
}

fn passes(problem: &Problem, plan: WgmmaPlan, schedule: Schedule) {
    let plan = Plan::Wgmma(WgmmaPlan { tables: Tables::Registers, ..plan });
    plan.check(problem, &SMALL).unwrap_or_else(|e| panic!("{plan:?}: {e}"));
    let bound = bind(&plan, problem, &SMALL).unwrap();
    let text = bound.kernel.module.to_string();
    assert!(text.contains("ld.global.nc.v4.b32"), "the kernel reads no vectors ahead\n{plan:?}");
    let settings = Settings { runs: vec![(Style::Normal, 1, schedule)], lagging: false, ..Settings::quick() };
    common::passes(&check_kernel(&bound, &settings).unwrap(), &(problem, plan));
}

/// Blocks of 48 keys have four words of a row that lanes exchange, and two that each lane reads itself. Rows
/// are aligned to 16 bytes, to words, or to elements.
#[test]
fn elements_are_read_ahead_at_every_alignment() {
    for (stride, dtype) in [(264, ElementType::Bf16), (266, ElementType::F16), (265, ElementType::F16)] {
        for band in [Band::FULL, Band::CAUSAL, Band::window(70, 20)] {
            let problem = biased(stride, dtype, band);
            let plan = WgmmaPlan { block_n: 48, ..WgmmaPlan::default_for(&problem, &SMALL) };
            passes(&problem, plan, Schedule::Late);
        }
    }
}

#[test]
fn variants_read_ahead() {
    let speculative = Rescaling::Speculative { beyond: 0, limit: 7 };
    for (i, band) in [Band::FULL, Band::CAUSAL].into_iter().enumerate() {
        let problem = biased(264, ElementType::Bf16, band);
        let plain = plain_wgmma(&problem);
        let mut plans = vec![
            WgmmaPlan { rescale: speculative, tiles: Tiles::Overlapped, ..plain.clone() },
            WgmmaPlan { turns: Turns::PingPong, tiles: Tiles::Overlapped, ..plain.clone() },
            WgmmaPlan { cluster: 2, rescale: Rescaling::Always, ..plain.clone() },
        ];
        if !band.is_full() {
            plans.push(WgmmaPlan { diagonal: Diagonal::Halved, ..plain });
        }
        for (j, plan) in plans.into_iter().enumerate() {
            passes(&problem, plan, [Schedule::Early, Schedule::Random][(i + j) % 2]);
        }
    }
}

/// With a mask program, blocks come from a list.
#[test]
fn listed_blocks_are_read_ahead() {
    let mut problem = biased(264, ElementType::Bf16, Band::CAUSAL);
    problem.programs.tables.push(Table::dense(ElementType::I32, &[1, KEYS]));
    problem.programs.mask = Some(Program::new(&lib::document(1)).unwrap());
    let plan = WgmmaPlan { block_n: 48, ..WgmmaPlan::default_for(&problem, &SMALL) };
    passes(&problem, plan, Schedule::Late);
}
