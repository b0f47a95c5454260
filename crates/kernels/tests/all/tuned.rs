//! Tests of the tuned plans that ship: each computes the right result, and its machine code has the emitted
//! instructions.

use crate::common;
use crate::tools;
use std::collections::HashSet;

use crate::common::each::each;
use emu::{Emulator, Options, Schedule};
use filetest::is_due;
use flashcore_kernels::select::{Choice, Device, TunedRow, TunedTable, choose_of};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{DType, Layout, Problem};
use ptx::Kernel;

/// A problem with the row's widths, types and mask that is small enough to run quickly: more rows than a tile
/// has, and more keys than a block, or as many as the plan takes. With three SMs, some of its tiles belong to
/// a last wave.
fn small(row: &TunedRow) -> (Problem, Arch) {
    let shape = &row.problem;
    let group = shape.heads_q / shape.heads_kv;
    let heads = group.max(2);
    let mut problem = Problem::new(1, heads, 200, shape.head_dim, shape.dtypes).with_band(shape.mask);
    problem.heads_kv = heads / group;
    problem.head_dim_v = shape.head_dim_v;
    let keys = match &row.plan {
        Plan::SmallAtOnce(plan) => 270.min(plan.cluster_keys() as usize),
        _ => 270,
    };
    let arch = Arch::of(row.sm).expect("the table was read");
    (problem.with_seq_kv(keys, Layout::Bshd), Arch { multiprocessors: 3, ..arch })
}

/// Every plan once per width and mask, a share of the tests each fourth. The types follow the rows of the
/// table.
#[test]
fn tuned_plans_are_right_without_hazards() {
    let mut seen = HashSet::new();
    let new = |row: &&TunedRow| {
        let shape = &row.problem;
        seen.insert((row.plan.clone(), shape.head_dim, shape.head_dim_v, shape.mask))
    };
    let rows: Vec<_> = TunedTable::builtin().rows().iter().filter(new).enumerate().collect();
    assert!(rows.len() > 100, "{}", rows.len());
    let taken: Vec<_> = rows.into_iter().filter(|(i, _)| is_due(*i, 4)).collect();
    each(&taken, |(i, row)| {
        let (problem, arch) = small(row);
        let schedule = [Schedule::Late, Schedule::Early, Schedule::Random][i % 3];
        let options = Options { seed: *i as u64, schedule, ..Options::default() };
        common::run(&mut Emulator::new(options), &problem, &row.plan, &arch, *i as u64).check();
    });
}

/// The tuned plans on their own problems, in both 16-bit types: a plan near the register limit can be fast in
/// one kernel and serialised in another. Nothing spills. Each product and copy appears once. The waits for
/// products are where the code places them, not after each product (`WARPGROUP.DEPBAR`), as when ptxas
/// serialises products.
#[test]
fn tuned_plans_are_not_serialised() {
    let kernels = hopper_kernels();
    let of_plans: Vec<&Kernel> = kernels.iter().map(|(_, kernel)| kernel).collect();
    let Some(facts) = tools::facts(&of_plans) else { return };
    for ((plan, kernel), facts) in kernels.iter().zip(facts) {
        assert_eq!(facts.spills, 0, "{plan:?}: {} registers", facts.registers);
        let text = kernel.module.to_string();
        for (ptx, machine) in [
            ("wgmma.mma_async", "HGMMA"),
            ("wgmma.wait_group", "WARPGROUP.DEPBAR"),
            (".shared::cluster.global", "UTMALDG"),
        ] {
            let emitted = text.matches(ptx).count();
            assert!(emitted > 0, "{plan:?}: no {ptx}");
            let Some(found) = facts.count(machine) else { continue };
            assert_eq!(found, emitted, "{plan:?}: {machine}");
        }
    }
}

/// Kernels of the tables' plans for sm_90a, each text once.
fn hopper_kernels() -> Vec<(Plan, Kernel)> {
    let table = TunedTable::builtin();
    let (mut kernels, mut seen) = (Vec::new(), HashSet::new());
    for (family, count) in [(Family::Wgmma, 40), (Family::SmallStreamed, 20), (Family::SmallAtOnce, 20)] {
        let rows = table.rows().iter().filter(|row| row.plan.family() == family.name());
        for (row, dtype) in rows.flat_map(|row| [(row, DType::Bf16), (row, DType::F16)]) {
            let problem = Problem { dtypes: dtype.into(), ..row.problem.problem() };
            let device = Device { name: &row.device, arch: Arch::SM_90 };
            let Ok(Choice { plan, .. }) = choose_of(family, &problem, &device, table) else {
                panic!("{}: no plan of the table's family", row.device);
            };
            let kernel =
                emit(&problem, &plan, &Arch::SM_90).unwrap_or_else(|e| panic!("{plan:?}: {e}")).kernel(0);
            if seen.insert(kernel.module.to_string()) {
                kernels.push((plan, kernel));
            }
        }
        let of_family = |(plan, _): &&(Plan, Kernel)| plan.family() == family.name();
        assert!(kernels.iter().filter(of_family).count() > count, "{family:?}");
    }
    kernels
}
