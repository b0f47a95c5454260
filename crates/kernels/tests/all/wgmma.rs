//! Tests of the persistent `wgmma` family of sm_90a: its launch contract, the plans and problems that it
//! rejects, and the output of ptxas and nvdisasm for its kernels.

use crate::common::each::each;
use crate::common::{assert_contract, cases};
use crate::tools;
use crate::tools::Facts;
use attend::{Packing, Sums, Tiles};
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, WgmmaPlan};
use flashcore_kernels::{Arch, Plan, emit};
use problem::program::library;
use problem::{Band, DType, ElementType, Layout, Problem, Program, Table};
use ptx::{Arg, Kernel};
use tile::{Handout, Tail, TileOrder, Turns};

const ARCH: Arch = Arch::SM_90;
const SPECULATIVE: Rescaling = Rescaling::Speculative { beyond: 8, limit: 15 };

fn problem(dim: usize, seq: usize, mask: Band) -> Problem {
    Problem::new(1, 16, seq, dim, DType::Bf16).with_band(mask).with_layout(Layout::Bshd)
}

fn default_plan(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan::default_for(problem, &ARCH)
}

/// The problem with a bias for each score.
fn biased(mut problem: Problem) -> Problem {
    let extents = [1, problem.heads_q, problem.seq_q, problem.seq_kv];
    problem.programs.tables = vec![Table::dense(ElementType::Bf16, &extents)];
    problem.programs.score = Some(Program::new(&library::bias(0)).unwrap());
    problem
}

/// The problem with the LSE, and its default plan.
fn with_lse(problem: Problem) -> (Problem, WgmmaPlan) {
    let problem = problem.with_lse(true);
    let plan = default_plan(&problem);
    (problem, plan)
}

fn classic(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan { rescale: Rescaling::Always, ..default_plan(problem) }
}

fn overlapped(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan { tiles: Tiles::Overlapped, ..default_plan(problem) }
}

fn kernel(problem: &Problem, plan: &WgmmaPlan) -> Kernel {
    emit(problem, &Plan::Wgmma(plan.clone()), &ARCH).unwrap_or_else(|e| panic!("{plan:?}: {e}")).kernel(0)
}

/// A plan in which all CTAs share the last wave (stream-K).
fn shared(problem: &Problem) -> WgmmaPlan {
    let (handout, ends, tail) = (Handout::Static, Ends::Common, Tail::Shared);
    WgmmaPlan { handout, ends, tail, sums: Sums::Lanes, ..default_plan(problem) }
}

fn shared_overlapped(problem: &Problem) -> WgmmaPlan {
    let (tiles, turns, block_n) = (Tiles::Overlapped, Turns::PingPong, 128);
    WgmmaPlan { tiles, turns, block_n, ..shared(problem) }
}

fn shared_by_pairs(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan { cluster: 2, block_n: 64, ..shared(problem) }
}

fn paired(problem: &Problem) -> WgmmaPlan {
    WgmmaPlan { cluster: 2, ..default_plan(problem) }
}

fn base() -> (Problem, WgmmaPlan) {
    let problem = problem(128, 8192, Band::CAUSAL);
    let plan =
        WgmmaPlan { handout: Handout::Static, tile_order: TileOrder::InOrder, ..default_plan(&problem) };
    (problem, plan)
}

/// Eight more product columns replace one addition per probability, unless the LSE is returned.
#[test]
fn sums_by_products_are_no_additions() {
    let problem = problem(64, 8192, Band::FULL);
    let plan = default_plan(&problem);
    assert_eq!(plan.sums, Sums::Product);
    let by_lanes = WgmmaPlan { sums: Sums::Lanes, ..plan.clone() };
    let count =
        |plan: &WgmmaPlan, what: &str| kernel(&problem, plan).module.to_string().matches(what).count();
    let (additions, products) = ("add.rn.f32", "wgmma.mma_async.sync.aligned.m64n72k16");
    let block = 2 * plan.block_n as usize / 4;
    assert!(count(&by_lanes, additions) > count(&plan, additions) + block);
    assert!(count(&by_lanes, products) == 0 && count(&plan, products) > 0);
    let (returning, its_plan) = with_lse(problem);
    assert_eq!(its_plan, by_lanes);
    let both = Plan::Wgmma(plan).check(&returning, &ARCH).expect_err("refused").to_string();
    assert!(both.starts_with("invalid value 'product' for sums with family wgmma: expected lanes"), "{both}");
}

