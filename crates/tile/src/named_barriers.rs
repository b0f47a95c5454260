//! The ids of the named barriers of a CTA, for all their users. There are 16; barrier 0 belongs to the whole
//! CTA (`bar.sync 0`).
//!
//! | ids | user |
//! |---|---|
//! | 1 to 4 | [`PingPong`](crate::PingPong), one for each consumer warpgroup |
//! | 1 to 8 | [`PairSum`](crate::PairSum), one for each pair of warps |
//! | 1 to 3 | [`WarpgroupPair`](crate::WarpgroupPair): one for each of both warpgroups, and one for both |
//! | 8 to 15 | [`WarpgroupVote`](crate::WarpgroupVote), one for each warpgroup |
//!
//! No kernel has pairs of warps or of warpgroups together with turns, or eight pairs together with votes.

/// Barrier of the turn of warpgroup 0.
pub(crate) const FIRST_TURN: u32 = 1;
/// Barrier of pair 0.
pub(crate) const FIRST_PAIR: u32 = 1;
/// Barrier of what warpgroup 0 of a pair passes on.
pub(crate) const FIRST_PASS: u32 = 1;
/// Barrier of both warpgroups of a pair.
pub(crate) const PAIR: u32 = 3;
/// Barrier of the vote of warpgroup 0.
pub(crate) const FIRST_VOTE: u32 = 8;
