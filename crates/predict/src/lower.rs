//! Lowers a module to the form that the replay uses: every instruction with its cost, its registers and its
//! memory access, after the foldings that ptxas makes within a function.
//!
//! - Copies, address-space conversions, loads of parameters and unpacking are removed (cost table).
//! - An `add` of a constant becomes the offset of an access if only addresses read its result.
//! - A `mul` or `shl` is merged into FFMA, IMAD, IMAD.WIDE or LEA if only one `add` of the same block reads
//!   its result.

use ptx::{
    Address, BarKind, Base, BinaryOp, Body, BulkCopy, BulkReduce, BulkRoute, CacheOp, ClusterBarrier, Imm,
    Instruction, MbarrierOp, MemSem, Module, Op, Operand, Precision, Space, Statement, Type, WgmmaSource,
};
use smallvec::SmallVec;

use super::address::{Linear, alignments, linear};
use super::cost::{Cost, cost};
use super::dataflow::{reads, writes};
use super::machine::Gpu;

/// Effects of an instruction besides arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Arithmetic,
    /// Uses the load-store unit without accessing memory: shuffles.
    Exchange,
    Shared(Direction),
    /// Global, local, constant or generic memory.
    Cached(Direction, Cached),
    /// `cp.async`.
    Copy,
    /// Closes a group of `cp.async` copies.
    Commit,
    /// Waits until at most this many groups are open.
    WaitGroups(u32),
    Barrier(BarKind),
    /// An mbarrier operation: arrival, announcement of bytes, wait.
    Mbarrier,
    /// A bulk copy from or to global memory.
    Bulk,
    /// Stores to another SM of the cluster.
    ToCluster,
    /// Closes a group of bulk stores; waits until at most this many groups are open.
    BulkCommit,
    BulkWait(u32),
    /// A warpgroup product, and whether A is in registers.
    Wgmma {
        from_registers: bool,
    },
    /// Closes a group of products; waits until at most this many groups are open.
    WgmmaCommit,
    WgmmaWait(u32),
    /// Arrival and wait at the cluster barrier.
    ClusterArrive,
    ClusterWait,
    /// A memory fence, or a barrier of a single warp.
    Fence,
    Branch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Load,
    Store,
    Atomic,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cached {
    /// Through L1.
    L1,
    /// Bypasses L1: `.cg`, `.cv`, volatile.
    L2,
    /// Local memory: private to a thread and written back.
    Local,
}

/// Registers of an instruction, numbered over the whole module.
pub(super) type Registers = SmallVec<[u32; 6]>;

#[derive(Clone, Debug)]
pub(super) struct Lowered {
    pub cost: Cost,
    pub action: Action,
    /// Whether the instruction reads predicates as data, and not only as its guard.
    pub selects: bool,
    pub reads: Registers,
    pub writes: Registers,
    /// The result as a linear sum of the sources. Unrolling folds it into offsets.
    pub linear: Option<Linear>,
    /// The address of a scalar load.
    pub load: Option<ScalarLoad>,
}

impl Lowered {
    /// Whether it is `r = r + constant`: a loop's counter.
    pub(super) fn is_induction(&self) -> bool {
        match (&self.linear, self.writes.as_slice()) {
            (Some(sum), [result]) => sum.terms.as_slice() == [(*result, 1)] && sum.constant != 0,
            _ => false,
        }
    }
}

/// The address of a load of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScalarLoad {
    pub base: u32,
    pub offset: i64,
    pub element: u32,
}

/// A basic block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BasicBlock {
    pub start: u32,
    pub len: u32,
    /// Whether its last instruction may branch to its first.
    pub is_loop: bool,
    /// The number of iterations that may be merged into one straight run.
    pub unroll: u32,
    /// Whether the compiler knows the counter in every iteration, and the counter starts from 0.
    pub counted: bool,
}

/// All functions of a module.
#[derive(Debug, Default)]
pub(super) struct LoweredModule {
    /// Indexed by event `pc`.
    pub code: Vec<Lowered>,
    pub blocks: Vec<BasicBlock>,
    /// The block of each `pc`.
    pub block_of: Vec<u32>,
    /// For each register, the number of low bits known to be zero.
    pub alignment: Vec<u8>,
    /// Number of registers of all functions together.
    pub registers: u32,
}

impl LoweredModule {
    /// Lowers every function that has a body.
    pub(super) fn new(module: &Module, gpu: &Gpu) -> LoweredModule {
        let mut program = LoweredModule::default();
        for body in module.functions().filter_map(|f| f.body.as_ref()) {
            program.add(module, body, gpu);
        }
        program
    }

