//! Tests mutants of a kernel that passes: faults are inserted one at a time, and the check must find each
//! fault that changes an output or the order of accesses.

use std::collections::HashSet;

use judge::inputs::Style;
use ptx::Kernel;
use serde::Serialize;

use super::feed::Feed;
use super::mutate::{Fault, mutant, sites, witness};
use super::repeat::{difference, outputs};
use super::run::{GateError, Settings, check_watched, run_steps};
use super::{CheckReport, Verdict, Watch};
use crate::launchfile::Bound;
use emu::{EmuError, HazardKind, Options};

/// Sites that are looked at for each mutant that is asked for: at some of them a fault has no effect.
const SITES: usize = 4;

/// The verdict on a mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// The check failed, for this reason.
    Failed(String),
    /// The check ended without a verdict, for this reason.
    Incomplete(String),
    /// No hazard, but an output differs from that of the original kernel; a reference would detect this.
    Differs(String),
    /// No hazard, and all outputs are bit for bit those of the original kernel.
    Same,
    /// Not checked: the instruction is not executed in any run.
    NotExecuted,
    /// Not checked: the comparison has the same results with the fault, in all runs.
    NoEffect,
}

impl Fate {
    /// Whether the fault was put into the kernel and had an effect in a run.
    fn was_checked(&self) -> bool {
        !matches!(self, Fate::NotExecuted | Fate::NoEffect)
    }
}

/// A fault that was inserted into a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Mutant {
    pub fault: String,
    /// Whether the fault removes ordering.
    pub orders: bool,
    /// The line of the PTX.
    pub line: u32,
    pub fate: Fate,
}

/// Checks up to `most` mutants of a kernel that passed with the report `passed`, drawn evenly from the kinds
/// of faults for which the kernel has sites. Sites at which a fault has no effect are in the result too, and
/// do not count.
///
/// # Errors
/// As for [`check_watched`].
pub fn check_mutants(
    bound: &Bound,
    settings: &Settings,
    passed: &CheckReport,
    most: usize,
    watch: &Watch,
) -> Result<Vec<Mutant>, GateError> {
    let executed: Option<HashSet<u32>> = passed
        .coverage
        .as_ref()
        .map(|coverage| coverage.lines().filter_map(|(line, executed)| executed.then_some(line)).collect());
    let mut found: Vec<Mutant> = Vec::new();
    for (fault, site) in chosen(&bound.kernel, most * SITES) {
        if found.iter().filter(|mutant| mutant.fate.was_checked()).count() >= most {
            break;
        }
        let (Some(kernel), Some(line)) =
            (mutant(&bound.kernel, fault, site), line_of(&bound.kernel, fault, site))
        else {
            continue;
        };
        let fate = if line > 0 && executed.as_ref().is_some_and(|lines| !lines.contains(&line)) {
            Fate::NotExecuted
        } else if !has_effect(bound, settings, fault, site).map_err(GateError::Launch)? {
            Fate::NoEffect
        } else {
            let mutated = Bound { kernel, ..bound.clone() };
            let check = check_watched(&mutated, settings, watch)?;
            let reason = || check.reasons.first().cloned().unwrap_or_default();
            match check.verdict {
                Verdict::Failed => Fate::Failed(reason()),
                Verdict::Incomplete => Fate::Incomplete(reason()),
                Verdict::Passed => compare(bound, &mutated, settings),
            }
        };
        found.push(Mutant { fault: format!("{fault:?}"), orders: fault.orders(), line, fate });
    }
    Ok(found)
}

