//! The forward families for small grids on Hopper (sm_90a), optimised for latency.
//!
//! A cluster of CTAs takes 64 query rows (or a small multiple) of one head, or of all query heads of a group.
//! Each of its warpgroups takes one part of the keys, and the parts are merged through distributed shared
//! memory. The two families differ in the main loop:
//!
//! - [`AtOncePlan`]: all keys of a warpgroup fit in one KV block. The warpgroup requests all tiles at once by
//!   TMA, keeps its scores in registers, and runs no loop: S = Q Kᵀ is issued as keys arrive, the softmax
//!   takes a few steps, and P V reads P from registers.
//! - [`StreamedPlan`]: KV blocks are streamed through a ring of stages, as in FlashAttention-3.
//!
//! The code depends on the plan and on [`crate::Baked`]: of the lengths, it has whether the parts of the keys
//! are whole, whether all keys fit the stages (then nothing is refilled), and the offset of the diagonal from
//! the tiles. Launch parameters: tensor maps of Q, K and V, the output's pointer and strides, `seq_q`,
//! `seq_kv` and the scale.

mod at_once;
mod common;
mod copies;
mod emit;
mod store;
mod streamed;
mod wave;

pub use at_once::{AtOncePlan, Merge, Requests, Scores};
pub use common::RowOrder;
pub use streamed::StreamedPlan;

use problem::Problem;

use self::emit::SmallPlan;
use self::wave::Wave;
use crate::{Arch, Plan};

/// The better default plan of the two families, unchecked: the plan that holds all keys if the tiles are at
/// most two waves and the plan's own grid is one wave, else the plan that streams KV blocks.
pub fn default_for(problem: &Problem, arch: &Arch) -> Plan {
    let at_once = AtOncePlan::default_for(problem, arch);
    let streamed = StreamedPlan::default_for(problem, arch);
    let few = Wave::of_problem(problem, arch) <= Wave::Two && at_once.check(problem, arch).is_ok();
    let streamed_is_one_wave =
        || streamed.check(problem, arch).is_ok() && streamed.common().is_one_wave(problem, arch);
    if few && (at_once.common().is_one_wave(problem, arch) || !streamed_is_one_wave()) {
        Plan::SmallAtOnce(at_once)
    } else {
        Plan::SmallStreamed(streamed)
    }
}
