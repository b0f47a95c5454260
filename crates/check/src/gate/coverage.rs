//! Instruction coverage of a check: the verdict says nothing about instructions that did not run.

use std::collections::HashSet;

use emu::Counters;
use ptx::{Kernel, Op};

use super::polls::loops;
use crate::launchfile::Bound;
use serde_json::{Value, json};

/// The instructions that are reachable from the entries of a program, each with its line and whether any run
/// executed it.
///
/// An instruction counts as executed when it was issued with an active lane. A branch, return or exit that no
/// lane took counts too: its condition was evaluated, and the instructions at its target are counted
/// separately. The exception is a backward branch: its loop ran only once, and nothing says what a second
/// round does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coverage {
    instructions: Vec<Reachable>,
}

/// A reachable instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reachable {
    /// Index in the module.
    index: usize,
    line: u32,
    /// Whether it is a backward branch.
    back: bool,
    executed: bool,
}

impl Coverage {
    /// Lists the reachable instructions, none of them executed yet.
    pub(super) fn of(bound: &Bound) -> Coverage {
        let module = &bound.kernel.module;
        let mut reached = vec![false; module.functions().count()];
        for kernel in bound.steps() {
            let by_kernel = module.reached_from(&kernel.entry);
            reached.iter_mut().zip(by_kernel).for_each(|(all, one)| *all |= one);
        }
        let (mut instructions, mut start) = (Vec::new(), 0);
        for (function, reached) in module.functions().zip(reached) {
            let backs: HashSet<usize> = loops(function).into_iter().map(|(_, back)| back).collect();
            let lines = function.instructions().map(|inst| inst.line).enumerate();
            let reachable = |(at, line)| Reachable {
                index: start + at,
                line,
                back: backs.contains(&at),
                executed: false,
            };
            let all: Vec<Reachable> = lines.map(reachable).collect();
            start += all.len();
            instructions.extend(all.into_iter().filter(|_| reached));
        }
        Coverage { instructions }
    }

    /// Adds the counters of one kernel's run.
    pub(super) fn add(&mut self, kernel: &Kernel, counters: &Counters) {
        let ops: Vec<Op> = kernel.module.instructions().map(|inst| inst.op).collect();
        for Reachable { index, back, executed, .. } in &mut self.instructions {
            let (Some(op), Some(counter)) = (ops.get(*index), counters.instructions.get(*index)) else {
                continue;
            };
            let evaluates = matches!(op, Op::Bra { .. } | Op::BrxIdx { .. } | Op::Ret { .. } | Op::Exit);
            *executed |= counter.lanes > 0 || evaluates && !*back && counter.issues > 0;
        }
    }

    /// Whether a run executed the instruction with this index in the module.
    pub(super) fn executed(&self, index: usize) -> bool {
        let at = self.instructions.binary_search_by_key(&index, |instruction| instruction.index);
        at.is_ok_and(|at| self.instructions[at].executed)
    }

    /// The number of executed instructions and the number of all instructions.
    pub fn counts(&self) -> (usize, usize) {
        let executed = self.instructions.iter().filter(|instruction| instruction.executed).count();
        (executed, self.instructions.len())
    }

    /// The executed share in percent.
    pub fn percent(&self) -> f64 {
        match self.counts() {
            (_, 0) => 100.0,
            (executed, all) => 100.0 * executed as f64 / all as f64,
        }
    }

    /// The PTX line of each instruction and whether it was executed, in the order of the text.
    pub fn lines(&self) -> impl Iterator<Item = (u32, bool)> {
        self.instructions.iter().map(|instruction| (instruction.line, instruction.executed))
    }

    /// The number of executed instructions and their share, in words.
    pub fn summary(&self) -> String {
        let (executed, all) = self.counts();
        // Rounded down, so that 99.97 % is not shown as 100 %.
        let percent = (10.0 * self.percent()).floor() / 10.0;
        format!("{executed} of {all} instructions executed ({percent} %)")
    }

