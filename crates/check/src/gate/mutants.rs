//! Tests mutants of a kernel that passes: faults are inserted one at a time, and the check must find each
//! fault that changes an output or the order of accesses.

use std::collections::HashSet;

use ptx::Kernel;
use serde::Serialize;

use super::feed::Feed;
use super::mutate::{Fault, mutant, sites, witness};
use super::outcome::GateError;
use super::repeat::{difference, outputs};
use super::run::{Settings, check_watched, unfinished};
use super::sampler::spread;
use super::steps::run_steps;
use super::{CheckReport, Verdict, Watch};
use crate::launchfile::Bound;
use emu::{EmuError, HazardKind, Options};

/// Sites that are looked at for each mutant that is asked for: at some of them a fault has no effect.
const SITES: usize = 4;

/// The result of checking a mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MutantResult {
    /// The check failed, for this reason.
    Failed(String),
    /// The check ended without a verdict, for this reason.
    Incomplete(String),
    /// No hazard, but an output that nothing judges differs from that of the original kernel; a reference
    /// would detect this.
    Differs(String),
    /// No hazard, and a judged output differs from that of the original kernel by less than its reference
    /// allows.
    Tolerated(String),
    /// No hazard, and all outputs are bit for bit those of the original kernel.
    Same,
    /// Not checked: the instruction is not executed in any run.
    NotExecuted,
    /// Not checked: the comparison has the same results with the fault, in all runs.
    NoEffect,
}

impl MutantResult {
    /// Whether the fault was put into the kernel and had an effect in a run.
    fn was_checked(&self) -> bool {
        !matches!(self, MutantResult::NotExecuted | MutantResult::NoEffect)
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
    #[serde(rename = "fate")]
    pub result: MutantResult,
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
        if found.iter().filter(|mutant| mutant.result.was_checked()).count() >= most {
            break;
        }
        let (Some(kernel), Some(line)) =
            (mutant(&bound.kernel, fault, site), line_of(&bound.kernel, fault, site))
        else {
            continue;
        };
        let result = if line > 0 && executed.as_ref().is_some_and(|lines| !lines.contains(&line)) {
            MutantResult::NotExecuted
        } else {
            let mutated = Bound { kernel, ..bound.clone() };
            match has_effect(bound, settings, fault, site, watch) {
                Ok(true) => check_mutant(bound, &mutated, settings, watch)?,
                Ok(false) => MutantResult::NoEffect,
                Err(error) => without_original(error, watch)?,
            }
        };
        found.push(Mutant { fault: format!("{fault:?}"), orders: fault.orders(), line, result });
    }
    Ok(found)
}

/// Checks a mutant, and compares its outputs with those of the original if it passes.
fn check_mutant(
    bound: &Bound,
    mutated: &Bound,
    settings: &Settings,
    watch: &Watch,
) -> Result<MutantResult, GateError> {
    let check = check_watched(mutated, settings, watch)?;
    let reason = || check.reasons.first().cloned().unwrap_or_default();
    match check.verdict {
        Verdict::Failed => Ok(MutantResult::Failed(reason())),
        Verdict::Incomplete => Ok(MutantResult::Incomplete(reason())),
        Verdict::Passed => compare(bound, mutated, settings, watch),
    }
}

/// The result of a mutant when a run of the original kernel does not end.
fn without_original(error: EmuError, watch: &Watch) -> Result<MutantResult, GateError> {
    Ok(MutantResult::Incomplete(format!("the kernel without the fault: {}", unfinished(error, watch)?)))
}

