//! Runs a launch: checks the contract, maps the buffers and runs the clusters of CTAs. Clusters that do not
//! communicate run independently and in parallel. Clusters that communicate run in turns.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use ptx::{Access, Arg, Function, GridDependency, Kernel, Op, TensorMapSpec};
use rayon::prelude::*;

use crate::EmuError;
use crate::contract::{
    check_agents, check_contract, check_registers, check_shadow, check_shared, shadow_bytes,
};
use crate::counters::{Counter, Counters};
use crate::decode::{Inst, Program, WORKSPACE, decoded};
use crate::exec::{
    Cluster, Context, Doubts, Follow, GlobalOrder, Outcome, Parameters, Progress, registers_at_entry,
};
use crate::memory::{Bitmap, Buffer, GlobalMemory, Region, RegionAccess};
use crate::numerics::tensor::TensorRules;
use crate::order::{Actors, Kinds};
use crate::report::{
    Fidelity, Findings, Footprint, HazardKind, Options, Place, Printed, Report, Schedule, Survey, ThreadId,
};
use crate::stopwatch::Stopwatch;
use crate::trace::CtaTrace;

/// Maximum number of CTAs that are resident at the same time when CTAs communicate. No GPU has more.
const RESIDENT: usize = 4096;

/// Cost of starting a CTA, in warp instructions. The cost limits the time for a huge grid of empty CTAs.
const START_STEPS: u64 = 64;

/// Warp instructions after which a CTA that starts before all others is no longer alone: it may wait by
/// atomics that add nothing, which do not look like a wait.
const ALONE: u64 = 1 << 20;

/// Bytes that the race check may use for records of reads when CTAs communicate.
const READS_LIMIT: u64 = 1 << 30;

/// The warp instructions that the CTAs of a grid have issued, and the limit for them.
struct Budget<'a> {
    ctas: u64,
    limit: u64,
    stopwatch: Option<&'a Stopwatch>,
    done: AtomicU64,
    steps: AtomicU64,
}

