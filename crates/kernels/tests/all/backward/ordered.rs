//! Tests of `backward::fused` for deterministic passes, whose additions to dQ have a fixed order.

use emu::{Checks, Emulator, Options};
use flashcore_kernels::backward::fused::FusedPlan;
use flashcore_kernels::forward::mma::CtaOrder;
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, Corner, DType, Layout, OperandMap, Pass, Problem};
use ptx::{Instruction, Item, Kernel, MemSem, Op, Statement};

use super::fused::{HEADS, check_lengths};
use super::reference::even;
use super::split::{MutantRun, SCHEDULES, uneven_problems};
use crate::common::cases;
use crate::common::each::each;
use crate::forward::without;
use crate::tools::{self, Facts};

const ARCH: Arch = Arch::SM_90;

/// One CTA at a time: a CTA that waits for a later one deadlocks.
fn alone(seed: usize) -> Options {
    Options { seed: seed as u64, resident: Some(1), ..Options::default() }
}

/// Each problem of the torture set that the family computes, with one CTA at a time.
#[test]
fn torture_set_is_right_without_deadlocks() {
    let mut computed = 0;
    for (i, problem) in cases::torture().into_iter().enumerate() {
        let problem = problem.with_pass(Pass::DETERMINISTIC);
        let tile_order = [CtaOrder::RowsFirst, CtaOrder::HeadsFirst][i % 2];
        let row_parts = if problem.lengths.is_even() { [1, 2, 3, 5][i / 2 % 4] } else { 1 };
        let plan = FusedPlan { tile_order, row_parts, ..FusedPlan::default_for(&problem, &ARCH) };
        if problem.check().is_err() || Plan::from(plan.clone()).check(&problem, &ARCH).is_err() {
            continue; // strides of gradients that a broadcast input has, no keys, or other head dims
        }
        computed += 1;
        check_lengths(&problem, even(), plan, alone(i));
    }
    assert!(computed > 60, "{computed} problems");
}

/// Bands of all kinds, with more queries than keys and the reverse, so that tiles of keys see no query rows
/// and query rows see no keys.
#[test]
fn bands_are_right_without_deadlocks() {
    let band = |corner, before, after| Band { corner, before, after };
    for (i, (before, after)) in [
        (None, Some(0)),
        (Some(20), Some(0)),
        (Some(9), Some(170)),
        (None, Some(30)),
        (Some(150), None),
        (Some(0), Some(0)),
    ]
    .into_iter()
    .enumerate()
    {
        for (j, corner) in [Corner::BottomRight, Corner::TopLeft].into_iter().enumerate() {
            for (k, (seq_q, seq_kv)) in [(300, 300), (70, 420), (420, 70), (129, 257)].into_iter().enumerate()
            {
                let (heads, heads_kv) = HEADS[(i + 2 * j + k) % HEADS.len()];
                let problem = Problem::new(1, heads, seq_q, [64, 128, 192][(i + j) % 3], DType::Bf16);
                let problem = problem.with_heads_kv(heads_kv, Layout::Bshd).with_seq_kv(seq_kv, Layout::Bshd);
                let problem = problem.with_band(band(corner, before, after)).with_pass(Pass::DETERMINISTIC);
                check_lengths(&problem, even(), FusedPlan::default_for(&problem, &ARCH), alone(i));
            }
        }
    }
}

/// Packed and used lengths of either side, with sequences without queries or keys, and rows of no sequence.
#[test]
fn uneven_lengths_are_right_without_deadlocks() {
    for i in 0..12 {
        let (heads, heads_kv) = HEADS[i % HEADS.len()];
        let base = Problem::new(4, heads, 150, [64, 128, 192][i / 4], DType::Bf16);
        let base = base.with_heads_kv(heads_kv, Layout::Bshd);
        let base = base.with_seq_kv(140, Layout::Bshd).with_pass(Pass::DETERMINISTIC);
        for (problem, lengths) in uneven_problems(&base.with_band(Band::NAMED[i % Band::NAMED.len()])) {
            check_lengths(&problem, lengths, FusedPlan::default_for(&problem, &ARCH), alone(i));
        }
    }
}

/// Problems with several tiles of keys for each tile of query rows. CTAs of one KV head alone wait for each
/// other, so there is one.
fn runs(dim: usize) -> Vec<MutantRun> {
    [(Band::FULL, 140, 300), (Band::CAUSAL, 300, 290), (Band::window(150, 0), 300, 300)]
        .map(|(band, seq_q, seq_kv)| {
            let problem = Problem::new(1, 2, seq_q, dim, DType::Bf16).with_band(band);
            let problem = problem.with_heads_kv(1, Layout::Bshd).with_seq_kv(seq_kv, Layout::Bshd);
            let problem = problem.with_pass(Pass::DETERMINISTIC);
            let plan = FusedPlan::default_for(&problem, &ARCH);
            MutantRun::new(problem, plan.into(), ARCH)
        })
        .into()
}

