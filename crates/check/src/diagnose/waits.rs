//! Root causes in what warps wait for: launches, mbarriers, special functions. They cover kernels with
//! asynchronous copies and products in which no unit is busy.

use kernels::Symptom;
use predict::{Bottleneck, Cause};
use ptx::Op;

use super::evidence::{Evidence, Executed};
use super::{Finding, amdahl};

/// Share of an empty kernel in the time from which the launch is reported as a cause.
const LAUNCH: f64 = 0.25;
/// Shares of mbarrier waits and of special functions from which they are reported as causes.
const MBARRIERS: f64 = 0.15;
const EXPONENTIALS: f64 = 0.15;

/// The kernel takes hardly longer than an empty one.
pub(super) fn launch(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    let share = prediction.share(Cause::Launch);
    (share >= LAUNCH).then(|| Finding {
        name: Symptom::LaunchOverhead,
        lines: Vec::new(),
        evidence: format!(
            "an empty kernel takes {:.1} of the {:.1} µs",
            share * prediction.us,
            prediction.us
        ),
        share,
        expected_gain: amdahl(share, 0.0),
        cure: "more work in a launch (batches, heads), or launches that overlap: programmatic dependent launch, a CUDA graph",
    })
}

/// Finds waits for phases of mbarriers: for bulk copies, or for the warps on the other side of a pipeline.
pub(super) fn mbarriers(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    let share = prediction.share(Cause::Mbarrier) + prediction.share(Cause::AsyncCopy);
    let is_wait = |e: &Executed| matches!(e.inst.op, Op::Mbarrier(_) | Op::CpAsyncWaitGroup);
    let at = |pc: usize| evidence.executed.iter().find(|e| e.pc == pc);
    let repeats = |e: &&Executed| matches!(e.inst.op, Op::Bra { .. });
    // The time of a wait is charged to the test of the mbarrier and to the branch that repeats the test.
    let stall = |e: &Executed| {
        let own = evidence.stall(e).unwrap_or(0.0);
        own + at(e.pc + 1).filter(repeats).and_then(|branch| evidence.stall(branch)).unwrap_or(0.0)
    };
    let waits = || evidence.executed.iter().filter(|e| is_wait(e));
    let longest = waits().max_by(|a, b| stall(a).total_cmp(&stall(b)))?;
    // The instruction after the wait is executed once for each time that a warp passes the wait, however
    // often the test is repeated. A wait that is passed once or twice belongs to a pipeline that never fills.
    let after = longest.pc + 1 + usize::from(at(longest.pc + 1).is_some_and(|e| repeats(&e)));
    let times = at(after).map_or(longest.busiest, |e| e.busiest).max(1);
    let is_short = times <= 2;
    let where_ = evidence.show_line(longest.inst.line);
    let lines = evidence.lines(|e| is_wait(e) && stall(e) > 0.01);
    (share >= MBARRIERS).then(|| Finding {
        name: if is_short { Symptom::PipelineTooShort } else { Symptom::WaitsForCopies },
        lines,
        evidence: format!(
            "warps wait {:.0} % of the time for copies or for the warps that consume them, longest at {where_}, which a \
             warp passes {times} time{}",
            100.0 * share,
            if times == 1 { "" } else { "s" },
        ),
        share,
        expected_gain: evidence.gain_of_waits(share, 0.0),
        cure: match is_short {
            true => "a tile has too few blocks of keys to hide the first copies: smaller blocks and more stages in flight, \
                     fewer CTAs with more tiles each, or several CTAs on a multiprocessor",
            false => "more stages in flight, or larger blocks, so that a copy has ended when its turn comes",
        },
    })
}

/// Finds exponentials that limit the special-function pipe.
pub(super) fn exponentials(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    let share = prediction.share(Cause::Mufu);
    let special = |op: &Op| matches!(op, Op::Unary(ptx::UnaryOp::Ex2, ..));
    (share >= EXPONENTIALS && evidence.has(special)).then(|| Finding {
        name: Symptom::Exponentials,
        lines: evidence.lines(|e| special(&e.inst.op)),
        evidence: format!(
            "warps wait {:.0} % of the time for the special-function pipe, which is busy {:.0} % of it",
            100.0 * share,
            100.0 * prediction.utilisation.mufu
        ),
        share,
        expected_gain: amdahl(share, 0.5),
        cure: "overlap the exponentials of one tile with the products of another, or compute some of them as polynomials on \
               the f32 pipe",
    })
}

