//! Runs a kernel and, if the first run finds races or unwritten registers that are stored, repeats the run on
//! copies of the buffers with the same schedule, to tell whether anything depends on these values.

use std::collections::HashSet;

use ptx::{Kernel, Op, Space, Statement};

use crate::EmuError;
use crate::exec::{Doubts, Follow};
use crate::grid::run_once;
use crate::memory::Buffer;
use crate::quiet::quiet_buffers;
use crate::report::{Fidelity, Hazard, HazardKind, Options, Report};
use crate::seeds::tell_seeds;

/// Runs a kernel with one buffer for each buffer of its contract, and returns the findings. Buffers of
/// [`ptx::Access::Write`] count as uninitialised, whatever they hold.
///
/// # Errors
/// The buffers or arguments do not match the contract, the kernel executes an instruction that is not
/// implemented, or the kernel does not end within [`Options::step_limit`], [`Options::grid_limit`]
/// and the limit of [`Options::stopwatch`].
pub fn run(kernel: &Kernel, buffers: &mut [&mut Buffer], options: &Options) -> Result<Report, EmuError> {
    let mut report = run_and_judge(kernel, buffers, options)?;
    tell_seeds(kernel, &mut report.hazards);
    report.hazards.iter_mut().for_each(|hazard| hazard.compare_with(options));
    Ok(report)
}

/// Runs a kernel, and tells hazards from notes.
fn run_and_judge(
    kernel: &Kernel,
    buffers: &mut [&mut Buffer],
    options: &Options,
) -> Result<Report, EmuError> {
    let whole = (options.only.is_none() || options.survey) && options.fidelity == Fidelity::Exact;
    let collectives = !options.collectives_order && has_collectives(kernel);
    let lines = Lines::of(kernel);
    if !(whole && options.checks.races && (collectives || lines.can_race())) {
        return run_once(kernel, buffers, options, Follow::Nothing, &[]).map(|once| once.report);
    }
    let copies: Vec<Buffer> = buffers.iter().map(|buffer| buffer.copy()).collect();
    let mut once = run_once(kernel, buffers, options, Follow::Nothing, &quiet_buffers(kernel))?;
    if once.broken {
        buffers.iter_mut().zip(&copies).for_each(|(buffer, copy)| **buffer = copy.copy());
        once = run_once(kernel, buffers, options, Follow::Nothing, &[])?;
    }
    let mut report = once.report;
    if collectives && report.hazards.iter().any(in_a_warp) {
        tell_warp_order(kernel, &copies, options, &mut report)?;
    }
    if report.hazards.iter().any(|hazard| lines.reads_beside_a_store(hazard)) {
        tell_unused_reads(kernel, &copies, options, &lines, collectives, &mut report);
    }
    let unused =
        |h: &Hazard| lines.stores_undefined(h) || lines.reads_unwritten(h) || lines.meets_in_a_store(h);
    if report.hazards.iter().any(unused) && only_loads_read_shared(kernel) {
        tell_unused_copies(kernel, &copies, options, &lines, &mut report);
    }
    Ok(report)
}

type Key = (HazardKind, u32, Option<u32>);

fn key(hazard: &Hazard) -> Key {
    (hazard.kind, hazard.line, hazard.other_line)
}

fn again(
    kernel: &Kernel,
    copies: &[Buffer],
    options: &Options,
    follow: Follow,
) -> Result<(Report, Doubts), EmuError> {
    let mut copies: Vec<Buffer> = copies.iter().map(Buffer::copy).collect();
    let mut handles: Vec<&mut Buffer> = copies.iter_mut().collect();
    let options = Options { traced_ctas: Vec::new(), ..options.clone() };
    run_once(kernel, &mut handles, &options, follow, &[]).map(|once| (once.report, once.doubts))
}

/// Whether a race is between lanes of one warp.
fn in_a_warp(h: &Hazard) -> bool {
    h.kind == HazardKind::Race
        && matches!(h.threads[..], [a, b] if (a.cta, a.warp) == (b.cta, b.warp) && a.lane != b.lane)
}

/// Reports a race as [`HazardKind::WarpOrder`] if it disappears when collectives order memory.
fn tell_warp_order(
    kernel: &Kernel,
    copies: &[Buffer],
    options: &Options,
    report: &mut Report,
) -> Result<(), EmuError> {
    let ordered = Options { collectives_order: true, ..options.clone() };
    let again = again(kernel, copies, &ordered, Follow::Nothing)?.0.hazards;
    for hazard in report.hazards.iter_mut().filter(|h| in_a_warp(h)) {
        if !again.iter().any(|other| key(other) == key(hazard)) {
            hazard.kind = HazardKind::WarpOrder;
            hazard.message += " but a shuffle or another collective, which orders no memory; put bar.warp.sync \
                 (__syncwarp) between";
        }
    }
    Ok(())
}

