//! Tests of the forward families on the emulator: no hazards with every check on, and results within the
//! rounding of P and O.

use crate::common;
use crate::common::cases;
use attend::{Order, Rescale};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::mma::{CtaOrder, MmaPlan, QueryHome};
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DType, Layout, Problem};
use ptx::{Item, Kernel, Op, Statement};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

fn default_plan(problem: &Problem, arch: &Arch) -> MmaPlan {
    MmaPlan::default_for(problem, arch)
}

/// The default plan without its adaptations to small grids, as a base for other genes.
fn plain_plan(problem: &Problem, arch: &Arch) -> MmaPlan {
    MmaPlan { kv_warps: 1, products: Order::InTurn, ..default_plan(problem, arch) }
}

fn check(problem: &Problem, plan: MmaPlan, arch: &Arch, options: Options) {
    let seed = options.seed;
    common::run(&mut Emulator::new(options), problem, &Plan::Mma(plan), arch, seed).check();
}

/// Each problem of the torture set with a plan of small tiles, so that every problem has several blocks.
/// Genes and architectures take turns.
#[test]
fn torture_set_is_right_and_without_hazards() {
    for (i, problem) in cases::torture().iter().enumerate() {
        let arch = Arch::ALL[i % Arch::ALL.len()];
        let (block_m, block_n, warps) = [(32, 32, 2), (64, 16, 2), (48, 48, 3), (64, 32, 4)][i % 4];
        let wide = problem.head_dim_v > 128;
        let block_m = if wide { 16 * warps } else { block_m };
        let mut plan = MmaPlan {
            block_m,
            block_n,
            warps,
            stages: [2, 1, 3][i % 3],
            queries: if wide || i % 4 < 2 { QueryHome::Shared } else { QueryHome::Registers },
            rescale: [Rescale::Beyond(8), Rescale::Always][i / 3 % 2],
            tile_order: [CtaOrder::RowsFirst, CtaOrder::HeadsFirst][i / 5 % 2],
            ..plain_plan(problem, &arch)
        };
        // Every second plan divides the keys among warps, if the columns of O can be divided.
        if i % 2 == 1 && problem.head_dim_v % 16 == 0 && !wide {
            (plan.kv_warps, plan.warps, plan.block_n) = (2, 2 * warps, block_n.max(32));
        }
        while plan.shared_bytes(problem) > u64::from(arch.shared_per_cta) {
            plan.stages -= 1;
        }
        if i / 2 % 2 == 1 && plan.stages > 1 {
            plan.products = Order::ScoresAhead;
        }
        let problem = problem.clone().with_lse(i % 4 != 0);
        check(&problem, plan, &arch, Options { seed: i as u64, ..Options::default() });
    }
}

/// The default plans, on one head of the reference problem.
#[test]
fn defaults_are_right_on_every_architecture() {
    for (i, arch) in Arch::ALL.into_iter().enumerate() {
        let mask = Band::NAMED[i % Band::NAMED.len()];
        let problem = Problem::new(1, 1, 260, 64, DType::F16).with_band(mask);
        check(&problem, default_plan(&problem, &arch), &arch, Options::default());
    }
}

#[test]
fn every_schedule_gives_the_same_clean_result() {
    let problem = Problem::new(1, 1, 96, 64, DType::Bf16).with_band(Band::CAUSAL).with_lse(true);
    let problem = problem.with_seq_kv(200, Layout::Bshd);
    let small = MmaPlan { block_m: 64, block_n: 32, warps: 4, ..plain_plan(&problem, &Arch::SM_80) };
    for stages in [1, 2, 3] {
        for (seed, schedule) in (0..4).flat_map(|seed| SCHEDULES.map(|schedule| (seed, schedule))) {
            let plan = MmaPlan { stages, ..small.clone() };
            check(&problem, plan, &Arch::SM_80, Options { seed, schedule, ..Options::default() });
        }
    }
}

/// Warps divide the keys: with more parts than the causal rows see, with no keys, and with several row tiles.
#[test]
fn parts_of_the_keys_are_joined() {
    let small = |kv_warps, block_m, warps, block_n, stages| MmaPlan {
        kv_warps,
        block_m,
        warps,
        block_n,
        stages,
        ..plain_plan(&Problem::mission(), &Arch::SM_80)
    };
    let plans =
        [small(2, 32, 4, 64, 2), small(4, 16, 4, 64, 3), small(8, 32, 8, 128, 1), small(4, 64, 8, 64, 2)];
    for (i, plan) in plans.iter().enumerate() {
        for (keys, mask) in [
            (200, Band::FULL),
            (70, Band::CAUSAL),
            (0, Band::FULL),
            (7, Band::CAUSAL),
            (70, Band::CAUSAL_TOP_LEFT),
        ] {
            for dim in [64, 128] {
                let problem = Problem::new(1, 2, 90, dim, [DType::F16, DType::Bf16][i % 2])
                    .with_band(mask)
                    .with_seq_kv(keys, Layout::Bshd)
                    .with_lse(true);
                for schedule in SCHEDULES {
                    let options = Options { seed: i as u64, schedule, ..Options::default() };
                    check(&problem, plan.clone(), &Arch::SM_80, options);
                }
            }
        }
    }
}

