//! Root causes in the distribution of work: serial sections, idle warps, idle SMs, unused units.

use kernels::Symptom;
use predict::Cause;
use predict::resources::Limiter;
use ptx::{BinaryOp, Op, TernaryOp, Type, UnaryOp};

use super::evidence::{Evidence, Executed};
use super::sums::sums_products;
use super::{Finding, amdahl};

/// Mean active lanes up to which an instruction counts as serial.
const SERIAL_LANES: f64 = 1.5;

fn is_serial(e: &Executed, evidence: &Evidence) -> bool {
    let cta_wide = evidence.counters.warps > 1 && e.warps <= 1;
    !e.feeds && e.lanes() <= SERIAL_LANES && (cta_wide || evidence.counters.warps == 1)
}

/// Finds sections in which one thread works while the rest of the CTA waits.
pub(super) fn serial_section(evidence: &Evidence) -> Option<Finding> {
    let serial = |e: &Executed| is_serial(e, evidence);
    let share = evidence.critical_share(serial);
    let lines = evidence.lines(serial);
    let reduces = evidence.executed.iter().filter(|e| serial(e)).any(|e| {
        matches!(
            e.inst.op,
            Op::Binary(BinaryOp::Max | BinaryOp::Add, Type::F32, _) | Op::Unary(UnaryOp::Ex2, ..)
        )
    });
    let slots = evidence.executed.iter().filter(|e| serial(e)).map(|e| e.counter.issues as f64).sum::<f64>();
    (!lines.is_empty()).then(|| Finding {
        name: if reduces { Symptom::SerialReduction } else { Symptom::SerialSection },
        evidence: format!(
            "1 of {} lanes active in {:.0} % of the critical path ({:.0} % of issue slots), {}",
            evidence.threads(),
            100.0 * share,
            100.0 * slots / evidence.issues(),
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, 1.0 / evidence.threads().min(32.0)),
        cure: "reduce across lanes with shuffles (or keep rows in registers), so that every thread takes part",
    })
}

/// Finds warps that work with full lanes while the other warps wait: `for (row = tid; row < 32; …)` in a CTA
/// of 128.
pub(super) fn idle_warps(evidence: &Evidence) -> Option<Finding> {
    let warps = evidence.working_warps;
    let idle = |e: &Executed| !e.feeds && warps > 1 && 2 * e.warps <= warps && !is_serial(e, evidence);
    let share = evidence.critical_share(idle);
    let lines = evidence.lines(idle);
    let heaviest = evidence.executed.iter().filter(|e| idle(e)).max_by_key(|e| e.busiest)?;
    Some(Finding {
        name: Symptom::IdleWarps,
        evidence: format!(
            "{} of {warps} warps {} in {:.0} % of the critical path, {}; typical cause: one row per thread and \
             fewer rows than threads",
            heaviest.warps,
            if heaviest.warps == 1 { "works" } else { "work" },
            100.0 * share,
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, f64::from(heaviest.warps) / f64::from(warps)),
        cure: "hand out rows to warps and columns to lanes, so that every warp has a part of each row",
    })
}

/// Finds warps with most lanes masked off.
pub(super) fn idle_lanes(evidence: &Evidence) -> Option<Finding> {
    let idle = |e: &Executed| !e.feeds && e.lanes() < 20.0 && !is_serial(e, evidence);
    let share = evidence.critical_share(idle);
    let (mut lanes, mut issues) = (0.0, 0.0);
    for e in evidence.executed.iter().filter(|e| idle(e)) {
        lanes += e.counter.lanes as f64;
        issues += e.counter.issues as f64;
    }
    let mean = lanes / f64::max(issues, 1.0);
    let lines = evidence.lines(idle);
    (!lines.is_empty()).then(|| Finding {
        name: Symptom::IdleLanes,
        evidence: format!(
            "{mean:.1} of 32 lanes active in {:.0} % of the critical path, {}",
            100.0 * share,
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, mean / 32.0),
        cure: "give each lane of the warp an element; move conditions out of the loop",
    })
}

