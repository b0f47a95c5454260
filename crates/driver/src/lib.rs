//! Runs PTX on a GPU through the CUDA driver. The driver's library is loaded at run time, so the same binary
//! also starts on a machine without a driver and returns [`DriverError::NoDriver`].
//!
//! A [`Context`] is a device. [`Stream`]s, [`Event`]s, [`Graph`]s, [`Buffer`]s, [`Pool`]s and [`Pinned`]
//! memory are made from it. [`Function::load`] compiles a [`ptx::Kernel`] or takes it from the [`CubinCache`]
//! on disk, and rejects a kernel whose resources are not what its plan promised ([`Expect`]). [`Gpu`]
//! combines all of these as a [`ptx::Machine`].
//!
//! This crate contains `unsafe`, because the driver is a C library. Each block states what makes the call
//! sound. The safe functions accept no raw addresses: a [`DeviceSlice`] borrows its buffer, freeing waits for
//! the work that was enqueued before (for the memory of a [`Pool`], the work on the memory's own stream), and
//! a captured graph keeps the modules and the memory that it refers to. A caller's own addresses and handles
//! come in through the `from_raw` constructors, which are `unsafe`.
//!
//! A kernel is a program. [`Function::launch`], [`GraphExec::launch`] and [`Gpu`] are safe to call in the
//! sense that [`std::process::Command`] is: they check the arguments against the kernel's parameters and
//! start the kernel. What the kernel does on the device is not part of Rust's guarantees. A wrong kernel can
//! write to any memory that the device can reach, including memory of the host (pinned memory always; all
//! memory on machines with heterogeneous memory management). Run only kernels whose author you trust, or that
//! passed a check such as the emulator's.
//!
//! A [`Communicator`] is a rank of a group of GPUs. It sends device memory through NCCL, whose library is
//! loaded at run time too.
//!
//! All types may be used from any thread. After a kernel error that makes the device unusable, every later
//! call returns [`DriverError::Poisoned`]. In a child of `fork` every call returns [`DriverError::Forked`].

mod cache;
mod call;
mod context;
mod device;
mod error;
mod event;
mod function;
mod gpu;
mod graph;
mod library;
mod memory;
mod module;
mod nccl;
mod pinned;
mod plain;
mod pool;
pub mod process;
mod stream;
mod sys;
mod tensor_map;

pub use cache::{CacheStats, CacheUsage, CubinCache, Key};
pub use call::Call;
pub use context::Context;
pub use device::{DeviceInfo, devices};
pub use error::DriverError;
pub use event::Event;
pub use function::{Expect, Function, Printed, Resources};
pub use gpu::Gpu;
pub use graph::{Graph, GraphExec};
pub use memory::{Buffer, DeviceSlice};
pub use nccl::{Communicator, GroupId};
pub use pinned::{Pinned, Transfer};
pub use plain::{Plain, bytes_of, bytes_of_mut};
pub use pool::{Pool, PoolBuffer};
pub use stream::{Queue, Stream, StreamRef};
pub use tensor_map::TensorMap;