impl<'a> Budget<'a> {
    fn new(context: &Context<'a>, ctas: u64) -> Result<Budget<'a>, EmuError> {
        let (limit, stopwatch) = (context.options.grid_limit, context.options.stopwatch.as_deref());
        let least = ctas.saturating_mul(START_STEPS);
        if least > limit {
            return Err(EmuError::GridSize { ctas, least, limit });
        }
        if let Some(stopwatch) = stopwatch {
            stopwatch.begin(ctas);
        }
        Ok(Budget { ctas, limit, stopwatch, done: AtomicU64::new(0), steps: AtomicU64::new(0) })
    }

    /// Charges the start of CTAs and checks the time limit.
    fn start(&self, ctas: u64) -> Result<(), EmuError> {
        self.stopwatch.map_or(Ok(()), Stopwatch::check)?;
        self.spend(START_STEPS * ctas)
    }

    /// Counts CTAs that have ended.
    fn finish(&self, ctas: u64) {
        self.done.fetch_add(ctas, Ordering::Relaxed);
        if let Some(stopwatch) = self.stopwatch {
            stopwatch.finish(ctas);
        }
    }

    fn spend(&self, steps: u64) -> Result<(), EmuError> {
        let steps = self.steps.fetch_add(steps, Ordering::Relaxed).saturating_add(steps);
        if steps <= self.limit {
            return Ok(());
        }
        let done = self.done.load(Ordering::Relaxed);
        Err(EmuError::GridLimit { done, ctas: self.ctas, steps, limit: self.limit })
    }

    fn remember(&self, bytes: u64) -> Result<(), EmuError> {
        if bytes <= READS_LIMIT {
            return Ok(());
        }
        let done = self.done.load(Ordering::Relaxed);
        Err(EmuError::MemoryLimit { done, ctas: self.ctas, limit: READS_LIMIT })
    }
}

/// Whether the CTAs of a kernel may communicate: the entry or a callee has atomics or strong accesses to
/// global memory. Such CTAs may wait for each other, so a run of only some of them has no meaning.
///
/// # Errors
/// When the kernel does not fit its contract.
pub fn communicates(kernel: &Kernel, options: &Options) -> Result<bool, EmuError> {
    Ok(decoded(kernel, options, false)?.communicates)
}

/// The result of one run.
pub(crate) struct Once {
    pub report: Report,
    /// The reads that race, if they are collected.
    pub doubts: Doubts,
    /// Whether the kernel stored to a quiet buffer. If so, the run is not valid.
    pub broken: bool,
}

/// Runs a kernel once. Reads of the buffers for which `quiet` is true are not recorded.
pub(crate) fn run_once(
    kernel: &Kernel,
    buffers: &mut [&mut Buffer],
    options: &Options,
    follow: Follow,
    quiet: &[bool],
) -> Result<Once, EmuError> {
    let entry = check_contract(kernel, buffers)?;
    let program = decoded(kernel, options, follow.follows_loads())?;
    // Only the order of the whole grid identifies the lanes of other CTAs.
    let communicates = program.communicates || !follow.is_nothing();
    let sm = options.sm.unwrap_or(kernel.module.target.sm);
    check_shared(program.layout.shared_bytes, sm)?;
    let rules = TensorRules::of_sm(sm).unwrap_or(TensorRules::Ampere);
    let fresh: Vec<Bitmap> = kernel.buffers.iter().map(|b| Bitmap::new(b.bytes)).collect();
    let variables: Vec<Vec<AtomicU32>> =
        program.layout.variables.iter().map(|v| words(&v.contents)).collect();
    let global = map_buffers(kernel, buffers, &fresh, &program, &variables, quiet);
    let mut context = Context {
        program: &program,
        parameters: parameters(kernel, entry),
        launch: &kernel.launch,
        global: &global,
        options,
        follow,
        rules,
        registers: registers_at_entry(&entry.bounds, &program),
        apart: !communicates,
        actors: Actors::new(
            kernel.launch.cluster.count() as usize,
            (kernel.launch.block.count() as usize).div_ceil(32),
            Kinds {
                asynchronous: program.asynchronous,
                tensor: program.tensor,
                overlapping: kernel.launch.overlapping,
            },
        ),
        maps: &kernel.tensor_maps,
        stands_for: 1,
    };
    check_registers(&context)?;
    check_agents(&context)?;
    check_shadow(&context)?;
    let mut total = Total::default();
    let clusters = Clusters::new(&context)?;
    if options.fidelity == Fidelity::Sketch {
        context.stands_for = (kernel.launch.grid.count() / context.ranks() / clusters.count().max(1)).max(1);
    }
    if communicates {
        run_together(&context, &clusters, &mut total)?;
    } else {
        run_apart(&context, &clusters, &mut total)?;
    }
    after_checks(&context, kernel, options, &mut total.findings);
    check_grid_after_next(&context, options, &mut total);
    let broken = context.global.is_broken();
    let stored = context.global.regions.iter().take(kernel.buffers.len()).map(Region::is_stored).collect();
    let neighbours = if options.survey { neighbours(&context) } else { Vec::new() };
    drop(global);
    keep_written(kernel, buffers, fresh);
    let doubts = std::mem::take(&mut total.doubts);
    let mut report = Report {
        changed: changed(&program, &variables),
        stored,
        communicates,
        ..total.report(&program, kernel)
    };
    report.survey.neighbours = neighbours;
    Ok(Once { report, doubts, broken })
}

/// The clusters to run.
enum Clusters {
    All(u64),
    Only(Vec<u64>),
}

impl Clusters {
    fn new(context: &Context) -> Result<Clusters, EmuError> {
        let grid = context.launch.grid.count();
        let Some(only) = &context.options.only else { return Ok(Clusters::All(grid / context.ranks())) };
        match only.iter().find(|cta| **cta >= grid) {
            None => {
                let mut clusters: Vec<u64> = only.iter().map(|cta| context.cluster_of(*cta)).collect();
                clusters.sort_unstable();
                clusters.dedup();
                Ok(Clusters::Only(clusters))
            }
            Some(cta) => {
                let (given, accepted) = (cta.to_string(), format!("0 to {}", grid - 1));
                Err(EmuError::Launch { what: "CTA to run", given, accepted })
            }
        }
    }

