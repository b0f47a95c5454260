//! Kernels that are ready to launch.

use std::sync::{Arc, OnceLock};

use driver::{Call, Context, DeviceSlice, DriverError, Expect, Function, Resources, Stream, StreamRef};
use kernels::{Arch, BufferKind, KernelError, Plan, Step, bind, emit, select};
use problem::{Operand, OperandSpec, Problem, Tensor};
use smallvec::SmallVec;

use super::candidates::{Candidate, PlanSource, candidates, unaligned};
use super::launches::{INLINE, Launches, check_slice};
use super::loaded::{Code, Kernels, Key};
use crate::AttentionError;

/// Maximum spilled bytes per thread of an unmeasured plan. A few registers saved outside the main loop have
/// no measurable cost. More spills than these are inside the loop.
const SPILLS: u32 = 64;
/// Maximum spilled bytes per thread of a measured plan. The measured time includes the spills of that time,
/// so only another compiler version can exceed them.
const MEASURED_SPILLS: u32 = 256;
/// The tensors of the forward pass: Q, K, V and O.
const TENSORS: usize = Tensor::FORWARD.len();

/// Alignment in bytes that tensor maps need of the addresses of tables.
const TABLE_ALIGNMENT: u64 = 16;

/// A plan that was tried and rejected.
#[derive(Clone, Debug, PartialEq)]
pub struct Fallback {
    /// The plan.
    pub plan: Plan,
    /// Where it came from.
    pub source: PlanSource,
    /// Why the plan was rejected.
    pub reason: AttentionError,
}

/// The kernels for one problem on one device, loaded, with the resources that their plan states. Any thread
/// may use them.
#[derive(Debug)]
pub struct Prepared {
    context: Arc<Context>,
    kernels: Arc<Kernels>,
    arch: Arch,
    /// Why the first candidate came first.
    why: Vec<String>,
    /// The problem that was compiled. A problem without rows is compiled with one row.
    problem: Problem,
    /// Whether the problem has no rows, so that there is nothing to compute.
    empty: bool,
    /// The operands that the caller provides.
    callers: Vec<Operand>,
    /// The alignment in bytes of each of them.
    accepted: Vec<u64>,
    /// The indices of the tensors among `callers`, whose addresses decide between `main` and `unaligned`.
    tensors: Vec<usize>,
    /// The size and alignment that `main` needs of the slices of each of `callers`.
    limits: Vec<Limit>,
    source: PlanSource,
    main: Ready,
    /// The variant for tensors whose addresses are not multiples of 16 bytes; compiled when first needed.
    unaligned: OnceLock<Ready>,
    /// The indices of the tables among `callers` whose addresses must be multiples of 16 bytes.
    aligned_tables: Vec<usize>,
    /// The variant for tables at other addresses; compiled when first needed.
    unaligned_tables: OnceLock<Ready>,
    fallbacks: Vec<Fallback>,
}

/// The slices of an operand that a kernel takes.
#[derive(Clone, Copy, Debug)]
struct Limit {
    bytes: usize,
    /// The bits of the address that must be 0.
    zeros: u64,
}

/// A plan's loaded kernels and their launch arguments for the problem.
#[derive(Debug)]
struct Ready {
    plan: Plan,
    launches: Launches,
}

