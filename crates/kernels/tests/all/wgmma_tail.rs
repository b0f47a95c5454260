//! Tests of the shared last wave (stream-K) of the persistent family: the result does not depend on which CTA
//! computes which part of a tile.

use crate::common;
use crate::common::cases;
use crate::common::wgmma_plan::{SPECULATIVE, varied};
use attend::{Packing, Tiles};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::wgmma::{Ends, Rescaling, Store, WgmmaPlan};
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DType, Layout, Problem};
use ptx::{Item, Kernel, MemSem, Op, Statement};
use tile::{Handout, Tail, TileOrder, Turns};

fn base() -> WgmmaPlan {
    WgmmaPlan { tail: Tail::Shared, ..WgmmaPlan::PLAIN }
}

/// A device with `multiprocessors` SMs.
fn arch(multiprocessors: u32) -> Arch {
    Arch { multiprocessors, ..Arch::SM_90 }
}

/// Checks a plan. The LSE is requested except for every fourth seed.
fn check(problem: &Problem, plan: &WgmmaPlan, multiprocessors: u32, options: Options) {
    let seed = options.seed;
    let problem = &problem.clone().with_lse(seed % 4 != 3);
    let (plan, arch) = (Plan::Wgmma(plan.clone()), arch(multiprocessors));
    common::run(&mut Emulator::new(options), problem, &plan, &arch, seed).check();
}

/// A problem of `count` tiles of 64 rows, the last of them ragged, with `blocks` blocks of 32 keys each.
fn tiles(count: usize, blocks: usize, ragged: usize, dim: usize) -> Problem {
    Problem::new(1, 1, 64 * count - 5, dim, DType::Bf16).with_seq_kv(32 * blocks - ragged, Layout::Bshd)
}

/// Tiles, blocks and CTAs: no remainder; parts of one tile and of two; a piece that is exactly a tile; more
/// CTAs than blocks; fewer tiles than CTAs; fewer blocks than SMs.
const ROUNDS: [(usize, usize, u32); 8] =
    [(4, 3, 2), (3, 4, 2), (5, 3, 3), (7, 5, 4), (5, 2, 4), (7, 1, 6), (2, 7, 5), (1, 3, 6)];