    fn count(&self) -> u64 {
        match self {
            Clusters::All(count) => *count,
            Clusters::Only(clusters) => clusters.len() as u64,
        }
    }

    fn get(&self, i: u64) -> u64 {
        match self {
            Clusters::All(_) => i,
            Clusters::Only(clusters) => clusters[i as usize],
        }
    }

    /// The position of the cluster that starts before all others.
    fn first(&self, context: &Context) -> Option<u64> {
        let cluster = context.cluster_of(context.options.first?);
        match self {
            Clusters::All(count) => (cluster < *count).then_some(cluster),
            Clusters::Only(clusters) => clusters.binary_search(&cluster).ok().map(|at| at as u64),
        }
    }
}

/// The results collected so far.
#[derive(Default)]
struct Total {
    findings: Findings,
    counters: Counters,
    traces: Vec<CtaTrace>,
    printed: Vec<Printed>,
    doubts: Doubts,
    /// The executed instructions of each cluster, by their place in the program.
    footprints: Vec<Footprint>,
    steps: u64,
    overtaken: bool,
}

impl Total {
    fn add(&mut self, outcome: Outcome) {
        self.findings.merge(outcome.findings);
        self.counters.add(&outcome.counters);
        self.traces.extend(outcome.traces);
        self.printed.extend(outcome.printed);
        self.doubts.merge(outcome.doubts);
        self.steps += outcome.steps;
        self.overtaken |= outcome.overtaken;
    }

    fn join(mut self, other: Total) -> Total {
        self.findings.merge(other.findings);
        self.counters.add(&other.counters);
        self.traces.extend(other.traces);
        self.printed.extend(other.printed);
        self.doubts.merge(other.doubts);
        self.footprints.extend(other.footprints);
        self.steps += other.steps;
        self.overtaken |= other.overtaken;
        self
    }

