//! Root causes in the use of memory.

use kernels::Symptom;
use predict::Cause;
use ptx::{Access, Op, Space};

use super::evidence::{Evidence, Executed};
use super::{Finding, amdahl};

const SHARED: [Cause; 2] = [Cause::SharedBandwidth, Cause::SharedLatency];
const GLOBAL: [Cause; 5] = [Cause::L1, Cause::L2, Cause::L2Bandwidth, Cause::Dram, Cause::DramBandwidth];

/// Finds shared-memory accesses that take more passes over the banks than their words need.
pub(super) fn bank_conflicts(evidence: &Evidence) -> Option<Finding> {
    let conflicted = |e: &Executed| e.counter.conflict_degree() >= 1.5;
    let (passes, ideal) = evidence
        .executed
        .iter()
        .fold((0u64, 0u64), |(p, i), e| (p + e.counter.shared_passes, i + e.counter.shared_ideal));
    let worst = evidence.executed.iter().filter(|e| conflicted(e)).max_by_key(|e| e.counter.shared_passes)?;
    let wasted = (passes - ideal.min(passes)) as f64 / passes.max(1) as f64;
    // Without a prediction, a pass is assumed to take as long as an issue slot.
    let alone = passes as f64 / (passes as f64 + evidence.issues());
    let share = wasted * evidence.predicted(&SHARED, alone);
    let lines = evidence.lines(conflicted);
    Some(Finding {
        name: Symptom::BankConflicts,
        evidence: format!(
            "{:.0} % of the passes over shared memory are conflicts, {:.0}-way at {}; {}",
            100.0 * wasted,
            worst.counter.conflict_degree(),
            evidence.show_line(worst.inst.line),
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, 0.0),
        cure: "swizzle the tile (XOR of 16-byte columns with the row) or pad its rows, and read it with ldmatrix",
    })
}

/// Finds global accesses that touch far more sectors than they use.
pub(super) fn uncoalesced(evidence: &Evidence) -> Option<Finding> {
    let used = |e: &Executed| e.counter.global_bytes as f64 / (32 * e.counter.global_sectors).max(1) as f64;
    let wasteful = |e: &Executed| e.counter.global_accesses > 0 && used(e) < 0.5 && e.lanes() > 1.5;
    let sectors = |select: &dyn Fn(&Executed) -> bool| {
        evidence.executed.iter().filter(|e| select(e)).map(|e| e.counter.global_sectors as f64).sum::<f64>()
    };
    let worst = evidence.executed.iter().filter(|e| wasteful(e)).max_by_key(|e| e.counter.global_sectors)?;
    let part = sectors(&wasteful) / sectors(&|_| true).max(1.0);
    let share = part * evidence.predicted(&GLOBAL, evidence.critical_share(wasteful));
    let lines = evidence.lines(wasteful);
    Some(Finding {
        name: Symptom::Uncoalesced,
        evidence: format!(
            "{} touches {:.0} sectors of 32 bytes an access and uses {:.0} % of them; {}",
            evidence.show_line(worst.inst.line),
            worst.counter.global_sectors as f64 / worst.counter.global_accesses.max(1) as f64,
            100.0 * used(worst),
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, used(worst)),
        cure: "let neighbouring lanes take neighbouring addresses: lanes along a row, not along rows",
    })
}

/// Finds loads and stores of at most 4 bytes where 16 would be possible.
pub(super) fn scalar_accesses(evidence: &Evidence) -> Option<Finding> {
    let bytes = |e: &Executed| match e.inst.op {
        Op::Ld(m) | Op::St(m) if matches!(m.space, Space::Global | Space::Generic) => Some(m.bytes()),
        _ => None,
    };
    let narrow = |e: &Executed| bytes(e).is_some_and(|b| b < 8) && e.lanes() > 1.5;
    let widest = evidence.executed.iter().filter(|e| narrow(e)).max_by_key(|e| e.counter.issues)?;
    let share = evidence.critical_share(narrow);
    let lines = evidence.lines(narrow);
    let bytes = bytes(widest)?;
    Some(Finding {
        name: Symptom::ScalarAccesses,
        evidence: format!(
            "{bytes} bytes a lane at {}, where one instruction moves 16; {:.0} % of the critical path, {}",
            evidence.show_line(widest.inst.line),
            100.0 * share,
            evidence.show(&lines)
        ),
        lines,
        share,
        // Wider accesses move the same bytes between the SMs, L2 and DRAM.
        expected_gain: evidence.limited(amdahl(share, f64::from(bytes) / 16.0), |u| u.l2.max(u.dram)),
        cure: "load and store 16 bytes a lane (ld.global.v4, cp.async 16)",
    })
}

