//! Tests of the gate with block lists: kernels that visit listed blocks pass for every kind of mask, and
//! kernels with a wrong list fail.

use judge::inputs::Style;
use std::cell::Cell;

use crate::common::programs::{FEATURES, Feature, draft};
use crate::common::{self, SMALL};
use attend::{Order, Packing, Tiles};
use emu::{Buffer, HazardKind, Options, Schedule};
use flashcore_check::gate::{Feed, Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::{Bound, Role};
use kernels::forward::Visits;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::wgmma::{Ends, Rescaling, WgmmaPlan};
use kernels::{Arch, Plan};
use problem::program::library as lib;
use problem::{Band, DType, ElementType, Expr, Layout, Operand, Problem, Program, SideLengths, Table};
use tile::{Handout, Turns};

/// Plans of both families with small tiles, so that lists have several blocks.
fn plans(problem: &Problem) -> Vec<Plan> {
    let mma = MmaPlan {
        block_n: 32,
        products: Order::InTurn,
        queries: QueryHome::Shared,
        resident_ctas: None,
        visits: Visits::Listed,
        ..common::plain_mma(problem, &SMALL)
    };
    let wgmma = WgmmaPlan {
        consumers: 1,
        block_n: 32,
        turns: Turns::Free,
        ends: Ends::Common,
        visits: Visits::Listed,
        packing: Packing::Apart,
        ..WgmmaPlan::default_for(problem, &SMALL)
    };
    let speculative = Rescaling::Speculative { beyond: 0, limit: 7 };
    let splits = if problem.lengths.q.is_even() { 3 } else { 1 };
    let mma = [
        mma.clone(),
        MmaPlan { products: Order::ScoresAhead, kv_warps: 2, stages: 3, ..mma.clone() },
        MmaPlan { stages: 1, splits, block_n: 48, ..mma },
    ];
    let handout = |handout| if problem.lengths.is_even() { handout } else { Handout::Dynamic };
    let wgmma = [
        WgmmaPlan { tiles: Tiles::InTurn, ..wgmma.clone() },
        WgmmaPlan {
            consumers: 2,
            tiles: Tiles::Overlapped,
            turns: Turns::PingPong,
            handout: handout(Handout::Static),
            ..wgmma.clone()
        },
        WgmmaPlan { packing: Packing::Packed, rescale: speculative, block_n: 16, ..wgmma },
    ];
    mma.into_iter().map(Plan::Mma).chain(wgmma.into_iter().map(Plan::Wgmma)).collect()
}

fn bound(plan: &Plan, problem: &Problem) -> Bound {
    let bound = bind(plan, problem, &SMALL).unwrap_or_else(|e| panic!("{plan:?} {problem:?}: {e}"));
    assert_eq!(bound.kernel.entry, "flash_forward_lists", "{problem:?}");
    bound
}

fn once(number: usize) -> Settings {
    let schedule = [Schedule::Late, Schedule::Early, Schedule::Random][number % 3];
    let run = ([Style::Normal, Style::NonFinite][number % 2], number as u64, schedule);
    Settings { runs: vec![run], lagging: false, ..Settings::quick() }
}

fn passes(plan: &Plan, problem: &Problem, settings: &Settings) {
    common::passes(&check_kernel(&bound(plan, problem), settings).unwrap(), &(plan, problem));
}

fn feature(name: &str) -> &'static Feature {
    FEATURES.iter().find(|feature| feature.name == name).unwrap()
}

/// Masks that no band can express.
const MASKS: [&str; 7] = ["mask", "document", "prefix", "chunk", "tree", "dilated", "block diagonal"];

/// Each mask alone and combined with a band, a score program and a sink, on ragged and on even lengths.
#[test]
fn listed_blocks_pass_for_every_mask() {
    let beside = ["causal", "window", "alibi", "sink", "softcap", "bias"];
    let lengths = [(70, 200), (96, 192), (33, 130), (130, 90)];
    for (i, mask) in MASKS.into_iter().enumerate() {
        for (j, plain) in [true, false].into_iter().enumerate() {
            let (seq_q, seq_kv) = lengths[(i + 2 * j) % lengths.len()];
            let dtype = [DType::F16, DType::Bf16][(i + j) % 2];
            let problem = Problem::new(2, 4, seq_q, 64, dtype)
                .with_seq_kv(seq_kv, Layout::Bshd)
                .with_heads_kv(2, Layout::Bshd)
                .with_lse(true);
            let other = feature(beside[i % beside.len()]);
            let problem = if plain {
                draft(problem, &[feature(mask)])
            } else {
                draft(problem, &[feature(mask), other])
            };
            for (number, plan) in plans(&problem).iter().enumerate() {
                passes(plan, &problem, &once(i + number));
            }
        }
    }
}