/// The main cause for which warps wait; reported only if there is no other finding.
pub(super) fn longest(evidence: &Evidence) -> Option<Finding> {
    let prediction = evidence.prediction?;
    // The launch is a cause of its own, with a threshold of its own.
    let is_wait = |cause: &Cause| !matches!(cause, Cause::Issue | Cause::Launch);
    let waits = prediction.split.iter().filter(|(cause, _)| is_wait(cause));
    let (cause, share) = waits.max_by(|a, b| a.1.total_cmp(&b.1))?;
    // Where a unit is the bound, waits follow from it.
    let unit = of_unit(prediction.bound);
    let bound = unit.map(|_| format!("; the bound is {}", prediction.bound.name()));
    Some(Finding {
        name: Symptom::LongestWait,
        lines: Vec::new(),
        evidence: format!(
            "warps spend {:.0} % of the time on {}, the largest part{}",
            100.0 * share,
            cause.name(),
            bound.unwrap_or_default()
        ),
        share: *share,
        expected_gain: evidence.gain_of_waits(*share, 0.5),
        cure: cure(unit.unwrap_or(*cause)),
    })
}

/// The wait whose cure relieves the unit that bounds a kernel; `None` where no unit is the bound.
const fn of_unit(bound: Bottleneck) -> Option<Cause> {
    Some(match bound {
        Bottleneck::Tensor => Cause::TensorPipe,
        Bottleneck::Fma => Cause::FmaPipe,
        Bottleneck::Alu => Cause::AluPipe,
        Bottleneck::Half => Cause::HalfPipe,
        Bottleneck::Double => Cause::DoublePipe,
        Bottleneck::Mufu => Cause::Mufu,
        Bottleneck::Issue => Cause::Issue,
        Bottleneck::Shared => Cause::SharedBandwidth,
        Bottleneck::L1 | Bottleneck::L2 => Cause::L2Bandwidth,
        Bottleneck::Dram => Cause::DramBandwidth,
        Bottleneck::Latency | Bottleneck::Serial | Bottleneck::Launch => return None,
    })
}

/// The cure of a wait for this cause.
const fn cure(cause: Cause) -> &'static str {
    match cause {
        Cause::Issue | Cause::NotSelected => {
            "fewer instructions: wider accesses, unrolled loops, less address arithmetic"
        }
        Cause::FmaPipe | Cause::AluPipe | Cause::HalfPipe | Cause::DoublePipe => {
            "fewer instructions of this pipe, or work for a pipe that is idle: two halves in one instruction, tensor cores"
        }
        Cause::Mufu => "fewer special functions, or some of them as polynomials on the f32 pipe",
        Cause::TensorPipe => "fewer products, a smaller type, or other work of the warps while products run",
        Cause::TensorLatency => {
            "independent products between a product and the use of its result, or more warps"
        }
        Cause::Arithmetic | Cause::Branch => {
            "independent work between an instruction and the use of its result, or more warps on a multiprocessor"
        }
        Cause::SharedLatency | Cause::Exchange => {
            "the loads of the next step before the arithmetic of this one, or more warps on a multiprocessor"
        }
        Cause::SharedBandwidth => "fewer or wider accesses to shared memory, or values kept in registers",
        Cause::L1 | Cause::L2 | Cause::Dram => {
            "more loads in flight: load the next step ahead (cp.async, more stages), or more warps on a multiprocessor"
        }
        Cause::L2Bandwidth | Cause::DramBandwidth => {
            "fewer bytes: larger tiles that reuse what they load, a smaller type, or no second read of the same data"
        }
        Cause::AsyncCopy | Cause::Mbarrier => {
            "more stages in flight, or larger blocks, so that a copy has ended when its turn comes"
        }
        Cause::Cluster | Cause::Barrier => {
            "fewer barriers, or work between arriving at a barrier and waiting there"
        }
        Cause::Launch => "more work in a launch, or launches that overlap",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The cure of one wait does not help with another one.
    #[test]
    fn cures_fit_their_causes() {
        for (cause, word) in [
            (Cause::Launch, "launch"),
            (Cause::Dram, "in flight"),
            (Cause::DramBandwidth, "fewer bytes"),
            (Cause::Barrier, "barrier"),
            (Cause::TensorPipe, "products"),
            (Cause::Arithmetic, "independent work"),
        ] {
            assert!(cure(cause).contains(word), "{cause:?}: {}", cure(cause));
        }
        // Full issue slots are not cured by waiting less for the tensor cores.
        assert!(
            of_unit(Bottleneck::Issue).is_some_and(|cause| cure(cause).starts_with("fewer instructions"))
        );
        assert_eq!(of_unit(Bottleneck::Latency), None);
    }
}