    fn add(&mut self, module: &Module, body: &Body, gpu: &Gpu) {
        let instructions: Vec<&Instruction> = body
            .statements
            .iter()
            .filter_map(|s| if let Statement::Inst(i) = s { Some(i) } else { None })
            .collect();
        let first = self.code.len() as u32;
        self.code.extend(instructions.iter().map(|i| lower(i, gpu, self.registers)));
        self.find_blocks(body, &instructions, first);
        let folded = foldable(&instructions, &self.block_of[first as usize..], body.registers.len());
        folded.into_iter().for_each(|i| self.code[first as usize + i].cost = Cost::FREE);
        self.alignment.extend(alignments(module, body));
        self.registers += body.registers.len() as u32;
    }

    fn find_blocks(&mut self, body: &Body, instructions: &[&Instruction], first: u32) {
        let (mut leaders, mut labels, mut rolled) = (vec![first], vec![None; body.labels.len()], Vec::new());
        let mut pc = first;
        for statement in &body.statements {
            match statement {
                Statement::Label(label) => {
                    leaders.push(pc);
                    if let Some(slot) = labels.get_mut(label.0 as usize) {
                        *slot = Some(pc);
                    }
                }
                Statement::Pragma(text) if text.contains("nounroll") => rolled.push(pc),
                Statement::Pragma(_) => {}
                Statement::Inst(_) => {
                    pc += 1;
                    if ends_block(self.code[pc as usize - 1].action) {
                        leaders.push(pc);
                    }
                }
            }
        }
        leaders.sort_unstable();
        leaders.dedup();
        leaders.retain(|l| *l < pc);
        for (i, start) in leaders.iter().copied().enumerate() {
            let end = leaders.get(i + 1).copied().unwrap_or(pc);
            let last = instructions[(end - 1 - first) as usize];
            let target = match (&last.op, last.operands.first()) {
                (Op::Bra { .. }, Some(Operand::Label(label))) => {
                    labels.get(label.0 as usize).copied().flatten()
                }
                _ => None,
            };
            let is_loop = target == Some(start);
            let range = (start - first) as usize..(end - first) as usize;
            let trips = if is_loop { constant_trips(instructions, range) } else { None };
            let (unroll, counted) = match is_loop && !rolled.contains(&start) {
                true => unroll_factor(end - start, trips),
                false => (1, false),
            };
            self.block_of.extend((start..end).map(|_| self.blocks.len() as u32));
            self.blocks.push(BasicBlock { start, len: end - start, is_loop, unroll, counted });
        }
    }
}

/// The number of iterations that ptxas 13 merges into one straight run, as observed in its code. It unrolls
/// completely where the trip count is known and the result has a few hundred instructions. Otherwise it
/// merges four iterations if the body is short.
fn unroll_factor(len: u32, trips: Option<Trips>) -> (u32, bool) {
    let most = if len <= 16 { 1024 } else { 640 };
    match trips {
        // The replay needs runs that are long enough to have loads of later iterations in flight. A few
        // hundred instructions suffice.
        Some(t) if t.count.saturating_mul(len) <= most => {
            let shown = t.count.min((320 / len).max(1));
            (if shown < t.count { 1 << shown.ilog2() } else { shown }, t.from_zero)
        }
        _ if len <= 64 => (4, false),
        _ => (1, false),
    }
}

/// The properties of a loop with a known trip count.
#[derive(Clone, Copy)]
struct Trips {
    count: u32,
    from_zero: bool,
}

/// The trip count of a loop whose counter has a constant start, step and end.
fn constant_trips(instructions: &[&Instruction], body: std::ops::Range<usize>) -> Option<Trips> {
    let predicate = instructions[body.end - 1].guard?.reg;
    let compare = instructions[body.clone()].iter().find(|i| writes(i).contains(&predicate))?;
    let (Op::Setp { .. }, Some(Operand::Reg(counter)), Some(Operand::Imm(Imm::Int(end)))) =
        (compare.op, compare.operands.get(1), compare.operands.get(2))
    else {
        return None;
    };
    let (mut start, mut step) = (None, None);
    for (i, instruction) in instructions.iter().enumerate().filter(|(_, i)| writes(i).contains(counter)) {
        let sum = linear(instruction, 0)?;
        match (sum.terms.as_slice(), body.contains(&i)) {
            ([], false) if start.is_none() => start = Some(sum.constant),
            ([(r, 1)], true) if *r == counter.0 && step.is_none() => step = Some(sum.constant),
            _ => return None,
        }
    }
    let (start, step) = (start?, step?);
    let count = u32::try_from(end.checked_sub(start)?.checked_div(step)?).ok()?;
    Some(Trips { count: count.max(1), from_zero: start == 0 })
}