/// The number of heads in a section is an argument, so the kernel serves every number of heads.
#[test]
fn a_section_is_an_argument() {
    let (problem, base) = base();
    let kernels = [1, 16, 32, 4096].map(|section_mib| {
        let tile_order = TileOrder::LongestFirst;
        kernel(&problem, &WgmmaPlan { tile_order, section_mib, ..base.clone() })
    });
    let heads = problem.batch * problem.heads_q;
    let bytes = 4 * problem.seq_kv * problem.head_dim;
    let section = |mib: usize| ((mib << 20) / bytes).clamp(1, heads) as u32;
    for (kernel, section) in kernels.iter().zip([1, 16, 32, 4096].map(section)) {
        assert_eq!(kernel.module, kernels[0].module);
        assert_eq!(kernel.args[kernel.args.len() - 2], Arg::U32(section));
    }
    assert!(kernels[1].args != kernels[2].args);
}

/// A shared last wave needs another kernel, but the same one for all lengths. Its arguments determine how
/// tiles are shared, and it needs scratch memory. Plans from before the gene existed do not share tiles.
#[test]
fn a_shared_tail_is_another_kernel_with_its_own_memory() {
    let problem = problem(128, 16384, Band::FULL).with_lse(true);
    let plan = shared(&problem);
    let whole = WgmmaPlan { tail: Tail::Whole, ..plan.clone() };
    assert_ne!(kernel(&problem, &plan).module, kernel(&problem, &whole).module);
    let kernel = kernel(&problem, &plan);
    let own: Vec<(&str, usize)> = kernel.buffers[5..].iter().map(|b| (b.name.as_str(), b.bytes)).collect();
    // 2048 tiles are 15 rounds on 132 CTAs, and 68 more tiles. Their blocks (114 of 144 keys per tile) make
    // pieces of 58 or 59 blocks.
    let (tiles, blocks, ctas) = (68, 114, 132);
    // Memory for the largest number of remaining tiles, where neighbouring tiles share at most one piece: O,
    // references and sums.
    let part = 4 * 128 * (128 + 8);
    assert_eq!(own, [("scratch", (ctas - 1 + ctas - 1) * part), ("counter", 4 * 8 * (ctas - 1))]);
    let numbers =
        [blocks, 15 * ctas, tiles * blocks / ctas, tiles * blocks % ctas].map(|n| Arg::U32(n as u32));
    assert_eq!(kernel.args[kernel.args.len() - 5..kernel.args.len() - 1], numbers);
    let mut json = serde_json::to_value(Plan::Wgmma(plan.clone())).unwrap();
    assert_eq!(serde_json::from_value::<Plan>(json.clone()).unwrap(), Plan::Wgmma(plan));
    json.as_object_mut().unwrap().remove("tail");
    assert_eq!(serde_json::from_value::<Plan>(json).unwrap(), Plan::Wgmma(whole));
}

#[test]
fn contracts_hold_together() {
    for dim in [64, 72, 96, 128, 192, 256] {
        for (mask, layout) in [(Band::FULL, Layout::Bhsd), (Band::CAUSAL, Layout::Bshd)] {
            let problem = Problem::new(2, 8, 1000, dim, DType::F16).with_band(mask);
            let (problem, plan) = with_lse(problem.with_seq_kv(777, layout).with_heads_kv(2, layout));
            let kernel = kernel(&problem, &plan);
            assert_contract(&kernel);
            let names: Vec<&str> = kernel.buffers.iter().map(|b| b.name.as_str()).collect();
            assert_eq!(names[..5], ["q", "k", "v", "out", "lse"]);
            assert_eq!(names.get(5), (plan.handout == Handout::Dynamic).then_some(&"counter"));
        }
    }
}