impl Prepared {
    pub(super) fn new(
        context: &Arc<Context>,
        kernels: &Arc<Kernels>,
        arch: &Arch,
        problem: &Problem,
        plan: Option<&Plan>,
    ) -> Result<Prepared, AttentionError> {
        let (problem, empty) = (problem.with_a_row().into_owned(), problem.is_empty());
        let callers = callers(&problem);
        let mut fallbacks = Vec::new();
        let device = select::Device { name: &context.info().name, arch: *arch };
        let (all, why) = candidates(&problem, &device, plan)?;
        let mut all = all.into_iter().peekable();
        while let Some(Candidate { plan, source }) = all.next() {
            let last = all.peek().is_none();
            let spills = if last { None } else { Some(spills(source)) };
            match Ready::new(context, kernels, arch, &problem, plan.clone(), spills) {
                Ok(main) => {
                    let accepted: Vec<u64> = problem.operands().map(element_bytes).collect();
                    let is_before = |operand: &Operand| *operand == Operand::OutBefore;
                    let before = callers.iter().position(is_before);
                    let tensors: Vec<usize> = (0..problem.tensors().len()).chain(before).collect();
                    let aligned_tables = positions(&callers, &main.plan.aligned_tables(&problem));
                    let mut zeros: Vec<u64> = accepted.iter().map(|&alignment| alignment - 1).collect();
                    tensors.iter().for_each(|&index| zeros[index] |= main.plan.alignment() - 1);
                    aligned_tables.iter().for_each(|&index| zeros[index] |= TABLE_ALIGNMENT - 1);
                    let limits = main.launches.needed().iter().zip(zeros);
                    return Ok(Prepared {
                        context: context.clone(),
                        kernels: kernels.clone(),
                        arch: *arch,
                        why,
                        limits: limits.map(|(&bytes, zeros)| Limit { bytes, zeros }).collect(),
                        accepted,
                        tensors,
                        aligned_tables,
                        problem,
                        empty,
                        callers,
                        source,
                        main,
                        unaligned: OnceLock::new(),
                        unaligned_tables: OnceLock::new(),
                        fallbacks,
                    });
                }
                Err(reason) if !last && is_the_plans_fault(&reason) => {
                    fallbacks.push(Fallback { plan, source, reason });
                }
                Err(reason) => return Err(reason),
            }
        }
        // Unreachable: `candidates` returns at least one plan or an error.
        Err(AttentionError::Unsupported {
            argument: "problem",
            value: "without a plan".to_owned(),
            accepted: "one that has a plan".to_owned(),
        })
    }

    /// The plan in use.
    pub fn plan(&self) -> &Plan {
        &self.main.plan
    }

    /// Where the plan in use came from.
    pub fn choice(&self) -> PlanSource {
        self.source
    }

    /// Why the first candidate plan came first: the sources that were consulted, in order, in words.
    pub fn why(&self) -> &[String] {
        &self.why
    }

    /// The plans that were tried before and rejected, with the reasons.
    pub fn fallbacks(&self) -> &[Fallback] {
        &self.fallbacks
    }

    /// Registers, shared memory and spills of the plan's first kernel, as the driver reports them.
    pub fn resources(&self) -> Resources {
        self.main.launches.first().function.resources()
    }

    /// The function of the first kernel and its launch arguments, to measure the overhead of
    /// [`Prepared::enqueue`].
    pub fn parts(&self) -> (&Function, &Call) {
        (&self.main.launches.first().function, &self.main.launches.first().call)
    }

    /// The context of the device.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The problem that the kernels compute. A problem without rows has one row here.
    pub(crate) fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Bytes of device memory that a launch uses besides its operands.
    pub(crate) fn workspace_bytes(&self) -> usize {
        if self.empty { 0 } else { self.main.launches.own_bytes() }
    }

    /// Enqueues the computation on the stream and returns. The call does not wait, and it may be captured in
    /// a graph.
    ///
    /// Each slice begins at the lowest element of its tensor in memory and covers the span of the problem's
    /// strides. `lse` is `[batch, heads_q, seq_q]` in f32. It is required if the problem's pass asks for the
    /// LSE, else it must be `None`. For tensors and tables whose addresses are not multiples of 16 bytes, a
    /// slower kernel may be needed; the first such call compiles that kernel.
    ///
    /// Any number of streams and threads may enqueue at once. A plan that hands out tiles from a counter has
    /// one counter per stream and per graph. A plan whose CTAs share tiles or divide the keys of a row block,
    /// that lists blocks of keys, or that transposes V, also has scratch memory per stream and per graph: up
    /// to tens of megabytes, up to 256 MiB for lists, and as much as V for its transposition. Both are reused
    /// when a graph is destroyed or the launches of a stream are done. Only the first four streams keep
    /// theirs, for each size up to the largest, which is less than 3.5 times the largest.
    ///
    /// One executable graph never runs concurrently with itself. But executable graphs that were instantiated
    /// from the same captured graph, its clones, and graphs that contain it share one counter and scratch. Do
    /// not run two of these at once.
    ///
    /// # Errors
    /// When a slice is too short or not aligned to its element size, when `lse` is missing or not expected,
    /// when the stream belongs to another device, or when the driver fails.
    pub fn enqueue(
        &self,
        stream: &Stream,
        q: DeviceSlice<'_>,
        k: DeviceSlice<'_>,
        v: DeviceSlice<'_>,
        out: DeviceSlice<'_>,
        lse: Option<DeviceSlice<'_>>,
    ) -> Result<(), AttentionError> {
        self.enqueue_with(stream, [q, k, v, out], lse, &[])
    }

