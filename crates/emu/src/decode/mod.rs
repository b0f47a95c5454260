//! Decodes PTX to a flat list of instructions. Operands are slots of the register files, branch targets are
//! indices, and each branch has its point of reconvergence. A malformed instruction is rejected here, before
//! the kernel runs.

mod bulk;
mod by_slot;
mod defined;
mod effects;
mod flow;
mod jumps;
mod kept;
mod layout;
mod matrix;
mod moves;
mod operands;
mod origin;
mod region;
mod synchronisation;
mod tensor_memory;
mod unread;
mod wmma;

use std::collections::HashMap;

use ptx::{
    Atomic, Body, Function, Kernel, Memory, Name, Op, Operand, Param, ParamSpace, Reg, Space, SpecialReg,
    Statement, Type,
};

pub(crate) use defined::{Join, Touches, UndefinedRule, Watch};
pub(crate) use kept::decoded;
pub(crate) use layout::{Layout, SharedVariable, VariableRegion};
pub(crate) use matrix::wgmma_bits;
pub(crate) use operands::{scope_strength, strength};

use crate::EmuError;
use crate::memory::GlobalMemory;
use crate::report::Options;
use crate::semantics::Fragment;

/// The name of the memory in which the CTAs of a cooperative launch count their arrivals.
pub(crate) const WORKSPACE: &str = "the grid workspace";

/// Bytes of the grid workspace, which holds its size and the barrier.
const WORKSPACE_BYTES: usize = 64;

/// A missing instruction index: the branch has no point of reconvergence.
pub(crate) const NOWHERE: u32 = u32::MAX;

/// A register file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Class {
    /// 8, 16 and 32 bits.
    W32,
    W64,
    Pred,
    /// No register: an unused result or an absent operand.
    Sink,
}

impl Class {
    pub fn of(ty: Type) -> Class {
        match ty.bits() {
            1 if ty == Type::Pred => Class::Pred,
            64 => Class::W64,
            _ => Class::W32,
        }
    }
}

/// A register, constant or special register. A constant is a register that is never written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Slot {
    pub class: Class,
    pub index: u16,
}

impl Slot {
    pub const NONE: Slot = Slot { class: Class::Sink, index: 0 };

    #[inline(always)]
    pub fn at(self) -> usize {
        usize::from(self.index)
    }

    pub fn is_some(self) -> bool {
        self.class != Class::Sink
    }

    fn key(self) -> (u8, u16) {
        (self.class as u8, self.index)
    }
}

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(crate) struct Inst {
    pub op: Op,
    pub line: u32,
    /// Index in [`Program::code`].
    pub pc: u32,
    /// Index among the module's instructions. Trace events and counters use this index.
    pub number: u32,
    /// Predicate and whether it is negated.
    pub guard: Option<(u16, bool)>,
    /// Results. The second one is the predicate of a pair, or the carry flag.
    pub d: [Slot; 2],
    /// Sources. The last one may be the carry flag.
    pub s: [Slot; 4],
    /// Bit i is set when predicate source i is negated.
    pub negated: u8,
    /// Bytes of an element of a load, store or atomic in memory; 0 for others.
    pub width: u8,
    /// Address: base and offset in `space`.
    pub base: Slot,
    pub offset: i64,
    pub space: Space,
    /// Branch target, index of a call, index of a fragment, or [`CLOCK`].
    pub target: u32,
    /// The instruction where lanes that diverge here reconverge.
    pub reconverge: u32,
    /// Range in [`Program::pool`] with the elements of vectors, fragments of matrices, or branch targets.
    pub list: (u32, u16),
    /// The source address of a cp.async; for a bulk copy, the address in global memory or of the tensor map.
    pub source: (Slot, i64),
    /// Address of the mbarrier on which an asynchronous copy completes.
    pub signal: (Slot, i64),
    /// Index in [`Program::touches`], if the instruction reads or writes registers of a wgmma.
    pub touches: Option<u32>,
    /// Index in [`Program::watches`], if the instruction reads or writes a register that may be undefined.
    pub watched: Option<u32>,
    /// Whether it is an atomic whose result no instruction reads.
    pub unread: bool,
    /// The action that replaces `op`, if the instruction has one.
    pub special: Option<Box<Special>>,
}