#[test]
fn plans_that_cannot_work_are_refused_with_the_reason() {
    let (good, plan) = base();
    let reason = |problem: &Problem, plan: &WgmmaPlan, arch: &Arch| {
        Plan::Wgmma(plan.clone()).check(problem, arch).expect_err("refused").to_string()
    };
    let of = |change: &dyn Fn(&mut WgmmaPlan)| {
        let mut plan = plan.clone();
        change(&mut plan);
        reason(&good, &plan, &ARCH)
    };
    assert!(of(&|p| p.consumers = 0).starts_with("invalid value '0' for consumers: expected 1 to 3"));
    assert!(of(&|p| p.consumers = 4).starts_with("invalid value '4' for consumers: expected 1 to 3"));
    assert!(of(&|p| p.cluster = 3).starts_with("invalid value '3' for cluster: expected 1 to 2"));
    assert!(of(&|p| p.resident_ctas = 5).starts_with("invalid value '5' for resident_ctas: expected 1 to 4"));
    assert!(of(&|p| (p.resident_ctas, p.consumers) = (2, 1)).contains("bytes of shared memory are needed"));
    assert!(of(&|p| (p.resident_ctas, p.block_n) = (2, 32)).contains("registers per thread are needed"));
    assert!(
        of(&|p| p.block_n = 72)
            .starts_with("invalid value '72' for block_n: expected multiples of 16 up to 256")
    );
    let halved = |p: &mut WgmmaPlan| (p.diagonal, p.block_n) = (Diagonal::Halved, 112);
    assert!(
        of(&halved)
            .starts_with("invalid value '112' for block_n: expected multiples of 32 with diagonal = halved")
    );
    let halved = WgmmaPlan { diagonal: Diagonal::Halved, ..plan.clone() };
    let refused = reason(&good.clone().with_band(Band::FULL), &halved, &ARCH);
    assert_eq!(
        refused,
        "invalid value 'none' for mask with family wgmma: expected masks with a bound after the diagonal, with diagonal = halved"
    );
    let refused = reason(&good, &WgmmaPlan { ends: Ends::Common, ..halved }, &ARCH);
    assert_eq!(
        refused,
        "invalid value 'common' for ends with family wgmma: expected own with diagonal = halved"
    );
    let mut grouped = good.clone().with_heads_kv(1, Layout::Bhsd);
    grouped.q.head = 0;
    let refused = reason(&grouped, &WgmmaPlan { packing: Packing::Packed, ..plan.clone() }, &ARCH);
    assert!(refused.starts_with("invalid value '0' for q head stride: expected other than 0"), "{refused}");
    assert!(of(&|p| p.queries_ahead = 3).starts_with("invalid value '3' for queries_ahead: expected 0 to 2"));
    assert!(
        of(&|p| p.sums = Sums::Product)
            .starts_with("invalid value '128' for head_dim_v: expected 64 with sums = product")
    );
    assert!(of(&|p| p.stages = 0).starts_with("invalid value '0' for stages:"));
    assert!(of(&|p| p.section_mib = 0).starts_with("invalid value '0' for section_mib: expected 1 to 4096"));
    assert!(of(&|p| p.chains.sum = 0).starts_with("invalid value '0' for chains.sum:"));
    assert!(of(&|p| p.stages = 4).contains("bytes of shared memory are needed"));
    assert!(of(&|p| (p.stages, p.block_n) = (1, 208)).contains("registers per thread are needed"));
    assert!(
        of(&|p| (p.consumers, p.turns) = (1, Turns::PingPong))
            .starts_with("invalid value '1' for consumers:")
    );
    assert!(
        of(&|p| p.rescale = Rescaling::Beyond(61))
            .starts_with("invalid value '61' for rescale.beyond: expected 0 to 60")
    );
    let speculative = |beyond, limit| Rescaling::Speculative { beyond, limit };
    assert!(
        of(&|p| p.rescale = speculative(9, 9))
            .starts_with("invalid value '9' for rescale.limit: expected 10 to 60")
    );
    let narrow = Problem { head_dim: 64, head_dim_v: 64, ..good.clone() }.with_layout(Layout::Bshd);
    let tiny = WgmmaPlan {
        rescale: speculative(8, 16),
        sums: Sums::Product,
        ..WgmmaPlan::default_for(&narrow, &ARCH)
    };
    assert_eq!(
        reason(&narrow, &tiny, &ARCH),
        "invalid value '16' for rescale.limit: expected 9 to 15 with sums = product"
    );
    let f16 = Problem { dtypes: DType::F16.into(), ..good.clone() };
    let overflowing = WgmmaPlan { rescale: speculative(8, 16), ..plan.clone() };
    assert!(
        reason(&f16, &overflowing, &ARCH)
            .starts_with("invalid value '16' for rescale.limit: expected 9 to 15")
    );
    let overflowing = WgmmaPlan { rescale: Rescaling::Beyond(9), ..plan.clone() };
    assert_eq!(
        reason(&f16, &overflowing, &ARCH),
        "invalid value '9' for rescale.beyond: expected 0 to 8 in f16"
    );
    assert!(reason(&good, &plan, &Arch::SM_89).starts_with("invalid value '89' for sm: expected 90"));
    assert!(reason(&good, &plan, &Arch::SM_120).starts_with("invalid value '120' for sm: expected 90"));
    let no_keys = good.clone().with_seq_kv(0, Layout::Bhsd);
    assert!(reason(&no_keys, &plan, &ARCH).starts_with("invalid value '0' for seq_kv: expected 1 to 2^30"));
    let mut backwards = good.clone();
    backwards.k.row = -128;
    assert!(reason(&backwards, &plan, &ARCH).contains("invalid value '-128' for k row stride"));
    let float = Problem { dtypes: DType::F32.into(), ..good.clone() };
    assert!(reason(&float, &plan, &ARCH).starts_with("invalid value 'f32' for dtype with family wgmma"));
}

