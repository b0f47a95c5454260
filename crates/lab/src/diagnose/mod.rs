//! Why a kernel is slow: named root causes, each with the lines, the counter, the share of the time it can answer for,
//! and Amdahl's bound on what its cure can gain, before anyone optimises a part.

mod evidence;
mod memory;
mod work;

use serde::Serialize;

pub use evidence::{Evidence, LineCost};

/// A root cause.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    /// Its name: `serial reduction`, `bank conflicts`, ….
    pub name: &'static str,
    /// Ranges of PTX lines, first and last, those that weigh most first.
    pub lines: Vec<(u32, u32)>,
    /// The counters that show it, in words.
    pub evidence: String,
    /// Share of the kernel's time that it can answer for, 0 to 1.
    pub share: f64,
    /// Speed-up at most, if the cure were perfect: 1 / (1 − share · (what the cure saves of it)).
    pub expected_gain: f64,
    /// What to do.
    pub cure: &'static str,
}

/// Causes below this share are not worth a sentence.
const LEAST_SHARE: f64 = 0.03;

/// All root causes found, those that promise most first.
pub fn diagnose(evidence: &Evidence) -> Vec<Finding> {
    let causes: [fn(&Evidence) -> Option<Finding>; 13] = [
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
    ];
    // Local memory is named however little it weighs: that a suspect costs nothing is worth knowing.
    let worth_saying = |f: &Finding| f.share >= LEAST_SHARE || f.name == memory::LOCAL_MEMORY;
    let mut findings: Vec<Finding> =
        causes.iter().filter_map(|cause| cause(evidence)).filter(worth_saying).collect();
    findings.sort_by(|a, b| b.expected_gain.total_cmp(&a.expected_gain));
    findings
}

/// Amdahl: the speed-up when `share` of the time shrinks to `rest` of itself.
fn amdahl(share: f64, rest: f64) -> f64 {
    let share = share.clamp(0.0, 0.999);
    1.0 / (1.0 - share * (1.0 - rest.clamp(0.0, 1.0)))
}

/// `88–97, 110` for people.
pub fn show_lines(lines: &[(u32, u32)]) -> String {
    let shown = lines.iter().take(4).map(|&(a, b)| if a == b { a.to_string() } else { format!("{a}–{b}") });
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if lines.len() > 4 {
        text.push_str(", …");
    }
    text
}