    /// Renumbers the counters by the instructions of the module. The `ret` instructions that decoding adds
    /// are left out.
    fn report(mut self, program: &Program, kernel: &Kernel) -> Report {
        let count =
            program.functions.iter().map(|f| f.end - f.start - u32::from(f.end > f.start)).sum::<u32>();
        let mut numbered = vec![Counter::default(); count as usize];
        for info in program.functions.iter().filter(|f| f.end > f.start) {
            for pc in info.start..info.end - 1 {
                let inst = &program.code[pc as usize];
                let counted = self.counters.instructions.get(pc as usize).copied().unwrap_or_default();
                let counter = &mut numbered[inst.number as usize];
                *counter = Counter { line: inst.line, ..counted };
                counter.set_work(&inst.op);
            }
        }
        self.counters.instructions = numbered;
        self.counters.shared_bytes = program.layout.shared_bytes;
        self.counters.warps = (kernel.launch.block.count() as u32).div_ceil(32);
        for footprint in &mut self.footprints {
            renumber(&mut footprint.executed, program, count as usize);
        }
        self.footprints.sort_by_key(|footprint| footprint.cta);
        self.traces.sort_by_key(|t| t.cta);
        self.printed.sort_by_key(|printed| printed.thread.cta);
        Report {
            hazards: self.findings.into_sorted(),
            counters: self.counters,
            traces: self.traces,
            printed: self.printed,
            communicates: false,
            steps: self.steps,
            changed: Vec::new(),
            stored: Vec::new(),
            overtakes: self.overtaken,
            survey: Survey { footprints: self.footprints, neighbours: Vec::new() },
        }
    }
}

/// Converts a set of instructions from positions in the program to numbers in the module.
fn renumber(executed: &mut Vec<u64>, program: &Program, count: usize) {
    let mut numbered = vec![0; count.div_ceil(64)];
    for info in program.functions.iter().filter(|f| f.end > f.start) {
        for pc in info.start..info.end - 1 {
            let at = program.code[pc as usize].number as usize;
            let word = executed.get(pc as usize / 64).copied().unwrap_or(0);
            numbered[at / 64] |= (word >> (pc % 64) & 1) << (at % 64);
        }
    }
    *executed = numbered;
}

/// The set of instructions that were executed by at least one lane.
fn executed(counters: &Counters) -> Vec<u64> {
    let chunks = counters.instructions.chunks(64);
    chunks
        .map(|chunk| chunk.iter().rev().fold(0, |set, counter| set << 1 | u64::from(counter.lanes > 0)))
        .collect()
}

/// Pairs of clusters that wrote to the same line of global memory, each pair once.
fn neighbours(context: &Context) -> Vec<(u64, u64)> {
    let mut found = std::collections::BTreeSet::new();
    for region in &context.global.regions {
        region.shared_lines(context.program.granules[1] as usize, |a, b| {
            let [a, b] = [a, b].map(|cluster| context.cta(u64::from(cluster), 0));
            if found.len() < Survey::PAIRS {
                found.insert((a.min(b), a.max(b)));
            }
        });
    }
    found.into_iter().collect()
}

/// Names of the module's variables whose contents differ from their initial contents.
fn changed(program: &Program, variables: &[Vec<AtomicU32>]) -> Vec<String> {
    let same = |before: &[u8], after: &[AtomicU32]| {
        words(before).iter().zip(after).all(|(a, b)| a.load(Ordering::Relaxed) == b.load(Ordering::Relaxed))
    };
    let pairs = program.layout.variables.iter().zip(variables);
    pairs
        .filter(|(region, _)| region.name != WORKSPACE)
        .filter(|(region, after)| !same(&region.contents, after))
        .map(|(region, _)| region.name.clone())
        .collect()
}

fn parameters(kernel: &Kernel, entry: &Function) -> Parameters {
    let (mut bytes, mut maps) = (Vec::new(), Vec::new());
    for (param, arg) in entry.params.iter().zip(&kernel.args) {
        bytes.resize(bytes.len().next_multiple_of(param.align.max(1) as usize), 0);
        maps_within(arg, bytes.len(), &mut maps);
        bytes.extend(argument_bytes(arg));
    }
    Parameters { bytes, maps }
}

/// Adds the byte ranges of the tensor maps in an argument that begins at byte `at`.
fn maps_within(arg: &Arg, at: usize, maps: &mut Vec<std::ops::Range<usize>>) {
    match arg {
        Arg::TensorMap { .. } => maps.push(at..at + TensorMapSpec::BYTES as usize),
        Arg::Struct(value) => {
            value.fields.iter().for_each(|(offset, field)| maps_within(field, at + *offset as usize, maps));
        }
        _ => {}
    }
}

/// The bytes of an argument as the emulator passes them to a kernel. An uploaded buffer may contain such
/// bytes too: the addresses of other buffers, or a tensor map.
pub fn argument_bytes(arg: &Arg) -> Vec<u8> {
    match arg {
        Arg::Buffer { index, offset } => {
            GlobalMemory::base(*index).wrapping_add(*offset).to_le_bytes().to_vec()
        }
        Arg::TensorMap { index } => crate::exec::map_image(*index).to_vec(),
        Arg::Null => vec![0; 8],
        Arg::U8(v) => v.to_le_bytes().to_vec(),
        Arg::U16(v) => v.to_le_bytes().to_vec(),
        Arg::U32(v) => v.to_le_bytes().to_vec(),
        Arg::I32(v) => v.to_le_bytes().to_vec(),
        Arg::U64(v) => v.to_le_bytes().to_vec(),
        Arg::I64(v) => v.to_le_bytes().to_vec(),
        Arg::F32(v) => v.to_le_bytes().to_vec(),
        Arg::F64(v) => v.to_le_bytes().to_vec(),
        Arg::Struct(value) => {
            let mut bytes = vec![0; value.bytes as usize];
            for (offset, field) in &value.fields {
                let image = argument_bytes(field);
                if let Some(room) = bytes.get_mut(*offset as usize..).and_then(|b| b.get_mut(..image.len())) {
                    room.copy_from_slice(&image);
                }
            }
            bytes
        }
    }
}

fn words(bytes: &[u8]) -> Vec<AtomicU32> {
    let word = |four: &[u8]| {
        let mut word = [0; 4];
        word[..four.len()].copy_from_slice(four);
        AtomicU32::new(u32::from_le_bytes(word))
    };
    bytes.chunks(4).map(word).collect()
}

fn map_buffers<'a>(
    kernel: &Kernel,
    buffers: &'a [&mut Buffer],
    fresh: &'a [Bitmap],
    program: &Program,
    variables: &'a [Vec<AtomicU32>],
    quiet: &[bool],
) -> GlobalMemory<'a> {
    let mut regions = Vec::new();
    for ((spec, buffer), fresh) in kernel.buffers.iter().zip(buffers).zip(fresh) {
        let written = match spec.access {
            Access::Write => Some(fresh),
            _ if buffer.initialised.is_full() => None,
            _ => Some(&buffer.initialised),
        };
        let access = RegionAccess::Contract(spec.access);
        regions.push(Region::new(spec.name.clone(), spec.bytes, access, &buffer.words, written));
    }
    regions
        .iter_mut()
        .zip(quiet)
        .filter(|(_, quiet)| **quiet)
        .for_each(|(region, _)| region.expect_no_store());
    for (variable, words) in program.layout.variables.iter().zip(variables) {
        let bytes = variable.contents.len();
        regions.push(Region::new(variable.name.clone(), bytes, RegionAccess::Variable, words, None));
    }
    let incoherent = |inst: &Inst| matches!(inst.op, Op::Ld(m) if m.non_coherent);
    if program.code.iter().any(incoherent) {
        let writable = regions.iter_mut().filter(|region| region.watched());
        writable.for_each(|region| region.watch_incoherent(program.granules[1] as usize));
    }
    GlobalMemory { regions }
}