/// Finds spills and arrays in local memory.
pub(super) fn local_memory(evidence: &Evidence) -> Option<Finding> {
    let local = |e: &Executed| {
        e.counter.local_bytes > 0 || matches!(e.inst.op, Op::Ld(m) | Op::St(m) if m.space == Space::Local)
    };
    let lines = evidence.lines(local);
    let spills = evidence.resources.map_or(0, |r| r.spill_stores + r.spill_loads);
    let stack = evidence.resources.map_or(0, |r| r.stack);
    if lines.is_empty() && spills == 0 {
        return None;
    }
    let moved: u64 = evidence.executed.iter().map(|e| e.counter.local_bytes).sum();
    let share = local_share(evidence, &local);
    let misses = evidence.prediction.map_or(0.0, |p| p.local_fraction);
    Some(Finding {
        name: if lines.is_empty() { Symptom::RegisterSpills } else { Symptom::LocalMemory },
        evidence: format!(
            "{stack} bytes of local memory a thread, {spills} bytes of spill code; {} moved to and from it, {:.0} % of \
             what L1 asks of L2, {}",
            size(moved as f64),
            100.0 * misses,
            if lines.is_empty() { "lines chosen by ptxas".to_owned() } else { evidence.show(&lines) }
        ),
        lines,
        share,
        expected_gain: amdahl(share, 0.05),
        cure: "index arrays with constants only (unroll), and split accumulators over more threads until they fit registers",
    })
}

/// Local memory's share of the time: its part of the waits for the caches, by its share of accesses and
/// misses, and the time of its instructions.
fn local_share(evidence: &Evidence, local: &dyn Fn(&Executed) -> bool) -> f64 {
    let slots = evidence.critical_share(local);
    let Some(prediction) = evidence.prediction else { return slots };
    let issues = |select: &dyn Fn(&Executed) -> bool| -> f64 {
        evidence.executed.iter().filter(|e| select(e)).map(|e| e.counter.issues as f64).sum()
    };
    let requests = issues(local) / issues(&|e| local(e) || e.counter.global_accesses > 0).max(1.0);
    let hits = evidence.predicted(&[Cause::L1], 0.0);
    let waits = evidence.predicted(&GLOBAL, 0.0);
    slots * (1.0 - waits) + requests * hits + prediction.local_fraction * (waits - hits)
}

/// A number of bytes in a readable unit.
fn size(bytes: f64) -> String {
    match bytes {
        _ if bytes >= 1e6 => format!("{:.1} MB", bytes * 1e-6),
        _ if bytes >= 1e3 => format!("{:.1} kB", bytes * 1e-3),
        _ => format!("{bytes:.0} bytes"),
    }
}

/// Finds bytes that are read from global memory repeatedly.
pub(super) fn redundant_loads(evidence: &Evidence) -> Option<Finding> {
    let unique: usize =
        evidence.kernel.buffers.iter().filter(|b| b.access != Access::Write).map(|b| b.bytes).sum();
    let loads = |e: &Executed| e.counter.global_bytes > 0 && matches!(e.inst.op, Op::Ld(_) | Op::CpAsync(_));
    let read: f64 =
        evidence.executed.iter().filter(|e| loads(e)).map(|e| e.counter.global_bytes as f64).sum();
    let times = read / unique.max(1) as f64;
    let share = evidence.predicted(&GLOBAL, evidence.critical_share(loads));
    (unique > 0 && times >= 12.0).then(|| Finding {
        name: Symptom::RedundantLoads,
        evidence: format!(
            "each byte of the inputs is read {times:.0} times ({} read, {} of inputs)",
            size(read),
            size(unique as f64)
        ),
        lines: evidence.lines(loads),
        share,
        expected_gain: amdahl(share, 8.0 / times),
        cure: "more query rows a CTA: every row that shares a tile of keys saves a reading of it",
    })
}

/// Finds waits for global memory without other work.
pub(super) fn no_overlap(evidence: &Evidence) -> Option<Finding> {
    let copies = evidence.has(|op| matches!(op, Op::CpAsync(_)));
    // Only latency counts: earlier requests do not speed up a busy L1 or DRAM.
    let share = evidence.predicted(&[Cause::L2, Cause::Dram], 0.0);
    let loads =
        |e: &Executed| matches!(e.inst.op, Op::Ld(m) if matches!(m.space, Space::Global | Space::Generic));
    (!copies && share >= 0.10).then(|| Finding {
        name: Symptom::NoOverlap,
        evidence: format!(
            "warps wait {:.0} % of their time for global memory, and no copy is asynchronous",
            100.0 * share
        ),
        lines: evidence.lines(loads),
        share,
        expected_gain: evidence.gain_of_waits(share, 0.0),
        cure: "cp.async into a second stage while the first is computed on",
    })
}