/// Reports races of reads as notes if nothing depends on the values that these reads returned, and as
/// [`HazardKind::WarpOrder`] if that holds when collectives order memory: a lane that reads before a shuffle
/// does not read what another lane stores behind it.
fn tell_unused_reads(
    kernel: &Kernel,
    copies: &[Buffer],
    options: &Options,
    lines: &Lines,
    collectives: bool,
    report: &mut Report,
) {
    let known: HashSet<Key> = report.hazards.iter().map(key).collect();
    let mut tell = |unused: HashSet<(u32, u32)>, kind: HazardKind, why: &str| {
        for hazard in report.hazards.iter_mut() {
            if lines.reads_beside_a_store(hazard) && unused.contains(&pair(hazard)) {
                hazard.kind = kind;
                hazard.message += why;
            }
        }
    };
    if let Some(unused) = unused_reads(kernel, copies, options, &known) {
        tell(unused, HazardKind::UnusedRead, "; nothing depends on the value that was read");
    } else if collectives {
        let ordered = Options { collectives_order: true, ..options.clone() };
        if let Some(unused) = unused_reads(kernel, copies, &ordered, &known) {
            let why = "; something depends on the value that was read, unless a shuffle or another collective \
                       orders memory; put bar.warp.sync (__syncwarp) beside it";
            tell(unused, HazardKind::WarpOrder, why);
        }
    }
}

fn pair(h: &Hazard) -> (u32, u32) {
    let other = h.other_line.unwrap_or(0);
    (h.line.min(other), h.line.max(other))
}

/// The lines of the races, if nothing depends on the values of racing reads. One run collects the racing
/// reads, the next run follows their values. Something depends on one if a hazard appears that is not
/// `known`.
fn unused_reads(
    kernel: &Kernel,
    copies: &[Buffer],
    options: &Options,
    known: &HashSet<Key>,
) -> Option<HashSet<(u32, u32)>> {
    let (racing, doubts) = again(kernel, copies, options, Follow::Collect).ok()?;
    if doubts.overflow || doubts.is_empty() {
        return None;
    }
    let (followed, _) = again(kernel, copies, options, Follow::Values(&doubts)).ok()?;
    let depends = followed.hazards.iter().any(|h| is_undefined(h) && !known.contains(&key(h)));
    let races = racing.hazards.iter().filter(|h| h.kind == HazardKind::Race);
    (!depends).then(|| races.map(pair).collect())
}

/// Reports stores of unwritten registers to shared memory, loads of shared memory that no thread has written,
/// and stores of different values to one word by lanes of a warp, as notes if nothing depends on the values.
/// A further run follows them through registers and shared memory. Libraries that exchange items of a tile
/// between lanes store and load the items beyond the end too.
fn tell_unused_copies(
    kernel: &Kernel,
    copies: &[Buffer],
    options: &Options,
    lines: &Lines,
    report: &mut Report,
) {
    let Ok((followed, doubts)) = again(kernel, copies, options, Follow::Copies) else { return };
    if doubts.overflow {
        return;
    }
    let known: HashSet<Key> = report.hazards.iter().map(key).collect();
    let found: HashSet<Key> = followed.hazards.iter().filter(|h| is_undefined(h)).map(key).collect();
    // Lanes that meet in one store do not race in this run.
    let races: HashSet<Key> = followed.hazards.iter().map(key).collect();
    // The line where an undefined value was first read.
    let origins: HashSet<u32> = found.iter().map(|(_, line, _)| *line).collect();
    let unwritten: HashSet<u32> =
        report.hazards.iter().filter(|h| lines.reads_unwritten(h)).map(|h| h.line).collect();
    if found.iter().any(|key| !known.contains(key) && !unwritten.contains(&key.1)) {
        return;
    }
    // Where values of two lines meet, only one of the lines is an origin. So all such loads stay hazards if
    // one does.
    let unused = origins.is_disjoint(&unwritten);
    for hazard in report.hazards.iter_mut() {
        if lines.stores_undefined(hazard) && !found.contains(&key(hazard)) {
            hazard.kind = HazardKind::UnusedRead;
            hazard.message += "; it is stored to shared memory, and nothing depends on it there";
        } else if found.is_empty() && lines.meets_in_a_store(hazard) && !races.contains(&key(hazard)) {
            hazard.kind = HazardKind::UnusedRead;
            hazard.message += "; nothing depends on the value that stays";
        } else if unused && lines.reads_unwritten(hazard) {
            hazard.kind = HazardKind::UnusedRead;
            hazard.message += "; nothing depends on the value that was read";
        }
    }
}