    /// Line ranges of instructions that never ran. Neighbouring instructions are joined.
    pub fn missing(&self) -> Vec<(u32, u32)> {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        let mut before = true;
        for &Reachable { line, executed, .. } in &self.instructions {
            match ranges.last_mut() {
                Some((_, last)) if !executed && !before => *last = line,
                _ if !executed => ranges.push((line, line)),
                _ => {}
            }
            before = executed;
        }
        ranges
    }

    /// The `coverage` object in the JSON of a check.
    pub fn json(&self) -> Value {
        let (executed, instructions) = self.counts();
        json!({
            "instructions": instructions, "executed": executed, "percent": self.percent(),
            "missing_lines": self.missing(),
        })
    }
}

impl std::fmt::Display for Coverage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.summary())?;
        let ranges = self.missing();
        if ranges.is_empty() {
            return Ok(());
        }
        let range = |&(first, last): &(u32, u32)| match first == last {
            true => first.to_string(),
            false => format!("{first}–{last}"),
        };
        write!(f, "; never executed: lines {}", ptx::quote::list(ranges.iter().map(range)))
    }
}

#[cfg(test)]
mod tests {
    use crate::gate::{CheckReport, Settings, Verdict, check_kernel};
    use crate::launchfile::LaunchSpec;

    const MODULE: &str = ".version 7.0
.target sm_80
.address_size 64
.func helper() { ret; }
.func unused() { ret; }
.visible .entry other() { ret; }
.visible .entry k(.param .u64 a)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [a];
    ld.global.u32 %r1, [%rd1];
    setp.eq.u32 %p1, %r1, 7;
    @%p1 st.global.u32 [%rd1], %r1;
    @%p1 bra SEVEN;
    call.uni helper;
    ret;
SEVEN:
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
";

    /// A loop with one round.
    const ONE_ROUND: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 a)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    .reg .pred %p<2>;
    ld.param.u64 %rd1, [a];
    mov.u32 %r0, 0;
AGAIN:
    add.u32 %r0, %r0, 1;
    setp.lt.u32 %p1, %r0, 1;
    @%p1 bra AGAIN;
    mov.u32 %r1, %tid.x;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra DONE;
    st.global.u32 [%rd1], %r0;
DONE:
    ret;
}
";

    fn check(module: &str) -> CheckReport {
        let launch = "[launch]\nentry = \"k\"\ngrid = [1]\nblock = [32]\n\
            [[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 4\ninit = \"zeros\"\n";
        let module = ptx::parse(module).unwrap().verify().unwrap();
        let bound = launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
        check_kernel(&bound, &Settings::quick()).unwrap()
    }

    #[test]
    fn what_no_lane_executed_is_named() {
        let check = check(MODULE);
        let coverage = check.coverage.as_ref().unwrap();
        // The helper's return counts; the other entry and the uncalled function do not. The branch was
        // evaluated.
        assert_eq!(coverage.counts(), (7, 11), "{coverage}");
        assert_eq!(coverage.missing(), [(15, 15), (20, 22)]);
        let said = coverage.to_string();
        assert_eq!(said, "7 of 11 instructions executed (63.6 %); never executed: lines 15, 20–22");
    }

    #[test]
    fn a_loop_with_one_round_is_not_covered() {
        let coverage = check(ONE_ROUND).coverage.unwrap();
        assert_eq!(coverage.missing(), [(14, 14)], "{coverage}");
    }

    #[test]
    fn a_verdict_can_ask_for_coverage() {
        let mut check = check(MODULE);
        assert_eq!(check.verdict, Verdict::Passed, "{:?}", check.reasons);
        check.require_coverage(60.0);
        assert_eq!(check.verdict, Verdict::Passed);
        check.require_coverage(64.0);
        assert_eq!(check.verdict, Verdict::Incomplete);
        assert!(check.reasons[0].contains("64 % were asked for"), "{:?}", check.reasons);
    }
}