pub(super) fn ends_block(action: Action) -> bool {
    use Action as A;
    // The instructions after such a wait depend on it, although no register shows that to the compiler.
    let waits = matches!(action, A::WgmmaWait(_) | A::BulkWait(_) | A::ClusterWait);
    waits || matches!(action, A::Branch | A::Barrier(_))
}

fn lower(instruction: &Instruction, gpu: &Gpu, base: u32) -> Lowered {
    let mut sources: Registers = reads(instruction).into_iter().map(|r| base + r.0).collect();
    let results: Registers = writes(instruction).into_iter().map(|r| base + r.0).collect();
    if instruction.guard.is_some() {
        // If the guard is false, the result keeps its old value, so the result is also a source.
        sources.extend(results.iter().copied());
    }
    Lowered {
        cost: cost(instruction, gpu),
        action: action(instruction),
        selects: selects(instruction),
        reads: sources,
        writes: results,
        linear: linear(instruction, base),
        load: scalar_load(instruction, base),
    }
}

/// Whether an unguarded instruction reads predicates as data: selections, votes, and operations that combine
/// predicates.
fn selects(instruction: &Instruction) -> bool {
    let combines = matches!(instruction.op, Op::Selp(_) | Op::Vote(_) | Op::Setp { .. })
        || matches!(instruction.op, Op::Binary(_, Type::Pred, _));
    combines && instruction.guard.is_none()
}

fn scalar_load(instruction: &Instruction, base: u32) -> Option<ScalarLoad> {
    match (instruction.op, instruction.operands.get(1), instruction.guard) {
        (Op::Ld(m), Some(Operand::Address(Address { base: Base::Reg(r), offset })), None)
            if m.vector == 1 && matches!(m.sem, MemSem::Default | MemSem::Weak) =>
        {
            Some(ScalarLoad { base: base + r.0, offset: *offset, element: m.bytes() })
        }
        _ => None,
    }
}

fn action(instruction: &Instruction) -> Action {
    match &instruction.op {
        Op::Ld(m) if matches!(m.space, Space::Param | Space::Const) => Action::Arithmetic,
        Op::St(m) if m.space == Space::Param => Action::Arithmetic,
        Op::Ld(m) => access(m.space, Direction::Load, past_l1(m)),
        Op::St(m) => access(m.space, Direction::Store, past_l1(m)),
        Op::Atom(a) | Op::Red(a) => access(a.space, Direction::Atomic, true),
        Op::Ldmatrix(_) => Action::Shared(Direction::Load),
        Op::Stmatrix(_) => Action::Shared(Direction::Store),
        Op::WmmaLoad(m) => access(m.space, Direction::Load, false),
        Op::WmmaStore(m) => access(m.space, Direction::Store, false),
        Op::Mbarrier(m) if m.op == MbarrierOp::PendingCount => Action::Arithmetic,
        Op::Mbarrier(_) => Action::Mbarrier,
        Op::CpAsyncMbarrierArrive { .. } => Action::Shared(Direction::Atomic),
        Op::CpAsyncBulk(BulkCopy { route: BulkRoute::CtaToCluster, .. })
        | Op::CpReduceAsyncBulk(BulkReduce { route: BulkRoute::CtaToCluster, .. })
        | Op::StAsync(_)
        | Op::RedAsync(_) => Action::ToCluster,
        Op::CpAsyncBulk(_)
        | Op::CpReduceAsyncBulk(_)
        | Op::CpAsyncBulkTensor(_)
        | Op::CpReduceAsyncBulkTensor(_) => Action::Bulk,
        Op::CpAsyncBulkCommitGroup => Action::BulkCommit,
        Op::CpAsyncBulkWaitGroup { .. } => Action::BulkWait(first_integer(instruction)),
        Op::Wgmma(w) => Action::Wgmma { from_registers: w.a_source == WgmmaSource::Registers },
        Op::WgmmaCommitGroup => Action::WgmmaCommit,
        Op::WgmmaWaitGroup => Action::WgmmaWait(first_integer(instruction)),
        Op::WgmmaFence => Action::Fence,
        Op::BarrierCluster(ClusterBarrier::Arrive { .. }) => Action::ClusterArrive,
        Op::BarrierCluster(ClusterBarrier::Wait { .. }) => Action::ClusterWait,
        Op::Prefetch(..) | Op::Discard(_) => Action::Cached(Direction::Store, Cached::L2),
        Op::CpAsync(_) => Action::Copy,
        Op::CpAsyncCommitGroup => Action::Commit,
        Op::CpAsyncWaitAll => Action::WaitGroups(0),
        Op::CpAsyncWaitGroup => Action::WaitGroups(first_integer(instruction)),
        Op::Shfl(_) | Op::Match(..) | Op::Movmatrix => Action::Exchange,
        Op::Bar { kind, .. } => Action::Barrier(*kind),
        Op::Membar(_) | Op::Fence(..) | Op::FenceProxy(_) | Op::FenceMbarrierInit => Action::Fence,
        Op::BarWarpSync | Op::FenceTensormap(..) | Op::Griddepcontrol(_) => Action::Fence,
        Op::Bra { .. } | Op::BrxIdx { .. } | Op::Call { .. } | Op::Ret { .. } | Op::Exit | Op::Trap => {
            Action::Branch
        }
        _ => Action::Arithmetic,
    }
}

