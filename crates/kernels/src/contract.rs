//! Builds the launch contract of a kernel: one call declares a parameter and its argument.

use std::fmt;

use problem::{Problem, Table, Tensor, descale_name};
use ptx::{
    Access, Arg, BufferSpec, Builder, F32, Global, Launch, R32, R64, TensorMapPtr, TensorMapSpec, Verified,
};

use crate::program::{Contracts, Program, Step};

/// An array of lengths, of 32-bit signed integers ([`problem::Lengths`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LengthArray {
    /// `batch + 1` cumulative lengths of packed queries (`cu_seqlens_q`).
    CumulativeQ,
    /// `batch + 1` cumulative lengths of packed keys (`cu_seqlens_k`).
    CumulativeKv,
    /// `batch` used lengths of queries (`seqused_q`).
    UsedQ,
    /// `batch` used lengths of keys (`seqused_k`).
    UsedKv,
    /// `batch` numbers of padding rows before the first key (`leftpad_k`).
    LeftPad,
}

impl LengthArray {
    /// All arrays.
    pub const ALL: [LengthArray; 5] = [
        LengthArray::CumulativeQ,
        LengthArray::CumulativeKv,
        LengthArray::UsedQ,
        LengthArray::UsedKv,
        LengthArray::LeftPad,
    ];

    /// The array's name in FlashAttention's interface.
    pub const fn name(self) -> &'static str {
        match self {
            LengthArray::CumulativeQ => "cu_seqlens_q",
            LengthArray::CumulativeKv => "cu_seqlens_k",
            LengthArray::UsedQ => "seqused_q",
            LengthArray::UsedKv => "seqused_k",
            LengthArray::LeftPad => "leftpad_k",
        }
    }

    /// Number of elements; `None` if the problem does not have the array.
    pub const fn len(self, problem: &Problem) -> Option<usize> {
        let lengths = &problem.lengths;
        let (is_used, elements) = match self {
            LengthArray::CumulativeQ => (lengths.q.packed.is_some(), problem.batch + 1),
            LengthArray::CumulativeKv => (lengths.kv.packed.is_some(), problem.batch + 1),
            LengthArray::UsedQ => (lengths.q.used, problem.batch),
            LengthArray::UsedKv => (lengths.kv.used, problem.batch),
            LengthArray::LeftPad => (lengths.left_padded, problem.batch),
        };
        if is_used { Some(elements) } else { None }
    }
}

/// The contents of a kernel's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operand {
    /// A tensor of the problem.
    Tensor(Tensor),
    /// The log-sum-exp output, f32, `[batch][head][row]`.
    Lse,
    /// An array of lengths.
    Lengths(LengthArray),
    /// The attention sinks, f32, `[head]`.
    Sinks,
    /// A table of the programs ([`problem::Programs::tables`]).
    Table(u8),
    /// The descale factors of an input, f32 ([`problem::Scales`]).
    Descale(Tensor),
    /// An input tensor quantised to 8 bits, dense.
    Codes(Tensor),
    /// The scales of quantised inputs, f32: one for each head of Q, then of K, then of V.
    Scales,
    /// Counters that the kernel uses across launches: zero before each launch and after it.
    Counter,
    /// Memory that the kernel uses within a launch. Its contents before and after are arbitrary.
    Scratch,
    /// Memory through which a kernel passes results to later kernels of the program. Temporaries with the
    /// same name are one buffer in all kernels of a program. The contents before and after the program are
    /// arbitrary.
    Temporary(&'static str),
}

impl Operand {
    /// The name of the buffer in findings and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Operand::Tensor(tensor) => tensor.name(),
            Operand::Lse => "lse",
            Operand::Lengths(array) => array.name(),
            Operand::Sinks => "sinks",
            Operand::Table(0) => "table_0",
            Operand::Table(1) => "table_1",
            Operand::Table(2) => "table_2",
            Operand::Table(3) => "table_3",
            Operand::Table(4) => "table_4",
            Operand::Table(5) => "table_5",
            Operand::Table(6) => "table_6",
            Operand::Table(_) => "table_7",
            Operand::Descale(tensor) => descale_name(tensor),
            Operand::Codes(Tensor::Q) => "q_codes",
            Operand::Codes(Tensor::K) => "k_codes",
            Operand::Codes(Tensor::V) => "v_codes",
            Operand::Codes(Tensor::Out) => "out_codes",
            Operand::Scales => "scales",
            Operand::Counter => "counter",
            Operand::Scratch => "scratch",
            Operand::Temporary(name) => name,
        }
    }

    /// Whether all kernels of a program share one buffer for this operand. Counters and scratch memory belong
    /// to a single kernel.
    pub(crate) const fn is_shared(self) -> bool {
        !matches!(self, Operand::Counter | Operand::Scratch)
    }
}