/// Whether a fault changes the result of a comparison in some run. Other faults count as having an effect.
fn has_effect(
    bound: &Bound,
    settings: &Settings,
    fault: Fault,
    site: usize,
    watch: &Watch,
) -> Result<bool, EmuError> {
    let Some(kernel) = witness(&bound.kernel, fault, site) else { return Ok(true) };
    let witness = Bound { kernel, ..bound.clone() };
    for (feed, options) in runs(bound, settings, watch) {
        let reports = run_steps(&witness, &mut feed.buffers(&witness), &options, 0)?;
        let mut hazards = reports.iter().flat_map(|report| &report.hazards);
        if hazards.any(|hazard| hazard.kind == HazardKind::Trap) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Compares the outputs of a mutant with those of the original.
fn compare(
    bound: &Bound,
    mutated: &Bound,
    settings: &Settings,
    watch: &Watch,
) -> Result<MutantResult, GateError> {
    for (feed, options) in runs(bound, settings, watch) {
        let original = match outputs(bound, &feed, &options) {
            Ok(original) => original,
            Err(error) => return without_original(error, watch),
        };
        let mutant = match outputs(mutated, &feed, &options) {
            Ok(mutant) => mutant,
            Err(error) => return Ok(MutantResult::Incomplete(unfinished(error, watch)?)),
        };
        if let Some((name, bytes, all)) = difference(bound, &original, &mutant) {
            let differs = format!("{bytes} of {all} bytes of {name} differ from the original's");
            let is_judged = bound.problem.is_some() || bound.references.iter().any(|by| by.name == name);
            return Ok(if is_judged {
                MutantResult::Tolerated(differs)
            } else {
                MutantResult::Differs(differs)
            });
        }
    }
    Ok(MutantResult::Same)
}

/// The inputs and options of the runs of [`check_watched`].
fn runs(bound: &Bound, settings: &Settings, watch: &Watch) -> impl Iterator<Item = (Feed, Options)> {
    let runs = settings.runs_of(bound);
    let count = runs.len();
    runs.into_iter().zip(1..).filter_map(move |((style, seed, schedule), run)| {
        watch.begin(run, count);
        Some((Feed::draw(bound, style, seed)?, settings.options(seed, schedule, watch)))
    })
}

/// Sites of faults: one of each kind in turn, spread over the kernel.
fn chosen(kernel: &Kernel, most: usize) -> Vec<(Fault, usize)> {
    let kinds = Fault::ALL.iter().map(|&fault| (fault, spread(sites(kernel, fault) as u64)));
    let mut kinds: Vec<_> = kinds.collect();
    let mut chosen = Vec::new();
    loop {
        let before = chosen.len();
        chosen.extend(kinds.iter_mut().filter_map(|(fault, sites)| Some((*fault, sites.next()? as usize))));
        if chosen.len() == before || chosen.len() >= most {
            chosen.truncate(most);
            return chosen;
        }
    }
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

    fn bound(module: &str) -> Bound {
        let launch = "[launch]\nentry = \"k\"\ngrid = [1]\nblock = [32]\n\
            [[arg]]\nrole = \"buffer\"\ndtype = \"u32\"\nelements = 32\n";
        let module = ptx::parse(module).unwrap().verify().unwrap();
        launch.parse::<LaunchSpec>().unwrap().bind(module).unwrap()
    }

    #[test]
    fn every_site_is_chosen_in_time() {
        let store = "    @!%p1 st.global.u32 [%rd1], %r1;\n";
        assert!(MODULE.contains(store));
        for count in 1..60 {
            let kernel = bound(&MODULE.replace(store, &store.repeat(count))).kernel;
            let all: Vec<usize> = Fault::ALL.iter().map(|&fault| sites(&kernel, fault)).collect();
            let chosen = chosen(&kernel, usize::MAX);
            assert_eq!(chosen.len(), all.iter().sum::<usize>(), "{count}");
            let known: HashSet<(Fault, usize)> = chosen.into_iter().collect();
            for (&fault, sites) in Fault::ALL.iter().zip(all) {
                assert!((0..sites).all(|site| known.contains(&(fault, site))), "{fault:?} of {count}");
            }
        }
        assert_eq!(chosen(&bound(MODULE).kernel, 4).len(), 4);
    }

    #[test]
    fn a_run_that_does_not_end_gives_no_verdict() {
        let (bound, none) = (bound(MODULE), Watch::default());
        let passed = check_kernel(&bound, &Settings::quick()).unwrap();
        let incomplete = |result: &MutantResult, words: &str| match result {
            MutantResult::Incomplete(reason) => assert!(reason.contains(words), "{reason}"),
            other => panic!("{other:?}"),
        };
        let over = Watch::start(std::time::Duration::ZERO);
        for mutant in check_mutants(&bound, &Settings::quick(), &passed, 8, &over).unwrap() {
            if mutant.result != MutantResult::NotExecuted {
                incomplete(&mutant.result, "the time limit of 0 s was exceeded");
            }
        }
        // Starting the CTAs already exceeds the limit.
        let small = Settings { grid_limit: 0, ..Settings::quick() };
        let compared = compare(&bound, &bound, &small, &none).unwrap();
        incomplete(&compared, "the kernel without the fault: the grid has 1 CTAs");
        for mutant in check_mutants(&bound, &small, &passed, 8, &none).unwrap() {
            if mutant.result != MutantResult::NotExecuted {
                incomplete(&mutant.result, "the grid has 1 CTAs");
            }
        }
    }

    #[test]
    fn a_fault_without_effect_is_no_mutant() {
        let (bound, settings) = (bound(MODULE), Settings::quick());
        let passed = check_kernel(&bound, &settings).unwrap();
        assert_eq!(passed.verdict, Verdict::Passed, "{:?}", passed.reasons);
        let mutants = check_mutants(&bound, &settings, &passed, 8, &Watch::default()).unwrap();
        let result = |fault: &str, line: u32| {
            let found = mutants.iter().find(|mutant| mutant.fault == fault && mutant.line == line);
            &found.unwrap_or_else(|| panic!("no {fault} at {line}: {mutants:?}")).result
        };
        // The launch has no thread with index 48.
        assert_eq!(*result("BoundTooLarge", 13), MutantResult::NoEffect);
        assert_eq!(*result("ComparisonOffByOne", 13), MutantResult::NoEffect);
        assert_eq!(*result("SkipStore", 18), MutantResult::NotExecuted);
        // The comparison changes for thread 15, and nothing depends on it.
        assert_eq!(*result("ComparisonOffByOne", 15), MutantResult::Same);
        assert!(matches!(result("SkipStore", 14), MutantResult::Differs(_)));
    }
}