/// The action of a decoded instruction that is not an operation of PTX. The instruction's `op` is
/// [`Op::Pmevent`], which does nothing.
#[derive(Clone, Debug)]
pub(crate) enum Special {
    /// An instruction that the emulator does not implement.
    Unsupported(String),
    /// `__assertfail(message, file, line, function, size of a character)`.
    Assert(SystemCall),
    /// `vprintf(format, values)`.
    Print(SystemCall),
}

/// A call of a function of the CUDA runtime. All offsets are relative to the caller's frame.
#[derive(Clone, Debug)]
pub(crate) struct SystemCall {
    /// Offset and bytes of each argument.
    pub arguments: Vec<(u32, u32)>,
    pub result: Option<u32>,
}

/// `target` of a `mov` that reads a clock.
pub(crate) const CLOCK: u32 = 1;

/// How a parameter or result is passed between caller and callee.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Transfer {
    Register {
        from: Slot,
        to: Slot,
    },
    /// Bytes of local memory. The offsets are relative to the caller's and the callee's frame.
    Bytes {
        caller: u32,
        callee: u32,
        bytes: u32,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub callee: usize,
    pub arguments: Vec<Transfer>,
    pub results: Vec<Transfer>,
}

impl Call {
    /// The registers that the call reads and writes, in the caller and in the callee.
    fn registers(&self) -> impl Iterator<Item = Slot> {
        let slots = self.arguments.iter().chain(&self.results).flat_map(|t| match *t {
            Transfer::Register { from, to } => [from, to],
            Transfer::Bytes { .. } => [Slot::NONE; 2],
        });
        slots.filter(|slot| slot.is_some())
    }

    /// The registers of the caller that the return writes.
    fn result_registers(&self) -> impl Iterator<Item = Slot> {
        self.results.iter().filter_map(|t| match *t {
            Transfer::Register { to, .. } if to.is_some() => Some(to),
            _ => None,
        })
    }
}

/// Properties of a function that the executor needs.
#[derive(Clone, Debug, Default)]
pub(crate) struct FunctionInfo {
    pub name: String,
    /// First instruction, and one past the last instruction.
    pub start: u32,
    pub end: u32,
    /// Per class, the first register and the number of registers.
    pub w32: (u16, u16),
    pub w64: (u16, u16),
    pub pred: (u16, u16),
    /// Bytes of local memory per thread.
    pub frame: u32,
    /// The suspects among its registers.
    pub suspects: Vec<u32>,
}

impl FunctionInfo {
    fn owns(&self, slot: Slot) -> bool {
        let (first, count) = match slot.class {
            Class::W32 => self.w32,
            Class::W64 => self.w64,
            Class::Pred => self.pred,
            Class::Sink => return false,
        };
        slot.index.checked_sub(first).is_some_and(|at| at < count)
    }
}

/// A kernel ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    pub code: Vec<Inst>,
    pub pool: Vec<Slot>,
    pub targets: Vec<u32>,
    pub calls: Vec<Call>,
    /// Fragments of the `wmma` loads and stores.
    pub fragments: Vec<Fragment>,
    pub functions: Vec<FunctionInfo>,
    pub entry: usize,
    /// Slots per class.
    pub sizes: [usize; 3],
    pub constants: Vec<(Slot, u64)>,
    pub specials: Vec<(Slot, SpecialReg)>,
    /// Addresses in shared memory, without the rank of the CTA in its cluster.
    pub shared_addresses: Vec<(Slot, u64)>,
    /// Frame pointer into local memory.
    pub frame_pointer: Slot,
    pub layout: Layout,
    /// Address of the grid workspace, which `%envreg1` and `%envreg2` name; 0 in a launch that is not
    /// cooperative.
    pub workspace: u64,
    /// Width in bytes of the narrowest access to shared memory and to global memory.
    pub granules: [u32; 2],
    /// Registers that may be undefined when they are read, in the order of [`Slot::key`].
    pub suspects: Vec<Slot>,
    pub watches: Vec<Watch>,
    /// Registers of a wgmma that instructions of other kinds read or write.
    pub touches: Vec<Touches>,
    /// Whether CTAs may communicate: the kernel has atomics, or strong accesses to global memory.
    pub communicates: bool,
    /// Whether the kernel has accesses by the asynchronous proxy, or mbarriers.
    pub asynchronous: bool,
    /// Whether it cancels clusters that have not started.
    pub cancels: bool,
    /// Whether the kernel uses tensor memory.
    pub tensor: bool,
}

