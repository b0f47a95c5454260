//! The rungs of the ladder on the emulator: the right ones match f64 without a hazard, the broken ones are refuted for
//! their own reason.

mod common;

use emu::{Emulator, HazardKind, Options, Schedule};
use flashcore_kernels::ladder::{Expected, Reason, RungPlan, rungs};
use flashcore_kernels::{Arch, KernelError, Plan, PlanError, emit};
use half::f16;
use problem::{DType, Layout, Mask, Problem};

/// Two tiles of keys and two heads, so that online rescaling and strides between heads count.
fn problem(rung: RungPlan) -> Problem {
    Problem::new(1, 2, 128, 64, DType::F16).with_mask(rung.mask())
}

fn machine(schedule: Schedule, seed: u64) -> Emulator {
    Emulator::new(Options { schedule, seed, ..Options::default() })
}

#[test]
fn right_rungs_match_f64_without_hazards() {
    for rung in rungs().into_iter().filter(|r| r.expected == Expected::Proven) {
        let mut machine = machine(Schedule::Random, 5);
        let run = common::run(&mut machine, &problem(rung.plan), &Plan::Ladder { rung: rung.plan }, &Arch::SM_89, 11);
        run.check();
    }
}
