//! Tests of `backward::split`.

use attend::Tanh;
use emu::{Emulator, Options, Schedule};
use filetest::is_due;
use flashcore_kernels::backward::split::SplitPlan;
use flashcore_kernels::forward::mma::{CtaOrder, QueryHome};
use flashcore_kernels::{Arch, Plan, ProgramBuffer, emit};
use problem::program::library as lib;
use problem::{
    Band, Corner, DType, ElementType, Expr, Gradients, Layout, LengthArray, OperandMap, Pass, Problem,
    Program, Programs, Table,
};
use ptx::{Arg, Item, Kernel, Op, Statement};

use super::reference::{Inputs, even, uneven};
use crate::common::cases;
use crate::forward::{synchronisations, without};
use crate::tools::{self, Facts};

pub const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

/// A plan of small tiles, so that small problems have several blocks.
fn small_plan(problem: &Problem, arch: &Arch) -> SplitPlan {
    let wide = problem.head_dim + problem.head_dim_v > 320;
    SplitPlan {
        dq_rows: 32,
        dq_keys: 16,
        dq_warps: 2,
        dkv_keys: 32,
        dkv_rows: 16,
        dkv_warps: if wide { 4 } else { 2 },
        dkv_dim_warps: if wide { 2 } else { 1 },
        ..SplitPlan::default_for(problem, arch)
    }
}

fn check(
    problem: &Problem,
    lengths: OperandMap<Vec<i32>>,
    plan: SplitPlan,
    arch: &Arch,
    options: Options,
) -> OperandMap<Vec<u32>> {
    let inputs = Inputs::draw(problem, lengths, options.seed);
    let plan = Plan::from(plan);
    let gradients = inputs.run(&mut Emulator::new(options), &plan, arch);
    if let Some(fault) = inputs.fault(&gradients) {
        panic!("{problem:?}\n{plan:?}\n{fault}");
    }
    gradients
}

/// Each problem of the torture set with a plan of small tiles. Genes and architectures take turns.
#[test]
fn torture_set_is_right_and_without_hazards() {
    for (i, problem) in cases::torture().into_iter().enumerate() {
        let problem = problem.with_pass(Pass::BACKWARD);
        if problem.check().is_err() {
            continue; // the strides of a gradient follow those of a broadcast input
        }
        let arch = Arch::ALL[i % Arch::ALL.len()];
        let home = |shared| if shared { QueryHome::Shared } else { QueryHome::Registers };
        let plan = SplitPlan {
            dq_stages: [2, 3][i / 2 % 2],
            dkv_stages: [3, 2][i / 3 % 2],
            dq_operands: home(problem.head_dim > 80 || i % 2 == 0),
            dkv_operands: home(problem.head_dim > 80 || i / 2 % 2 == 0),
            dq_keys: [16, 32][i / 4 % 2],
            dkv_rows: [32, 16][i / 5 % 2],
            tile_order: [CtaOrder::RowsFirst, CtaOrder::HeadsFirst][i / 5 % 2],
            ..small_plan(&problem, &arch)
        };
        // The rows of the largest head dims leave room for fewer and smaller stages on some architectures.
        let least = SplitPlan { dq_stages: 2, dkv_stages: 2, dq_keys: 16, dkv_rows: 16, ..plan.clone() };
        let plan = if plan.check(&problem, &arch).is_ok() { plan } else { least };
        check(&problem, even(), plan, &arch, Options { seed: i as u64, ..Options::default() });
    }
}

/// Head dims of both kinds of plans, `Dv ≠ Dqk` among them, with the default plans of every architecture.
#[test]
fn defaults_are_right_on_every_architecture() {
    for (i, arch) in Arch::ALL.into_iter().enumerate() {
        for (j, (dim, dim_v)) in
            [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)].into_iter().enumerate()
        {
            let mut problem = Problem::new(1, 1, 150, dim, [DType::F16, DType::Bf16][(i + j) % 2]);
            problem.head_dim_v = dim_v;
            let problem =
                problem.with_band(Band::NAMED[(i + j) % Band::NAMED.len()]).with_pass(Pass::BACKWARD);
            let problem = problem.with_seq_kv(135, Layout::Bhsd);
            let plan = SplitPlan::default_for(&problem, &arch);
            check(&problem, even(), plan, &arch, Options { seed: j as u64, ..Options::default() });
        }
    }
}