/// Runs clusters that do not communicate, in parallel and in any order.
fn run_apart(context: &Context, clusters: &Clusters, total: &mut Total) -> Result<(), EmuError> {
    let granule = context.program.granules[1];
    let budget = Budget::new(context, clusters.count() * context.ranks())?;
    let found = (0..clusters.count())
        .into_par_iter()
        .try_fold(Total::default, |mut sum, i| {
            if context.global.is_broken() {
                return Ok(sum);
            }
            budget.start(context.ranks())?;
            let cluster = Cluster::new(context, clusters.get(i), GlobalOrder::new(granule));
            let (outcome, _) = cluster.run()?;
            budget.spend(outcome.effort)?;
            budget.finish(context.ranks());
            if context.options.survey {
                let cta = context.cta(clusters.get(i), 0);
                sum.footprints.push(Footprint { cta, executed: executed(&outcome.counters) });
            }
            sum.add(outcome);
            Ok(sum)
        })
        .try_reduce(Total::default, |a, b| Ok(a.join(b)))?;
    *total = found;
    Ok(())
}

/// Runs clusters that communicate in turns, so that a cluster that waits for another cluster sees its
/// arrival.
fn run_together(context: &Context, clusters: &Clusters, total: &mut Total) -> Result<(), EmuError> {
    let mut order = GlobalOrder::new(context.program.granules[1]);
    let mut resident: VecDeque<Cluster> = VecDeque::new();
    let budget = Budget::new(context, clusters.count() * context.ranks())?;
    let mut spinning = 0;
    let count = clusters.count();
    let first = clusters.first(context);
    let place = |next: u64| match first {
        Some(first) if next == 0 => first,
        Some(first) if next <= first => next - 1,
        _ => next,
    };
    let mut alone = first.is_some();
    let most = resident_clusters(context);
    let mut room = if context.program.cancels { most.min(first_clusters(context, count)) } else { most };
    let mut others = 0..count;
    if context.program.cancels {
        order.unstarted = others.by_ref().map(|next| clusters.get(place(next))).collect();
    }
    let mut next = |order: &mut GlobalOrder| {
        order.unstarted.pop_front().or_else(|| others.next().map(|next| clusters.get(place(next))))
    };
    loop {
        while resident.len() < if alone { 1 } else { room }
            && let Some(cluster) = next(&mut order)
        {
            budget.start(context.ranks())?;
            resident.push_back(Cluster::new(context, cluster, GlobalOrder::default()));
        }
        let Some(mut cluster) = resident.pop_front() else { break };
        *cluster.order() = order;
        let before = cluster.effort();
        let progress = cluster.turn()?;
        budget.spend(cluster.effort() - before)?;
        budget.remember(cluster.order().bytes())?;
        order = std::mem::take(cluster.order());
        alone &= progress == Progress::Running && !cluster.is_waiting() && cluster.effort() < ALONE;
        if progress == Progress::Running {
            spinning = if cluster.is_spinning() { spinning + 1 } else { 0 };
            resident.push_back(cluster);
            if spinning > resident.len() && room < most && !order.unstarted.is_empty() {
                (room, spinning) = (most, 0);
            } else if spinning > resident.len() {
                // Every resident cluster waits for an arrival that never happens, or for a cluster that is
                // not resident.
                for mut cluster in resident.drain(..) {
                    cluster.report_deadlock();
                    total.add(cluster.finish().0);
                }
                return Ok(());
            }
        } else {
            spinning = 0;
            budget.finish(context.ranks());
            *cluster.order() = order;
            let (outcome, back) = cluster.finish();
            order = back;
            total.add(outcome);
        }
    }
    Ok(())
}

