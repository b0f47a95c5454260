//! What a diagnosis rests on: the instructions with their counters, and the prediction.

use emu::model::{Cause, Prediction};
use emu::resources::Resources;
use emu::trace::CtaTrace;
use emu::{Counter, Counters};
use ptx::{Instruction, Kernel, Op, Statement};
use serde::Serialize;

/// One PTX instruction with what was counted of it.
#[derive(Clone, Copy, Debug)]
pub struct Executed<'a> {
    /// The instruction.
    pub inst: &'a Instruction,
    /// Its counts.
    pub counter: &'a Counter,
    /// Warps of a CTA that issue it, as far as recorded; all of them when nothing was recorded.
    pub warps: u32,
    /// Issues of the warp that issues it most often, in the recorded CTAs.
    pub busiest: u64,
}

impl Executed<'_> {
    /// Mean active lanes.
    pub fn lanes(&self) -> f64 {
        self.counter.lanes as f64 / self.counter.issues.max(1) as f64
    }
}

/// Everything known of a kernel.
pub struct Evidence<'a> {
    /// The instructions that were executed, in the module's order.
    pub executed: Vec<Executed<'a>>,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// The counters.
    pub counters: &'a Counters,
    /// The prediction, where there is one.
    pub prediction: Option<&'a Prediction>,
    /// Registers and spills.
    pub resources: Option<&'a Resources>,
}

/// The weight of one line, for heat maps and listings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LineCost {
    pub line: u32,
    pub issues: u64,
    /// Share of all issue slots.
    pub share: f64,
    /// Mean active lanes.
    pub lanes: f64,
    /// Wavefronts over those without conflicts.
    pub conflicts: f64,
    /// 32-byte sectors per access.
    pub sectors: f64,
}

impl<'a> Evidence<'a> {
    /// Joins counters with the instructions they belong to.
    pub fn new(
        kernel: &'a Kernel,
        counters: &'a Counters,
        traces: &[CtaTrace],
        prediction: Option<&'a Prediction>,
        resources: Option<&'a Resources>,
    ) -> Evidence<'a> {
        let instructions = kernel.module.functions().flat_map(|f| f.body.iter()).flat_map(|b| &b.statements);
        let instructions = instructions.filter_map(|s| match s {
            Statement::Inst(inst) => Some(inst),
            Statement::Label(_) | Statement::Pragma(_) => None,
        });
        let by_warp = issues_by_warp(traces, counters.instructions.len());
        let executed = instructions
            .zip(&counters.instructions)
            .enumerate()
            .filter(|(_, (_, counter))| counter.issues > 0)
            .map(|(pc, (inst, counter))| {
                let issues = by_warp.get(pc).map_or(&[][..], |w| w);
                let busiest = issues.iter().copied().max().unwrap_or(0);
                // A warp that does a tenth of the busiest one's work counts as taking part.
                let part = issues.iter().filter(|&&n| n * 10 > busiest).count() as u32;
                let warps = if busiest == 0 { counters.warps } else { part };
                Executed { inst, counter, warps, busiest }
            })
            .collect();
        Evidence { executed, kernel, counters, prediction, resources }
    }

    /// Issue slots of the whole grid.
    pub fn issues(&self) -> f64 {
        self.executed.iter().map(|e| e.counter.issues as f64).sum::<f64>().max(1.0)
    }

    /// Threads of a CTA.
    pub fn threads(&self) -> f64 {
        self.kernel.launch.block.count() as f64
    }

    /// Share of the critical path (each instruction at its busiest warp) of the instructions that `select` picks; of issue
    /// slots where nothing was recorded.
    pub fn critical_share(&self, select: impl Fn(&Executed) -> bool) -> f64 {
        // What no recorded CTA issued has no part in its path; issues of the whole grid count only where nothing was recorded.
        let recorded = self.executed.iter().any(|e| e.busiest > 0);
        let weight = |e: &Executed| if recorded { e.busiest as f64 } else { e.counter.issues as f64 };
        let total: f64 = self.executed.iter().map(weight).sum();
        self.executed.iter().filter(|e| select(e)).map(weight).sum::<f64>() / total.max(1.0)
    }

    /// Predicted share of causes; `otherwise` where there is no prediction.
    pub fn predicted(&self, causes: &[Cause], otherwise: f64) -> f64 {
        self.prediction.map_or(otherwise, |p| causes.iter().map(|&c| p.share(c)).sum())
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
                // Address arithmetic and the like between two lines of a kind belong to them.
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

    /// Every executed line.
    pub fn line_costs(&self) -> Vec<LineCost> {
        let total = self.issues();
        let cost = |e: &Executed| LineCost {
            line: e.inst.line,
            issues: e.counter.issues,
            share: e.counter.issues as f64 / total,
            lanes: e.lanes(),
            conflicts: e.counter.conflict_degree(),
            sectors: e.counter.global_sectors as f64 / e.counter.global_accesses.max(1) as f64,
        };
        self.executed.iter().map(cost).collect()
    }
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