/// All features that the family has, one at a time, with groups of 1, 3 and 8 query heads.
#[test]
fn features_are_right() {
    let arch = Arch::SM_80;
    let problem = |i: usize| {
        let heads_kv = [2, 1, 1][i % 3];
        Problem::new(1, heads_kv * [1, 3, 8][i % 3], 70, 64, [DType::F16, DType::Bf16][i % 2])
            .with_heads_kv(heads_kv, Layout::Bshd)
            .with_seq_kv([70, 45, 90][i / 3 % 3], Layout::Bshd)
            .with_pass(Pass::BACKWARD)
    };
    for i in 0..24 {
        let mut p = problem(i);
        let corner = [Corner::BottomRight, Corner::TopLeft][i % 2];
        match i / 3 {
            0 => p.band = Band::CAUSAL,
            1 => p.band = Band { corner, before: Some(20), after: Some(0) },
            2 => p.band = Band { corner, before: Some(9), after: Some(17) },
            3 => p.band = Band { corner, before: None, after: Some(30) },
            4 => p.score.softcap = Some(2.0),
            5 => (p.band, p.score.softcap) = (Band { corner, ..Band::CAUSAL }, Some(100.0)),
            6 => p.score.sink = true,
            _ => p.pass = Pass::Backward { deterministic: true, d_lse: true, wants: Default::default() },
        }
        let tanh = [Tanh::Exp2, Tanh::Approx][i % 2];
        let plan = SplitPlan { tanh, ..small_plan(&p, &arch) };
        check(&p, even(), plan, &arch, Options { seed: i as u64, ..Options::default() });
    }
}

/// A problem of four batch entries with packed and used lengths of either side, of which some have no queries
/// or no keys.
pub fn uneven_problems(base: &Problem) -> [(Problem, OperandMap<Vec<i32>>); 4] {
    use LengthArray::{CumulativeKv, CumulativeQ, LeftPad, UsedKv, UsedQ};
    let (seq_q, seq_kv) = (base.seq_q as i32, base.seq_kv as i32);
    let of_q = [0, 33, 33, 33 + seq_q, 43 + seq_q];
    let of_kv = [0, seq_kv - 20, seq_kv + 15, seq_kv + 15, 2 * seq_kv + 10];
    let (rows_q, rows_kv) = (Some(seq_q as usize + 48), Some(2 * seq_kv as usize + 10));
    let [mut packed, mut queries, mut keys, mut used] = [0; 4].map(|_| base.clone());
    (packed.lengths.q.packed, packed.lengths.kv.packed) = (rows_q, rows_kv);
    queries.lengths.q.packed = rows_q;
    keys.lengths.kv.packed = rows_kv;
    (used.lengths.q.used, used.lengths.kv.used, used.lengths.left_padded) = (true, true, true);
    [
        (packed, uneven([(CumulativeQ, &of_q), (CumulativeKv, &of_kv)])),
        (queries, uneven([(CumulativeQ, &of_q)])),
        (keys, uneven([(CumulativeKv, &of_kv)])),
        (
            used,
            uneven([(UsedQ, &[seq_q, 0, 33, 5]), (UsedKv, &[seq_kv, 20, 0, 31]), (LeftPad, &[7, 0, 0, 31])]),
        ),
    ]
}

/// Packed and used lengths of either side, with sequences without queries or keys, and rows of no sequence.
#[test]
fn uneven_lengths_are_right() {
    let arch = Arch::SM_80;
    let base = Problem::new(4, 4, 70, 64, DType::Bf16).with_heads_kv(2, Layout::Bshd);
    let base = base.with_seq_kv(60, Layout::Bshd).with_pass(Pass::BACKWARD);
    for (i, band) in
        [Band::FULL, Band::CAUSAL, Band::CAUSAL_TOP_LEFT, Band::window(20, 5)].into_iter().enumerate()
    {
        for (problem, lengths) in uneven_problems(&base.clone().with_band(band)) {
            let plan = small_plan(&problem, &arch);
            check(&problem, lengths, plan, &arch, Options { seed: i as u64, ..Options::default() });
        }
    }
}

