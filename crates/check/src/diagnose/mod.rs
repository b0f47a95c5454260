//! Root causes of a kernel's time. Each has its lines, its counters, its share of the time, and Amdahl's
//! bound on the gain from a fix.

mod evidence;
mod loops;
mod memory;
mod sums;
mod waits;
mod work;

use kernels::Symptom;
use serde::Serialize;

pub use evidence::{Evidence, Executed, LineCost, SourceCost};
pub use loops::{LoopCost, loops};

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    pub name: Symptom,
    /// Ranges of PTX lines (first, last), the heaviest first.
    pub lines: Vec<(u32, u32)>,
    /// The counters behind the finding, in words.
    pub evidence: String,
    /// Share of the kernel's time that the cause explains, 0 to 1.
    pub share: f64,
    /// Maximum speed-up by a perfect fix: 1 / (1 − share · (the fraction of the share that the fix saves)).
    /// For a wait, at most the speed-up that makes the busiest unit fully busy.
    pub expected_gain: f64,
    /// The recommended change.
    pub cure: &'static str,
}

impl Finding {
    /// The finding for a whole program, of whose time the kernel takes the fraction `part`.
    #[must_use]
    pub(crate) fn within(self, part: f64) -> Finding {
        if part >= 1.0 {
            return self;
        }
        let saved = part * (1.0 - 1.0 / self.expected_gain);
        Finding { share: self.share * part, expected_gain: 1.0 / (1.0 - saved), ..self }
    }
}

/// Causes with a smaller share, or a smaller potential gain, are not reported.
const LEAST_SHARE: f64 = 0.03;

/// All root causes, the largest expected gain first.
pub fn diagnose(evidence: &Evidence) -> Vec<Finding> {
    let causes: [fn(&Evidence) -> Option<Finding>; 16] = [
        work::serial_section,
        work::idle_warps,
        work::idle_lanes,
        work::tensor_cores_unused,
        work::small_grid,
        work::low_occupancy,
        work::barriers,
        memory::bank_conflicts,
        memory::uncoalesced,
        memory::scalar_accesses,
        memory::local_memory,
        memory::redundant_loads,
        memory::no_overlap,
        waits::launch,
        waits::mbarriers,
        waits::exponentials,
    ];
    // Local memory is reported whatever its share is, because a small share is useful information too.
    let matters = |f: &Finding| f.share >= LEAST_SHARE && f.expected_gain >= 1.0 + LEAST_SHARE;
    let worth_saying = |f: &Finding| matters(f) || f.name == Symptom::LocalMemory;
    let mut findings: Vec<Finding> =
        causes.iter().filter_map(|cause| cause(evidence)).filter(worth_saying).collect();
    if findings.is_empty() {
        findings.extend(waits::longest(evidence));
    }
    findings.sort_by(|a, b| b.expected_gain.total_cmp(&a.expected_gain));
    findings
}

/// Amdahl's law: the speed-up when `share` of the time shrinks to the fraction `rest` of itself.
fn amdahl(share: f64, rest: f64) -> f64 {
    let share = share.clamp(0.0, 0.999);
    1.0 / (1.0 - share * (1.0 - rest.clamp(0.0, 1.0)))
}

/// Lines for display: `88–97, 110`.
pub fn show_lines(lines: &[(u32, u32)]) -> String {
    let shown = lines.iter().take(4).map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}–{b}") });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if lines.len() > 4 {
        text.push_str(", …");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use predict::Bottleneck;

    /// A search looks for cures of the time model's limit by its name.
    #[test]
    fn every_bottleneck_is_a_symptom() {
        for limit in <Bottleneck as strum::VariantArray>::VARIANTS {
            let name = serde_json::to_value(limit).unwrap();
            assert!(name.as_str().and_then(Symptom::named).is_some(), "{name}");
        }
    }
}