/// Whether the gradients of the kernels have equal bits in runs whose CTAs advance in many orders, without a
/// hazard.
fn repeats(MutantRun { inputs, buffers, .. }: &MutantRun, kernels: &[Kernel]) -> Result<(), String> {
    let ctas = kernels[1].launch.grid.count();
    let mut first: Option<OperandMap<Vec<u32>>> = None;
    for (number, &schedule) in (0..).zip(SCHEDULES.iter().cycle().take(6)) {
        let (starts, resident) = match number {
            0 => (None, Some(1)),
            1..4 => (Some(ctas - number), None),
            4 => (None, None),
            _ => (None, Some(2)),
        };
        let options = Options { seed: number, schedule, first: starts, resident, ..Options::default() };
        let mut machine = Emulator::new(options);
        let gradients =
            inputs.run_kernels(&mut machine, buffers, kernels).map_err(|error| error.to_string())?;
        if let Some(fault) = inputs.fault(&gradients) {
            return Err(fault);
        }
        match &first {
            None => first = Some(gradients),
            Some(first) if *first != gradients => return Err(format!("run {number} has other bits")),
            Some(_) => {}
        }
    }
    Ok(())
}

#[test]
fn every_run_has_the_same_bits() {
    for dim in [64, 128, 256] {
        for run in runs(dim) {
            let repeated = repeats(&run, &run.kernels);
            repeated.unwrap_or_else(|error| panic!("D{dim} {:?}: {error}", run.inputs.problem()));
        }
    }
}

/// A CTA waits for those that are launched before it: alone, the last one never ends.
#[test]
fn the_last_cta_waits_for_those_before() {
    for dim in [64, 128, 256] {
        let MutantRun { inputs, buffers, kernels } = runs(dim).remove(1);
        let last = kernels[1].launch.grid.count() - 1;
        let checks = Checks { unwritten: false, ..Options::default().checks };
        let mut machine = Emulator::new(Options { first: Some(last), checks, ..alone(1) });
        let error = inputs.run_kernels(&mut machine, &buffers, &kernels).unwrap_err();
        assert!(error.to_string().contains("deadlock"), "D{dim}: {error}");
    }
}

/// The instructions of the main kernel that order additions, with the number of statements to remove: what
/// synchronises the threads that wait for turns and end them. A wait is removed with the branch back to it.
fn sites(kernel: &Kernel) -> Vec<(String, usize, usize, usize)> {
    let site = |inst: &Instruction| match inst.op {
        Op::Ld(memory) if memory.sem == MemSem::Acquire => Some(3),
        Op::Mbarrier(mbarrier) if mbarrier.op.waits() => Some(2),
        Op::Mbarrier(_) | Op::CpAsyncBulkWaitGroup { .. } => Some(1),
        _ => None,
    };
    let ends = |inst: &Instruction| matches!(inst.op, Op::St(memory) if memory.sem == MemSem::Release);
    let mut found = Vec::new();
    for (item, function) in kernel.module.items.iter().enumerate() {
        let Item::Function(function) = function else { continue };
        let statements = function.body.iter().flat_map(|body| &body.statements).enumerate();
        let all: Vec<_> = statements
            .filter_map(|(at, statement)| match statement {
                Statement::Inst(inst) => Some((at, inst)),
                _ => None,
            })
            .collect();
        let Some(first) = all.iter().position(|(_, inst)| site(inst) == Some(3)) else { continue };
        let last = all.iter().rposition(|(_, inst)| ends(inst)).expect("turns end");
        for (at, inst) in &all[first..last] {
            found.extend(site(inst).map(|count| (format!("{} {at}", inst.op), item, *at, count)));
        }
    }
    found
}

/// Without any of them, runs have other bits or a hazard.
#[test]
fn every_wait_is_needed() {
    for dim in [64, 128, 256] {
        let runs = runs(dim);
        let sites = sites(&runs[0].kernels[1]);
        assert_eq!(sites.len(), 5, "{sites:?}");
        let spared = each(&sites, |&(ref name, item, at, count)| {
            let caught = runs.iter().any(|run| {
                let mut mutants = run.kernels.clone();
                for _ in 0..count {
                    mutants[1] = without(&mutants[1], item, at);
                }
                repeats(run, &mutants).is_err()
            });
            (!caught).then(|| name.clone())
        });
        assert_eq!(spared.into_iter().flatten().collect::<Vec<_>>(), [""; 0], "D{dim}");
    }
}

/// ptxas keeps the products asynchronous, and spills nothing; above head dim 128, eight numbers at most,
/// which are read outside the products.
#[test]
fn defaults_assemble_without_spills() {
    let mut cases = Vec::new();
    for (dim, dim_v) in [(64, 64), (72, 72), (128, 128), (192, 128), (256, 256)] {
        for band in [Band::FULL, Band::CAUSAL, Band::window(50, 50)] {
            let problem = Problem::new(2, 16, 4000, dim, DType::Bf16).with_band(band);
            let problem = Problem { head_dim_v: dim_v, ..problem }.with_layout(Layout::Bshd);
            let problem = problem.with_pass(Pass::DETERMINISTIC);
            let plan = FusedPlan::default_for(&problem, &ARCH).into();
            cases.push((dim, emit(&problem, &plan, &ARCH).unwrap().kernel(1)));
        }
    }
    let Some(facts) = tools::facts(&cases.iter().map(|(_, kernel)| kernel).collect::<Vec<_>>()) else {
        return;
    };
    for ((dim, _), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        let most = if *dim > 128 { 64 } else { 0 }; // bytes stored and loaded
        assert!(spills <= most, "D{dim}: {spills} bytes of spills with {registers} registers");
    }
}