/// Positions of the instructions that order memory accesses.
pub fn synchronisations(kernel: &Kernel) -> Vec<(usize, usize, Op)> {
    let mut found = Vec::new();
    for (i, item) in kernel.module.items.iter().enumerate() {
        let Item::Function(function) = item else { continue };
        for (j, statement) in function.body.iter().flat_map(|body| &body.statements).enumerate() {
            if let Statement::Inst(inst) = statement
                && matches!(inst.op, Op::Bar { .. } | Op::BarWarpSync | Op::CpAsyncWaitGroup)
            {
                found.push((i, j, inst.op));
            }
        }
    }
    found
}

/// Every barrier and every wait is needed: if any one is removed, the emulator rejects the kernel, with keys
/// or without.
#[test]
fn every_synchronisation_is_needed() {
    let problem = Problem::new(1, 1, 128, 64, DType::F16);
    let base = MmaPlan { block_m: 64, block_n: 32, warps: 4, ..plain_plan(&problem, &Arch::SM_80) };
    let (shared, registers) = (QueryHome::Shared, QueryHome::Registers);
    let (in_turn, ahead) = (Order::InTurn, Order::ScoresAhead);
    for (stages, queries, kv_warps, products) in [
        (1, shared, 1, in_turn),
        (2, shared, 1, in_turn),
        (3, registers, 1, in_turn),
        (2, shared, 2, in_turn),
        (2, registers, 4, in_turn),
        (2, shared, 1, ahead),
        (3, registers, 2, ahead),
    ] {
        let block_m = 64 / kv_warps;
        let block_n = 32.max(16 * kv_warps);
        let plan =
            Plan::Mma(MmaPlan { stages, queries, kv_warps, products, block_m, block_n, ..base.clone() });
        let problems = [5 * block_n as usize, 0].map(|keys| problem.clone().with_seq_kv(keys, Layout::Bhsd));
        let kernels = problems.each_ref().map(|p| emit(p, &plan, &Arch::SM_80).unwrap().kernel(0));
        for (item, at, op) in synchronisations(&kernels[0]) {
            let caught = problems.iter().zip(&kernels).any(|(problem, kernel)| {
                let mutant = without(kernel, item, at);
                (0..3).any(|seed| {
                    let options = Options { seed, ..Options::default() };
                    common::run_kernel(&mut Emulator::new(options), problem, &mutant, seed).is_err()
                })
            });
            assert!(
                caught,
                "{stages} stages, queries {queries:?}, {kv_warps} kv_warps, {products:?}: without statement {at}, {op:?}"
            );
        }
    }
}

pub fn without(kernel: &Kernel, item: usize, statement: usize) -> Kernel {
    let mut module = kernel.module.clone().into_module();
    if let Item::Function(function) = &mut module.items[item]
        && let Some(body) = &mut function.body
    {
        body.statements.remove(statement);
    }
    Kernel { module: module.assume_verified(), ..kernel.clone() }
}

/// Matrix loads, and the stores and loads of the epilogue, use every bank once, for every row width.
#[test]
fn no_head_dim_has_bank_conflicts() {
    for dim in (8..=256).step_by(8) {
        let problem = Problem::new(1, 1, 64, dim, DType::F16).with_seq_kv(64, Layout::Bhsd);
        let mut plan = default_plan(&problem, &Arch::SM_90);
        if dim % 64 == 0 {
            (plan.kv_warps, plan.warps, plan.block_m, plan.block_n) = (4, 4, 16, 64);
        }
        let kernel = emit(&problem, &Plan::Mma(plan), &Arch::SM_90).unwrap().kernel(0);
        let mut machine = Emulator::new(Options::default());
        common::run_kernel(&mut machine, &problem, &kernel, dim as u64).unwrap().check();
        let report = machine.last_report().unwrap();
        let text = kernel.module.to_string();
        for counter in &report.counters.instructions {
            let line = text.lines().nth(counter.line as usize - 1).unwrap_or_default();
            // 16-byte accesses are served quarter warp by quarter warp, also if lanes are idle in a row of
            // odd width.
            let wide = line.contains("cp.async") || line.contains(".v4.");
            let least = if wide { 4 * counter.shared_accesses } else { counter.shared_ideal };
            assert!(counter.shared_passes <= least, "head_dim {dim}: {counter:?}\n{line}");
        }
    }
}