impl fmt::Display for Operand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes of a tensor's buffer: the span of the problem's strides.
pub(crate) fn span_bytes(problem: &Problem, tensor: Tensor) -> usize {
    problem.span(tensor).map_or(0, |(elements, _)| elements * problem.dtypes.of(tensor).bytes())
}

/// Bytes from the start of a tensor's buffer to its element (0, 0, 0, 0).
pub(crate) fn origin(problem: &Problem, tensor: Tensor) -> u64 {
    (problem.span(tensor).map_or(0, |(_, origin)| origin) * problem.dtypes.of(tensor).bytes()) as u64
}

/// A launch contract under construction. Each method declares the kernel's next parameter and states its
/// argument.
#[derive(Debug)]
pub(crate) struct Contract<'a> {
    problem: &'a Problem,
    operands: Vec<Operand>,
    buffers: Vec<BufferSpec>,
    tensor_maps: Vec<TensorMapSpec>,
    args: Vec<Arg>,
}

impl<'a> Contract<'a> {
    pub fn new(problem: &'a Problem) -> Contract<'a> {
        Contract {
            problem,
            operands: Vec::new(),
            buffers: Vec::new(),
            tensor_maps: Vec::new(),
            args: Vec::new(),
        }
    }

    /// The address of a tensor's element (0, 0, 0, 0), in a parameter of the tensor's name.
    pub fn tensor(&mut self, k: &mut Builder, tensor: Tensor) -> Global {
        let index = self.tensor_buffer(tensor);
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
        let buffer = self.tensor_buffer(tensor);
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        k.param_tensor_map(&format!("{}_map", tensor.name()))
    }

    /// The address of the LSE of row (0, 0, 0).
    pub fn lse(&mut self, k: &mut Builder) -> Global {
        // With uneven lengths, rows that belong to no sequence keep their values.
        let even = self.problem.lengths.is_even();
        let access = if even { Access::Write } else { Access::ReadWrite };
        self.memory(k, Operand::Lse, 4 * self.problem.lse_len(), access)
    }

    /// The address of an array of lengths; `None` if the problem does not have it.
    pub fn lengths(&mut self, k: &mut Builder, array: LengthArray) -> Option<Global> {
        let elements = array.len(self.problem)?;
        Some(self.memory(k, Operand::Lengths(array), 4 * elements, Access::Read))
    }

    /// The address of the attention sinks; `None` if the problem has none.
    pub fn sinks(&mut self, k: &mut Builder) -> Option<Global> {
        let bytes = 4 * self.problem.heads_q;
        self.problem.score.sink.then(|| self.memory(k, Operand::Sinks, bytes, Access::Read))
    }

    /// The address of the descale factors of an input; `None` if it has none.
    pub fn descale(&mut self, k: &mut Builder, tensor: Tensor) -> Option<Global> {
        let bytes = 4 * self.problem.scale_len(tensor);
        self.problem.scales.of(tensor)?;
        Some(self.memory(k, Operand::Descale(tensor), bytes, Access::Read))
    }

    /// The address of the first element of the programs' table `number`.
    pub fn table(&mut self, k: &mut Builder, number: u8, table: &Table) -> Global {
        let index = self.table_buffer(number, table);
        self.args.push(Arg::Buffer { index, offset: 0 });
        k.param_pointer(Operand::Table(number).name())
    }

    /// A tensor map of the programs' table `number`, in the parameter `name`. `map` makes it from the index
    /// of the table's buffer.
    pub fn table_map(
        &mut self,
        k: &mut Builder,
        (number, table): (u8, &Table),
        name: &str,
        map: impl FnOnce(usize) -> TensorMapSpec,
    ) -> TensorMapPtr {
        let buffer = self.table_buffer(number, table);
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        k.param_tensor_map(name)
    }

    /// The address of counters of `bytes` bytes.
    pub fn counter(&mut self, k: &mut Builder, bytes: usize) -> Global {
        self.memory(k, Operand::Counter, bytes, Access::ReadWrite)
    }

    /// The address of scratch memory of `bytes` bytes.
    pub fn scratch(&mut self, k: &mut Builder, bytes: usize) -> Global {
        self.memory(k, Operand::Scratch, bytes, Access::ReadWrite)
    }

    /// The address of a temporary of `bytes` bytes.
    pub fn temporary(&mut self, k: &mut Builder, name: &'static str, bytes: usize, access: Access) -> Global {
        self.memory(k, Operand::Temporary(name), bytes, access)
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
        let buffer = self.buffer(Operand::Temporary(name), bytes, Access::Read);
        self.args.push(Arg::TensorMap { index: self.tensor_maps.len() });
        self.tensor_maps.push(map(buffer));
        k.param_tensor_map(&format!("{name}_map"))
    }

    /// The address of the codes of a quantised input, dense.
    pub fn codes(&mut self, k: &mut Builder, tensor: Tensor, access: Access) -> Global {
        let bytes = self.problem.extents(tensor).iter().product();
        self.memory(k, Operand::Codes(tensor), bytes, access)
    }

    /// The address of the descale factors that a quantisation writes.
    pub fn factors(&mut self, k: &mut Builder, tensor: Tensor, factors: usize) -> Global {
        self.memory(k, Operand::Descale(tensor), 4 * factors, Access::Write)
    }

    /// The address of the scales of quantised inputs.
    pub fn scales(&mut self, k: &mut Builder) -> Global {
        let heads: usize = [Tensor::Q, Tensor::K, Tensor::V]
            .map(|tensor| self.problem.extents(tensor)[..2].iter().product::<usize>())
            .iter()
            .sum();
        self.memory(k, Operand::Scales, 4 * heads, Access::Read)
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
        let Contract { operands, buffers, tensor_maps, args, .. } = self;
        let first = Step { entry: entry.to_owned(), launch, buffers, tensor_maps, args };
        Contracts { first, then: Vec::new(), operands }
    }

    /// The program of one kernel with this contract.
    pub fn into_program(self, module: Verified, entry: &str, launch: Launch) -> Program {
        Program::new(module, self.into_contracts(entry, launch))
    }

    /// A separate buffer, in a parameter with the operand's name.
    fn memory(&mut self, k: &mut Builder, operand: Operand, bytes: usize, access: Access) -> Global {
        let index = self.buffer(operand, bytes, access);
        self.args.push(Arg::Buffer { index, offset: 0 });
        k.param_pointer(operand.name())
    }

    /// The index of a tensor's buffer, whose size is the span of the problem's strides.
    fn tensor_buffer(&mut self, tensor: Tensor) -> usize {
        let operand = Operand::Tensor(tensor);
        if let Some(known) = self.operands.iter().position(|&o| o == operand) {
            return known;
        }
        let bytes = span_bytes(self.problem, tensor);
        let bytes_of_element = self.problem.dtypes.of(tensor).bytes();
        let dense = bytes_of_element * self.problem.extents(tensor).iter().product::<usize>();
        let access = match tensor {
            Tensor::Out if dense == bytes && self.problem.lengths.is_even() => Access::Write,
            // Elements between the rows must keep their values, so the output is also read.
            Tensor::Out => Access::ReadWrite,
            _ => Access::Read,
        };
        self.buffer(operand, bytes, access)
    }

    /// The index of a table's buffer. A table may be read through its address and through tensor maps.
    fn table_buffer(&mut self, number: u8, table: &Table) -> usize {
        let operand = Operand::Table(number);
        let known = self.operands.iter().position(|&o| o == operand);
        known.unwrap_or_else(|| self.buffer(operand, table.span() * table.dtype.bytes(), Access::Read))
    }

    fn buffer(&mut self, operand: Operand, bytes: usize, access: Access) -> usize {
        self.operands.push(operand);
        self.buffers.push(BufferSpec { name: operand.name().to_owned(), bytes, access });
        self.buffers.len() - 1
    }
}
