//! The evidence of a diagnosis: instructions with their counters, and the prediction.

use std::collections::{BTreeMap, BTreeSet};

use emu::trace::CtaTrace;
use emu::{Counter, Counters};
use predict::resources::Resources;
use predict::{Cause, Prediction, Utilisation};
use ptx::{Instruction, Kernel, Op};
use serde::Serialize;

use super::{amdahl, show_lines};
use crate::sources::{SourceRange, Sources};

/// A PTX instruction with its counters.
#[derive(Clone, Copy, Debug)]
pub struct Executed<'a> {
    pub inst: &'a Instruction,
    /// Its index in the module.
    pub pc: usize,
    pub counter: &'a Counter,
    /// Warps of a CTA that issue the instruction in the recorded CTAs; all warps when nothing was recorded.
    pub warps: u32,
    /// Issues by the warp that issues it most often, in the recorded CTAs.
    pub busiest: u64,
    /// Whether the instruction only moves data for other warps: the warps that issue it issue bulk copies or
    /// use mbarriers without the other warps and compute nothing there, like the producer of a
    /// warp-specialised kernel. The branch that repeats a wait on an mbarrier counts too. Other lanes could
    /// not share this work.
    pub feeds: bool,
}

impl Executed<'_> {
    pub fn lanes(&self) -> f64 {
        self.counter.lanes as f64 / self.counter.issues.max(1) as f64
    }
}

/// All data about a kernel.
pub struct Evidence<'a> {
    /// The executed instructions in the module's order.
    pub executed: Vec<Executed<'a>>,
    pub kernel: &'a Kernel,
    pub counters: &'a Counters,
    /// Warps of a CTA that compute: all warps unless the kernel is warp-specialised.
    pub working_warps: u32,
    pub prediction: Option<&'a Prediction>,
    /// Registers and spills.
    pub resources: Option<&'a Resources>,
    /// The source lines of the PTX lines.
    sources: Option<&'a Sources>,
}

/// The cost of one line, for heat maps and listings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LineCost {
    pub line: u32,
    pub issues: u64,
    /// Share of all issue slots.
    pub share: f64,
    /// Share of the warps' time: the issues of the line, and the waits for its results. `None` without a
    /// prediction.
    pub stall: Option<f64>,
    /// Mean active lanes.
    pub lanes: f64,
    /// Shared-memory wavefronts relative to the number without conflicts.
    pub conflicts: f64,
    /// 32-byte sectors per access.
    pub sectors: f64,
}

impl LineCost {
    /// Share of the warps' time, or of the issue slots without a prediction.
    pub fn weight(&self) -> f64 {
        self.stall.unwrap_or(self.share)
    }

    fn new(line: u32, counter: &Counter, all_issues: f64) -> LineCost {
        LineCost {
            line,
            issues: counter.issues,
            share: counter.issues as f64 / all_issues,
            stall: None,
            lanes: counter.lanes as f64 / counter.issues.max(1) as f64,
            conflicts: counter.conflict_degree(),
            sectors: counter.global_sectors as f64 / counter.global_accesses.max(1) as f64,
        }
    }
}

/// The cost of one source line, over all PTX lines that were compiled from it.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceCost {
    pub file: String,
    /// The text of the line; `None` if the file cannot be read.
    pub text: Option<String>,
    /// The PTX lines.
    pub ptx_lines: Vec<u32>,
    /// The cost; its `line` is the line in the file.
    pub cost: LineCost,
    /// The counts behind the cost.
    pub counter: Counter,
}

