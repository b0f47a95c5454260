//! The record of a run.

use ptx::Space;

use super::launch::Facts;
use crate::EmuError;
use crate::counters::{Counter, Counters, Pattern};
use crate::decode::Inst;
use crate::report::{Findings, HazardKind, Printed};
use crate::trace::Recorder;

/// Findings, counters, trace and text of a cluster, and the work that its run took.
pub(crate) struct Log {
    pub findings: Findings,
    pub counters: Counters,
    pub recorder: Option<Recorder>,
    /// The text that the threads printed.
    pub printed: Vec<Printed>,
    /// The error that stopped the run.
    pub stopped: Option<EmuError>,
    pub steps: u64,
    /// Whether a thread let the next grid start before it waited for the previous one.
    pub overtaken: bool,
    /// Extra work in warp instructions: copying and joining clocks, and moving data. Only the instruction
    /// budget counts it.
    pub toll: u64,
    /// For each instruction, its last access to shared memory.
    patterns: Vec<Pattern>,
}

impl Log {
    pub fn new(facts: &Facts) -> Log {
        let Facts { context, ctas, actors, .. } = facts;
        let traced = ctas.iter().any(|cta| context.options.traced_ctas.contains(cta));
        Log {
            findings: Findings::default(),
            counters: Counters {
                instructions: vec![Counter::default(); context.program.code.len()],
                shared_bytes: context.program.layout.shared_bytes,
                warps: actors.warps as u32,
                ..Counters::default()
            },
            recorder: traced.then(|| Recorder::of_cluster(ctas, actors.warps, Recorder::DEFAULT_LIMIT)),
            printed: Vec::new(),
            stopped: None,
            steps: 0,
            overtaken: false,
            toll: 0,
            patterns: vec![Pattern::default(); context.program.code.len()],
        }
    }

    /// Counts an access of `lanes`, which are not none, to shared memory.
    #[inline(always)]
    pub fn count_shared(&mut self, inst: &Inst, lanes: u32, addresses: &[u64; 32], bytes: u32) {
        let passes = self.patterns[inst.pc as usize].passes(lanes, addresses, bytes);
        self.counters.instructions[inst.pc as usize].shared(lanes, bytes, passes);
    }

    /// The counter of an instruction.
    #[inline(always)]
    pub fn counter(&mut self, inst: &Inst) -> &mut Counter {
        &mut self.counters.instructions[inst.pc as usize]
    }

    /// Reports a finding of one thread.
    pub fn report(
        &mut self,
        facts: &Facts,
        kind: HazardKind,
        inst: &Inst,
        (warp, lane): (usize, usize),
        place: Option<(Space, u64)>,
        message: impl FnOnce() -> String,
    ) {
        self.findings.report(kind, inst.line, None, || {
            let place = place.map(|(space, address)| facts.place(space, address));
            (vec![facts.thread(warp, lane)], place, message())
        });
    }
}