/// Decodes the kernel's entry and the functions that it calls.
///
/// With `follow_loads`, registers that a load writes are watched like registers that may be undefined.
fn decode(kernel: &Kernel, options: &Options, follow_loads: bool) -> Result<Program, EmuError> {
    let (module, buffers) = (&kernel.module, kernel.buffers.len());
    let functions: Vec<&Function> = module.functions().collect();
    let entry = functions
        .iter()
        .position(|f| f.kind == ptx::FunctionKind::Entry && f.body.is_some() && *f.name == *kernel.entry)
        .ok_or_else(|| EmuError::NoEntry {
            name: kernel.entry.clone(),
            available: module.entries().map(|f| f.name.to_string()).collect(),
        })?;
    let reached = module.reached_from(&kernel.entry);
    let layout =
        Layout::new(module, &kernel.entry, buffers, (kernel.launch.dynamic_shared, options.placement))?;
    let mut decoder = Decoder {
        functions: &functions,
        layout: &layout,
        current: 0,
        line: 0,
        number: 0,
        infos: Vec::new(),
        next: [0; 3],
        registers: Vec::new(),
        constants: HashMap::new(),
        specials: HashMap::new(),
        shared_addresses: HashMap::new(),
        frame_pointer: Slot { class: Class::W64, index: 0 },
        carry: Slot { class: Class::Pred, index: 0 },
        labels: Vec::new(),
        code: Vec::new(),
        pool: Vec::new(),
        targets: Vec::new(),
        calls: Vec::new(),
        fragments: Vec::new(),
        granules: [16, 16],
        communicates: false,
        asynchronous: false,
        cancels: false,
        tensor: false,
    };
    decoder.assign_registers(&reached)?;
    for (index, function) in functions.iter().enumerate() {
        decoder.function(index, function, reached[index])?;
    }
    let Decoder {
        infos,
        next,
        constants,
        specials,
        shared_addresses,
        frame_pointer,
        code,
        pool,
        targets,
        calls,
        fragments,
        granules,
        communicates,
        asynchronous,
        cancels,
        tensor,
        ..
    } = decoder;
    let mut program = Program {
        code,
        pool,
        targets,
        calls,
        fragments,
        functions: infos,
        entry,
        sizes: next.map(|n| n as usize),
        constants: constants.into_iter().map(|((_, value), slot)| (slot, value)).collect(),
        specials: specials.into_iter().map(|(special, slot)| (slot, special)).collect(),
        shared_addresses: shared_addresses.into_iter().map(|((_, address), slot)| (slot, address)).collect(),
        frame_pointer,
        layout,
        workspace: 0,
        granules,
        suspects: Vec::new(),
        watches: Vec::new(),
        touches: Vec::new(),
        communicates,
        asynchronous,
        cancels,
        tensor,
    };
    let names_workspace = |special| matches!(special, SpecialReg::Envreg1 | SpecialReg::Envreg2);
    if options.cooperative && program.specials.iter().any(|(_, special)| names_workspace(*special)) {
        program.workspace = GlobalMemory::base(buffers + program.layout.variables.len());
        let contents = vec![0; WORKSPACE_BYTES];
        program.layout.variables.push(VariableRegion { name: WORKSPACE.to_owned(), contents });
    }
    for info in program.functions.clone() {
        flow::reconvergence(&mut program.code, &program.targets, info.start, info.end);
    }
    defined::watch(&mut program, follow_loads);
    defined::touch(&mut program);
    Ok(program)
}

