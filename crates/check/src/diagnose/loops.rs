//! The share of each loop in the time of the warps.

use std::collections::HashMap;

use ptx::{Op, Operand, Statement};
use serde::Serialize;

use super::evidence::Evidence;

/// A loop with its share of the time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LoopCost {
    /// The first and the last PTX line.
    pub lines: (u32, u32),
    /// Share of the warps' time.
    pub stall: f64,
    /// Whether the loop has products on tensor cores.
    pub has_products: bool,
}

/// Maximum number of instructions of a loop that only repeats a wait: the test of an mbarrier, and the
/// branch.
const WAIT: usize = 4;

/// The innermost loops of a kernel, the most expensive first; loops that only wait do not count as inner
/// loops. Empty without a prediction.
pub fn loops(evidence: &Evidence) -> Vec<LoopCost> {
    let mut found: Vec<LoopCost> = bodies(evidence)
        .into_iter()
        .filter_map(|(from, to)| {
            let inside = || evidence.executed.iter().filter(|e| (from..=to).contains(&e.pc));
            let stall = inside().map(|e| evidence.stall(e)).sum::<Option<f64>>()?;
            let lines = (inside().map(|e| e.inst.line).min()?, inside().map(|e| e.inst.line).max()?);
            Some(LoopCost { lines, stall, has_products: inside().any(|e| e.counter.tensor_flop > 0) })
        })
        .collect();
    found.sort_by(|a, b| b.stall.total_cmp(&a.stall));
    found
}

/// The instructions of innermost loops, from the target of a backward branch to the branch.
fn bodies(evidence: &Evidence) -> Vec<(usize, usize)> {
    let mut all = Vec::new();
    let mut pc = 0;
    for body in evidence.kernel.module.functions().flat_map(|f| f.body.iter()) {
        let mut labels = HashMap::new();
        for statement in &body.statements {
            match statement {
                Statement::Label(label) => drop(labels.insert(*label, pc)),
                Statement::Inst(inst) => {
                    if let (Op::Bra { .. }, Some(Operand::Label(target))) = (&inst.op, inst.operands.first())
                        && let Some(&from) = labels.get(target)
                    {
                        all.push((from, pc));
                    }
                    pc += 1;
                }
                Statement::Pragma(_) => {}
            }
        }
    }
    all.retain(|(from, to)| to - from >= WAIT);
    let holds = |outer: &(usize, usize), inner: &(usize, usize)| {
        outer != inner && outer.0 <= inner.0 && inner.1 <= outer.1
    };
    let innermost = all.iter().filter(|outer| !all.iter().any(|inner| holds(outer, inner)));
    innermost.copied().collect()
}