/// The number of clusters that start before any can be cancelled. On a GPU it depends on what else runs: with
/// one, the first cluster may cancel all others, and with all, none.
fn first_clusters(context: &Context, count: u64) -> usize {
    let first = match context.options.schedule {
        Schedule::Late => count,
        Schedule::Early => 1,
        Schedule::Random | Schedule::Lagging => 1 + context.options.seed % count.max(1),
    };
    usize::try_from(first).unwrap_or(RESIDENT)
}

/// The number of clusters whose state fits in about a gigabyte, at most `RESIDENT` and
/// [`Options::resident`].
fn resident_clusters(context: &Context) -> usize {
    let warps = context.actors.threads();
    let [w32, w64, _] = context.program.sizes;
    // Local memory needs a word for each lane, and for each byte a mask of the lanes that have written it.
    // The frames of nested calls add up.
    let frames: usize = context.program.functions.iter().map(|f| f.frame as usize).sum();
    let local = context.actors.ctas * context.actors.warps * frames / 4 * 144;
    let bytes = warps * (128 * w32 + 256 * w64) + shadow_bytes(context) as usize + local;
    let room = ((1 << 30) / bytes.max(1)).clamp(1, RESIDENT);
    let held = context.options.resident.map_or(RESIDENT as u64, |ctas| ctas / context.ranks());
    room.min(usize::try_from(held).unwrap_or(RESIDENT)).max(1)
}