#[test]
fn tiles_of_the_last_wave_are_whole_in_the_end() {
    for (i, (count, blocks, takers)) in ROUNDS.into_iter().enumerate() {
        for tile_order in [Tiles::InTurn, Tiles::Overlapped] {
            let problem = tiles(count, blocks, [0, 7][i % 2], 64);
            let plan =
                WgmmaPlan { tiles: tile_order, rescale: [SPECULATIVE, Rescaling::Always][i % 2], ..base() };
            check(&problem, &plan, takers, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// A shared last wave together with the family's other genes.
#[test]
fn every_gene_computes_the_same_beside_it() {
    let two = WgmmaPlan { consumers: 2, ..base() };
    let plans = [
        WgmmaPlan { consumers: 3, turns: Turns::PingPong, tiles: Tiles::Overlapped, ..base() },
        WgmmaPlan { tiles: Tiles::Overlapped, rescale: SPECULATIVE, ..two.clone() },
        WgmmaPlan { cluster: 2, ..two.clone() },
        WgmmaPlan { cluster: 2, tiles: Tiles::Overlapped, turns: Turns::PingPong, ..two.clone() },
        WgmmaPlan { store: Store::Bulk, queries_ahead: 1, ..two.clone() },
        WgmmaPlan { store: Store::Bulk, tiles: Tiles::Overlapped, cluster: 2, ..two.clone() },
        WgmmaPlan { store: Store::OverQueries, queries_ahead: 1, ..base() },
        WgmmaPlan { resident_ctas: 2, stages: 1, ..base() },
        WgmmaPlan { tile_order: TileOrder::LongestFirst, stages: 3, rescale: Rescaling::Always, ..two },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        for (j, (dim, takers)) in [(64, 4), (128, 3), (256, 5)].into_iter().enumerate() {
            let problem = Problem::new(1, 3, 200, dim, DType::F16).with_seq_kv(150 + 10 * j, Layout::Bshd);
            let plan = WgmmaPlan { stages: if dim == 256 { 1 } else { plan.stages }, ..plan.clone() };
            if Plan::Wgmma(plan.clone()).check(&problem, &arch(takers * plan.cluster)).is_ok() {
                let options = Options { seed: (3 * i + j) as u64, ..Options::default() };
                check(&problem, &plan, takers * plan.cluster, options);
            } else {
                assert_eq!((dim, plan.consumers.max(plan.resident_ctas) > 1), (256, true), "{plan:?}");
            }
        }
    }
}

/// The torture set, each problem on a few more or a few fewer CTAs than tiles.
#[test]
fn torture_set_is_right_and_without_hazards() {
    let mut passed = 0;
    for (i, problem) in cases::torture().iter().enumerate() {
        let plan = varied(i, base());
        let ctas = plan.cluster * [3, 4, 7][i / 3 % 3];
        if Plan::Wgmma(plan.clone()).check(problem, &arch(ctas)).is_ok() {
            check(problem, &plan, ctas, Options { seed: i as u64, ..Options::default() });
            passed += 1;
        }
    }
    assert!(passed > 25, "{passed}");
}

/// Rows in which some parts contain only tiny probabilities, or one part contains all, and scores that grow
/// from part to part.
#[test]
fn parts_may_be_far_apart() {
    for (scale, rescale) in [(20.0, SPECULATIVE), (-300.0, Rescaling::Always), (90.0, Rescaling::Beyond(8))] {
        let problem = Problem {
            score: problem::Score { scale: Some(scale), ..problem::Score::default() },
            ..tiles(3, 7, 4, 64)
        };
        check(&problem, &WgmmaPlan { rescale, ..base() }, 4, Options::default());
    }
}

#[test]
fn heads_may_be_packed() {
    for (heads_kv, seq_q, consumers) in [(2, 50, 2), (1, 33, 1), (4, 70, 1)] {
        let problem = Problem { seq_kv: 90, ..Problem::new(2, 8, seq_q, 64, DType::F16) };
        let problem = problem.with_heads_kv(heads_kv, Layout::Bhsd);
        let plan = WgmmaPlan { packing: Packing::Packed, consumers, ..base() };
        check(&problem, &plan, 3, Options::default());
    }
}

#[test]
fn every_schedule_gives_the_same_bits() {
    for (cluster, tile_order) in [(1, Tiles::Overlapped), (2, Tiles::InTurn)] {
        let problem = tiles(7 * cluster, 5, 9, 64);
        let plan = WgmmaPlan { tiles: tile_order, cluster: cluster as u32, rescale: SPECULATIVE, ..base() };
        let kernel =
            emit(&problem, &Plan::Wgmma(plan), &arch(4 * cluster as u32)).expect("a good plan").kernel(0);
        let mut first = None;
        for schedule in [Schedule::Late, Schedule::Early, Schedule::Random, Schedule::Lagging] {
            for seed in 0..4 {
                let mut machine = Emulator::new(Options { seed, schedule, ..Options::default() });
                let run = common::run_kernel(&mut machine, &problem, &kernel, 0).expect("no hazard");
                run.check();
                let bits = run.bits();
                assert_eq!(first.get_or_insert_with(|| bits.clone()), &bits, "{schedule:?} {seed}");
            }
        }
    }
}

#[test]
fn what_cannot_be_shared_is_refused() {
    let problem = tiles(5, 4, 0, 64);
    let refusal = |problem: &Problem, plan: WgmmaPlan| {
        Plan::Wgmma(plan).check(problem, &Arch::SM_90).expect_err("refused").to_string()
    };
    let causal = refusal(&problem.clone().with_band(Band::CAUSAL), base());
    assert!(causal.contains("with family wgmma with tail = shared"), "{causal}");
    for (handout, name) in [(Handout::Dynamic, "dynamic"), (Handout::Folded, "folded")] {
        let dynamic = refusal(&problem, WgmmaPlan { handout, ..base() });
        assert!(
            dynamic.starts_with(&format!("invalid value '{name}' for handout beside tail = shared")),
            "{dynamic}"
        );
    }
    let own = refusal(&problem, WgmmaPlan { ends: Ends::Own, ..base() });
    assert!(
        own.starts_with("invalid value 'own' for ends beside tail = shared") && own.ends_with("common"),
        "{own}"
    );
}

/// The kernel with modified entry statements.
fn changed(kernel: &Kernel, change: impl FnOnce(&mut Vec<Statement>)) -> Kernel {
    let mut module = kernel.module.clone().into_module();
    let entry = module.items.iter_mut().find_map(|item| match item {
        Item::Function(function) if *function.name == *kernel.entry => function.body.as_mut(),
        _ => None,
    });
    change(&mut entry.expect("an entry").statements);
    Kernel { module: module.assume_verified(), ..kernel.clone() }
}

/// Indices of the entry's instructions of a kind.
fn places(kernel: &Kernel, wanted: impl Fn(&Op) -> bool) -> Vec<usize> {
    let entry = kernel.module.function(&kernel.entry).and_then(|f| f.body.as_ref()).expect("an entry");
    let statements = entry.statements.iter().enumerate();
    statements
        .filter(|(_, s)| matches!(s, Statement::Inst(inst) if wanted(&inst.op)))
        .map(|(at, _)| at)
        .collect()
}

/// Each part is written before its warp is counted, and read after all parts have been counted.
#[test]
fn parts_that_nothing_orders_are_refused() {
    let (problem, arch) = (tiles(5, 4, 0, 64), arch(4));
    let kernel = emit(&problem, &Plan::Wgmma(base()), &arch).expect("a good plan").kernel(0);
    let schedules = [Schedule::Late, Schedule::Early, Schedule::Random, Schedule::Lagging];
    let refused = |kernel: &Kernel| {
        schedules.into_iter().any(|schedule| {
            let mut machine = Emulator::new(Options { schedule, seed: 1, ..Options::default() });
            common::run_kernel(&mut machine, &problem, kernel, 0).is_err()
        })
    };
    assert!(!refused(&kernel));
    let [counts] = places(&kernel, |op| matches!(op, Op::Atom(_)))[..] else { panic!("one atomic") };
    for weaker in [MemSem::Acquire, MemSem::Release, MemSem::Relaxed] {
        let mutant = changed(&kernel, |statements| {
            if let Statement::Inst(inst) = &mut statements[counts]
                && let Op::Atom(atomic) = &mut inst.op
            {
                atomic.sem = weaker;
            }
        });
        assert!(refused(&mutant), "{weaker:?} is not enough");
    }
    let barriers = places(&kernel, |op| matches!(op, Op::BarWarpSync));
    assert_eq!(barriers.len(), 2, "around the atomic");
    for at in barriers {
        let mutant = changed(&kernel, |statements| drop(statements.remove(at)));
        assert!(refused(&mutant), "without the barrier at {at}");
    }
}
