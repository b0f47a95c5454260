//! Happens-before: who knows of whose accesses ([`Clock`], [`WarpView`]), and the last accesses of every place
//! ([`shadow`](self::shadow)), after FastTrack (Flanagan & Freund, PLDI 2009) with a thread per lane.

mod clock;
mod shadow;
mod view;

pub(crate) use clock::{Agent, Clock, Epoch, FLIGHT};
pub(crate) use shadow::{Access, Conflict, DenseShadow, PagedShadow, Strength, Touch, Verdict};
pub(crate) use view::WarpView;