fn first_integer(instruction: &Instruction) -> u32 {
    match instruction.operands.first() {
        Some(Operand::Imm(Imm::Int(n))) => *n as u32,
        _ => 0,
    }
}

fn past_l1(m: &ptx::Memory) -> bool {
    use ptx::MemSem as M;
    matches!(m.cache, Some(CacheOp::Cg | CacheOp::Cv))
        || !matches!(m.sem, M::Default | M::Weak)
        || m.l1 == Some(ptx::Eviction::NoAllocate)
}

fn access(space: Space, direction: Direction, past_l1: bool) -> Action {
    match space {
        Space::Shared | Space::SharedCluster => Action::Shared(direction),
        Space::Local => Action::Cached(direction, Cached::Local),
        _ if past_l1 => Action::Cached(direction, Cached::L2),
        _ => Action::Cached(direction, Cached::L1),
    }
}

/// Positions of the instructions of a function that ptxas merges into others.
fn foldable(instructions: &[&Instruction], block_of: &[u32], registers: usize) -> Vec<usize> {
    let mut uses: Vec<SmallVec<[u32; 2]>> = vec![SmallVec::new(); registers];
    let mut definitions = vec![0u32; registers];
    for (i, instruction) in instructions.iter().enumerate() {
        for r in reads(instruction) {
            uses[r.0 as usize].push(i as u32);
        }
        for r in writes(instruction) {
            definitions[r.0 as usize] += 1;
        }
    }
    let mut folded = Vec::new();
    let mut taken = vec![false; instructions.len()];
    for (i, instruction) in instructions.iter().enumerate() {
        let Some(Operand::Reg(result)) = instruction.operands.first() else { continue };
        let readers = &uses[result.0 as usize];
        if instruction.guard.is_some() || readers.is_empty() || definitions[result.0 as usize] != 1 {
            continue;
        }
        if adds_constant(instruction)
            && readers.iter().all(|u| only_as_address(instructions[*u as usize], *result))
        {
            folded.push(i);
        } else if let [reader] = readers.as_slice() {
            let j = *reader as usize;
            if !taken[j] && block_of[i] == block_of[j] && merges(instruction, instructions[j]) {
                taken[j] = true;
                folded.push(i);
            }
        }
    }
    folded
}

fn adds_constant(instruction: &Instruction) -> bool {
    matches!(instruction.op, Op::Binary(BinaryOp::Add, ty, _) if !ty.is_float())
        && matches!(instruction.operands.get(2), Some(Operand::Imm(_)))
}

fn only_as_address(instruction: &Instruction, register: ptx::Reg) -> bool {
    let in_address =
        |o: &Operand| matches!(o, Operand::Address(a) if matches!(a.base, Base::Reg(r) if r == register));
    let elsewhere = |o: &Operand| match o {
        Operand::Reg(r) => *r == register,
        Operand::Vector(parts) => parts.contains(&Operand::Reg(register)),
        _ => false,
    };
    instruction.operands.iter().any(in_address) && !instruction.operands.iter().any(elsewhere)
}

/// Whether ptxas merges `producer` into `consumer`, its only reader.
fn merges(producer: &Instruction, consumer: &Instruction) -> bool {
    use BinaryOp as B;
    let Op::Binary(second, sum, modifiers) = consumer.op else { return false };
    if !matches!(second, B::Add | B::Sub) {
        return false;
    }
    match producer.op {
        // Contraction requires that neither instruction has an explicit rounding (PTX ISA, `mul` and `add`,
        // "Notes").
        Op::Binary(B::Mul, ty, first) => {
            ty == sum
                && ty.is_float()
                && (first.precision, modifiers.precision) == (Precision::Unspecified, Precision::Unspecified)
        }
        Op::Binary(B::MulLo | B::Shl, ty, _) => {
            second == B::Add && ty.bits() == sum.bits() && ty.bits() == 32
        }
        Op::Binary(B::MulWide, ty, _) => second == B::Add && ty.bits() == 32 && sum.bits() == 64,
        Op::Cvt(c) => c.from.bits() == 32 && !c.from.is_float() && matches!(sum, Type::S64 | Type::U64),
        _ => false,
    }
}
