//! A CTA of warpgroups: its tiles, and their places in shared memory.

use attend::SharedRowMax;
use tile::{Mbarriers, Roles, SwizzledTile};

/// Query rows of a tile, and keys of a block.
pub(super) const BLOCK: u32 = 64;
/// Columns of Q and K, and those of V and O.
pub(super) const DIMS: [usize; 2] = [576, 512];
/// Columns of the blocks and of Q that one barrier counts. S of these columns can begin when they arrive.
pub(super) const PART: SwizzledTile = SwizzledTile::new(BLOCK, 192);
/// Parts of the columns.
pub(super) const PARTS: u32 = DIMS[0] as u32 / PART.columns;
/// Bytes of Q, and of a stage of keys.
pub(super) const TILE_BYTES: u32 = PARTS * PART.bytes();
/// A panel of 64 columns, as P has.
pub(super) const PANEL: SwizzledTile = SwizzledTile::new(BLOCK, SwizzledTile::PANEL);
/// Bytes from the start of a stage to the columns that only S reads.
pub(super) const P_FROM: u32 = DIMS[1] as u32 / SwizzledTile::PANEL * PANEL.bytes();
/// Stages: each warpgroup computes S of the blocks of one of them.
pub(super) const STAGES: u32 = 2;
/// Bytes before the state of the rows that the warpgroups share.
pub(super) const STATE_FROM: u32 = (1 + STAGES) * TILE_BYTES;
/// Bytes before the mbarriers.
pub(super) const BARRIERS_FROM: u32 = STATE_FROM + SharedRowMax::BYTES;
/// Bytes of shared memory.
pub(super) const SHARED_BYTES: u32 = BARRIERS_FROM + STAGES * (PARTS + 1) * Mbarriers::BYTES;

/// The producer warpgroup, of which one warp works with TMA, and two consumers.
pub(super) const ROLES: Roles = Roles { consumers: 2, producer_registers: 40, consumer_registers: 232 };
