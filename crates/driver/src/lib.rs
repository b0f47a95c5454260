//! Runs PTX on a GPU through the CUDA driver, which is loaded at run time: the same binary starts on a machine that
//! has none and says so ([`DriverError::NoDriver`]).
//!
//! [`Context`] is a device; [`Stream`]s, [`Event`]s, [`Graph`]s, [`Buffer`]s, [`Pool`]s and [`Pinned`] memory are made from it.
//! [`Function::load`] turns a [`ptx::Kernel`] into something that can be launched, by way of the [`CubinCache`] on disk, and
//! refuses one that is not what its plan said ([`Expect`]). [`Gpu`] is all of that as a [`ptx::Machine`].
//!
//! This crate contains `unsafe`, because the driver is a C library. Each block states what makes the call sound; nothing
//! unsafe leaves the crate but the `from_raw` constructors, which take the caller's word for a handle or an address. All
//! types may be used from any thread. An error of a kernel that leaves the device unusable is remembered:
//! [`DriverError::Poisoned`] is what every later call gives.

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
mod stream;
mod tensor_map;

pub use cache::{CacheStats, CacheUsage, CubinCache, Key};
pub use call::Call;
pub use context::Context;
pub use device::{DeviceInfo, devices};
pub use error::DriverError;
pub use event::Event;
pub use function::{Expect, Function, Resources, Value};
pub use gpu::Gpu;
pub use graph::{Graph, GraphExec};
pub use memory::{Buffer, DeviceSlice};
pub use pinned::{Pinned, Transfer};
pub use plain::{Plain, bytes_of, bytes_of_mut};
pub use pool::{Pool, PoolBuffer};
pub use stream::{Queue, Stream};
pub use tensor_map::TensorMap;
