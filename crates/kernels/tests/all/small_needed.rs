//! Tests that every barrier, fence and wait of the families for small grids is needed: if any one is removed,
//! the emulator rejects the kernel.

use crate::common;
use crate::common::small_plan::{at_once, streamed};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::small::{AtOncePlan, Merge, Requests, StreamedPlan};
use flashcore_kernels::{Arch, Plan, emit};
use problem::{DType, Layout, Problem};
use ptx::{GridDependency, Item, Kernel, Op, Statement};
use tile::Turns;

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// Query rows of a CTA.
fn rows(plan: &Plan) -> usize {
    match plan {
        Plan::SmallAtOnce(plan) => plan.rows() as usize,
        Plan::SmallStreamed(plan) => plan.rows() as usize,
        other => panic!("a plan of another family: {other:?}"),
    }
}

/// Positions of the instructions that order memory accesses or products.
fn synchronisations(kernel: &Kernel) -> Vec<(usize, usize, Op)> {
    let mut found = Vec::new();
    for (i, item) in kernel.module.items.iter().enumerate() {
        let Item::Function(function) = item else { continue };
        for (j, statement) in function.body.iter().flat_map(|body| &body.statements).enumerate() {
            if let Statement::Inst(inst) = statement
                && matches!(
                    inst.op,
                    Op::Bar { .. }
                        | Op::BarWarpSync
                        | Op::BarrierCluster(_)
                        | Op::Mbarrier(_)
                        | Op::WgmmaFence
                        | Op::WgmmaCommitGroup
                        | Op::WgmmaWaitGroup
                        | Op::Griddepcontrol(GridDependency::Wait)
                )
            {
                found.push((i, j, inst.op));
            }
        }
    }
    found
}

#[test]
fn every_synchronisation_is_needed() {
    let at_once = [
        AtOncePlan {
            cluster: 2,
            block_n: 64,
            key_copies: 2,
            qk_pieces: 2,
            softmax_steps: 2,
            pv_pieces: 2,
            requests: Requests::FirstKeysOnly,
            merge: Merge::PeerFirst,
            ..at_once()
        },
        AtOncePlan { cluster: 2, kv_warpgroups: 2, block_n: 32, overlapping: true, ..at_once() },
        // The warp with late requests has no early requests.
        AtOncePlan { requests: Requests::ValuesLate, overlapping: true, ..at_once() },
        AtOncePlan { cluster: 4, block_n: 32, ..at_once() },
    ];
    let plain = StreamedPlan { block_n: 16, ..streamed() };
    let streamed = [
        plain.clone(),
        StreamedPlan { row_warpgroups: 2, overlapping: true, ..plain.clone() },
        StreamedPlan { row_warpgroups: 2, turns: Turns::PingPong, ..plain.clone() },
        StreamedPlan { speculative: Some(1), ..plain.clone() },
        StreamedPlan { cluster: 2, ..plain },
    ];
    let plans = at_once.map(Plan::SmallAtOnce).into_iter().chain(streamed.map(Plan::SmallStreamed));
    // Ping-pong only schedules the tensor cores; the rings order memory. A missing `bar.sync` changes the
    // order of turns but not the result.
    let surviving = |plan: &Plan| match plan {
        Plan::SmallStreamed(StreamedPlan { turns: Turns::PingPong, .. }) => &["bar.sync"][..],
        _ => &[],
    };
    for plan in plans {
        // An even and an odd number of turns, with streamed blocks.
        let problems = [128, 112].map(|keys| {
            let rows = rows(&plan);
            Problem::new(1, 1, rows, 64, DType::F16).with_seq_kv(keys, Layout::Bhsd).with_lse(true)
        });
        let kernels =
            problems.each_ref().map(|problem| emit(problem, &plan, &Arch::SM_90).unwrap().kernel(0));
        let both = if matches!(plan, Plan::SmallStreamed(_)) { 2 } else { 1 };
        let survives = |&(item, at, op): &(usize, usize, Op)| {
            !problems.iter().zip(&kernels).take(both).any(|(problem, kernel)| {
                let mut module = kernel.module.clone().into_module();
                if let Item::Function(function) = &mut module.items[item]
                    && let Some(body) = &mut function.body
                {
                    // Together with a wait, the branch back to it is removed. Otherwise a warp could test the
                    // barrier once and learn of its completion through another warp.
                    let wait = matches!(op, Op::Mbarrier(mbarrier) if mbarrier.op.waits());
                    body.statements.drain(at..=at + usize::from(wait));
                }
                let mutant = Kernel { module: module.assume_verified(), ..kernel.clone() };
                SCHEDULES.into_iter().any(|schedule| {
                    let options = Options { schedule, ..Options::default() };
                    common::run_kernel(&mut Emulator::new(options), problem, &mutant, 1).is_err()
                })
            })
        };
        let survivors = synchronisations(&kernels[0]).into_iter().filter(survives);
        let survivors: Vec<String> = survivors.map(|(_, _, op)| op.to_string()).collect();
        assert_eq!(survivors, surviving(&plan), "{plan:?} is right without them");
    }
}
