//! Runs PTX on a GPU through the CUDA driver, which is loaded at run time: the same binary starts on a machine that
//! has none and says so ([`DriverError::NoDriver`]).
//!
//! [`Context`] is a device; [`Stream`]s, [`Event`]s, [`Graph`]s, [`Buffer`]s, [`Pool`]s and [`Pinned`] memory are made from it.
//! [`Function::load`] turns a [`ptx::Kernel`] into something that can be launched, by way of the [`CubinCache`] on disk, and
//! refuses one that is not what its plan said ([`Expect`]). [`Gpu`] is all of that as a [`ptx::Machine`].
//!
//! This crate contains `unsafe`, because the driver is a C library. Each block states what makes the call
//! sound. Its safe functions take no address at its word: a [`DeviceSlice`] borrows its buffer, freeing waits
//! for the work that was enqueued before, and a captured graph keeps the modules and the memory that it
//! names. Addresses and handles of others come in by the `from_raw` constructors, which are `unsafe`.
//!
//! A kernel is a program. [`Function::launch`], [`GraphExec::launch`] and [`Gpu`] are safe to call as
//! [`std::process::Command`] is: they hold the arguments against the kernel's parameters and start it. What
//! the program does on the device is not part of Rust's guarantees. A wrong one can write to any memory that
//! the device can reach, that of the host among it (pinned memory always; all memory on machines with
//! heterogeneous memory management). Run only kernels whose maker you trust, or that a check such as the
//! emulator's has passed.
//!
//! All types may be used from any thread. An error of a kernel that leaves the device unusable is remembered:
//! [`DriverError::Poisoned`] is what every later call gives. In a child of `fork` every call gives
//! [`DriverError::Forked`].

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
pub use pinned::{Pinned, Transfer};
pub use plain::{Plain, bytes_of, bytes_of_mut};
pub use pool::{Pool, PoolBuffer};
pub use stream::{Queue, Stream};
pub use tensor_map::TensorMap;