impl<'a> Evidence<'a> {
    /// Joins the counters with their instructions.
    pub fn new(
        kernel: &'a Kernel,
        counters: &'a Counters,
        traces: &[CtaTrace],
        prediction: Option<&'a Prediction>,
        resources: Option<&'a Resources>,
    ) -> Evidence<'a> {
        let by_warp = issues_by_warp(traces, counters.instructions.len());
        let instructions: Vec<(&Instruction, &Counter)> =
            kernel.module.instructions().zip(&counters.instructions).collect();
        let teams: Vec<Vec<usize>> = (0..instructions.len()).map(|pc| team(&by_warp, pc)).collect();
        let producers = producers(&instructions, &teams);
        let executed = instructions
            .iter()
            .zip(&teams)
            .enumerate()
            .filter(|(_, ((_, counter), _))| counter.issues > 0)
            .map(|(pc, (&(inst, counter), team))| {
                let busiest = by_warp.get(pc).and_then(|issues| issues.iter().copied().max()).unwrap_or(0);
                let warps = if busiest == 0 { counters.warps } else { team.len() as u32 };
                let feeds = producers.contains(team) || repeats_wait(&instructions, pc);
                Executed { inst, pc, counter, warps, busiest, feeds }
            })
            .collect();
        let working_warps = match producers.is_empty() {
            true => counters.warps,
            false => {
                let computing = instructions.iter().zip(&teams).filter(|((_, counter), _)| computes(counter));
                computing.flat_map(|(_, team)| team).collect::<BTreeSet<_>>().len() as u32
            }
        };
        Evidence { executed, kernel, counters, working_warps, prediction, resources, sources: None }
    }

    /// Lets the findings name source lines if the PTX has line information.
    pub fn in_sources(self, sources: &'a Sources) -> Evidence<'a> {
        Evidence { sources: Some(sources).filter(|sources| !sources.is_empty()), ..self }
    }

    /// Issue slots of the whole grid, at least 1.
    pub fn issues(&self) -> f64 {
        self.executed.iter().map(|e| e.counter.issues as f64).sum::<f64>().max(1.0)
    }

    pub fn threads(&self) -> f64 {
        self.kernel.launch.block.count() as f64
    }

    /// Share of the critical path of the instructions that `select` picks. The path counts each instruction
    /// at its busiest warp. Without recorded CTAs, the result is the share of issue slots.
    pub fn critical_share(&self, select: impl Fn(&Executed) -> bool) -> f64 {
        // An instruction outside the recorded CTAs is not part of their path. Issues of the whole grid are
        // used only without a recording.
        let recorded = self.executed.iter().any(|e| e.busiest > 0);
        let weight = |e: &Executed| if recorded { e.busiest as f64 } else { e.counter.issues as f64 };
        let total: f64 = self.executed.iter().map(weight).sum();
        self.executed.iter().filter(|e| select(e)).map(weight).sum::<f64>() / total.max(1.0)
    }

    /// Predicted time share of some causes; `otherwise` if there is no prediction.
    pub fn predicted(&self, causes: &[Cause], otherwise: f64) -> f64 {
        self.prediction.map_or(otherwise, |p| causes.iter().map(|&c| p.share(c)).sum())
    }

    /// Limits the gain of a cure that leaves the work of some units as it is: the kernel then takes at least
    /// its launch and the time of the busiest of these units. `units` gives the utilisation of that unit.
    pub fn limited(&self, gain: f64, units: impl Fn(&Utilisation) -> f64) -> f64 {
        let Some(prediction) = self.prediction else { return gain };
        let launch = prediction.share(Cause::Launch);
        let floor = launch + (1.0 - launch) * units(&prediction.utilisation);
        gain.min(1.0 / floor.clamp(0.001, 1.0))
    }

    /// Maximum speed-up when waits that are `share` of the time shrink to the fraction `rest`. No cure of a
    /// wait reduces the work of a unit.
    pub fn gain_of_waits(&self, share: f64, rest: f64) -> f64 {
        self.limited(amdahl(share, rest), Utilisation::busiest)
    }

    /// Whether the kernel has an instruction that `select` picks.
    pub fn has(&self, select: impl Fn(&Op) -> bool) -> bool {
        self.executed.iter().any(|e| select(&e.inst.op))
    }

    /// Lines of the instructions that `select` picks, joined to ranges, heaviest first.
    pub fn lines(&self, select: impl Fn(&Executed) -> bool) -> Vec<(u32, u32)> {
        let mut ranges: Vec<((u32, u32), u64)> = Vec::new();
        let mut picked: Vec<&Executed> = self.executed.iter().filter(|e| select(e)).collect();
        picked.sort_by_key(|e| e.inst.line);
        for e in picked {
            match ranges.last_mut() {
                // Up to five lines between two such instructions, such as address arithmetic, are included in
                // the range.
                Some(((_, last), weight)) if e.inst.line <= *last + 6 => {
                    *last = e.inst.line;
                    *weight += e.counter.issues;
                }
                _ => ranges.push(((e.inst.line, e.inst.line), e.counter.issues)),
            }
        }
        ranges.sort_by_key(|&(_, weight)| std::cmp::Reverse(weight));
        ranges.into_iter().map(|(range, _)| range).collect()
    }

    /// Line ranges for display: source lines with the PTX lines in brackets, or only PTX lines.
    pub fn show(&self, lines: &[(u32, u32)]) -> String {
        let ptx = show_lines(lines);
        let within = |line: &u32| lines.iter().take(4).any(|&(first, last)| (first..=last).contains(line));
        let executed = self.executed.iter().map(|e| e.inst.line).filter(within);
        let ranges = self.sources.map_or(Vec::new(), |sources| sources.ranges(executed));
        match ranges.is_empty() {
            true => format!("lines {ptx}"),
            false => format!("{} (PTX {ptx})", ptx::quote::list(ranges.iter().map(SourceRange::to_string))),
        }
    }

    /// One line for display, in the form of [`Evidence::show`].
    pub fn show_line(&self, line: u32) -> String {
        match self.sources.and_then(|sources| sources.line(line)) {
            Some(source) => format!("{} (PTX {line})", source.name()),
            None => format!("line {line}"),
        }
    }

    /// The cost of every executed PTX line.
    pub fn line_costs(&self) -> Vec<LineCost> {
        let total = self.issues();
        let cost =
            |e: &Executed| LineCost { stall: self.stall(e), ..LineCost::new(e.inst.line, e.counter, total) };
        self.executed.iter().map(cost).collect()
    }

    /// The share of an instruction in the warps' time.
    pub fn stall(&self, executed: &Executed) -> Option<f64> {
        let stalls = &self.prediction?.stalls;
        (!stalls.is_empty()).then(|| stalls.get(executed.pc).copied().unwrap_or(0.0))
    }

    /// The cost of every source line that was executed, in the order of files and lines. Empty without line
    /// information.
    pub fn source_costs(&self) -> Vec<SourceCost> {
        let Some(sources) = self.sources else { return Vec::new() };
        let total = self.issues();
        let mut lines: BTreeMap<(String, u32), SourceCost> = BTreeMap::new();
        for e in &self.executed {
            let Some(source) = sources.line(e.inst.line) else { continue };
            let line = lines.entry((source.file.clone(), source.line)).or_insert_with(|| {
                let counter = Counter::default();
                let cost = LineCost::new(source.line, &counter, total);
                SourceCost { file: source.file, text: source.text, ptx_lines: Vec::new(), cost, counter }
            });
            line.ptx_lines.push(e.inst.line);
            line.counter.add(e.counter);
            let stall = self.stall(e).map(|stall| stall + line.cost.stall.unwrap_or(0.0));
            line.cost = LineCost { stall, ..LineCost::new(source.line, &line.counter, total) };
        }
        lines.into_values().collect()
    }
}

