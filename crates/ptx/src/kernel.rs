//! A kernel with its launch contract: grid, buffers, tensor maps and arguments.

use std::fmt;

use crate::{TensorMapSpec, Verified};

/// Extents in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Dim3(pub u32, pub u32, pub u32);

impl Dim3 {
    /// The product of the extents, saturating.
    pub const fn count(self) -> u64 {
        (self.0 as u64 * self.1 as u64).saturating_mul(self.2 as u64)
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}, {}]", self.0, self.1, self.2)
    }
}

/// The launch configuration of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Launch {
    /// Extents of the grid in CTAs.
    pub grid: Dim3,
    /// Extents of a cluster in CTAs; (1, 1, 1) without clusters.
    pub cluster: Dim3,
    /// Extents of a CTA in threads.
    pub block: Dim3,
    /// Dynamic shared memory per CTA in bytes.
    pub dynamic_shared: u32,
    /// Whether the launch may start while the previous launch still runs (programmatic dependent launch). The
    /// kernel must then execute `griddepcontrol.wait` before it reads data that the previous launch writes,
    /// and before it writes data that the previous launch reads. The emulator requires the wait before any
    /// access to global memory.
    #[serde(default)]
    pub overlapping: bool,
}

impl Launch {
    /// A launch without clusters, dynamic shared memory and programmatic dependent launch.
    pub const fn new(grid: Dim3, block: Dim3) -> Launch {
        Launch { grid, cluster: Dim3(1, 1, 1), block, dynamic_shared: 0, overlapping: false }
    }
}

/// How a kernel accesses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "self-evident")]
pub enum Access {
    Read,
    Write,
    ReadWrite,
}

/// A buffer that the caller provides at each launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BufferSpec {
    /// The name used in findings and errors.
    pub name: String,
    /// Size in bytes.
    pub bytes: usize,
    /// How the kernel accesses the buffer. A kernel must write a `Write` buffer completely.
    pub access: Access,
}

/// The value of one kernel parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Arg {
    /// Address of a buffer, plus an offset in bytes.
    Buffer {
        /// Index into [`Kernel::buffers`].
        index: usize,
        /// Bytes from the start of the buffer.
        offset: u64,
    },
    /// A tensor map by value: `.param .align 64 .b8 name[128]`.
    TensorMap {
        /// Index into [`Kernel::tensor_maps`].
        index: usize,
    },
    /// A null pointer, for an optional output that is not requested.
    Null,
    /// An integer of 8 bits, signed or not, or a bool.
    U8(u8),
    /// The bits of a number of 16 bits: an integer, f16 or bf16.
    U16(u16),
    /// A 32-bit unsigned integer.
    U32(u32),
    /// A 32-bit signed integer.
    I32(i32),
    /// A 64-bit unsigned integer.
    U64(u64),
    /// A 64-bit signed integer.
    I64(i64),
    /// A 32-bit float.
    F32(f32),
    /// A 64-bit float.
    F64(f64),
    /// A struct by value: `.param .align A .b8 name[bytes]`.
    Struct(StructArg),
}

/// The value of a struct that a kernel takes by value. Bytes between the fields are 0.
#[derive(Clone, Debug, PartialEq)]
pub struct StructArg {
    /// Size in bytes, with the padding at the end.
    pub bytes: u32,
    /// Offset in bytes and value of each field. The fields do not overlap.
    pub fields: Vec<(u32, Arg)>,
}

impl Arg {
    /// The size in bytes of the parameter that takes the argument.
    pub const fn bytes(&self) -> u32 {
        match self {
            Arg::Buffer { .. } | Arg::Null | Arg::U64(_) | Arg::I64(_) | Arg::F64(_) => 8,
            Arg::TensorMap { .. } => TensorMapSpec::BYTES,
            Arg::U8(_) => 1,
            Arg::U16(_) => 2,
            Arg::U32(_) | Arg::I32(_) | Arg::F32(_) => 4,
            Arg::Struct(value) => value.bytes,
        }
    }

    /// The argument itself, or the values of a struct's fields at any depth.
    pub fn leaves(&self) -> Vec<&Arg> {
        match self {
            Arg::Struct(value) => value.fields.iter().flat_map(|(_, field)| field.leaves()).collect(),
            other => vec![other],
        }
    }
}

/// A module with its launch contract: everything a machine needs except the contents of the buffers. A kernel
/// contains no host code, so a candidate kernel can do nothing but run.
///
/// The module is [`Verified`]:
///
/// ```
/// # use flashcore_ptx as ptx;
/// use ptx::{Kernel, Module};
///
/// fn replace(kernel: &mut Kernel, module: Module) -> Result<(), ptx::Violations> {
///     kernel.module = module.verify()?;
///     Ok(())
/// }
/// ```
///
/// A module that was not verified has another type:
///
/// ```compile_fail,E0308
/// # use flashcore_ptx as ptx;
/// use ptx::{Kernel, Module};
///
/// fn replace(kernel: &mut Kernel, module: Module) -> Result<(), ptx::Violations> {
///     kernel.module = module;
///     Ok(())
/// }
/// ```
///
/// Nor can a verified one be changed:
///
/// ```compile_fail,E0594
/// # use flashcore_ptx as ptx;
/// use ptx::{Kernel, Module};
///
/// fn empty(kernel: &mut Kernel) {
///     kernel.module.items = Vec::new();
/// }
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The module.
    pub module: Verified,
    /// Name of the `.entry` to launch.
    pub entry: String,
    /// The launch configuration.
    pub launch: Launch,
    /// The buffers that a launch takes, in order.
    pub buffers: Vec<BufferSpec>,
    /// The tensor maps that arguments refer to by index.
    pub tensor_maps: Vec<TensorMapSpec>,
    /// One value per parameter of the entry, in order.
    pub args: Vec<Arg>,
}

impl Kernel {
    /// Whether a parameter refers to the buffer with this index.
    pub fn uses(&self, buffer: usize) -> bool {
        let by_map = |index: usize| self.tensor_maps.get(index).is_some_and(|map| map.buffer == buffer);
        self.args.iter().any(|arg| match *arg {
            Arg::Buffer { index, .. } => index == buffer,
            Arg::TensorMap { index } => by_map(index),
            _ => false,
        })
    }
}
