//! Tests of the families for small grids: on the emulator, no hazards with every check on, and results within
//! the rounding of P and O; their launch contracts; and the output of ptxas and nvdisasm for their kernels.

use crate::common::cases;
use crate::common::each::each;
use crate::common::small_plan::{at_once, streamed};
use crate::common::{self, assert_contract};
use crate::tools;
use crate::tools::Facts;
use attend::{Packing, Rescale};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::small::{
    AtOncePlan, Merge, Requests, RowOrder, Scores, StreamedPlan, default_for,
};
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DType, Layout, Problem, Strides};
use ptx::{Dim3, Kernel};
use tile::RowStore;

const ARCH: Arch = Arch::SM_90;
const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// Checks a plan. The LSE is requested except for every fourth seed.
fn check(problem: &Problem, plan: &Plan, options: Options) {
    let seed = options.seed;
    let problem = &problem.clone().with_lse(seed % 4 != 3);
    common::run(&mut Emulator::new(options), problem, plan, &ARCH, seed).check();
}

/// Sets genes that both families have, in a plan of either family.
macro_rules! gene {
    ($plan:expr, $gene:ident) => {
        match $plan {
            Plan::SmallAtOnce(plan) => plan.$gene,
            Plan::SmallStreamed(plan) => plan.$gene,
            other => panic!("a plan of another family: {other:?}"),
        }
    };
}

fn cluster_keys(plan: &Plan) -> usize {
    let keys = gene!(plan, cluster) * gene!(plan, kv_warpgroups) * gene!(plan, block_n);
    keys as usize
}

/// Combinations of genes; `genes` tests each gene alone.
fn together() -> Vec<Plan> {
    let plain = at_once();
    let pieces = AtOncePlan { qk_pieces: 4, softmax_steps: 2, pv_pieces: 2, ..plain.clone() };
    let at_once = [
        AtOncePlan { cluster: 2, block_n: 64, ..plain.clone() },
        AtOncePlan { cluster: 4, block_n: 32, ..plain.clone() },
        AtOncePlan { kv_warpgroups: 2, block_n: 64, ..plain.clone() },
        AtOncePlan { kv_warpgroups: 4, block_n: 32, ..plain.clone() },
        AtOncePlan { cluster: 2, kv_warpgroups: 2, row_warpgroups: 2, block_n: 32, ..plain.clone() },
        AtOncePlan { cluster: 2, row_warpgroups: 2, block_n: 64, merge: Merge::PeerFirst, ..plain.clone() },
        pieces.clone(),
        AtOncePlan { key_copies: 2, scores: Scores::StepByStep, ..pieces.clone() },
        AtOncePlan { key_copies: 4, requests: Requests::FirstKeysOnly, ..pieces.clone() },
        AtOncePlan { requests: Requests::ValuesLate, store: RowStore::Chunks, ..pieces.clone() },
        AtOncePlan { kv_warpgroups: 2, block_n: 64, requests: Requests::ValuesLate, ..plain.clone() },
        AtOncePlan { overlapping: true, requests: Requests::ValuesLate, ..pieces },
        AtOncePlan { store: RowStore::Chunks, ..plain.clone() },
        AtOncePlan { tile_order: RowOrder::LongestFirst, cluster: 2, block_n: 64, ..plain },
    ];
    let plain = streamed();
    let streamed = [
        StreamedPlan { stages: 3, rescale: Rescale::Beyond(8), overlapping: true, ..plain.clone() },
        StreamedPlan { block_n: 16, cluster: 2, row_warpgroups: 2, ..plain.clone() },
        StreamedPlan { kv_warpgroups: 2, row_warpgroups: 2, ..plain.clone() },
        StreamedPlan {
            stages: 3,
            block_n: 16,
            speculative: Some(1),
            kv_warpgroups: 2,
            row_warpgroups: 2,
            ..plain.clone()
        },
        StreamedPlan { tile_order: RowOrder::Folded, block_n: 64, ..plain },
    ];
    at_once.into_iter().map(Plan::from).chain(streamed.into_iter().map(Plan::from)).collect()
}

