//! Tests mutants of a kernel that passes: faults are inserted one at a time, and the check must find each
//! fault that changes an output or the order of accesses.

use ptx::{Kernel, Statement};
use serde::Serialize;

use super::feed::Feed;
use super::mutate::{Fault, mutant, sites};
use super::repeat::{difference, outputs};
use super::run::{GateError, Settings, check_watched};
use super::{Verdict, Watch};
use crate::launchfile::Bound;
use emu::Options;

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

/// Checks up to `most` mutants, drawn evenly from the kinds of faults for which the kernel has sites.
///
/// # Errors
/// As for [`check_watched`].
pub fn check_mutants(
    bound: &Bound,
    settings: &Settings,
    most: usize,
    watch: &Watch,
) -> Result<Vec<Mutant>, GateError> {
    let mut found = Vec::new();
    for (fault, site) in chosen(&bound.kernel, most) {
        let (Some(kernel), Some(line)) =
            (mutant(&bound.kernel, fault, site), line_of(&bound.kernel, fault, site))
        else {
            continue;
        };
        let mutated = Bound { kernel, ..bound.clone() };
        let check = check_watched(&mutated, settings, watch)?;
        let reason = || check.reasons.first().cloned().unwrap_or_default();
        let fate = match check.verdict {
            Verdict::Failed => Fate::Failed(reason()),
            Verdict::Incomplete => Fate::Incomplete(reason()),
            Verdict::Passed => compare(bound, &mutated, settings),
        };
        found.push(Mutant { fault: format!("{fault:?}"), orders: fault.orders(), line, fate });
    }
    Ok(found)
}

/// Compares the outputs of a mutant with those of the original.
fn compare(bound: &Bound, mutated: &Bound, settings: &Settings) -> Fate {
    for &(style, seed, schedule) in &settings.runs {
        let Some(feed) = Feed::draw(bound, style, seed) else { continue };
        let options = Options {
            seed,
            schedule,
            step_limit: settings.step_limit,
            grid_limit: settings.grid_limit,
            placement: settings.placement,
            collectives_order: settings.collectives_order,
            ..Options::default()
        };
        let run = |bound: &Bound| outputs(bound, &feed, &options);
        let (Ok(original), Ok(mutant)) = (run(bound), run(mutated)) else { continue };
        if let Some((name, bytes, all)) = difference(bound, &original, &mutant) {
            return Fate::Differs(format!("{bytes} of {all} bytes of {name} differ from the original's"));
        }
    }
    Fate::Same
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
    let body = kernel.module.function(&kernel.entry)?.body.as_ref()?;
    let lines: Vec<u32> = body
        .statements
        .iter()
        .filter_map(|statement| match statement {
            Statement::Inst(inst) if fault.applies(inst) => Some(inst.line),
            _ => None,
        })
        .collect();
    // Faults in arguments come before those in the code.
    let arguments = sites(kernel, fault) - lines.len();
    Some(site.checked_sub(arguments).map_or(0, |at| lines[at]))
}