/// Programs and all gradients: ptxas spills nothing in any kernel of the default plans.
#[test]
fn features_assemble_without_spills() {
    let mut cases = Vec::new();
    for (dim, dim_v) in [(64, 64), (128, 128), (192, 128), (256, 256)] {
        for arch in [Arch::SM_80, Arch::SM_90] {
            let mut p = Problem::new(1, 8, 1024, dim, DType::Bf16).with_band(Band::CAUSAL);
            (p.head_dim_v, p.heads_kv, p.score.sink) = (dim_v, 2, true);
            let wants = Gradients { sinks: true, tables: 1 };
            let pass = Pass::Backward { deterministic: true, d_lse: true, wants };
            let with = |score: Expr, mask: Option<Expr>, cap, tables| {
                let mut p = p.clone().with_layout(Layout::Bshd).with_pass(pass);
                let program = |expr: Expr| Program::new(&expr).unwrap();
                p.programs =
                    Programs { score: Some(program(score)), mask: mask.map(program), tables, ..p.programs };
                p.score.softcap = cap;
                p
            };
            let slopes = Table::dense(ElementType::F32, &[1, 8]);
            let documents = Table::dense(ElementType::I32, &[1, 1024]);
            let bias = Table::dense(ElementType::Bf16, &[1, 8, 1024, 1024]);
            for (what, problem) in [
                ("alibi", with(lib::alibi(0), Some(lib::document(1)), None, vec![slopes, documents])),
                ("bias", with(lib::bias(0), None, Some(30.0), vec![bias])),
            ] {
                let plan = Plan::from(SplitPlan::default_for(&problem, &arch));
                let kernel = emit(&problem, &plan, &arch).unwrap().kernel(0);
                cases.push((format!("{what} D{dim}/{dim_v} sm_{}", arch.sm), kernel));
            }
        }
    }
    let kernels: Vec<&Kernel> = cases.iter().map(|(_, kernel)| kernel).collect();
    let Some(facts) = tools::facts(&kernels) else { return };
    for ((what, _), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        assert_eq!(spills, 0, "{what}: {registers} registers");
    }
}

/// Adversarial schedules find no hazard, and all return the same bits.
#[test]
fn every_schedule_gives_the_same_clean_bits() {
    for (dim, stages) in [(64, 2), (64, 3), (176, 2)] {
        let problem = Problem::new(1, 2, 96, dim, DType::Bf16).with_band(Band::CAUSAL);
        let problem = problem.with_heads_kv(1, Layout::Bshd).with_seq_kv(130, Layout::Bshd);
        let problem = problem.with_pass(Pass::DETERMINISTIC);
        let plan = small_plan(&problem, &Arch::SM_80);
        let plan = SplitPlan { dq_stages: stages, dkv_stages: stages, ..plan };
        let runs = SCHEDULES.into_iter().zip(1..).map(|(schedule, order)| {
            let inputs = Inputs::draw(&problem, even(), 3);
            let mut machine = Emulator::new(Options { seed: order, schedule, ..Options::default() });
            let gradients = inputs.run(&mut machine, &plan.clone().into(), &Arch::SM_80);
            assert_eq!(inputs.fault(&gradients), None, "{plan:?}");
            gradients
        });
        let runs: Vec<_> = runs.collect();
        assert!(runs.windows(2).all(|pair| pair[0] == pair[1]), "{plan:?}");
    }
}

/// Inputs, and the buffers and the kernels of a program for their problem.
pub struct MutantRun {
    pub inputs: Inputs,
    pub buffers: Vec<ProgramBuffer>,
    pub kernels: Vec<Kernel>,
}

impl MutantRun {
    pub fn new(problem: Problem, plan: Plan, arch: Arch) -> MutantRun {
        let program = emit(&problem, &plan, &arch).unwrap();
        let inputs = Inputs::draw(&problem, even(), 1);
        MutantRun { inputs, kernels: program.kernels(), buffers: program.contracts.buffers }
    }
}

/// Whether the emulator refuses the kernels or their gradients are wrong, for one of the problems.
pub fn is_caught(runs: &[MutantRun], mutate: impl Fn(&Kernel) -> Option<Kernel>) -> bool {
    runs.iter().any(|MutantRun { inputs, buffers, kernels }| {
        let mutants: Vec<Kernel> =
            kernels.iter().map(|kernel| mutate(kernel).unwrap_or_else(|| kernel.clone())).collect();
        SCHEDULES.into_iter().zip(0..).any(|(schedule, seed)| {
            let mut machine = Emulator::new(Options { seed, schedule, ..Options::default() });
            match inputs.run_kernels(&mut machine, buffers, &mutants) {
                Ok(gradients) => inputs.fault(&gradients).is_some(),
                Err(_) => true,
            }
        })
    })
}

/// A change of a plan.
type Change = fn(&mut SplitPlan);

/// A problem with several blocks, one without keys, and one with keys that no row sees, each with the kernels
/// of a plan.
fn runs(dim: usize, change: Change) -> Vec<MutantRun> {
    let problem = |seq_q, seq_kv, band| {
        let problem = Problem::new(1, 2, seq_q, dim, DType::F16).with_band(band);
        problem.with_heads_kv(1, Layout::Bhsd).with_seq_kv(seq_kv, Layout::Bhsd).with_pass(Pass::BACKWARD)
    };
    let problems =
        [problem(70, 75, Band::FULL), problem(40, 0, Band::FULL), problem(16, 64, Band::CAUSAL_TOP_LEFT)];
    let run = |problem: Problem| {
        let mut plan = small_plan(&problem, &Arch::SM_80);
        change(&mut plan);
        MutantRun::new(problem, plan.into(), Arch::SM_80)
    };
    problems.map(run).into()
}