/// Whether a fault changes the result of a comparison in some run. Other faults count as having an effect.
fn has_effect(bound: &Bound, settings: &Settings, fault: Fault, site: usize) -> Result<bool, EmuError> {
    let Some(kernel) = witness(&bound.kernel, fault, site) else { return Ok(true) };
    let witness = Bound { kernel, ..bound.clone() };
    for (feed, options) in runs(bound, settings) {
        let reports = run_steps(&witness, &mut feed.buffers(&witness), &options, 0)?;
        let mut hazards = reports.iter().flat_map(|report| &report.hazards);
        if hazards.any(|hazard| hazard.kind == HazardKind::Trap) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Compares the outputs of a mutant with those of the original.
fn compare(bound: &Bound, mutated: &Bound, settings: &Settings) -> Fate {
    for (feed, options) in runs(bound, settings) {
        let run = |bound: &Bound| outputs(bound, &feed, &options);
        let (Ok(original), Ok(mutant)) = (run(bound), run(mutated)) else { continue };
        if let Some((name, bytes, all)) = difference(bound, &original, &mutant) {
            return Fate::Differs(format!("{bytes} of {all} bytes of {name} differ from the original's"));
        }
    }
    Fate::Same
}

/// The inputs and options of the runs. Without a problem the inputs do not vary, as in [`check_watched`].
fn runs(bound: &Bound, settings: &Settings) -> impl Iterator<Item = (Feed, Options)> {
    let runs = settings.runs.iter().enumerate();
    let runs =
        runs.filter(|(index, (style, ..))| *index == 0 || bound.problem.is_some() || *style == Style::Normal);
    runs.filter_map(|(_, &(style, seed, schedule))| {
        let options = Options {
            seed,
            schedule,
            step_limit: settings.step_limit,
            grid_limit: settings.grid_limit,
            placement: settings.placement,
            collectives_order: settings.collectives_order,
            ..Options::default()
        };
        Some((Feed::draw(bound, style, seed)?, options))
    })
}

/// Sites of faults: one of each kind in turn, spread over the kernel.
fn chosen(kernel: &Kernel, most: usize) -> Vec<(Fault, usize)> {
    let counts: Vec<(Fault, usize)> =
        Fault::ALL.into_iter().map(|fault| (fault, sites(kernel, fault))).filter(|(_, n)| *n > 0).collect();
    let mut chosen = Vec::new();
    for round in 0.. {
        let before = chosen.len();
        for &(fault, count) in counts.iter().filter(|(_, count)| round < *count) {
            if chosen.len() < most {
                // The golden ratio spreads the sites of successive rounds.
                let spread = (round as f64 * 0.618_033_988_75).fract();
                let site = ((spread * count as f64) as usize).min(count - 1);
                if !chosen.contains(&(fault, site)) {
                    chosen.push((fault, site));
                }
            }
        }
        if chosen.len() == before || chosen.len() >= most {
            return chosen;
        }
    }
    chosen
}

/// The line of the instruction that a fault changes; 0 for an argument.
fn line_of(kernel: &Kernel, fault: Fault, site: usize) -> Option<u32> {
    let instructions = kernel.module.function(&kernel.entry)?.instructions();
    let lines: Vec<u32> = instructions.filter(|inst| fault.applies(inst)).map(|inst| inst.line).collect();
    // Faults in arguments come before those in the code.
    let arguments = sites(kernel, fault) - lines.len();
    Some(site.checked_sub(arguments).map_or(0, |at| lines[at]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gate::check_kernel;
    use crate::launchfile::LaunchSpec;

    const MODULE: &str = ".version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 out)
{
    .reg .b64 %rd<3>;
    .reg .b32 %r<3>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd1, %rd1, %rd2;
    setp.lt.u32 %p1, %r1, 48;
    @%p1 st.global.u32 [%rd1], %r1;
    setp.gt.u32 %p2, %r1, 15;
    @%p2 bra END;
    setp.lt.u32 %p1, %r1, 20;
    @!%p1 st.global.u32 [%rd1], %r1;
    @%p1 bra END;
    st.global.u32 [%rd1+4], %r1;
END:
    ret;
}
";

    #[test]
    fn a_fault_without_effect_is_no_mutant() {
        let launch = "[launch]\nentry = \"k\"\ngrid = [1]\nblock = [32]\n\
            [[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 32\n";
        let module = ptx::parse(MODULE).unwrap().verify().unwrap();
        let bound = launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap();
        let settings = Settings::quick();
        let passed = check_kernel(&bound, &settings).unwrap();
        assert_eq!(passed.verdict, Verdict::Passed, "{:?}", passed.reasons);
        let mutants = check_mutants(&bound, &settings, &passed, 8, &Watch::default()).unwrap();
        let fate = |fault: &str, line: u32| {
            let found = mutants.iter().find(|mutant| mutant.fault == fault && mutant.line == line);
            &found.unwrap_or_else(|| panic!("no {fault} at {line}: {mutants:?}")).fate
        };
        // The launch has no thread with index 48.
        assert_eq!(*fate("BoundTooLarge", 13), Fate::NoEffect);
        assert_eq!(*fate("ComparisonOffByOne", 13), Fate::NoEffect);
        assert_eq!(*fate("SkipStore", 18), Fate::NotExecuted);
        // The comparison changes for thread 15, and nothing depends on it.
        assert_eq!(*fate("ComparisonOffByOne", 15), Fate::Same);
        assert!(matches!(fate("SkipStore", 14), Fate::Differs(_)));
    }
}
