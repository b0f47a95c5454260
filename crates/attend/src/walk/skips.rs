//! Blocks that a consumer warpgroup skips while the other consumers compute them. The warpgroup still follows
//! the phases of the rings and the ping-pong order.

use ptx::{Builder, CmpOp, Pred, R32};
use tile::{PingPong, TileStream};

use super::MainLoop;
use crate::StagedTables;

/// Blocks at both ends of a tile that none of the warpgroup's own rows sees. The warpgroup skips them and
/// leaves the tensor cores to the other warpgroups.
#[derive(Clone, Debug)]
pub struct Skips {
    /// Blocks to skip in the next tile.
    blocks: R32,
    /// Number of value tiles that must still be skipped.
    owed_values: R32,
    /// Blocks to skip after the last visited block of the tile; `None` if the band has no lower bound.
    last_blocks: Option<R32>,
    keys: TileStream,
    values: TileStream,
    tables: StagedTables,
    ping_pong: Option<PingPong>,
}

impl Skips {
    /// No blocks to skip. The rings and the ping-pong barriers are those of the warpgroup's main loop.
    pub fn none(k: &mut Builder, keys: TileStream, values: TileStream, ping_pong: Option<PingPong>) -> Skips {
        Skips {
            blocks: k.mov(0),
            owed_values: k.mov(0),
            last_blocks: None,
            keys,
            values,
            tables: StagedTables::default(),
            ping_pong,
        }
    }

    /// Skips that also pass over the tiles of tables.
    #[must_use]
    pub fn with_tables(self, tables: StagedTables) -> Skips {
        Skips { tables, ..self }
    }

    /// Skips that also pass over blocks after the last visited one.
    #[must_use]
    pub fn at_both_ends(self, k: &mut Builder) -> Skips {
        Skips { last_blocks: Some(k.mov(0)), ..self }
    }

    /// Whether blocks may be skipped after the last visited one. Tiles are then in turn.
    pub(super) fn has_last_blocks(&self) -> bool {
        self.last_blocks.is_some()
    }

    /// Sets the number of blocks to skip after the last visited block of the tile.
    pub fn set_last(&self, k: &mut Builder, blocks: R32) {
        if let Some(last_blocks) = self.last_blocks {
            k.mov_to(last_blocks, blocks);
        }
    }

    /// Sets the number of blocks to skip in the next tile.
    pub fn set(&self, k: &mut Builder, blocks: R32) {
        k.mov_to(self.blocks, blocks);
    }

    /// Runs `pass` until `left` is zero.
    fn each(&self, k: &mut Builder, left: R32, pass: impl FnOnce(&mut Builder)) {
        k.while_(
            |k| k.setp_u(CmpOp::Ne, left, 0),
            |k| {
                pass(k);
                k.sub_to(left, left, 1);
            },
        );
    }

    /// Skips the value tiles that are still to be skipped.
    pub(super) fn values_owed(&self, k: &mut Builder) {
        self.each(k, self.owed_values, |k| self.skip_values(k));
    }

    /// Skips blocks in the order of the requests: keys, then values. The values of the last skipped block
    /// stay pending; they are skipped together with the first visited block.
    pub(super) fn before_first_keys(&self, k: &mut Builder) {
        let some = k.setp_u(CmpOp::Ne, self.blocks, 0);
        k.if_(some, |k| {
            self.skip_keys(k);
            k.sub_to(self.blocks, self.blocks, 1);
            self.each(k, self.blocks, |k| {
                self.skip_keys(k);
                self.skip_values(k);
            });
            k.mov_to(self.owed_values, 1);
        });
    }

    /// Skips the blocks after the last visited one, whose values have been released. Here the warpgroup is
    /// one turn ahead of the others, so it waits for the values before it releases them. It waits after its
    /// turn: with one stage, these values are requested only when the other warpgroups have had their turn.
    pub(super) fn after_last_values(&self, k: &mut Builder) {
        let Some(last_blocks) = self.last_blocks else { return };
        self.each(k, last_blocks, |k| {
            self.skip_keys(k);
            self.turn(k);
            self.values.wait(k);
            self.values.release(k);
        });
    }

    /// Skips the keys of all blocks before any of their values.
    pub(super) fn keys_ahead(&self, k: &mut Builder) {
        // Tiles overlap only if the number of skipped blocks is smaller than the number of stages
        // ([`Skips::fewer_than_stages`]). With one stage, no block is skipped here.
        if self.keys.stages() > 1 {
            k.mov_to(self.owed_values, self.blocks);
            self.each(k, self.blocks, |k| self.skip_keys(k));
        }
    }

    /// Waits for the keys although they are not read: otherwise a warp that is one round ahead would arrive
    /// on the empty barrier in the wrong phase. The tiles of tables are skipped with the keys, before which
    /// they are requested.
    fn skip_keys(&self, k: &mut Builder) {
        self.tables.skip(k);
        self.keys.wait(k);
        self.keys.release(k);
    }

    /// Waits as for keys, unless ping-pong keeps the warpgroups in step: when a warpgroup has its turn, all
    /// others have released the values before the last ones.
    fn skip_values(&self, k: &mut Builder) {
        let together = self.ping_pong.is_some() && !self.values.is_multicast();
        if !together || self.values.stages() == 1 {
            self.values.wait(k);
        }
        self.turn(k);
        self.values.release(k);
    }

    /// Waits for the warpgroup's turn and passes the turn to the next warpgroup.
    pub(super) fn turn(&self, k: &mut Builder) {
        if let Some(ping_pong) = &self.ping_pong {
            ping_pong.wait(k);
            ping_pong.arrive(k);
        }
    }

    /// Whether the first scores of the next tile, if there is one (`more`), can be issued before the values
    /// of this tile are released. All keys that are skipped until then must have stages. Otherwise their
    /// loads would wait for a warpgroup whose turn comes later.
    pub(super) fn fewer_than_stages(&self, k: &mut Builder, more: Pred) -> Pred {
        k.setp_u_and(CmpOp::Lt, self.blocks, self.values.stages(), more)
    }
}

impl MainLoop {
    /// Skips the value tiles that are still to be skipped.
    pub(super) fn skip_owed_values(&self, k: &mut Builder) {
        if let Some(skips) = &self.schedule.skips {
            skips.values_owed(k);
        }
    }
}
