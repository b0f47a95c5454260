//! Builds the launch contract of a kernel: one call declares a parameter and its argument.

use std::fmt;

use problem::{Operand, Problem, Tensor};
use ptx::{Access, Arg, Builder, F32, Global, Launch, R32, R64, TensorMapPtr, TensorMapSpec};

use crate::program::{Contracts, ProgramBuffer, Step};

/// The contents of a kernel's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferKind {
    /// An operand of the problem.
    Operand(Operand),
    /// An input tensor quantised to 8 bits, dense.
    Codes(Tensor),
    /// Counters that the kernel uses across launches: zero before each launch and after it.
    Counter,
    /// Memory that the kernel uses within a launch. Its contents before and after are arbitrary.
    Scratch,
    /// Memory through which a kernel passes results to later kernels of the program. Temporaries with the
    /// same name are one buffer in all kernels of a program. The contents before and after the program are
    /// arbitrary.
    Temporary(&'static str),
    /// An array of a kernel that is no attention, by its name.
    Array(&'static str),
}

impl BufferKind {
    /// The name of the buffer in findings and errors.
    pub const fn name(self) -> &'static str {
        match self {
            BufferKind::Operand(operand) => operand.name(),
            BufferKind::Codes(Tensor::Q) => "q_codes",
            BufferKind::Codes(Tensor::K) => "k_codes",
            BufferKind::Codes(Tensor::V) => "v_codes",
            BufferKind::Codes(_) => "out_codes",
            BufferKind::Counter => "counter",
            BufferKind::Scratch => "scratch",
            BufferKind::Temporary(name) | BufferKind::Array(name) => name,
        }
    }

    /// The operand of the problem in this buffer.
    pub const fn operand(self) -> Option<Operand> {
        match self {
            BufferKind::Operand(operand) => Some(operand),
            _ => None,
        }
    }

    /// Whether all kernels of a program share one buffer of this kind. Counters and scratch memory belong to
    /// a single kernel.
    pub(crate) const fn is_shared(self) -> bool {
        !matches!(self, BufferKind::Counter | BufferKind::Scratch)
    }
}

impl From<Operand> for BufferKind {
    fn from(operand: Operand) -> BufferKind {
        BufferKind::Operand(operand)
    }
}

impl fmt::Display for BufferKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An array of a kernel that is no attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelArray {
    /// The name in findings and errors.
    pub name: &'static str,
    /// Size in bytes.
    pub bytes: usize,
    /// How the kernel uses the array.
    pub access: Access,
}

/// Bytes from the start of a tensor's buffer to its element (0, 0, 0, 0).
pub(crate) fn origin(problem: &Problem, tensor: Tensor) -> u64 {
    (problem.span(tensor).map_or(0, |(_, origin)| origin) * problem.dtypes.of(tensor).bytes()) as u64
}

/// Why the specification of a tensor is found.
const EVERY_PROBLEM: &str = "every problem has Q, K, V and O";

/// A launch contract under construction. Each method declares the kernel's next parameter and states its
/// argument.
#[derive(Debug)]
pub(crate) struct Contract<'a> {
    problem: &'a Problem,
    buffers: Vec<ProgramBuffer>,
    takes: Vec<(usize, Access)>,
    tensor_maps: Vec<TensorMapSpec>,
    args: Vec<Arg>,
}