/// Finds scalar matrix products. Kernels whose multiply-adds belong to exponentials or polynomials have no
/// use for tensor cores.
pub(super) fn tensor_cores_unused(evidence: &Evidence) -> Option<Finding> {
    let scalar = |e: &Executed| {
        matches!(
            e.inst.op,
            Op::Ternary(
                TernaryOp::Fma | TernaryOp::Mad,
                Type::F32 | Type::F16 | Type::F16x2 | Type::Bf16x2,
                _
            )
        )
    };
    let flops = |e: &Executed, each: f64| e.counter.lanes as f64 * each;
    let by_hand: f64 = evidence.executed.iter().filter(|e| scalar(e)).map(|e| flops(e, 2.0)).sum();
    let on_tensor: f64 = evidence.executed.iter().map(|e| e.counter.tensor_flop as f64).sum();
    // An empty sum of floats is −0, hence the absolute value.
    let fraction = on_tensor.abs() / (on_tensor + by_hand).max(1.0);
    if fraction > 0.9 || by_hand == 0.0 || !sums_products(evidence) {
        return None;
    }
    // Loads from shared memory that feed a scalar product are counted with the product.
    let feeds = |e: &Executed| scalar(e) || matches!(e.inst.op, Op::Ld(m) if m.space == ptx::Space::Shared);
    let share = evidence.critical_share(feeds);
    let lines = evidence.lines(scalar);
    Some(Finding {
        name: if fraction == 0.0 { Symptom::TensorCoresUnused } else { Symptom::TensorCoresHardlyUsed },
        evidence: format!(
            "tensor cores do {:.0} % of the multiply-adds; scalar products and the loads that feed them take {:.0} % of the \
             critical path, {}",
            100.0 * fraction,
            100.0 * share,
            evidence.show(&lines)
        ),
        lines,
        share,
        expected_gain: amdahl(share, 1.0 / 16.0),
        cure: "compute matrix products with mma.sync; its accumulators stay in registers",
    })
}

/// Share of an empty kernel in the time from which a launch counts as a test launch.
const TINY_LAUNCH: f64 = 0.25;

/// Finds SMs without a CTA. A test launch has no work that could be spread over SMs.
pub(super) fn small_grid(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    let active = prediction.active_sms;
    (active < 0.75 && prediction.share(Cause::Launch) < TINY_LAUNCH).then(|| Finding {
        name: Symptom::SmallGrid,
        lines: Vec::new(),
        evidence: format!(
            "{} CTAs give work to {:.0} % of the {}'s multiprocessors",
            prediction.ctas,
            100.0 * active,
            prediction.machine
        ),
        share: 1.0 - active,
        expected_gain: 1.0 / active.max(0.01),
        cure: "smaller tiles of queries, or split the keys over several CTAs and merge",
    })
}

/// Finds kernels with too few warps to hide latencies.
pub(super) fn low_occupancy(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    let occupancy = prediction.occupancy;
    let latency =
        [Cause::Arithmetic, Cause::TensorLatency, Cause::SharedLatency, Cause::L1, Cause::L2, Cause::Dram];
    let share = evidence.predicted(&latency, 0.0);
    let limiter = match occupancy.limiter {
        Limiter::Registers => format!("registers ({} a thread)", occupancy.registers),
        Limiter::Shared => format!("shared memory ({} bytes a CTA)", occupancy.shared),
        Limiter::Warps => "warps".to_owned(),
        Limiter::Ctas => "CTAs".to_owned(),
    };
    (occupancy.fraction < 0.25).then(|| Finding {
        name: Symptom::LowOccupancy,
        lines: Vec::new(),
        evidence: format!(
            "{} warps on a multiprocessor, {:.0} % of what it holds, limited by {limiter}; {:.0} % of warp time waits \
             for latencies that more warps would hide",
            occupancy.warps,
            100.0 * occupancy.fraction,
            100.0 * share
        ),
        share,
        expected_gain: evidence.gain_of_waits(share, 0.5),
        cure: "free what limits it, or give each warp more independent work",
    })
}

/// Finds time at barriers that the causes above do not explain. A wait for one reducing thread is a symptom
/// of the serial reduction, not of the barrier.
pub(super) fn barriers(evidence: &Evidence) -> Option<Finding> {
    let share = evidence.prediction?.share(Cause::Barrier);
    let unequal = [serial_section(evidence), idle_warps(evidence)];
    let explained: f64 = unequal.iter().flatten().map(|f| f.share).sum();
    if explained >= 0.5 * share {
        return None;
    }
    let is_barrier = |e: &Executed| matches!(e.inst.op, Op::Bar { .. });
    let warps = evidence.kernel.launch.grid.count() * u64::from(evidence.counters.warps);
    (share >= 0.10).then(|| Finding {
        name: Symptom::Barriers,
        evidence: format!(
            "warps wait {:.0} % of their time at barriers, {:.0} of them a warp",
            100.0 * share,
            evidence.counters.barriers as f64 / warps.max(1) as f64
        ),
        lines: evidence.lines(is_barrier),
        share,
        expected_gain: evidence.gain_of_waits(share, 0.0),
        cure: "even out the work between barriers, then drop those that order nothing (two buffers need one a tile)",
    })
}