/// Whether an instruction depends on a register that was not written.
fn is_undefined(h: &Hazard) -> bool {
    h.kind == HazardKind::UninitialisedRead && h.place.is_none()
}

/// Whether only plain loads and `ldmatrix` read shared memory, as far as the instructions tell.
fn only_loads_read_shared(kernel: &Kernel) -> bool {
    !statements(kernel).any(|statement| match statement {
        Statement::Inst(inst) => match inst.op {
            Op::Atom(a) | Op::Red(a) => a.space != Space::Global,
            Op::WmmaLoad(_) | Op::Wgmma(_) | Op::Tcgen05Mma(_) | Op::Tcgen05Cp { .. } => true,
            Op::CpAsyncBulk(_)
            | Op::CpReduceAsyncBulk(_)
            | Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_) => true,
            _ => false,
        },
        Statement::Label(_) | Statement::Pragma(_) => false,
    })
}

/// The lines of loads and stores of a module whose values and readers can be followed: plain accesses,
/// `ldmatrix` and `cp.async`.
struct Lines {
    loads: HashSet<u32>,
    stores: HashSet<u32>,
}

impl Lines {
    fn of(kernel: &Kernel) -> Lines {
        let mut lines = Lines { loads: HashSet::new(), stores: HashSet::new() };
        for statement in statements(kernel) {
            let Statement::Inst(inst) = statement else { continue };
            match inst.op {
                Op::Ld(m) if may_be_common(m.space) => lines.loads.insert(inst.line),
                Op::Ldmatrix(_) => lines.loads.insert(inst.line),
                Op::St(m) if may_be_common(m.space) => lines.stores.insert(inst.line),
                Op::CpAsync(_) => lines.stores.insert(inst.line),
                _ => continue,
            };
        }
        lines
    }

    /// Whether a store of an unwritten register is a hazard that may be one of shared memory.
    fn stores_undefined(&self, hazard: &Hazard) -> bool {
        is_undefined(hazard) && self.stores.contains(&hazard.other_line.unwrap_or(hazard.line))
    }

    /// Whether a hazard is a load of shared memory that no thread has written.
    fn reads_unwritten(&self, hazard: &Hazard) -> bool {
        hazard.kind == HazardKind::UninitialisedRead
            && hazard.place.as_ref().is_some_and(|place| place.space == Space::Shared)
            && self.loads.contains(&hazard.line)
    }

    /// Whether lanes of a warp store different values to one word of shared memory by one instruction.
    fn meets_in_a_store(&self, hazard: &Hazard) -> bool {
        in_a_warp(hazard)
            && hazard.other_line == Some(hazard.line)
            && hazard.place.as_ref().is_some_and(|place| place.space == Space::Shared)
            && self.stores.contains(&hazard.line)
    }

    fn can_race(&self) -> bool {
        !self.loads.is_empty() && !self.stores.is_empty()
    }

    /// Whether a race is between a load and a store.
    fn reads_beside_a_store(&self, hazard: &Hazard) -> bool {
        let other = hazard.other_line.unwrap_or(0);
        let is = |read: u32, write: u32| self.loads.contains(&read) && self.stores.contains(&write);
        hazard.kind == HazardKind::Race && (is(hazard.line, other) || is(other, hazard.line))
    }
}

fn may_be_common(space: Space) -> bool {
    matches!(space, Space::Generic | Space::Global | Space::Shared | Space::SharedCluster)
}

/// Whether the entry or a callee has a warp-wide instruction that does not order memory.
fn has_collectives(kernel: &Kernel) -> bool {
    statements(kernel).any(|statement| {
        matches!(statement, Statement::Inst(inst) if matches!(
            inst.op,
            Op::Shfl(_) | Op::Vote(_) | Op::Match(..) | Op::Redux { .. } | Op::Elect
        ))
    })
}

/// The statements of the entry and of its callees.
fn statements(kernel: &Kernel) -> impl Iterator<Item = &Statement> {
    let reached = kernel.module.reached_from(&kernel.entry);
    let functions = kernel.module.functions().zip(reached).filter(|(_, reached)| *reached);
    functions.flat_map(|(f, _)| f.body.iter().flat_map(|b| &b.statements))
}