/// State of decoding.
struct Decoder<'m> {
    functions: &'m [&'m Function],
    layout: &'m Layout,
    /// Index of the function being decoded, and the line.
    current: usize,
    line: u32,
    number: u32,
    infos: Vec<FunctionInfo>,
    /// Next free slot per class.
    next: [u32; 3],
    /// Slots of each function's registers.
    registers: Vec<Vec<Slot>>,
    constants: HashMap<(Class, u64), Slot>,
    specials: HashMap<SpecialReg, Slot>,
    shared_addresses: HashMap<(Class, u64), Slot>,
    frame_pointer: Slot,
    /// The carry flag CC.CF.
    carry: Slot,
    /// Instruction index of each label of the current function.
    labels: Vec<u32>,
    code: Vec<Inst>,
    pool: Vec<Slot>,
    targets: Vec<u32>,
    calls: Vec<Call>,
    fragments: Vec<Fragment>,
    granules: [u32; 2],
    communicates: bool,
    asynchronous: bool,
    cancels: bool,
    tensor: bool,
}

/// Which registers of a body are parameters or appear in its instructions.
fn mentioned(function: &Function, body: &Body) -> Vec<bool> {
    let mut mentioned = vec![false; body.registers.len()];
    mentioned.iter_mut().take(function.register_params()).for_each(|parameter| *parameter = true);
    let mut mark = |register: Reg| {
        if let Some(slot) = mentioned.get_mut(register.0 as usize) {
            *slot = true;
        }
    };
    for statement in &body.statements {
        if let Statement::Inst(instruction) = statement {
            instruction.registers_read(&mut mark);
            instruction.registers_written(&mut mark);
        }
    }
    mentioned
}

