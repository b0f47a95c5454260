//! Code paths for a causal block that holds all keys of a warpgroup. The code branches by the number of keys
//! that the rows see: keys that no row sees are not computed, and only the last visible keys are masked. Each
//! path is straight-line code, since its extent is known at emission.

use attend::Coverage;
use problem::Problem;
use ptx::{Builder, CmpOp, R32};
use tile::WARPGROUP_ROWS;

use super::AtOncePlan;
use crate::forward::contract::band;
use crate::forward::packing::packed_heads;
use crate::forward::small::emit::Forward;

/// The part of the block that the rows of a path see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    /// Number of keys that at least one row sees, rounded up to whole pieces of both products.
    pub keys: u32,
    /// The first key that some row does not see.
    pub hidden_from: u32,
}

impl Seen {
    /// The whole block.
    pub const fn whole(block_n: u32) -> Seen {
        Seen { keys: block_n, hidden_from: block_n }
    }

    /// Number of pieces with `keys` keys each.
    pub const fn pieces(self, keys: u32) -> u32 {
        self.keys / keys
    }

    /// The coverage of piece `piece`, which has `keys` keys.
    pub const fn coverage(self, piece: u32, keys: u32) -> Coverage {
        if (piece + 1) * keys <= self.hidden_from { Coverage::Full } else { Coverage::Partial }
    }
}

impl AtOncePlan {
    /// The number of keys by which successive paths differ: whole pieces of both products.
    fn path_keys(&self) -> u32 {
        let (small, large) = (self.qk_keys().min(self.pv_keys()), self.qk_keys().max(self.pv_keys()));
        let mut keys = if large.is_multiple_of(small) { large } else { self.block_n };
        while self.block_n / keys > self.paths {
            keys = if (self.block_n / keys).is_multiple_of(2) { 2 * keys } else { self.block_n };
        }
        keys
    }

    /// The number of last steps of a path in which some row does not see some key. Each position sees one key
    /// more than the previous one.
    pub(super) fn hidden_steps(&self, problem: &Problem) -> u32 {
        let (positions, keys) = (WARPGROUP_ROWS / packed_heads(self.packing, problem), self.path_keys());
        let shift = band(problem).shift(problem.seq_q, problem.seq_kv);
        let aligned = keys.is_multiple_of(positions) && shift % i64::from(positions) == 0;
        let hidden = if aligned { 1 } else { (positions - 2) / keys + 2 };
        hidden.min(self.block_n / keys)
    }
}

impl Forward<'_, AtOncePlan> {
    /// Emits `body` for each path that the warpgroup may take.
    pub(super) fn paths(&self, k: &mut Builder, body: impl Fn(&mut Builder, Seen)) {
        let block_n = self.plan.block_n;
        let whole = Seen::whole(block_n);
        if !self.params.band.is_causal() {
            let masks = !self.params.band.is_full() || !self.baked.divides;
            let hidden_from = if masks { 0 } else { block_n };
            return body(k, Seen { hidden_from, ..whole });
        }
        let (rows, first) = (self.own_rows(k), self.first_key(k));
        let [by_all, by_any] = rows.keys_seen(k, &self.params.band).map(|keys| k.sub(keys, first));
        let is_whole = k.setp_s(CmpOp::Ge, by_all, block_n);
        let step = self.plan.path_keys();
        let hidden = self.baked.hidden_steps;
        let path = |steps: u32| Seen { keys: steps * step, hidden_from: steps.saturating_sub(hidden) * step };
        let partial = |k: &mut Builder| longest_first(k, by_any, step, block_n / step, &path, &body);
        k.if_else(is_whole, |k| body(k, whole), partial);
    }
}

/// Emits the path with `steps` steps under the condition that there are that many, and shorter paths
/// otherwise.
fn longest_first(
    k: &mut Builder,
    seen: R32,
    step: u32,
    steps: u32,
    path: &impl Fn(u32) -> Seen,
    body: &impl Fn(&mut Builder, Seen),
) {
    if steps == 0 {
        return body(k, path(0));
    }
    let reaches = k.setp_s(CmpOp::Gt, seen, (steps - 1) * step);
    let shorter = |k: &mut Builder| longest_first(k, seen, step, steps - 1, path, body);
    k.if_else(reaches, |k| body(k, path(steps)), shorter);
}