fn problem(mask: Expr, tables: Vec<Table>) -> Problem {
    let mut problem = Problem::new(1, 2, 100, 64, DType::Bf16).with_seq_kv(256, Layout::Bhsd).with_lse(true);
    problem.programs.mask = Some(Program::new(&mask).unwrap());
    problem.programs.ints = vec![40, 3];
    problem.programs.tables = tables;
    problem
}

/// Masks whose blocks are classified in every way: by bounds alone, element by element, by one element of a
/// coarse table. Some blocks are not seen by any row, and some rows see nothing.
#[test]
fn every_way_to_decide_a_block_is_right() {
    let (q, k) = (lib::query, lib::key);
    let coarse = Table::dense(ElementType::U8, &[2, 4, 8]);
    let of_block = |table| Expr::load(table, false, [lib::head(), q() / 32, k() / 32]);
    let of_key = |table| Expr::load(table, false, [k()]);
    for (i, (mask, tables)) in [
        ((q() / lib::int(0)).eq(k() / lib::int(0)), vec![]),
        ((q() - k()).abs().lt(50) ^ k().lt(10), vec![]),
        ((q() * 3 - k()).max(0).lt(70) & !(k() / 64).eq(2), vec![]),
        (((k() - q()) % 64).lt(9) | ((k() - q()) / 100).eq(1), vec![]),
        (q().lt(50).select(k().lt(64), k().ge(192)), vec![]),
        ((k() * q() % 7).eq(lib::int(1)), vec![]),
        ((of_block(0) & 3).eq(1), vec![coarse]),
        (of_key(0).gt(0) | q().lt(30) & k().lt(100), vec![Table::dense(ElementType::I32, &[256])]),
        (k().gt(1000), vec![]),
        (lib::head().eq(1) & k().lt(100), vec![]),
        (lib::batch().eq(0), vec![]),
        ((q() + 2_000_000_000).gt(k() + 2_000_000_000), vec![]),
        (
            (q().unary(problem::program::UnaryOp::ToFloat) * 0.5f32)
                .gt(k().unary(problem::program::UnaryOp::ToFloat)),
            vec![],
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let problem = problem(mask, tables);
        problem.check().unwrap();
        for (number, plan) in plans(&problem).iter().enumerate().filter(|(n, _)| (n + i) % 2 == 0) {
            passes(plan, &problem, &once(i + number));
        }
    }
}

fn uneven() -> Vec<Problem> {
    let mut base = Problem::new(4, 2, 100, 64, DType::F16).with_lse(true);
    base.seq_kv = 130;
    let base = draft(base.with_layout(Layout::Bshd), &[feature("document")]);
    let with = |q: SideLengths, kv: SideLengths, left_padded: bool| {
        let mut problem = base.clone();
        problem.lengths = problem::Lengths { q, kv, left_padded };
        problem
    };
    let packed = |rows| SideLengths { packed: Some(rows), used: false };
    let used = SideLengths { packed: None, used: true };
    vec![
        with(packed(210), packed(290), false),
        with(packed(210), packed(290), false).with_band(Band::CAUSAL),
        with(used, used, false),
        with(SideLengths::default(), used, true).with_band(Band::window(37, 5)),
    ]
}

#[test]
fn listed_blocks_follow_uneven_lengths() {
    for problem in uneven() {
        for (number, plan) in plans(&problem).iter().enumerate() {
            passes(plan, &problem, &once(number));
        }
    }
}

/// No contents of tables or of arrays of lengths lead either kernel outside its buffers.
#[test]
fn hostile_contents_stay_inside_the_buffers() {
    let hidden = [HazardKind::OutOfBounds, HazardKind::Misaligned];
    let mut problems = uneven();
    let coarse = Expr::load(0, false, [lib::head(), lib::query() - lib::key(), lib::key() / 32]).ne(0);
    problems.push(problem(coarse, vec![Table::dense(ElementType::I32, &[2, 4, 8])]));
    for problem in problems {
        for plan in plans(&problem) {
            let bound = bound(&plan, &problem);
            for values in [[i32::MIN, -1, i32::MAX, 7, 1 << 30], [0, 90, 20, 210, 100]] {
                let feed = Feed::draw(&bound, Style::Normal, 1).unwrap();
                let mut buffers = feed.buffers(&bound);
                for (buffer, role) in buffers.iter_mut().zip(&bound.roles) {
                    let elements = match role {
                        Role::Operand(Operand::Lengths(array)) => array.len(&problem).unwrap(),
                        Role::Operand(Operand::Table(_)) => buffer.to_bytes().len() / 4,
                        _ => continue,
                    };
                    let values = values.iter().cycle().take(elements);
                    *buffer = Buffer::from_bytes(&values.flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>());
                }
                for kernel in std::iter::once(&bound.kernel).chain(&bound.then) {
                    let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
                    let report = emu::run(kernel, &mut handles, &Options::default()).unwrap();
                    let found: Vec<_> = report.hazards.iter().filter(|h| hidden.contains(&h.kind)).collect();
                    assert!(found.is_empty(), "{plan:?} {problem:?} {values:?}: {found:?}");
                }
            }
        }
    }
}

/// The verdict on the kernels with a changed text.
fn verdict(bound: &Bound, change: impl Fn(&str) -> Option<String>) -> Verdict {
    let text = bound.kernel.module.to_string();
    let changed: String =
        text.lines().map(|line| change(line).unwrap_or_else(|| line.to_owned()) + "\n").collect();
    let module = ptx::parse(&changed).unwrap().verify().unwrap();
    let mut mutant = bound.clone();
    mutant.kernel.module = module.clone();
    mutant.then.iter_mut().for_each(|kernel| kernel.module = module.clone());
    check_kernel(&mutant, &once(0)).unwrap().verdict
}

/// Lists in which a block is missing, and lists that mark partial blocks as full.
#[test]
fn wrong_lists_fail() {
    // Rows see parts of all blocks, and all keys of some blocks.
    let mask = (lib::key() % 3).eq(0) | lib::key().lt(128) | (lib::query() + lib::key()).gt(320);
    let problem = problem(mask, vec![]);
    for plan in plans(&problem) {
        let bound = bound(&plan, &problem);
        assert_eq!(verdict(&bound, |_| None), Verdict::Passed);
        // The last bit count is the number of partial blocks of a round.
        let counted = Cell::new(0);
        let dropped = verdict(&bound, |line| {
            counted.set(counted.get() + usize::from(line.contains("popc")));
            let last = line.contains("popc") && counted.get() == 4;
            last.then(|| {
                let count = line.split([' ', ',']).find(|word| word.starts_with("%r")).unwrap();
                format!("{line}\n\tsub.s32 {count}, {count}, 1;")
            })
        });
        assert_eq!((counted.get(), dropped), (4, Verdict::Failed), "{plan:?}");
        let found = Cell::new(0);
        let exchanged = verdict(&bound, |line| {
            let matches = line.contains("selp") && line.contains(", 2, 1, ");
            found.set(found.get() + usize::from(matches));
            matches.then(|| line.replace(", 2, 1, ", ", 1, 2, "))
        });
        assert_eq!((found.get(), exchanged), (1, Verdict::Failed), "{plan:?}");
    }
}

/// Lists are not used for dense masks and few scores. A plan without a mask program has no list.
#[test]
fn lists_are_the_default_for_large_masks_that_are_no_tensor() {
    let large = |mask: Expr, tables: Vec<Table>| {
        let mut large = problem(mask, tables);
        (large.seq_q, large.seq_kv, large.heads_q, large.heads_kv) = (4096, 4096, 16, 16);
        large.with_layout(Layout::Bhsd)
    };
    let visits = |problem: &Problem| {
        let problem = problem.canonical();
        let (mma, wgmma) =
            (MmaPlan::default_for(&problem, &Arch::SM_90), WgmmaPlan::default_for(&problem, &Arch::SM_90));
        wgmma.check(&problem, &Arch::SM_90).unwrap();
        assert_eq!(mma.visits, wgmma.visits);
        mma.visits
    };
    let documents = Table::dense(ElementType::I32, &[1, 4096]);
    assert_eq!(visits(&large(lib::document(0), vec![documents])), Visits::Listed);
    assert_eq!(visits(&large(lib::chunk(1024), vec![])), Visits::Listed);
    let dense = Table::dense(ElementType::U8, &[1, 16, 4096, 4096]);
    assert_eq!(visits(&large(lib::mask_tensor(0), vec![dense])), Visits::Band);
    let few = problem(lib::chunk(30), vec![]);
    assert_eq!(visits(&few), Visits::Band);
    assert_eq!(visits(&large(lib::causal(), vec![])), Visits::Band);
}