#[test]
fn genes_get_along() {
    for (i, plan) in together().iter().enumerate() {
        // With streamed blocks, there are so many blocks that every stage is refilled.
        let blocks = if let Plan::SmallStreamed(plan) = plan { 2 * plan.stages as usize + 1 } else { 1 };
        let keys = blocks * cluster_keys(plan);
        let dtype = [DType::F16, DType::Bf16][i % 2];
        let whole = Problem::new(1, 1, 64, 64, dtype).with_seq_kv(keys, Layout::Bhsd);
        let ragged = Problem::new(1, 2, 100, 64, dtype)
            .with_band(Band::NAMED[i % 2])
            .with_seq_kv(keys - 27, Layout::Bshd);
        for (problem, schedule) in [whole, ragged].iter().zip(SCHEDULES.into_iter().cycle().skip(i)) {
            check(problem, plan, Options { seed: i as u64, schedule, ..Options::default() });
        }
    }
}

/// A GPU with so few SMs that few heads are many waves.
fn small_gpu(multiprocessors: u32) -> Arch {
    Arch { multiprocessors, ..ARCH }
}

/// The default plans of one head of the reference problem and of similar problems, chosen as for larger
/// grids.
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
    let waves = [132, 1, 2, 4].map(small_gpu);
    for (i, (seq, dim)) in cases.into_iter().enumerate() {
        for (j, mask) in Band::NAMED.into_iter().enumerate() {
            let dtype = [DType::F16, DType::Bf16][(i + j) % 2];
            let problem = Problem::new(1, 1, seq, dim, dtype).with_band(mask).with_layout(Layout::Bshd);
            let mut few = problem.clone();
            few.seq_q = 128.min(seq);
            let problem = if mask == Band::FULL { few.with_layout(Layout::Bshd) } else { problem };
            let plan = default_for(&problem, &waves[(i + j) % 4]);
            check(&problem, &plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Values narrower than keys, with the default plans of grids of one wave and of many, and with divided keys.
#[test]
fn values_may_be_narrower_than_keys() {
    for (i, problem) in cases::narrow_values(100, 120).into_iter().enumerate() {
        let plans = [
            default_for(&problem, &ARCH),
            default_for(&problem, &small_gpu(1)),
            AtOncePlan { cluster: 2, block_n: 64, merge: Merge::PeerFirst, ..at_once() }.into(),
            StreamedPlan { kv_warpgroups: 2, speculative: Some(12), ..streamed() }.into(),
        ];
        for plan in plans {
            check(&problem, &plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// The grid is one wave if possible. The fewer row tiles there are, the more SMs share the keys of one tile.
#[test]
fn defaults_follow_the_grid() {
    let plan = |batch, heads, seq, dim, mask| {
        let problem = Problem::new(batch, heads, seq, dim, DType::F16).with_band(mask);
        let plan = default_for(&problem, &ARCH);
        plan.check(&problem, &ARCH).unwrap();
        let stages = if let Plan::SmallStreamed(plan) = &plan { plan.stages } else { 1 };
        let [rows, cluster, parts] =
            [gene!(&plan, row_warpgroups), gene!(&plan, cluster), gene!(&plan, kv_warpgroups)];
        let resident = if let Plan::SmallStreamed(plan) = &plan { plan.resident_ctas } else { 1 };
        let genes = [rows, cluster, parts, gene!(&plan, block_n), stages, resident];
        (genes, gene!(&plan, tile_order))
    };
    let (full, causal) = (Band::FULL, Band::CAUSAL);
    assert_eq!(plan(1, 8, 512, 64, full), ([1, 2, 1, 256, 1, 1], RowOrder::ByHead));
    assert_eq!(plan(1, 8, 1024, 64, full), ([2, 2, 1, 128, 4, 1], RowOrder::ByHead));
    assert_eq!(plan(1, 32, 256, 64, causal), ([1, 1, 2, 128, 1, 1], RowOrder::ByHead));
    assert_eq!(plan(4, 16, 256, 128, full), ([2, 1, 1, 256, 1, 1], RowOrder::ByHead));
    assert_eq!(plan(1, 32, 512, 64, full), ([2, 1, 1, 128, 4, 1], RowOrder::ByHead));
    assert_eq!(plan(1, 32, 512, 64, causal), ([1, 1, 1, 128, 3, 2], RowOrder::Folded));
    assert_eq!(plan(1, 32, 512, 128, full), ([2, 1, 1, 128, 3, 1], RowOrder::ByHead));
    assert_eq!(plan(4, 16, 512, 64, full), ([4, 1, 1, 64, 8, 1], RowOrder::ByHead));
    assert_eq!(plan(4, 16, 512, 64, causal), ([1, 1, 1, 64, 4, 3], RowOrder::LongestFirst));
    assert_eq!(plan(1, 32, 1024, 64, full), ([1, 1, 1, 64, 2, 4], RowOrder::ByHead));
    // Grids of many waves belong to another family.
    let large = Problem::new(4, 16, 1024, 128, DType::F16);
    assert_eq!(Plan::default_for(&large, &ARCH).unwrap().family(), "wgmma");
}

/// Every row order computes each tile once: tiles, heads and batch entries have different counts.
#[test]
fn every_order_takes_every_tile() {
    for (tile_order, rows) in
        [RowOrder::ByHead, RowOrder::LongestFirst, RowOrder::Folded].into_iter().zip([129, 257, 300])
    {
        let problem = Problem::new(2, 3, rows, 16, DType::F16).with_band(Band::CAUSAL);
        let problem = problem.with_seq_kv(48, Layout::Bshd);
        for cluster in [1, 2] {
            let block_n = (48u32 / cluster).next_multiple_of(16);
            let plan = AtOncePlan { tile_order, cluster, block_n, ..at_once() };
            check(&problem, &plan.into(), Options::default());
        }
    }
}

#[test]
fn every_schedule_gives_the_same_clean_result() {
    let problem =
        Problem::new(1, 1, 70, 64, DType::Bf16).with_band(Band::CAUSAL).with_seq_kv(120, Layout::Bhsd);
    let plans: [Plan; 3] = [
        AtOncePlan { cluster: 2, block_n: 64, qk_pieces: 2, merge: Merge::PeerFirst, ..at_once() }.into(),
        AtOncePlan { cluster: 2, kv_warpgroups: 2, block_n: 32, ..at_once() }.into(),
        StreamedPlan { cluster: 2, block_n: 16, ..streamed() }.into(),
    ];
    for plan in plans {
        for (seed, schedule) in (0..4).flat_map(|seed| SCHEDULES.map(|schedule| (seed, schedule))) {
            check(&problem, &plan, Options { seed, schedule, ..Options::default() });
        }
    }
}

/// Each path of a warpgroup's only block is right: with diagonals at the start of a step and elsewhere, with
/// rows that see nothing, and with steps of either product.
#[test]
fn every_path_is_right() {
    let pieces = AtOncePlan { cluster: 2, block_n: 128, qk_pieces: 4, pv_pieces: 4, ..at_once() };
    let plans = [
        AtOncePlan { key_copies: 4, merge: Merge::PeerFirst, ..pieces.clone() },
        AtOncePlan { qk_pieces: 2, softmax_steps: 2, pv_pieces: 2, key_copies: 2, ..pieces.clone() },
        AtOncePlan { row_warpgroups: 2, pv_pieces: 1, scores: Scores::StepByStep, ..pieces.clone() },
        AtOncePlan { paths: 2, merge: Merge::PeerFirst, ..pieces.clone() },
        AtOncePlan { paths: 1, key_copies: 2, ..pieces.clone() },
        AtOncePlan { qk_pieces: 16, pv_pieces: 8, requests: Requests::FirstKeysOnly, ..pieces },
    ];
    for (i, plan) in plans.iter().enumerate() {
        for (j, (mask, rows, keys)) in [
            (Band::CAUSAL, 256, 256),
            (Band::CAUSAL, 320, 250),
            (Band::CAUSAL, 199, 236),
            (Band::CAUSAL, 70, 256),
            (Band::CAUSAL_TOP_LEFT, 260, 170),
        ]
        .into_iter()
        .enumerate()
        {
            let problem = Problem::new(1, 1, rows, 32, DType::F16).with_band(mask);
            let problem = problem.with_seq_kv(keys, Layout::Bhsd);
            let schedule = SCHEDULES[(i + j) % SCHEDULES.len()];
            check(&problem, &plan.clone().into(), Options { seed: i as u64, schedule, ..Options::default() });
        }
    }
}

/// Keys that no row of a warpgroup sees are not computed. For four tiles of 64 rows, the products have one,
/// two, three and four steps; with one path for all partial tiles they have two, two, four and four.
#[test]
fn unseen_keys_are_no_work() {
    let flop = |mask, paths| {
        let plan = AtOncePlan { cluster: 2, block_n: 128, qk_pieces: 2, pv_pieces: 2, paths, ..at_once() };
        let problem = Problem::new(1, 1, 256, 64, DType::F16).with_band(mask);
        let mut emulator = Emulator::new(Options::default());
        common::run(&mut emulator, &problem, &plan.into(), &ARCH, 1).check();
        let report = emulator.last_report().expect("it ran");
        report.counters.instructions.iter().map(|counter| counter.tensor_flop).sum::<u64>()
    };
    let full = flop(Band::FULL, 4);
    assert_eq!([4, 2, 1].map(|paths| 16 * flop(Band::CAUSAL, paths)), [10, 10, 12].map(|steps| steps * full));
}

/// In a causal tile, each row warpgroup visits only the blocks that its own rows see. The cases range from no
/// skipped block to most blocks skipped, and include rows beyond the end.
#[test]
fn warpgroups_of_rows_end_where_their_rows_do() {
    for (mask, rows, keys, warpgroups, stages) in [
        (Band::CAUSAL, 256, 256, 4, 2),
        (Band::CAUSAL, 130, 140, 3, 3),
        (Band::CAUSAL, 200, 90, 2, 4),
        (Band::CAUSAL, 128, 128, 2, 8),
        (Band::CAUSAL_TOP_LEFT, 250, 90, 4, 2),
    ] {
        let problem = Problem::new(1, 1, rows, 64, DType::F16).with_band(mask);
        let problem = problem.with_seq_kv(keys, Layout::Bhsd);
        for speculative in [None, Some(12)] {
            let plan =
                StreamedPlan { row_warpgroups: warpgroups, stages, block_n: 16, speculative, ..streamed() };
            let plan = plan.into();
            for schedule in SCHEDULES {
                check(&problem, &plan, Options { schedule, ..Options::default() });
            }
        }
    }
}

/// Groups of heads with packed rows, with ragged ends and with diagonals at the start of a path's step and
/// elsewhere: over all keys at once, over a part of the keys, and with streamed blocks.
#[test]
fn packed_heads_are_apart_again_in_the_output() {
    let packed = AtOncePlan { packing: Packing::Packed, ..at_once() };
    let pair = AtOncePlan { cluster: 2, block_n: 64, ..packed.clone() };
    let pieces = AtOncePlan { qk_pieces: 4, softmax_steps: 2, pv_pieces: 2, ..packed.clone() };
    let streams = StreamedPlan { block_n: 16, speculative: Some(1), packing: Packing::Packed, ..streamed() };
    let plans: [Plan; 7] = [
        packed.into(),
        AtOncePlan { row_warpgroups: 2, merge: Merge::PeerFirst, pv_pieces: 4, ..pair.clone() }.into(),
        AtOncePlan { kv_warpgroups: 2, block_n: 32, ..pair }.into(),
        AtOncePlan { key_copies: 4, paths: 2, requests: Requests::FirstKeysOnly, ..pieces.clone() }.into(),
        AtOncePlan { row_warpgroups: 2, tile_order: RowOrder::Folded, store: RowStore::Chunks, ..pieces }
            .into(),
        StreamedPlan {
            row_warpgroups: 2,
            overlapping: true,
            tile_order: RowOrder::LongestFirst,
            ..streams.clone()
        }
        .into(),
        StreamedPlan { cluster: 2, kv_warpgroups: 2, stages: 3, ..streams }.into(),
    ];
    let shapes = [(1, 8), (2, 50), (2, 32), (1, 16), (4, 7), (1, 1), (2, 33)];
    for (i, plan) in plans.iter().enumerate() {
        for (j, (mask, seq_kv, layout)) in [
            (Band::FULL, 90, Layout::Bshd),
            (Band::CAUSAL, 128, Layout::Bhsd),
            (Band::CAUSAL, 90, Layout::Bshd),
            (Band::CAUSAL_TOP_LEFT, 23, Layout::Bshd),
        ]
        .into_iter()
        .enumerate()
        {
            let (heads_kv, seq_q) = shapes[(i + 2 * j) % shapes.len()];
            // The columns are divided evenly among the parts of the keys.
            let dims: &[usize] =
                if cluster_keys(plan) == gene!(plan, block_n) as usize { &[72, 64, 128] } else { &[64, 128] };
            let dim = dims[(i + j) % dims.len()];
            let mut problem = Problem::new(2, 8, seq_q, dim, DType::F16).with_band(mask);
            problem.seq_kv = seq_kv;
            let problem = problem.with_heads_kv(heads_kv, layout);
            let schedule = SCHEDULES[(i + j) % SCHEDULES.len()];
            check(&problem, plan, Options { seed: i as u64, schedule, ..Options::default() });
        }
    }
}

/// A group size that divides the rows of a CTA but not those of a warpgroup; one copy loads all rows.
#[test]
fn groups_of_three_share_three_warpgroups() {
    let plan = StreamedPlan { row_warpgroups: 3, block_n: 16, packing: Packing::Packed, ..streamed() };
    let plan = plan.into();
    for (mask, seq_q, seq_kv) in [
        (Band::FULL, 30, 60),
        (Band::CAUSAL, 70, 90),
        (Band::CAUSAL_TOP_LEFT, 65, 40),
        (Band::CAUSAL, 65, 20),
    ] {
        let problem = Problem::new(1, 6, seq_q, 64, DType::Bf16).with_band(mask);
        let problem = problem.with_seq_kv(seq_kv, Layout::Bshd).with_heads_kv(2, Layout::Bshd);
        check(&problem, &plan, Options::default());
        let at_once = AtOncePlan { packing: Packing::Packed, ..at_once() };
        let refused = Plan::from(at_once).check(&problem, &ARCH).expect_err("3 does not divide 64");
        assert!(
            refused
                .to_string()
                .starts_with("invalid value '3' for query heads a key head: expected divisors of 64")
        );
    }
}

/// Strides of packed heads: with gaps, KV heads with stride 0, and an output in another order. Query heads
/// with stride 0 are rejected.
#[test]
fn packed_heads_follow_strides() {
    let (packing, store) = (Packing::Packed, RowStore::Chunks);
    let plan = Plan::from(AtOncePlan { packing, store, ..at_once() });
    let streamed = Plan::from(StreamedPlan { packing, store, ..streamed() });
    let dense = Problem::new(2, 8, 9, 64, DType::F16).with_seq_kv(70, Layout::Bhsd);
    let dense = dense.with_heads_kv(2, Layout::Bhsd);
    let mut padded = dense.clone();
    padded.q = Strides { batch: 8 * 10 * 96, head: 10 * 96, row: 96 };
    padded.out = Strides { batch: 8 * 11 * 80, head: 11 * 80, row: 80 };
    let mut mixed = dense.clone();
    mixed.q = Strides { batch: 9 * 8 * 64, head: 64, row: 8 * 64 };
    (mixed.k.head, mixed.v.batch, mixed.out.row) = (0, 0, -64);
    for problem in [dense.clone(), padded, mixed] {
        check(&problem, &plan, Options::default());
        check(&problem, &streamed, Options::default());
    }
    let same = Problem { q: Strides { head: 0, ..dense.q }, ..dense };
    let refused = plan.check(&same, &ARCH).expect_err("one head is no group");
    assert!(
        refused.to_string().starts_with("invalid value '0' for q head stride: expected other than 0"),
        "{refused}"
    );
    assert_eq!(gene!(&default_for(&same, &ARCH), packing), Packing::Apart);
}

/// Few queries of grouped heads are packed, and the saved CTAs divide the keys. Tiles that are full without
/// packing are not packed.
#[test]
fn defaults_pack_few_queries() {
    let of = |heads_kv, seq_q, seq_kv| {
        let problem = Problem::new(1, 32, seq_q, 64, DType::Bf16).with_seq_kv(seq_kv, Layout::Bshd);
        let problem = problem.with_heads_kv(heads_kv, Layout::Bshd);
        let plan = default_for(&problem, &ARCH);
        plan.check(&problem, &ARCH).unwrap();
        (plan, problem)
    };
    for seq_q in [1, 2, 5, 16] {
        for heads_kv in [8, 4] {
            let (plan, problem) = of(heads_kv, seq_q, 200);
            assert_eq!(gene!(&plan, packing), Packing::Packed, "{problem:?}");
            let tiles = heads_kv * (seq_q * 32 / heads_kv).div_ceil(64);
            assert_eq!(
                kernel(&problem, &plan).launch.grid,
                Dim3(gene!(&plan, cluster) * tiles as u32 / heads_kv as u32, heads_kv as u32, 1)
            );
        }
        assert_eq!(gene!(&of(32, seq_q, 200).0, packing), Packing::Apart);
    }
    for seq_q in [64, 128, 1024] {
        assert_eq!(gene!(&of(8, seq_q, 200).0, packing), Packing::Apart);
    }
    // 96 tiles of 64 rows would be a wave. With packing they are half a wave, and pairs of CTAs divide the
    // keys.
    let problem = Problem::new(3, 32, 16, 64, DType::Bf16).with_seq_kv(512, Layout::Bshd);
    let problem = problem.with_heads_kv(8, Layout::Bshd);
    let plan = default_for(&problem, &ARCH);
    let apart = default_for(&problem.clone().with_heads_kv(32, Layout::Bshd), &ARCH);
    let parts = [&plan, &apart].map(|plan| (gene!(plan, cluster), gene!(plan, kv_warpgroups)));
    assert_eq!(parts, [(2, 1), (1, 2)]);
    check(
        &Problem::new(1, 8, 16, 64, DType::Bf16)
            .with_seq_kv(512, Layout::Bshd)
            .with_heads_kv(2, Layout::Bshd),
        &plan,
        Options::default(),
    );
}

/// Groups of heads, rows that see nothing, strides with gaps, batch entries with stride 0, and every sign of
/// the scale.
#[test]
fn shapes_and_strides() {
    let at_once = Plan::from(AtOncePlan { cluster: 2, block_n: 64, ..at_once() });
    let streamed = Plan::from(StreamedPlan { cluster: 2, block_n: 16, ..streamed() });
    let grouped =
        Problem::new(2, 4, 65, 64, DType::F16).with_seq_kv(128, Layout::Bshd).with_heads_kv(2, Layout::Bshd);
    let more_rows =
        Problem::new(1, 2, 140, 64, DType::Bf16).with_band(Band::CAUSAL).with_seq_kv(37, Layout::Bhsd);
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
        let mut scaled = Problem::new(1, 1, 40, 64, DType::F16).with_band(Band::CAUSAL);
        scaled.score.scale = Some(scale);
        problems.push(scaled);
    }
    for (seed, problem) in problems.iter().enumerate() {
        for plan in [&at_once, &streamed] {
            check(problem, plan, Options { seed: seed as u64, ..Options::default() });
        }
    }
}

fn kernel(problem: &Problem, plan: &Plan) -> Kernel {
    emit(problem, plan, &ARCH).unwrap_or_else(|e| panic!("{plan:?}: {e}")).kernel(0)
}

#[test]
fn contracts_hold_together() {
    for dim in [40, 64, 72, 96, 128, 192, 256] {
        for (seq_kv, layout) in [(100, Layout::Bhsd), (1777, Layout::Bshd)] {
            let problem = Problem::new(2, 8, 1000, dim, DType::F16).with_band(Band::CAUSAL);
            let problem = problem.with_seq_kv(seq_kv, layout).with_heads_kv(2, layout).with_lse(true);
            let plan = default_for(&problem, &ARCH);
            let kernel = kernel(&problem, &plan);
            assert_contract(&kernel);
            let names: Vec<&str> = kernel.buffers.iter().map(|b| b.name.as_str()).collect();
            assert_eq!(names, ["q", "k", "v", "out", "lse"]);
            assert_eq!(kernel.launch.grid.0 % kernel.launch.cluster.0, 0);
        }
    }
}

/// Combinations of genes, and the defaults of every width and length, including values narrower than keys.
#[test]
fn products_are_not_serialised_and_nothing_spills() {
    let problem = |seq, dim, mask| Problem::new(1, 8, seq, dim, DType::F16).with_band(mask);
    let ragged = problem(100, 64, Band::CAUSAL).with_lse(true);
    let mut cases: Vec<(Problem, Plan)> = together().into_iter().map(|plan| (ragged.clone(), plan)).collect();
    // SM counts for which 8 heads are half a wave to four waves.
    let common =
        [(128, 132), (256, 32), (512, 32), (512, 64), (512, 16), (1024, 32), (1024, 128), (4000, 132)];
    for (dim, mask, grids) in [
        (64, Band::FULL, &common[..]),
        (64, Band::CAUSAL, &common[1..7]),
        (128, Band::FULL, &common[3..]),
        (128, Band::CAUSAL, &common[..]),
        (72, Band::FULL, &common[6..]),
        (96, Band::CAUSAL, &common[4..]),
        (192, Band::FULL, &common[4..]),
        (256, Band::CAUSAL, &common[3..]),
    ] {
        for &(seq, multiprocessors) in grids {
            let problem = problem(seq, dim, mask);
            let plan = default_for(&problem, &small_gpu(multiprocessors));
            cases.push((problem.with_lse(dim == 128), plan));
        }
    }
    for problem in [120, 1000].into_iter().flat_map(|keys| cases::narrow_values(100, keys)) {
        let plan = default_for(&problem, &ARCH);
        cases.push((problem, plan));
    }
    for (dim, seq_q, seq_kv) in [(64, 16, 512), (64, 5, 4000), (128, 40, 512), (128, 1, 4000), (256, 8, 1000)]
    {
        for mask in Band::NAMED {
            let problem = problem(seq_q, dim, mask).with_seq_kv(seq_kv, Layout::Bshd);
            let problem = problem.with_heads_kv(2, Layout::Bshd).with_lse(true);
            for multiprocessors in [132, 2] {
                let plan = default_for(&problem, &small_gpu(multiprocessors));
                assert_eq!(gene!(&plan, packing), Packing::Packed);
                cases.push((problem.clone(), plan));
            }
        }
    }
    let kernels = each(&cases, |(problem, plan)| kernel(problem, plan));
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for ((problem, plan), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        assert_eq!(spills, 0, "head_dim {} {plan:?}: {registers} registers", problem.head_dim);
    }
}

/// Machine code of the reference problem's kernel, on each path of a causal mask, and of a kernel whose
/// blocks are streamed and stay resident: each product and copy appears once, and descriptors are in uniform
/// registers.
#[test]
fn machine_code_is_what_was_emitted() {
    let (Some(ptxas), Some(nvdisasm)) = (tools::find("FLASHCORE_PTXAS"), tools::find("FLASHCORE_NVDISASM"))
    else {
        return;
    };
    let (mission, resident) = (Problem::mission(), Problem::new(1, 32, 512, 64, DType::F16));
    for (problem, mask, paths, most) in
        [(&mission, Band::FULL, 1, 1264), (&mission, Band::CAUSAL, 6, 4400), (&resident, Band::FULL, 1, 1200)]
    {
        let problem = problem.clone().with_band(mask);
        let kernel = kernel(&problem, &default_for(&problem, &ARCH));
        let sass = tools::disassemble(&nvdisasm, &tools::assemble(&ptxas, &kernel));
        let text = kernel.module.to_string();
        for (ptx, machine) in
            [("wgmma.mma_async", "HGMMA"), ("cp.async.bulk.tensor", "UTMALDG"), ("st.async", "STAS")]
        {
            let (emitted, found) = (text.matches(ptx).count(), sass.matches(machine).count());
            assert_eq!(found, emitted, "{mask:?}: {machine}");
        }
        let moved = sass.matches("R2UR").count();
        assert!(moved <= paths, "{mask:?}: {moved} moves to uniform registers");
        let count =
            sass.lines().filter(|line| line.trim_start().starts_with("/*") && line.contains(';')).count();
        assert!(count <= most, "{mask:?}: {count} instructions, {most} are enough");
    }
}