/// Products compute sums only in bf16, whose range they need, and never with an LSE.
#[test]
fn lanes_sum_where_products_may_not() {
    let of = |dtype: DType| {
        let problem = Problem { dtypes: dtype.into(), ..problem(64, 8192, Band::FULL) };
        (WgmmaPlan::default_for(&problem, &ARCH), problem)
    };
    let ((bf16, problem), (f16, in_f16)) = (of(DType::Bf16), of(DType::F16));
    assert_eq!((bf16.sums, f16.sums), (Sums::Product, Sums::Lanes));
    let refused = Plan::Wgmma(bf16.clone()).check(&in_f16, &ARCH).expect_err("refused").to_string();
    assert!(
        refused.starts_with("invalid value 'f16' for dtype with family wgmma: expected bf16 with sums"),
        "{refused}"
    );
    let (problem, with) = with_lse(problem);
    assert_eq!(with, WgmmaPlan { sums: Sums::Lanes, ..bf16 });
    Plan::Wgmma(with).check(&problem, &ARCH).unwrap();
}

/// Dimensions that no tile has are rejected before they are used in arithmetic.
#[test]
fn the_default_of_a_huge_head_dim_is_refused() {
    for dim in [1 << 24, 1 << 40] {
        let refused = Plan::default_for(&Problem::new(1, 1, 1, dim, DType::F16), &ARCH).unwrap_err();
        assert!(refused.to_string().starts_with(&format!("invalid value '{dim}' for head_dim")), "{refused}");
    }
}

