//! The ids of the named barriers of a CTA, for all their users. There are 16; barrier 0 belongs to the whole
//! CTA (`bar.sync 0`).
//!
//! | ids | user |
//! |---|---|
//! | 1 to 4 | [`PingPong`](crate::PingPong), one for each consumer warpgroup |
//! | 1 to 8 | [`PairSum`](crate::PairSum), one for each pair of warps |
//! | 8 to 15 | [`WarpgroupVote`](crate::WarpgroupVote), one for each warpgroup |
//!
//! No kernel has pairs of warps together with turns, or eight pairs together with votes.

/// Barrier of the turn of warpgroup 0.
pub(crate) const FIRST_TURN: u32 = 1;
/// Barrier of pair 0.
pub(crate) const FIRST_PAIR: u32 = 1;
/// Barrier of the vote of warpgroup 0.
pub(crate) const FIRST_VOTE: u32 = 8;