    /// Like [`Prepared::enqueue`], for `[q, k, v, out]` and the problem's other operands: arrays of lengths
    /// ([`Operand::Lengths`], i32), sinks ([`Operand::Sinks`], f32) and tables ([`Operand::Table`]). Each
    /// operand that the problem has is given once, in any order. Lengths are read on the device when the
    /// kernel runs: a graph that is launched again uses the values of that time.
    ///
    /// # Errors
    /// As [`Prepared::enqueue`], and when an operand is missing or not expected.
    pub fn enqueue_with(
        &self,
        stream: &Stream,
        tensors: [DeviceSlice<'_>; TENSORS],
        lse: Option<DeviceSlice<'_>>,
        others: &[(Operand, DeviceSlice<'_>)],
    ) -> Result<(), AttentionError> {
        let wanted = self.problem.pass.lse();
        if lse.is_some() != wanted {
            return Err(AttentionError::LseWanted { prepared: wanted });
        }
        let tensors = Tensor::FORWARD.into_iter().map(Operand::from).zip(tensors);
        let lse = lse.map(|lse| (Operand::Lse, lse));
        let all: SmallVec<[(Operand, DeviceSlice<'_>); INLINE]> =
            tensors.chain(lse).chain(others.iter().copied()).collect();
        self.enqueue_operands(stream, &all)
    }

    /// Like [`Prepared::enqueue`], for the operands of any pass, each once, in any order: those of the
    /// backward pass have no other call. Gradients that are returned are written; the forward pass's outputs
    /// are only read. A problem without rows leaves all outputs as they are.
    ///
    /// ```no_run
    /// use flashcore::gpu::{Buffer, Gpu, Stream};
    /// use flashcore::{DType, Pass, Problem};
    ///
    /// let gpu = Gpu::open(0)?;
    /// let problem = Problem::new(1, 8, 512, 64, DType::F16).with_pass(Pass::DETERMINISTIC);
    /// let prepared = gpu.prepare(&problem, None)?;
    /// let stream = Stream::new(gpu.context())?;
    /// // q, k, v, out, lse and d_out, which are read, and dq, dk and dv.
    /// let mut buffers = Vec::new();
    /// for spec in problem.operands() {
    ///     buffers.push((spec.operand, Buffer::new(gpu.context(), spec.bytes())?));
    /// }
    /// let slices: Vec<_> = buffers.iter().map(|(operand, buffer)| (*operand, buffer.slice())).collect();
    /// prepared.enqueue_operands(&stream, &slices)?;
    /// # Ok::<(), flashcore::AttentionError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Prepared::enqueue`], and when an operand is missing, not expected, or given twice.
    pub fn enqueue_operands(
        &self,
        stream: &Stream,
        operands: &[(Operand, DeviceSlice<'_>)],
    ) -> Result<(), AttentionError> {
        let named = |operand: &Operand| operand.name();
        let unexpected = operands.iter().find(|(operand, _)| !self.callers.contains(operand));
        if let Some((operand, _)) = unexpected {
            return Err(AttentionError::OperandWanted { operand: named(operand), wanted: false });
        }
        let mut slices: SmallVec<[DeviceSlice<'_>; INLINE]> = SmallVec::new();
        for operand in &self.callers {
            let mut given = operands.iter().filter(|(given, _)| given == operand);
            let missing = || AttentionError::OperandWanted { operand: named(operand), wanted: true };
            slices.push(given.next().ok_or_else(missing)?.1);
            if given.next().is_some() {
                return Err(AttentionError::OperandTwice { operand: named(operand) });
            }
        }
        self.launch(stream.into(), |operand| slices[operand])
    }

    /// Launches on the slices of all operands of the problem, which have these numbers.
    pub(crate) fn launch<'s>(
        &self,
        stream: StreamRef<'_>,
        slice: impl Fn(usize) -> DeviceSlice<'s>,
    ) -> Result<(), AttentionError> {
        if self.empty {
            return Ok(());
        }
        let fits = |(operand, limit): (usize, &Limit)| {
            let slice = slice(operand);
            slice.bytes() >= limit.bytes && slice.address() != 0 && slice.address() & limit.zeros == 0
        };
        let ready = match self.limits.iter().enumerate().all(fits) {
            true => &self.main,
            false => {
                let ready = self.variant(|operand| slice(operand).address())?;
                check_slices(ready.launches.needed(), &self.callers, &self.accepted, &slice)?;
                ready
            }
        };
        ready.launches.enqueue(stream, slice)
    }

    /// Compiles the kernel that supports the addresses of the operands.
    pub(crate) fn prepare_variant(&self, address: impl Fn(usize) -> u64) -> Result<(), AttentionError> {
        self.variant(address).map(drop)
    }

    /// The kernel that supports the addresses of the operands, by their number.
    fn variant(&self, address: impl Fn(usize) -> u64) -> Result<&Ready, AttentionError> {
        let (main, alignment) = (&self.main, self.main.plan.alignment());
        if !self.tensors.iter().all(|&tensor| address(tensor).is_multiple_of(alignment)) {
            return self.ready(&self.unaligned, || unaligned(&main.plan, &self.problem, &self.arch));
        }
        let is_aligned = |&table: &usize| address(table).is_multiple_of(TABLE_ALIGNMENT);
        if !self.aligned_tables.iter().all(is_aligned) {
            return self.ready(&self.unaligned_tables, || main.plan.clone().with_unaligned_tables());
        }
        Ok(main)
    }

    /// The variant in `known`, which is compiled when first needed.
    fn ready<'a>(
        &self,
        known: &'a OnceLock<Ready>,
        plan: impl FnOnce() -> Plan,
    ) -> Result<&'a Ready, AttentionError> {
        if let Some(ready) = known.get() {
            return Ok(ready);
        }
        // Only a success is kept: memory that is exhausted now may be free at the next call.
        let ready = Ready::new(&self.context, &self.kernels, &self.arch, &self.problem, plan(), None)?;
        Ok(known.get_or_init(|| ready))
    }
}

impl Ready {
    fn new(
        context: &Arc<Context>,
        kernels: &Kernels,
        arch: &Arch,
        problem: &Problem,
        plan: Plan,
        spills: Option<u32>,
    ) -> Result<Ready, AttentionError> {
        let (baked, contracts) = bind(problem, &plan, arch)?;
        let admit = |step: &Step| Expect { local_bytes: spills, ..Expect::of(&step.launch) };
        let mut expect: Vec<Expect> = contracts.steps.iter().map(admit).collect();
        if let (Some(most), Some(first)) = (plan.max_registers(), expect.first_mut()) {
            first.max_registers = most;
        }
        let key = Key { code: Code::Attention(Box::new((baked, plan.clone().coded()))), expect };
        let callers: Vec<BufferKind> = problem.operands().map(|spec| spec.operand.into()).collect();
        let emit = || emit(problem, &plan, arch);
        let launches = Launches::new((context, kernels), &callers, contracts, key, emit)?;
        Ok(Ready { plan, launches })
    }
}

/// The operands that the caller of a problem provides.
fn callers(problem: &Problem) -> Vec<Operand> {
    problem.operands().map(|spec| spec.operand).collect()
}

/// The indices of tables among the operands.
fn positions(callers: &[Operand], tables: &[u8]) -> Vec<usize> {
    let is_one = |operand: &Operand| tables.iter().any(|&table| *operand == Operand::Table(table));
    callers.iter().enumerate().filter(|(_, operand)| is_one(operand)).map(|(index, _)| index).collect()
}

/// Alignment in bytes that an operand needs: the size of an element, and 2 for 8-bit elements of tensors,
/// which are read in pairs.
fn element_bytes(operand: OperandSpec) -> u64 {
    let bytes = operand.dtype.bytes() as u64;
    if matches!(operand.operand, Operand::Tensor(_)) { bytes.max(2) } else { bytes }
}

/// Checks the caller's slices against the sizes and alignments of their operands.
fn check_slices<'s>(
    needed: &[usize],
    callers: &[Operand],
    accepted: &[u64],
    slice: impl Fn(usize) -> DeviceSlice<'s>,
) -> Result<(), AttentionError> {
    for (index, ((&needed, &operand), &accepted)) in needed.iter().zip(callers).zip(accepted).enumerate() {
        check_slice(operand.into(), needed, accepted, slice(index))?;
    }
    Ok(())
}

/// Maximum spilled bytes per thread while a further candidate remains.
fn spills(source: PlanSource) -> u32 {
    match source {
        PlanSource::Tuned => MEASURED_SPILLS,
        PlanSource::Given | PlanSource::Predicted | PlanSource::Default | PlanSource::Safe => SPILLS,
    }
}

/// Whether the failure is specific to the plan, so that the next candidate may succeed. Invalid PTX is a bug
/// and is reported.
fn is_the_plans_fault(reason: &AttentionError) -> bool {
    matches!(
        reason,
        AttentionError::Kernel(KernelError::Problem(_) | KernelError::Plan(_))
            | AttentionError::Unsupported { .. }
            | AttentionError::Driver(
                DriverError::Admission { .. }
                    | DriverError::Compile { .. }
                    | DriverError::TensorMap(_)
                    | DriverError::Call { call: "cuTensorMapEncodeTiled", .. }
            )
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use problem::Problem;

    #[test]
    fn slices_are_held_against_the_problem() {
        let (none, mut problem) = (DeviceSlice::EMPTY, Problem::mission());
        let check = |problem: &Problem, needed: &[usize]| {
            check_slices(needed, &callers(problem), &vec![1; needed.len()], |_| none)
        };
        assert_eq!(check(&problem, &[0, 0, 0, 0]), Ok(()));
        let error = check(&problem, &[0, 64, 0, 0]).unwrap_err().to_string();
        assert_eq!(error, "k has 0 bytes of device memory; its shape and strides need 64");
        problem.lengths.kv.used = true;
        problem.score.sink = true;
        problem.programs.tables = vec![problem::Table::dense(problem::ElementType::U8, &[3])];
        let error = check(&problem, &[0, 0, 0, 0, 4, 4, 3]).unwrap_err().to_string();
        assert_eq!(error, "seqused_k has 0 bytes of device memory; its shape and strides need 4");
        let names: Vec<&str> = callers(&problem)[4..].iter().map(|operand| operand.name()).collect();
        assert_eq!(names, ["seqused_k", "sinks", "table_0"]);
    }

    #[test]
    fn only_a_plans_own_fault_leads_to_the_next_plan() {
        let admission = DriverError::Admission {
            entry: "e".into(),
            what: "local bytes per thread",
            found: 80,
            accepted: 64,
        };
        assert!(is_the_plans_fault(&admission.into()));
        let refused = DriverError::Call { call: "cuTensorMapEncodeTiled", message: "no".into() };
        assert!(is_the_plans_fault(&refused.into()));
        assert!(!is_the_plans_fault(&DriverError::OutOfMemory { what: "x".into() }.into()));
        assert!(!is_the_plans_fault(&DriverError::NoDriver.into()));
    }
}
