//! The units of a cluster. Each owns its state and the rules by which that state changes. A unit knows
//! neither warps nor [`Env`](super::Env) nor the other units: the files of [`exec`](super) execute
//! instructions with them. A new kind of hardware is one file here and one file of instructions.

mod barriers;
mod bulk;
mod copies;
mod doubts;
mod fence_order;
mod fences;
mod launch;
mod log;
mod mbarriers;
mod order;
mod products;
mod register_pool;
mod rendezvous;
mod tensor_memory;
mod undefined;
mod weak;

pub(crate) use barriers::{Barriers, Joined, Wake, reduction};
pub(crate) use bulk::{BulkFlights, BulkQueue, Departure, Flight, Payload};
pub(crate) use copies::{CopyFlight, CopyQueue};
pub(crate) use doubts::Doubts;
pub(crate) use fences::Fences;
pub(crate) use launch::{Context, Facts, Follow, Parameters};
pub(crate) use log::Log;
pub(crate) use mbarriers::{Arrival, CheckedWait, Clocks, LIMIT, Mbarriers, inside, reaches_peers};
pub(crate) use order::{GlobalOrder, MemoryOrder, Observation, Publication, StrongAccess};
pub(crate) use products::{Issued, Products, WARPS, WgmmaQueue};
pub(crate) use register_pool::{Change, REGISTERS, RegisterPool, registers_at_entry};
pub(crate) use rendezvous::{Attendance, Rendezvous, Visit, Visits};
pub(crate) use tensor_memory::{CELL_LANES, COLUMNS, LANES, PendingCommit, Refused, TensorMemory, Touched};
pub(crate) use undefined::{Definedness, Undefined, UndefinedBytes};
