//! Happens-before: who knows of whose accesses ([`Clock`], [`WarpView`]), and the last accesses of every place
//! ([`DenseShadow`], [`PagedShadow`]), after FastTrack (Flanagan & Freund, PLDI 2009) with a thread per lane.

mod actors;
mod clock;
mod dense;
mod paged;
mod records;
mod shadow;
mod view;

pub(crate) use actors::{Actor, Actors};
pub(crate) use clock::{Agent, Clock, Epoch, FLIGHT};
pub(crate) use dense::DenseShadow;
pub(crate) use paged::PagedShadow;
pub(crate) use shadow::{Access, Conflict, Strength, Touch, Verdict};
pub(crate) use view::{Moment, WarpView};