impl Decoder<'_> {
    fn assign_registers(&mut self, reached: &[bool]) -> Result<(), EmuError> {
        self.frame_pointer = self.new_slot(Class::W64)?;
        self.carry = self.new_slot(Class::Pred)?;
        for (index, function) in self.functions.iter().enumerate() {
            let before = self.next.map(|n| n as u16);
            let mut slots = Vec::new();
            for body in function.body.iter().filter(|_| reached[index]) {
                // Only these get a slot: compilers declare more registers than they use, and each recursive
                // call saves a copy of all registers.
                for (register, mentioned) in body.registers.iter().zip(mentioned(function, body)) {
                    slots.push(match register.ty {
                        _ if !mentioned => Slot::NONE,
                        // The lower half; the slot behind it is the upper half.
                        Type::B128 => {
                            let low = self.new_slot(Class::W64)?;
                            self.new_slot(Class::W64)?;
                            low
                        }
                        ty => self.new_slot(Class::of(ty))?,
                    });
                }
            }
            let count = |class: usize| (before[class], self.next[class] as u16 - before[class]);
            self.infos.push(FunctionInfo {
                name: function.name.to_string(),
                w32: count(0),
                w64: count(1),
                pred: count(2),
                frame: self.layout.frames[index].bytes,
                ..FunctionInfo::default()
            });
            self.registers.push(slots);
        }
        Ok(())
    }

    fn new_slot(&mut self, class: Class) -> Result<Slot, EmuError> {
        let next = &mut self.next[class as usize];
        let index = u16::try_from(*next).ok().filter(|&index| index < u16::MAX);
        let index = index.ok_or_else(|| EmuError::Unsupported {
            line: 0,
            what: "more than 65535 registers of a width".into(),
        })?;
        *next += 1;
        Ok(Slot { class, index })
    }

    fn constant(&mut self, class: Class, value: u64) -> Result<Slot, EmuError> {
        let value = if class == Class::W32 { value & 0xffff_ffff } else { value };
        if let Some(slot) = self.constants.get(&(class, value)) {
            return Ok(*slot);
        }
        let slot = self.new_slot(class)?;
        self.constants.insert((class, value), slot);
        Ok(slot)
    }

    /// A slot with an address in the shared memory of the CTA that runs.
    pub(super) fn shared_address(&mut self, class: Class, address: u64) -> Result<Slot, EmuError> {
        let slot = match self.shared_addresses.get(&(class, address)) {
            Some(slot) => return Ok(*slot),
            None => self.new_slot(class)?,
        };
        self.shared_addresses.insert((class, address), slot);
        Ok(slot)
    }

    fn function(&mut self, index: usize, function: &Function, reached: bool) -> Result<(), EmuError> {
        self.current = index;
        self.infos[index].start = self.code.len() as u32;
        if let Some(body) = &function.body {
            let mut at = self.code.len() as u32;
            self.labels = vec![NOWHERE; body.labels.len()];
            for statement in &body.statements {
                match statement {
                    Statement::Label(label) => self.labels[label.0 as usize] = at,
                    Statement::Inst(_) => at += 1,
                    Statement::Pragma(_) => {}
                }
            }
            let mentions = unread::mentions(body);
            for statement in &body.statements {
                let Statement::Inst(inst) = statement else { continue };
                self.line = inst.line;
                let mut decoded = match reached {
                    false => Inst::new(Op::Trap, inst.line),
                    true => match self.instruction(inst) {
                        // An unsupported instruction ends the run only if it is executed.
                        Err(EmuError::Unsupported { line, what }) => {
                            let guard = self.guard(inst)?;
                            Inst { guard, ..Inst::special(line, Special::Unsupported(what)) }
                        }
                        decoded => decoded?,
                    },
                };
                decoded.unread = unread::is_unread(inst, &mentions);
                decoded.number = self.number;
                decoded.pc = self.code.len() as u32;
                self.number += 1;
                self.code.push(decoded);
            }
        }
        // A body may end without `ret`, and a label may follow the last instruction.
        let pc = self.code.len() as u32;
        let end = Inst { pc, number: self.number, ..Inst::new(Op::Ret { uni: false }, self.line) };
        self.code.push(end);
        self.infos[index].end = self.code.len() as u32;
        Ok(())
    }

    fn malformed<T>(&self, what: impl Into<String>) -> Result<T, EmuError> {
        Err(EmuError::Malformed { line: self.line, what: what.into() })
    }

    fn unsupported<T>(&self, what: impl Into<String>) -> Result<T, EmuError> {
        Err(EmuError::Unsupported { line: self.line, what: what.into() })
    }

    fn call(&mut self, callee: &Name, results: &[Operand], arguments: &[Operand]) -> Result<u32, EmuError> {
        let Some(index) = self.functions.iter().position(|f| f.name == *callee && f.body.is_some()) else {
            return self.unsupported(format!("a call of `{callee}`, which has no body"));
        };
        let function = self.functions[index];
        if function.params.len() != arguments.len() || function.returns.len() != results.len() {
            return self
                .malformed(format!("`{callee}` is called with the wrong number of arguments or results"));
        }
        let mut call = Call { callee: index, arguments: Vec::new(), results: Vec::new() };
        for (param, given) in function.params.iter().zip(arguments) {
            let transfer = self.transfer(index, param, given)?;
            call.arguments.push(transfer);
        }
        for (param, given) in function.returns.iter().zip(results) {
            let transfer = match self.transfer(index, param, given)? {
                Transfer::Register { from, to } => Transfer::Register { from: to, to: from },
                bytes => bytes,
            };
            call.results.push(transfer);
        }
        self.calls.push(call);
        Ok(self.calls.len() as u32 - 1)
    }

    /// A call of a function that the module does not define: one of the CUDA runtime, or an unsupported one.
    pub(super) fn system_call(
        &self,
        callee: &str,
        results: &[Operand],
        arguments: &[Operand],
    ) -> Result<Special, EmuError> {
        let frame = &self.layout.frames[self.current];
        let body = self.functions[self.current].body.iter().flat_map(|b| &b.variables);
        let bytes: HashMap<&str, u32> = body.map(|v| (&*v.name, v.bytes() as u32)).collect();
        let place = |operand: &Operand| match operand {
            Operand::Symbol(name, offset) => {
                let at = frame.offset_of(name)?.checked_add_signed(i32::try_from(*offset).ok()?)?;
                Some((at, *bytes.get(&**name)?))
            }
            _ => None,
        };
        let call = || {
            let arguments = arguments.iter().map(place).collect::<Option<Vec<_>>>()?;
            Some(SystemCall { arguments, result: results.first().and_then(place).map(|(at, _)| at) })
        };
        match (callee, call()) {
            ("__assertfail", Some(call)) => Ok(Special::Assert(call)),
            ("vprintf", Some(call)) => Ok(Special::Print(call)),
            _ => self.unsupported(format!("a call of `{callee}`, which has no body")),
        }
    }

    fn is_defined(&self, callee: &str) -> bool {
        self.functions.iter().any(|f| *f.name == *callee && f.body.is_some())
    }

    /// How an argument or result of the caller is passed to a parameter of the callee.
    fn transfer(&mut self, callee: usize, param: &Param, given: &Operand) -> Result<Transfer, EmuError> {
        match (param.space, given) {
            (ParamSpace::Param, Operand::Symbol(name, offset)) => {
                let frames = &self.layout.frames;
                let (caller, callee) =
                    (frames[self.current].offset_of(name), frames[callee].offset_of(&param.name));
                match (caller, callee) {
                    (Some(caller), Some(callee)) => Ok(Transfer::Bytes {
                        caller: (i64::from(caller) + offset) as u32,
                        callee,
                        bytes: param.bytes(),
                    }),
                    _ => self.malformed(format!("`{name}` is not a .param variable of the caller")),
                }
            }
            (ParamSpace::Reg, operand) => {
                let body = self.functions[callee].body.as_ref();
                let position = body.and_then(|b| b.registers.iter().position(|r| r.name == param.name));
                let Some(to) = position.and_then(|p| self.registers[callee].get(p).copied()) else {
                    return self.malformed(format!("`{}` is not a register of the callee", param.name));
                };
                let from = self.source(operand, param.ty)?;
                Ok(Transfer::Register { from, to })
            }
            (ParamSpace::Param, _) => {
                self.unsupported("a register or constant passed to a .param of a function")
            }
        }
    }
}