#[test]
fn packing_heads_changes_the_kernel_and_needs_a_tile_for_a_position() {
    let problem = problem(128, 40, Band::CAUSAL).with_heads_kv(2, Layout::Bshd);
    let plan = default_plan(&problem);
    assert_eq!(plan.packing, Packing::Packed, "40 rows of 8 heads fill tiles better together");
    let apart = WgmmaPlan { packing: Packing::Apart, ..plan.clone() };
    assert_ne!(kernel(&problem, &plan).module, kernel(&problem, &apart).module);
    let uneven = Problem::new(1, 12, 40, 128, DType::Bf16).with_heads_kv(1, Layout::Bshd);
    assert_eq!(default_plan(&uneven).packing, Packing::Packed, "60 of 64 rows have 5 positions of 12 heads");
    let many = Problem::new(1, 200, 40, 128, DType::Bf16).with_heads_kv(1, Layout::Bshd);
    let reason = Plan::Wgmma(WgmmaPlan { consumers: 2, ..plan }).check(&many, &ARCH).expect_err("200 heads");
    assert!(
        reason
            .to_string()
            .starts_with("invalid value '200' for query heads a key head: expected up to a tile's rows")
    );
}

/// The default plans, including values narrower than keys; the longest code; and the largest tiles that the
/// register estimate admits.
#[test]
fn products_are_not_serialised_and_nothing_spills() {
    let (causal, plan) = base();
    let pingpong = WgmmaPlan { tiles: Tiles::Overlapped, turns: Turns::PingPong, ..plan.clone() };
    let mut cases = vec![(causal.clone(), pingpong), (causal.clone(), classic(&causal))];
    for (dim, plan) in
        [(64, shared as fn(&Problem) -> WgmmaPlan), (128, shared_overlapped), (256, shared_by_pairs)]
    {
        cases.extend(
            [4001, 8192]
                .map(|seq| (problem(dim, seq, Band::FULL), plan))
                .map(|(p, plan)| (p.clone().with_lse(true), plan(&p))),
        );
    }
    for dim in [64, 96, 128, 192, 256] {
        for mask in Band::NAMED {
            let problem = problem(dim, 4001, mask);
            let plan = default_plan(&problem);
            if plan.sums == Sums::Product {
                cases.push((problem.clone(), plan.clone()));
            }
            cases.push(with_lse(problem));
        }
    }
    for (dim, consumers, block_n) in [(64, 1, 256), (64, 2, 240), (128, 2, 192), (128, 3, 80), (256, 2, 112)]
    {
        let problem = problem(dim, 4001, Band::CAUSAL).with_lse(true);
        let rescale = SPECULATIVE;
        let plan = WgmmaPlan { consumers, block_n, rescale, stages: 1, ..plan.clone() };
        let wider = WgmmaPlan { block_n: block_n + 16, ..plan.clone() };
        assert!(
            Plan::Wgmma(wider).check(&problem, &ARCH).is_err(),
            "{dim} {consumers}: {block_n} is not the most"
        );
        cases.push((problem, plan));
    }
    cases.extend(cases::narrow_values(4001, 4001).into_iter().map(with_lse));
    assemble_all(&cases);
}

/// No kernel spills, and no products are serialised.
fn assemble_all(cases: &[(Problem, WgmmaPlan)]) {
    let kernels = each(cases, |(problem, plan)| kernel(problem, plan));
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for ((problem, plan), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        assert_eq!(spills, 0, "head_dim {} {plan:?}: {registers} registers", problem.head_dim);
    }
}

