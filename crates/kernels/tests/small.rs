//! The family for small grids on the emulator: every hazard check on, results within the rounding of P and O.

mod common;

use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::small::{Merge, Requests, Scores, SmallPlan};
use flashcore_kernels::{Arch, Plan};
use problem::{DType, Layout, Mask, Problem, Strides};
use tile::{Rescale, RowStore};

const ARCH: Arch = Arch::SM_90;
const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

fn prove(problem: &Problem, plan: &SmallPlan, options: Options) {
    let seed = options.seed;
    let plan = Plan::Small(plan.clone());
    common::run(&mut Emulator::new(options), problem, &plan, &ARCH, seed).check();
}

/// One warpgroup with all keys, nothing early or late.
fn plain() -> SmallPlan {
    SmallPlan {
        row_warpgroups: 1,
        cluster: 1,
        kv_warpgroups: 1,
        block_n: 128,
        stages: 1,
        rescale: Rescale::Always,
        key_copies: 1,
        qk_pieces: 1,
        softmax_steps: 1,
        pv_pieces: 1,
        requests: Requests::AtOnce,
        scores: Scores::AllAtOnce,
        merge: Merge::Shares,
        store: RowStore::Pairs,
        overlapping: false,
        resident_ctas: 1,
        lse: true,
    }
}

/// Every value that a gene takes elsewhere, beside the plain plan.
fn genes() -> Vec<SmallPlan> {
    let plain = plain();
    let pieces = SmallPlan { qk_pieces: 4, softmax_steps: 2, pv_pieces: 2, ..plain.clone() };
    vec![
        plain.clone(),
        SmallPlan { row_warpgroups: 2, ..plain.clone() },
        SmallPlan { cluster: 2, block_n: 64, ..plain.clone() },
        SmallPlan { cluster: 4, block_n: 32, ..plain.clone() },
        SmallPlan { kv_warpgroups: 2, block_n: 64, ..plain.clone() },
        SmallPlan { kv_warpgroups: 4, block_n: 32, ..plain.clone() },
        SmallPlan { cluster: 2, kv_warpgroups: 2, row_warpgroups: 2, block_n: 32, ..plain.clone() },
        SmallPlan { cluster: 2, block_n: 64, merge: Merge::PeerFirst, ..plain.clone() },
        SmallPlan { cluster: 2, row_warpgroups: 2, block_n: 64, merge: Merge::PeerFirst, ..plain.clone() },
        pieces.clone(),
        SmallPlan { key_copies: 2, scores: Scores::StepByStep, ..pieces.clone() },
        SmallPlan { key_copies: 4, requests: Requests::FirstKeysOnly, ..pieces.clone() },
        SmallPlan { requests: Requests::ValuesLate, store: RowStore::Chunks, ..pieces.clone() },
        SmallPlan { overlapping: true, requests: Requests::ValuesLate, resident_ctas: 2, ..pieces },
        SmallPlan { lse: false, store: RowStore::Chunks, ..plain.clone() },
        SmallPlan { stages: 2, block_n: 64, ..plain.clone() },
        SmallPlan { stages: 3, block_n: 32, rescale: Rescale::Beyond(8), overlapping: true, ..plain.clone() },
        SmallPlan { stages: 2, block_n: 16, cluster: 2, row_warpgroups: 2, ..plain.clone() },
        SmallPlan { stages: 2, block_n: 32, kv_warpgroups: 2, row_warpgroups: 2, ..plain },
    ]
}

#[test]
fn every_gene_is_right_without_hazards() {
    for (i, plan) in genes().iter().enumerate() {
        // Where blocks stream by, so many that every stage is filled again.
        let blocks = if plan.streams() { 2 * plan.stages as usize + 1 } else { 1 };
        let keys = blocks * plan.cluster_keys() as usize;
        let dtype = [DType::F16, DType::Bf16][i % 2];
        let whole = Problem::new(1, 1, 64, 64, dtype).with_seq_kv(keys, Layout::Bhsd);
        let ragged = Problem::new(1, 2, 100, 64, dtype)
            .with_mask(Mask::ALL[i % 2])
            .with_seq_kv(keys - 27, Layout::Bshd);
        for (problem, schedule) in [whole, ragged].iter().zip(SCHEDULES.into_iter().cycle().skip(i)) {
            prove(problem, plan, Options { seed: i as u64, schedule, ..Options::default() });
        }
    }
}

