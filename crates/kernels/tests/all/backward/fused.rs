//! Tests of `backward::fused`.

use attend::Order;
use emu::{Emulator, Options};
use flashcore_kernels::backward::fused::FusedPlan;
use flashcore_kernels::forward::mma::CtaOrder;
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, Corner, DType, Layout, OperandMap, Pass, Problem, Tensor};
use ptx::{GridDependency, Item, Kernel, Op, Statement};

use super::reference::{Inputs, even};
use super::split::{
    MutantRun, SCHEDULES, assert_factors_matter, assert_products_matter, is_caught, places, uneven_problems,
};
use crate::common::cases;
use crate::common::each::each;
use crate::forward::without;
use crate::tools::{self, Facts};
use crate::wgmma_needed::{in_share, in_shares};

/// Each CTA computes several tiles of keys.
const ARCH: Arch = Arch { multiprocessors: 2, ..Arch::SM_90 };
const ORDERS: [Order; 2] = [Order::InTurn, Order::ScoresAhead];
/// Query heads and KV heads: several groups of several heads, one group, and groups of one head.
pub(super) const HEADS: [(usize, usize); 4] = [(4, 2), (2, 1), (2, 2), (2, 1)];

fn default_plan(problem: &Problem) -> FusedPlan {
    FusedPlan::default_for(problem, &ARCH)
}

fn check(problem: &Problem, plan: FusedPlan, options: Options) {
    check_lengths(problem, even(), plan, options);
}

pub(super) fn check_lengths(
    problem: &Problem,
    lengths: OperandMap<Vec<i32>>,
    plan: FusedPlan,
    options: Options,
) {
    let inputs = Inputs::draw(problem, lengths, options.seed);
    let plan = Plan::from(plan);
    let gradients = inputs.run(&mut Emulator::new(options), &plan, &ARCH);
    if let Some(fault) = inputs.fault(&gradients) {
        panic!("{problem:?}\n{plan:?}\n{fault}");
    }
}

