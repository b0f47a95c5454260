//! Happens-before. [`Clock`] and [`WarpView`] hold which accesses a warp knows to have happened before.
//! [`DenseShadow`] and [`PagedShadow`] hold the last accesses of every memory location. The method follows
//! FastTrack (Flanagan & Freund, PLDI 2009), with one thread per lane.

mod actors;
mod clock;
mod dense;
mod observed;
mod paged;
mod records;
mod shadow;
mod view;

pub(crate) use actors::{Actor, Actors, Agent, Kinds, ProxySpace, Strength, TensorPipe};
pub(crate) use clock::{Clock, Epoch, FLIGHT};
pub(crate) use dense::DenseShadow;
pub(crate) use paged::PagedShadow;
pub(crate) use shadow::{Access, Conflict, Touch, Unordered, Verdict};
pub(crate) use view::{Moment, WarpView};