/// The plan of the mission problem, on a head of it, and those of its neighbours.
#[test]
fn defaults_are_right() {
    let cases = [
        (128, 64),
        (256, 64),
        (512, 64),
        (512, 128),
        (1024, 64),
        (300, 96),
        (200, 192),
        (90, 72),
        (700, 128),
        (600, 72),
        (1100, 64),
        (400, 256),
        (70, 40),
    ];
    for (i, (seq, dim)) in cases.into_iter().enumerate() {
        for (j, mask) in Mask::ALL.into_iter().enumerate() {
            let dtype = [DType::F16, DType::Bf16][(i + j) % 2];
            let problem = Problem::new(1, 1, seq, dim, dtype).with_mask(mask).with_layout(Layout::Bshd);
            let mut few = problem.clone();
            few.seq_q = 64.min(seq);
            let problem = if mask == Mask::None { few.with_layout(Layout::Bshd) } else { problem };
            let plan = SmallPlan { lse: i % 2 == 0, ..SmallPlan::default_for(&problem, &ARCH) };
            prove(&problem, &plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

#[test]
fn every_schedule_gives_the_same_clean_result() {
    let problem =
        Problem::new(1, 1, 70, 64, DType::Bf16).with_mask(Mask::Causal).with_seq_kv(120, Layout::Bhsd);
    for plan in [
        SmallPlan { cluster: 2, block_n: 64, qk_pieces: 2, merge: Merge::PeerFirst, ..plain() },
        SmallPlan { cluster: 2, kv_warpgroups: 2, block_n: 32, ..plain() },
        SmallPlan { cluster: 2, stages: 2, block_n: 16, ..plain() },
    ] {
        for (seed, schedule) in (0..4).flat_map(|seed| SCHEDULES.map(|schedule| (seed, schedule))) {
            prove(&problem, &plan, Options { seed, schedule, ..Options::default() });
        }
    }
}

/// Groups of heads, rows that see nothing, strides with gaps, batch entries that are all the same, every sign of the scale.
#[test]
fn shapes_and_strides() {
    let at_once = SmallPlan { cluster: 2, block_n: 64, ..plain() };
    let streamed = SmallPlan { stages: 2, block_n: 16, ..at_once.clone() };
    let grouped =
        Problem::new(2, 4, 65, 64, DType::F16).with_seq_kv(128, Layout::Bshd).with_heads_kv(2, Layout::Bshd);
    let more_rows =
        Problem::new(1, 2, 140, 64, DType::Bf16).with_mask(Mask::Causal).with_seq_kv(37, Layout::Bhsd);
    let one = Problem::new(1, 1, 1, 64, DType::F16).with_seq_kv(1, Layout::Bhsd);
    let mut padded = Problem::new(2, 2, 50, 64, DType::F16);
    for strides in [&mut padded.q, &mut padded.k, &mut padded.v, &mut padded.out] {
        *strides = Strides { batch: 2 * 50 * 96 + 16, head: 50 * 96 + 8, row: 96 };
    }
    let mut broadcast = Problem::new(2, 2, 50, 64, DType::F16);
    (broadcast.k.batch, broadcast.v.head, broadcast.q.batch) = (0, 0, 0);
    let mut backwards = Problem::new(1, 1, 50, 64, DType::F16);
    backwards.out.row = -64;
    let mut narrow_values = Problem::new(1, 1, 70, 72, DType::Bf16).with_seq_kv(70, Layout::Bhsd);
    narrow_values.head_dim_v = 32;
    let narrow_values = narrow_values.with_layout(Layout::Bhsd);
    let mut problems = vec![grouped, more_rows, one, padded, broadcast, backwards, narrow_values];
    for scale in [0.0, -0.3, 4.0] {
        let mut scaled = Problem::new(1, 1, 40, 64, DType::F16).with_mask(Mask::Causal);
        scaled.scale = Some(scale);
        problems.push(scaled);
    }
    for (seed, problem) in problems.iter().enumerate() {
        for plan in [&at_once, &streamed] {
            prove(problem, plan, Options { seed: seed as u64, ..Options::default() });
        }
    }
}