/// The warps that take part in an instruction: those with at least a tenth of the busiest warp's issues.
fn team(by_warp: &[Vec<u64>], pc: usize) -> Vec<usize> {
    let issues = by_warp.get(pc).map_or(&[][..], |issues| issues);
    let busiest = issues.iter().copied().max().unwrap_or(0);
    (0..issues.len()).filter(|&warp| issues[warp] * 10 > busiest).collect()
}

/// Whether an instruction is the branch back to the mbarrier wait just before it.
fn repeats_wait(instructions: &[(&Instruction, &Counter)], pc: usize) -> bool {
    let before = pc.checked_sub(1).map(|before| instructions[before].0.op);
    matches!(instructions[pc].0.op, Op::Bra { .. }) && matches!(before, Some(Op::Mbarrier(_)))
}

fn computes(counter: &Counter) -> bool {
    counter.flop + counter.special + counter.tensor_flop > 0
}

/// The groups of warps that only move data: they issue bulk copies or wait on mbarriers without the other
/// warps, and compute nothing without them.
fn producers(instructions: &[(&Instruction, &Counter)], teams: &[Vec<usize>]) -> BTreeSet<Vec<usize>> {
    let all: BTreeSet<usize> = teams.iter().flatten().copied().collect();
    let with = |select: &dyn Fn(&Op, &Counter) -> bool| -> BTreeSet<&Vec<usize>> {
        let picked = instructions.iter().zip(teams).filter(|((inst, counter), _)| select(&inst.op, counter));
        picked.map(|(_, team)| team).filter(|team| !team.is_empty() && team.len() < all.len()).collect()
    };
    let moving = with(&|op, _| {
        matches!(
            op,
            Op::CpAsyncBulk(_)
                | Op::CpReduceAsyncBulk(_)
                | Op::CpAsyncBulkTensor(_)
                | Op::CpReduceAsyncBulkTensor(_)
                | Op::Mbarrier(_)
        )
    });
    let computing = with(&|_, counter| computes(counter));
    moving.difference(&computing).map(|&team| team.clone()).collect()
}

fn issues_by_warp(traces: &[CtaTrace], instructions: usize) -> Vec<Vec<u64>> {
    let warps = traces.iter().map(|t| t.warps.len()).max().unwrap_or(0);
    let mut counts = vec![vec![0; warps]; if warps == 0 { 0 } else { instructions }];
    for trace in traces {
        for (warp, events) in trace.warps.iter().enumerate() {
            for event in events.iter().filter(|e| e.lanes != 0) {
                if let Some(count) = counts.get_mut(event.pc as usize) {
                    count[warp] += 1;
                }
            }
        }
    }
    counts
}