/// Head dims of both tiles, in both orders, on ragged lengths, with groups of 1, 3 and 8 query heads.
#[test]
fn head_dims_and_groups_are_right() {
    let dims = [(64, 64), (128, 128), (40, 56), (72, 104), (96, 96), (128, 72)];
    let apart = [(256, 256), (192, 128), (8, 136), (248, 200), (192, 192), (136, 40)];
    for (i, (dim, dim_v)) in dims.into_iter().chain(apart).enumerate() {
        let heads_kv = [2, 1, 1][i % 3];
        let mut p = Problem::new(1, heads_kv * [1, 3, 8][i % 3], 150, dim, [DType::F16, DType::Bf16][i % 2]);
        p.head_dim_v = dim_v;
        let layout = [Layout::Bshd, Layout::Bhsd][i / 2 % 2];
        let p = p.with_heads_kv(heads_kv, layout).with_seq_kv(135, layout).with_pass(Pass::BACKWARD);
        let p = p.with_band(Band::NAMED[i % Band::NAMED.len()]);
        for &products in if dim.max(dim_v) > 64 { &ORDERS[1..] } else { &ORDERS } {
            let plan = FusedPlan { products, ..default_plan(&p) };
            check(&p, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Each problem of the torture set that the family computes. Genes take turns.
#[test]
fn torture_set_is_right_and_without_hazards() {
    let mut computed = 0;
    for (i, problem) in cases::torture().into_iter().enumerate() {
        let problem = problem.with_pass(Pass::BACKWARD);
        let dim = problem.head_dim.max(problem.head_dim_v);
        let plan = FusedPlan {
            query_stages: match dim {
                65..=128 => 3,
                ..=192 => [2, 3][i % 2],
                _ => 2,
            },
            gradient_stages: if dim > 64 { 2 } else { [2, 3][i / 2 % 2] },
            key_stages: if dim <= 64 { [1, 2][i / 7 % 2] } else { 1 },
            products: ORDERS[i / 3 % 2],
            tile_order: [CtaOrder::RowsFirst, CtaOrder::HeadsFirst][i / 5 % 2],
            row_parts: if problem.lengths.is_even() { [1, 2, 3, 5][i / 3 % 4] } else { 1 },
        };
        if problem.check().is_err() || Plan::from(plan.clone()).check(&problem, &ARCH).is_err() {
            continue; // strides of gradients that a broadcast input has, no keys, or other head dims
        }
        computed += 1;
        check(&problem, plan, Options { seed: i as u64, ..Options::default() });
    }
    assert!(computed > 90, "{computed} problems");
}

/// Lengths decide how many parts a tile of keys has, and must not decide what is compiled.
#[test]
fn all_numbers_of_parts_have_one_code() {
    for band in [Band::FULL, Band::CAUSAL] {
        for dim in [64, 96, 256] {
            let p = Problem::new(1, 2, 1000, dim, DType::Bf16).with_band(band).with_pass(Pass::BACKWARD);
            let of = |row_parts| Plan::from(FusedPlan { row_parts, ..default_plan(&p) });
            let text = |row_parts| emit(&p, &of(row_parts), &ARCH).unwrap().kernel(1).module.to_string();
            assert_eq!(text(2), text(7));
            assert_ne!(text(1), text(2));
            assert_eq!(of(2).coded(), of(7).coded());
            assert_ne!(of(1).coded(), of(2).coded());
        }
    }
}

/// All features that the family has, one at a time.
#[test]
fn features_are_right() {
    for i in 0..54 {
        let corner = [Corner::BottomRight, Corner::TopLeft][i % 2];
        let dim = if i < 27 { [64, 128][i / 3 % 2] } else { [192, 256][i / 3 % 2] };
        let mut p = Problem::new(1, 2, 150, dim, [DType::F16, DType::Bf16][i % 2])
            .with_heads_kv(1, Layout::Bshd)
            .with_seq_kv([150, 90, 200][i % 3], Layout::Bshd)
            .with_pass(Pass::BACKWARD);
        match i / 3 % 9 {
            0 => p.band = Band { corner, before: Some(20), after: Some(0) },
            1 => p.band = Band { corner, before: Some(9), after: Some(17) },
            2 => p.band = Band { corner, before: None, after: Some(30) },
            3 => p.score.scale = Some(-0.3),
            4 => p.score.scale = Some([0.0, 200.0, -200.0][i % 3]),
            5 => p.score.sink = true,
            6 => p.score.softcap = Some([2.0, 30.0, 100.0][i % 3]),
            7 => (p.score.softcap, p.band) = (Some(1.5), Band { corner, ..Band::CAUSAL }),
            _ => p.pass = Pass::Backward { deterministic: false, d_lse: true, wants: Default::default() },
        }
        check(&p, default_plan(&p), Options { seed: i as u64, ..Options::default() });
    }
}

/// Packed and used lengths of either side, with sequences without queries or keys, and rows of no sequence.
#[test]
fn uneven_lengths_are_right() {
    for i in 0..12 {
        let dim = [64, 128, 192][i / 4];
        let (heads, heads_kv) = HEADS[i % HEADS.len()];
        let base = Problem::new(4, heads, 150, dim, DType::Bf16).with_heads_kv(heads_kv, Layout::Bshd);
        let base = base.with_seq_kv(140, Layout::Bshd).with_pass(Pass::BACKWARD);
        for (problem, lengths) in uneven_problems(&base.with_band(Band::NAMED[i % Band::NAMED.len()])) {
            let plan = FusedPlan { products: ORDERS[i / 2 % 2], ..default_plan(&problem) };
            check_lengths(&problem, lengths, plan, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// The family refuses the problems that it does not compute, and names the reason.
#[test]
fn other_problems_are_refused() {
    let base = Problem::new(1, 2, 150, 64, DType::F16).with_pass(Pass::BACKWARD);
    let mut wide_v = base.clone();
    wide_v.head_dim_v = 128;
    let wide_v = wide_v.with_layout(Layout::Bshd);
    let mut packed = base.clone().with_layout(Layout::Bshd);
    packed.lengths.q.packed = Some(0);
    let f32 = Problem::new(1, 2, 150, 64, DType::F32).with_pass(Pass::BACKWARD);
    let dim = |dim| Problem::new(1, 2, 150, dim, DType::F16).with_pass(Pass::BACKWARD);
    for (problem, expected) in [
        (packed, "invalid value '0' for rows of packed queries"),
        (f32, "for dtype with family backward_fused: expected f16 or bf16"),
        (dim(264), "invalid value '264' for head_dim: expected"),
        (dim(60), "invalid value '60' for head_dim: expected multiples of 8 up to 256"),
        (wide_v, "invalid value '128' for head_dim_v: expected up to 64 if head_dim is"),
        (base.clone().with_seq_kv(0, Layout::Bhsd), "invalid value '0' for seq_kv"),
    ] {
        let error = Plan::from(default_plan(&problem)).check(&problem, &ARCH).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}\ndoes not contain: {expected}");
        if problem.dtypes.q != DType::F32 && problem.head_dim <= 256 && problem.check().is_ok() {
            Plan::default_for(&problem, &ARCH).expect("another family computes the problem");
        }
    }
    let error = Plan::from(default_plan(&base)).check(&base, &Arch::SM_80).unwrap_err().to_string();
    assert!(error.contains("invalid value '80' for sm"), "{error}");
    let small = Arch { shared_per_cta: 160_000, ..ARCH };
    let error = Plan::from(default_plan(&dim(128))).check(&dim(128), &small).unwrap_err().to_string();
    assert!(error.contains("bytes of shared memory are needed"), "{error}");
}

/// Adversarial schedules find no hazard, and dK and dV have the same bits. The order of additions may change
/// those of dQ.
#[test]
fn every_schedule_is_clean() {
    for (dim, products) in
        [(64, Order::InTurn), (64, Order::ScoresAhead), (128, Order::ScoresAhead), (256, Order::ScoresAhead)]
    {
        let problem = Problem::new(1, 2, 300, dim, DType::Bf16).with_band(Band::CAUSAL);
        let problem = problem.with_heads_kv(1, Layout::Bshd).with_seq_kv(290, Layout::Bshd);
        let problem = problem.with_pass(Pass::BACKWARD);
        let plan = FusedPlan { products, ..default_plan(&problem) };
        let inputs = Inputs::draw(&problem, even(), 3);
        let runs = SCHEDULES.into_iter().zip(1..).map(|(schedule, seed)| {
            let mut machine = Emulator::new(Options { seed, schedule, ..Options::default() });
            let gradients = inputs.run(&mut machine, &plan.clone().into(), &ARCH);
            assert_eq!(inputs.fault(&gradients), None, "{plan:?}");
            [Tensor::Dk, Tensor::Dv].map(|tensor| gradients[tensor.into()].clone())
        });
        let runs: Vec<_> = runs.collect();
        assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "{plan:?}");
    }
}

/// ptxas keeps the products asynchronous, and spills nothing; above head dim 128, eight numbers at most,
/// which are read outside the products.
#[test]
fn defaults_assemble_without_spills() {
    let mut kernels = Vec::new();
    for (dim, dim_v) in [(64, 64), (72, 72), (128, 128), (96, 80), (192, 128), (256, 256)] {
        for (band, products, softcap) in [
            (Band::FULL, Order::InTurn, None),
            (Band::FULL, Order::ScoresAhead, Some(30.0)),
            (Band::CAUSAL, Order::ScoresAhead, None),
            (Band::window(50, 50), Order::ScoresAhead, None),
        ] {
            let mut p = Problem::new(2, 16, 4000, dim, DType::Bf16).with_band(band).with_pass(Pass::BACKWARD);
            (p.head_dim_v, p.score.softcap) = (dim_v, softcap);
            let p = p.with_layout(Layout::Bshd);
            for (key_stages, gradient_stages) in if dim == 64 { &[(1, 3), (2, 2)][..] } else { &[(1, 2)] } {
                let (key_stages, gradient_stages) = (*key_stages, *gradient_stages);
                for row_parts in [1, 3] {
                    let stages = FusedPlan { key_stages, gradient_stages, ..default_plan(&p) };
                    let plan = FusedPlan { products, row_parts, ..stages };
                    kernels.push((dim, emit(&p, &plan.into(), &ARCH).unwrap().kernel(1)));
                }
            }
        }
    }
    let Some(facts) = tools::facts(&kernels.iter().map(|(_, kernel)| kernel).collect::<Vec<_>>()) else {
        return;
    };
    for ((dim, _), Facts { registers, spills, .. }) in kernels.iter().zip(facts) {
        let most = if *dim > 128 { 64 } else { 0 }; // bytes stored and loaded
        assert!(spills <= most, "D{dim}: {spills} bytes of spills with {registers} registers");
    }
}

/// Problems in which the ring of Q wraps, keys are missing in the last tile, heads of a group follow each
/// other, and one CTA computes all tiles of keys, so that the ring of tiles wraps.
fn runs(dim: usize, products: Order) -> Vec<MutantRun> {
    let rows = if dim == 64 { 128 } else { 64 };
    // With as many stages of dO as of Q, an empty stage of Q implies one of dO; with fewer, the reverse.
    let stages = if dim == 64 { [(2, 2, 1), (3, 2, 2)] } else { [(if dim == 128 { 3 } else { 2 }, 2, 1); 2] };
    // Two tiles of keys, the second one with fewer rows. The last tiles of keys of the second problem are
    // visited by no query.
    let bands = [(4 * rows - 10, 200, Band::FULL), (rows + 20, 700, Band::CAUSAL_TOP_LEFT)];
    bands
        .into_iter()
        .zip(stages)
        .map(|((seq_q, seq_kv, band), (query_stages, gradient_stages, key_stages))| {
            let problem = Problem::new(1, 2, seq_q, dim, DType::F16).with_band(band);
            let problem = problem.with_heads_kv(1, Layout::Bhsd).with_seq_kv(seq_kv, Layout::Bhsd);
            let problem = problem.with_pass(Pass::BACKWARD);
            let base = default_plan(&problem);
            let plan = FusedPlan { query_stages, gradient_stages, key_stages, products, ..base };
            MutantRun::new(problem, plan.into(), Arch { multiprocessors: 1, ..ARCH })
        })
        .collect()
}

/// The instructions of the main kernel that order memory accesses, products or warps: name and number of that
/// name, item, statement, and the number of statements to remove. A wait is removed with the branch back to
/// it.
fn sites(kernel: &Kernel) -> Vec<(String, usize, usize, usize)> {
    let mut seen = std::collections::HashMap::new();
    let mut found = Vec::new();
    for (item, function) in kernel.module.items.iter().enumerate() {
        let Item::Function(function) = function else { continue };
        if function.name.as_ref() != kernel.entry {
            continue;
        }
        for (at, statement) in function.body.iter().flat_map(|body| &body.statements).enumerate() {
            let Statement::Inst(inst) = statement else { continue };
            let (name, count) = match inst.op {
                Op::Mbarrier(mbarrier) if mbarrier.op.waits() => ("wait".to_owned(), 2),
                Op::Mbarrier(mbarrier) => (format!("{:?}", mbarrier.op).to_lowercase(), 1),
                Op::Griddepcontrol(GridDependency::Wait)
                | Op::Bar { .. }
                | Op::BarWarpSync
                | Op::FenceProxy(_)
                | Op::CpAsyncBulkCommitGroup
                | Op::CpAsyncBulkWaitGroup { .. }
                | Op::WgmmaFence
                | Op::WgmmaCommitGroup
                | Op::WgmmaWaitGroup => (inst.op.to_string(), 1),
                _ => continue,
            };
            let nth = seen.entry(name.clone()).and_modify(|n| *n += 1).or_insert(0);
            found.push((format!("{name} {nth}"), item, at, count));
        }
    }
    found
}

/// Every barrier, fence, arrival and wait is needed, but for these: the turn on the tensor cores, which only
/// saves time; with gradients apart, waits for slots that are free at the first visit, and for dO and Q after
/// waits that imply them. A share of the tests removes half of the sites.
#[test]
fn every_synchronisation_is_needed() {
    let turn = ["bar.sync 1"].as_slice();
    let apart =
        ["wait 2", "wait 7", "wait 14", "wait 16", "wgmma.fence.sync.aligned 8", "wait 19"].as_slice();
    for (dim, products, expected) in [
        (64, Order::InTurn, [].as_slice()),
        (64, Order::ScoresAhead, &[]),
        (128, Order::ScoresAhead, turn),
        (192, Order::ScoresAhead, apart),
    ] {
        let runs = runs(dim, products);
        assert!(!is_caught(&runs, |_| None));
        let sites =
            sites(&runs[0].kernels[1]).into_iter().filter(|(name, ..)| in_share(name)).collect::<Vec<_>>();
        let spared = each(&sites, |(name, ..)| {
            let mutate = |kernel: &Kernel| {
                let all =
                    if kernel.entry == runs[0].kernels[1].entry { self::sites(kernel) } else { Vec::new() };
                let (_, item, at, count) = all.into_iter().find(|(other, ..)| other == name)?;
                Some((0..count).fold(kernel.clone(), |kernel, _| without(&kernel, item, at)))
            };
            (!is_caught(&runs, mutate)).then(|| name.clone())
        });
        let spared: Vec<_> = spared.into_iter().flatten().collect();
        assert_eq!(spared, in_shares(expected), "D{dim} {products:?}");
    }
}

/// Gradients are wrong if a factor is, if a product is missing, or if a product takes the operand of another.
#[test]
fn wrong_factors_and_products_are_noticed() {
    for (dim, products) in [(64, Order::InTurn), (128, Order::ScoresAhead), (192, Order::ScoresAhead)] {
        let runs = &runs(dim, products)[..1];
        assert_factors_matter(runs);
        let products = places(&runs[0].kernels[1], |op| matches!(op, Op::Wgmma(_)));
        assert!(products.len() >= 32, "{} products", products.len());
        assert_products_matter(runs, &products, 5);
    }
}