impl Inst {
    fn new(op: Op, line: u32) -> Inst {
        let width = match op {
            Op::Ld(Memory { ty, .. })
            | Op::St(Memory { ty, .. })
            | Op::Atom(Atomic { ty, .. })
            | Op::Red(Atomic { ty, .. }) => element_width(ty),
            _ => 0,
        };
        Inst {
            op,
            width,
            line,
            pc: 0,
            number: 0,
            guard: None,
            d: [Slot::NONE; 2],
            s: [Slot::NONE; 4],
            negated: 0,
            base: Slot::NONE,
            offset: 0,
            space: Space::Generic,
            target: NOWHERE,
            reconverge: NOWHERE,
            list: (0, 0),
            source: (Slot::NONE, 0),
            signal: (Slot::NONE, 0),
            touches: None,
            watched: None,
            unread: false,
            special: None,
        }
    }

    fn special(line: u32, special: Special) -> Inst {
        Inst { special: Some(Box::new(special)), ..Inst::new(Op::Pmevent, line) }
    }
}

/// Bytes of an element: a packed type has two.
pub(crate) fn element_width(ty: Type) -> u8 {
    let packed = matches!(ty, Type::F16x2 | Type::Bf16x2);
    (ty.bytes() >> u32::from(packed)) as u8
}

impl Program {
    /// The index of a register in [`Program::suspects`], if it is there.
    pub fn suspect(&self, slot: Slot) -> Option<u32> {
        self.suspects.binary_search_by_key(&slot.key(), |s| s.key()).ok().map(|at| at as u32)
    }

    /// The pool slots of an instruction: its vector, fragments or other list.
    #[inline(always)]
    pub fn slots(&self, inst: &Inst) -> &[Slot] {
        &self.pool[inst.list.0 as usize..][..usize::from(inst.list.1)]
    }
}