/// Checks that a grid which overlaps with the previous one has a thread that waits for its end. Without one,
/// the grid may end first, and the wait of the next grid does not cover the previous grid. Whether the next
/// grid relies on that is not known.
fn check_grid_after_next(context: &Context, options: &Options, total: &mut Total) {
    let waits = |(inst, counter): (&Inst, &Counter)| {
        matches!(inst.op, Op::Griddepcontrol(GridDependency::Wait)) && counter.lanes > 0
    };
    let waited = context.program.code.iter().zip(&total.counters.instructions).any(waits);
    if !context.launch.overlapping || waited {
        return;
    }
    total.overtaken = true;
    let kind = match options.by_the_letter {
        true => HazardKind::BeforeGridWait,
        false => HazardKind::EarlyAccess,
    };
    // Accesses of such a grid are reported as separate findings.
    if options.checks.races && options.only.is_none() && !total.findings.has(kind) {
        total.findings.report(kind, 0, None, || {
            let message = "no thread executes griddepcontrol.wait: this grid may end before the previous one, and a \
                           grid that waits for this one then does not wait for the previous one";
            (Vec::new(), None, message.into())
        });
    }
}

/// Makes the checks that are possible only after all CTAs have ended: races between CTAs that ran one after
/// the other, and outputs that were not written.
fn after_checks(context: &Context, kernel: &Kernel, options: &Options, findings: &mut Findings) {
    let line = |pc: u32| context.program.code[pc as usize].line;
    for region in &context.global.regions {
        if !options.checks.races {
            break;
        }
        let Some((granule, writer, reader)) = region.read_and_written() else { continue };
        let offset = granule as i64 * i64::from(context.program.granules[1]);
        let thread = |cluster: Option<u32>| {
            cluster.map(|n| ThreadId { cta: context.cta(u64::from(n), 0), warp: 0, lane: 0 })
        };
        findings.report(HazardKind::Race, line(writer.pc), Some(line(reader.pc)), || {
            let place = Place { space: ptx::Space::Global, name: region.name.clone(), offset };
            let threads = [thread(writer.cta), thread(reader.cta)].into_iter().flatten().collect();
            (threads, Some(place), "writes memory that another CTA reads; the CTAs are not ordered".into())
        });
    }
    for region in context.global.regions.iter().filter(|_| options.checks.races) {
        let granule = context.program.granules[1] as usize;
        for (at, pc) in region.incoherent_reads(granule) {
            findings.report(HazardKind::NonCoherentRead, line(pc), None, || {
                let offset = (at * granule) as i64;
                let place = Place { space: ptx::Space::Global, name: region.name.clone(), offset };
                let message = "reads memory by ld.global.nc that this launch also writes: the load may return \
                               an old value, whatever orders it";
                (Vec::new(), Some(place), message.into())
            });
        }
    }
    if options.checks.unwritten && options.only.is_none() && !findings.lost_global {
        for (index, (spec, region)) in kernel.buffers.iter().zip(&context.global.regions).enumerate() {
            if spec.access == Access::Write {
                check_written(
                    options.must_write.get(&index).map(Vec::as_slice),
                    spec.bytes,
                    region,
                    findings,
                );
            }
        }
    }
}

fn check_written(
    ranges: Option<&[std::ops::Range<usize>]>,
    bytes: usize,
    region: &Region,
    findings: &mut Findings,
) {
    let Some(written) = region.written else { return };
    for range in ranges.unwrap_or(std::slice::from_ref(&(0..bytes))) {
        if let Some((first, count)) = written.missing(range.clone()) {
            findings.report(HazardKind::UnwrittenOutput, 0, None, || {
                let place =
                    Place { space: ptx::Space::Global, name: region.name.clone(), offset: first as i64 };
                (Vec::new(), Some(place), format!("{count} bytes of the output were never written"))
            });
        }
    }
}

/// Marks the bytes that the kernel wrote as initialised for later launches.
fn keep_written(kernel: &Kernel, buffers: &mut [&mut Buffer], fresh: Vec<Bitmap>) {
    for ((spec, buffer), fresh) in kernel.buffers.iter().zip(buffers).zip(fresh) {
        if spec.access == Access::Write {
            buffer.initialised.union(&fresh);
        }
    }
}