impl<'a> Contract<'a> {
    pub fn new(problem: &'a Problem) -> Contract<'a> {
        Contract {
            problem,
            buffers: Vec::new(),
            takes: Vec::new(),
            tensor_maps: Vec::new(),
            args: Vec::new(),
        }
    }

    /// The address of a tensor's element (0, 0, 0, 0), in a parameter of the tensor's name.
    pub fn tensor(&mut self, k: &mut Builder, tensor: Tensor) -> Global {
        let index = self.operand_buffer(tensor.into()).expect(EVERY_PROBLEM);
        self.args.push(Arg::Buffer { index, offset: origin(self.problem, tensor) });
        k.param_pointer(tensor.name())
    }

    /// A tensor map of a tensor, in the parameter `<tensor>_map`. `map` makes it from the index of the
    /// tensor's buffer.
    pub fn tensor_map(
        &mut self,
        k: &mut Builder,
        tensor: Tensor,
        map: impl FnOnce(usize) -> TensorMapSpec,
    ) -> TensorMapPtr {
        let buffer = self.operand_buffer(tensor.into()).expect(EVERY_PROBLEM);
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        k.param_tensor_map(&format!("{}_map", tensor.name()))
    }

    /// The address of an operand that is no tensor; `None` if the problem does not have it.
    pub fn operand(&mut self, k: &mut Builder, operand: Operand) -> Option<Global> {
        let index = self.operand_buffer(operand)?;
        // O of an earlier result has the layout of O.
        let offset = if operand == Operand::OutBefore { origin(self.problem, Tensor::Out) } else { 0 };
        self.args.push(Arg::Buffer { index, offset });
        Some(k.param_pointer(operand.name()))
    }

    /// A tensor map of an operand that the problem has, in the parameter `name`. `map` makes it from the
    /// index of the operand's buffer.
    pub fn operand_map(
        &mut self,
        k: &mut Builder,
        operand: Operand,
        name: &str,
        map: impl FnOnce(usize) -> TensorMapSpec,
    ) -> Option<TensorMapPtr> {
        let buffer = self.operand_buffer(operand)?;
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        Some(k.param_tensor_map(name))
    }

    /// The address of counters of `bytes` bytes.
    pub fn counter(&mut self, k: &mut Builder, bytes: usize) -> Global {
        self.memory(k, BufferKind::Counter, bytes, Access::ReadWrite)
    }

    /// The address of scratch memory of `bytes` bytes.
    pub fn scratch(&mut self, k: &mut Builder, bytes: usize) -> Global {
        self.memory(k, BufferKind::Scratch, bytes, Access::ReadWrite)
    }

    /// The address of a temporary of `bytes` bytes.
    pub fn temporary(&mut self, k: &mut Builder, name: &'static str, bytes: usize, access: Access) -> Global {
        self.memory(k, BufferKind::Temporary(name), bytes, access)
    }

    /// The address of an array that is no operand.
    pub fn array(&mut self, k: &mut Builder, name: &'static str, bytes: usize, access: Access) -> Global {
        self.memory(k, BufferKind::Array(name), bytes, access)
    }

    /// A tensor map of a temporary of `bytes` bytes that the kernel reads, in the parameter `<name>_map`.
    /// `map` makes it from the index of the buffer.
    pub fn temporary_map(
        &mut self,
        k: &mut Builder,
        name: &'static str,
        bytes: usize,
        map: impl FnOnce(usize) -> TensorMapSpec,
    ) -> TensorMapPtr {
        let buffer = self.buffer(BufferKind::Temporary(name), bytes, Access::Read);
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        k.param_tensor_map(&format!("{name}_map"))
    }

    /// The address of the codes of a quantised input, dense.
    pub fn codes(&mut self, k: &mut Builder, tensor: Tensor, access: Access) -> Global {
        let bytes = self.problem.extents(tensor).iter().product();
        self.memory(k, BufferKind::Codes(tensor), bytes, access)
    }

    /// The address of the descale factors that a quantisation writes.
    pub fn factors(&mut self, k: &mut Builder, tensor: Tensor, factors: usize) -> Global {
        self.memory(k, Operand::Descale(tensor).into(), 4 * factors, Access::Write)
    }

    pub fn u32(&mut self, k: &mut Builder, name: &str, value: u32) -> R32 {
        self.args.push(Arg::U32(value));
        k.param_u32(name)
    }

    pub fn i64(&mut self, k: &mut Builder, name: &str, value: i64) -> R64 {
        self.args.push(Arg::I64(value));
        k.param_u64(name)
    }

    pub fn f32(&mut self, k: &mut Builder, name: &str, value: f32) -> F32 {
        self.args.push(Arg::F32(value));
        k.param_f32(name)
    }

    /// The contract of one kernel.
    pub fn into_contracts(self, entry: &str, launch: Launch) -> Contracts {
        let Contract { buffers, takes, tensor_maps, args, .. } = self;
        Contracts { buffers, steps: vec![Step { entry: entry.to_owned(), launch, takes, tensor_maps, args }] }
    }

    /// A separate buffer, in a parameter of its kind's name.
    fn memory(&mut self, k: &mut Builder, kind: BufferKind, bytes: usize, access: Access) -> Global {
        let index = self.buffer(kind, bytes, access);
        self.args.push(Arg::Buffer { index, offset: 0 });
        k.param_pointer(kind.name())
    }

    /// The index of an operand's buffer; `None` if the problem does not have the operand. Kernels may read a
    /// buffer through its address and through tensor maps.
    fn operand_buffer(&mut self, operand: Operand) -> Option<usize> {
        if let Some(known) = self.buffers.iter().position(|buffer| buffer.kind == operand.into()) {
            return Some(known);
        }
        let spec = self.problem.operand(operand)?;
        let even = self.problem.lengths.is_even();
        let access = match operand {
            _ if !operand.is_output(self.problem.pass.kind()) => Access::Read,
            Operand::Tensor(tensor) => {
                let is_dense = self.problem.extents(tensor).iter().product::<usize>() == spec.elements;
                // Elements between the rows must keep their values, so the output is also read.
                if is_dense && even { Access::Write } else { Access::ReadWrite }
            }
            // With uneven lengths, rows that belong to no sequence keep their values.
            Operand::Lse if !even => Access::ReadWrite,
            _ => Access::Write,
        };
        Some(self.buffer(operand.into(), spec.bytes(), access))
    }

    fn buffer(&mut self, kind: BufferKind, bytes: usize, access: Access) -> usize {
        let index = self.buffers.len();
        self.buffers.push(ProgramBuffer { kind, bytes });
        self.takes.push((index, access));
        index
    }
}