/// The instructions of the loops over KV blocks, in order.
fn product_loops(sass: &str) -> Vec<Vec<&str>> {
    let mut code: Vec<&str> = Vec::new();
    let mut labels = std::collections::HashMap::new();
    for line in sass.lines() {
        if let Some(label) = line.strip_prefix('.').and_then(|l| l.strip_suffix(':')) {
            labels.insert(label, code.len());
        } else if let Some((_, text)) = line.split_once("*/").filter(|_| line.trim_start().starts_with("/*"))
        {
            code.extend(text.split(';').next().map(str::trim).filter(|t| !t.is_empty()));
        }
    }
    let target = |text: &str| {
        let name = text.split_once("`(.")?.1.split(')').next()?;
        text.contains("BRA").then(|| labels.get(name).copied()).flatten()
    };
    let back = code
        .iter()
        .enumerate()
        .filter_map(|(end, text)| target(text).filter(|&top| top < end).map(|top| (top, end)));
    // The loop of a wait is placed after the kernel's end and also jumps back. The main loops are longer than
    // that loop.
    let holds =
        |(top, end): (usize, usize), what| code[top..=end].iter().filter(|t| t.contains(what)).count();
    let mut loops: Vec<(usize, usize)> =
        back.filter(|&l| holds(l, "HGMMA") > 0 && holds(l, "MUFU.EX2") > 16).collect();
    loops.sort_by_key(|(top, end)| end - top);
    let mut inner: Vec<(usize, usize)> = Vec::new();
    for (top, end) in loops {
        if inner.iter().all(|&(t, e)| end < t || e < top) {
            inner.push((top, end));
        }
    }
    inner.sort_unstable();
    inner.into_iter().map(|(top, end)| code[top..=end].to_vec()).collect()
}

/// A problem, its plan, and the maximum number of instructions in each loop.
type Case = (Problem, fn(&Problem) -> WgmmaPlan, &'static [usize]);

/// The main loop in machine code: products read their operands through descriptors that stay in uniform
/// registers. The softmax needs little more than an FFMA, an EX2, half a conversion and, unless products
/// compute the sums, one addition per score. The loops of a speculative softmax contain a second loop body
/// for recomputed blocks.
#[test]
fn main_loops_are_short_and_keep_descriptors_uniform() {
    let (Some(ptxas), Some(nvdisasm)) = (tools::find("FLASHCORE_PTXAS"), tools::find("FLASHCORE_NVDISASM"))
    else {
        return;
    };
    let cases: [Case; 11] = [
        (problem(128, 8192, Band::FULL), paired, &[797]),
        (problem(128, 8192, Band::FULL), default_plan, &[797]),
        (problem(64, 8192, Band::FULL), shared, &[660]),
        (problem(128, 8192, Band::FULL), shared_overlapped, &[730]),
        (problem(256, 8192, Band::FULL), shared_by_pairs, &[410]),
        (problem(128, 8192, Band::CAUSAL), default_plan, &[603, 730]),
        (problem(128, 2048, Band::FULL), classic, &[451]),
        (problem(64, 8192, Band::FULL), default_plan, &[550]),
        (problem(64, 8192, Band::CAUSAL), default_plan, &[385, 450]),
        (problem(64, 512, Band::FULL), overlapped, &[550]),
        (biased(problem(64, 4096, Band::FULL)), default_plan, &[870]),
    ];
    for (problem, plan, limits) in cases {
        let plan = plan(&problem);
        let kernel = kernel(&problem, &plan);
        let sass = tools::disassemble(&nvdisasm, &tools::assemble(&ptxas, &kernel));
        let text = kernel.module.to_string();
        for (ptx, machine) in [("wgmma.mma_async", "HGMMA"), ("cp.async.bulk.tensor", "UTMALDG")] {
            assert_eq!(sass.matches(machine).count(), text.matches(ptx).count(), "{plan:?}: {machine}");
        }
        let loops = product_loops(&sass);
        assert_eq!(loops.len(), limits.len(), "{plan:?}");
        for (body, &limit) in loops.iter().zip(limits) {
            let moved = body.iter().filter(|text| text.contains("R2UR")).count();
            assert_eq!(moved, 0, "{plan:?}: descriptors leave the uniform registers");
            assert!(body.len() <= limit, "{plan:?}: {} instructions, {limit} are enough", body.len());
        }
    }
}