/// Every barrier and every wait is needed.
#[test]
fn every_synchronisation_is_needed() {
    let changes: [(usize, Change); 3] = [
        (64, |plan| plan.dq_operands = QueryHome::Shared),
        (64, |plan| (plan.dq_stages, plan.dkv_stages, plan.dkv_operands) = (3, 3, QueryHome::Registers)),
        (176, |_| {}),
    ];
    for (dim, change) in changes {
        let runs = runs(dim, change);
        for (item, at, op) in synchronisations(&runs[0].kernels[0]) {
            assert!(is_caught(&runs, |kernel| Some(without(kernel, item, at))), "D{dim}: {at}, {op:?}");
        }
    }
}

/// Gradients are wrong if a factor is, if a product is missing, or if a product takes the P or dS of another
/// tile.
#[test]
fn wrong_factors_and_products_are_noticed() {
    let runs = &runs(64, |_| {})[..1];
    assert!(!is_caught(runs, |_| None));
    assert_factors_matter(runs);
    let products = places(&runs[0].kernels[0], |op| matches!(op, Op::Mma(_)));
    assert!(products.len() > 50, "{} products", products.len());
    assert_products_matter(runs, &products, 13);
}

/// Gradients are wrong if any factor is.
pub fn assert_factors_matter(runs: &[MutantRun]) {
    for (step, kernel) in runs[0].kernels.iter().enumerate() {
        let own = |other: &Kernel| other.entry == kernel.entry;
        let factors = kernel.args.iter().enumerate().filter(|(_, arg)| matches!(arg, Arg::F32(_)));
        for (at, _) in factors {
            let wrong = |other: &Kernel| {
                let mut wrong = other.clone();
                if let Some(Arg::F32(factor)) = wrong.args.get_mut(at) {
                    *factor *= 1.25;
                }
                own(other).then_some(wrong)
            };
            assert!(is_caught(runs, wrong), "factor {at} of step {step}");
        }
    }
}

/// Gradients are wrong without a product, or with the A operand of another, for every `step`th product, of
/// which a share of the tests takes half.
pub fn assert_products_matter(runs: &[MutantRun], products: &[(usize, usize)], step: usize) {
    let taken = products.iter().step_by(step).enumerate().filter(|(i, _)| is_due(*i, 2));
    for (_, &(item, at)) in taken {
        assert!(is_caught(runs, |kernel| Some(without(kernel, item, at))), "without product {at}");
        let other = |kernel: &Kernel| with_other_operand(kernel, products, (item, at));
        if other(&runs[0].kernels[0]).is_some() {
            assert!(is_caught(runs, other), "operand A of product {at}");
        }
    }
}

/// The kernel in which a product takes the A operand of a later product, if a later one has another.
fn with_other_operand(
    kernel: &Kernel,
    products: &[(usize, usize)],
    (item, at): (usize, usize),
) -> Option<Kernel> {
    let mut module = kernel.module.clone().into_module();
    let Item::Function(function) = &mut module.items[item] else { return None };
    let statements = &mut function.body.as_mut()?.statements;
    let operand = |statement: &Statement| match statement {
        Statement::Inst(inst) => inst.operands[1].clone(),
        _ => unreachable!("a product"),
    };
    let own = operand(&statements[at]);
    let later = products.iter().filter(|&&(of, place)| of == item && place > at);
    let other = later.map(|&(_, place)| operand(&statements[place])).find(|other| *other != own)?;
    if let Statement::Inst(inst) = &mut statements[at] {
        inst.operands[1] = other;
    }
    Some(Kernel { module: module.assume_verified(), ..kernel.clone() })
}

/// The item and the statement of each instruction of a kind.
pub fn places(kernel: &Kernel, is_one: impl Fn(&Op) -> bool) -> Vec<(usize, usize)> {
    let mut found = Vec::new();
    for (i, item) in kernel.module.items.iter().enumerate() {
        let Item::Function(function) = item else { continue };
        for (j, statement) in function.body.iter().flat_map(|body| &body.statements).enumerate() {
            if matches!(statement, Statement::Inst(inst) if is_one(&inst.op)) {
                found.push((i, j));
            }
        }
    }
    found
}
