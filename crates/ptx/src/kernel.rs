use std::fmt;

use crate::{Module, TensorMapSpec};

/// Extents in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Dim3(pub u32, pub u32, pub u32);

impl Dim3 {
    /// Number of points; the largest number when there are more.
    pub const fn count(self) -> u64 {
        (self.0 as u64 * self.1 as u64).saturating_mul(self.2 as u64)
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}, {}]", self.0, self.1, self.2)
    }
}

/// How a kernel is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct Launch {
    /// CTAs.
    pub grid: Dim3,
    /// CTAs per cluster; (1, 1, 1) without clusters.
    pub cluster: Dim3,
    /// Threads per CTA.
    pub block: Dim3,
    /// Dynamic shared memory in bytes.
    pub dynamic_shared: u32,
    /// Whether it may start while the launch before it still runs (programmatic dependent launch). The kernel itself must
    /// then wait (`griddepcontrol.wait`) before it touches what that launch writes, or writes what it reads; the emulator asks for
    /// it before any access to global memory.
    #[serde(default)]
    pub overlapping: bool,
}

/// What a kernel does with a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs, reason = "self-evident")]
pub enum Access {
    Read,
    Write,
    ReadWrite,
}

/// A buffer the caller provides at each launch.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BufferSpec {
    /// The name used in findings and errors.
    pub name: String,
    /// Size in bytes.
    pub bytes: usize,
    /// What the kernel does with it. A `Write` buffer must be written completely.
    pub access: Access,
}

/// The value of one kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arg {
    /// Address of a buffer, plus an offset in bytes.
    Buffer {
        /// Index into [`Kernel::buffers`].
        index: usize,
        /// Bytes from its start.
        offset: u64,
    },
    /// A tensor map by value: `.param .align 64 .b8 name[128]`.
    TensorMap {
        /// Index into [`Kernel::tensor_maps`].
        index: usize,
    },
    /// A null pointer (an optional output not wanted).
    Null,
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
}

impl Arg {
    /// Size in bytes of the parameter that takes it.
    pub const fn bytes(self) -> u32 {
        match self {
            Arg::Buffer { .. } | Arg::Null | Arg::U64(_) | Arg::I64(_) => 8,
            Arg::TensorMap { .. } => TensorMapSpec::BYTES,
            Arg::U32(_) | Arg::I32(_) | Arg::F32(_) => 4,
        }
    }
}

/// A module with its launch contract: everything a machine needs except the buffers' contents. It carries no host
/// code, so a candidate kernel cannot do anything but run.
#[derive(Clone, Debug, PartialEq)]
pub struct Kernel {
    /// The module.
    pub module: Module,
    /// Name of the `.entry` to launch.
    pub entry: String,
    /// Grid, cluster, block and dynamic shared memory.
    pub launch: Launch,
    /// Buffers the launch takes, in order.
    pub buffers: Vec<BufferSpec>,
    /// Tensor maps that the arguments name.
    pub tensor_maps: Vec<TensorMapSpec>,
    /// One value per parameter of the entry, in order.
    pub args: Vec<Arg>,
}
