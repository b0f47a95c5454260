//! How the work of a pass is divided among the multiprocessors: the order of tiles of keys, and the parts of
//! a tile. Both are chosen by the time at which the last CTA would end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use problem::Problem;

use super::plan::{FusedPlan, TileSizes};
use crate::Arch;
use crate::forward::mma::CtaOrder;

/// What a tile of keys costs beside its visits, in quarters of a visit: loading K and V, and storing dK and
/// dV. Parts store f32.
const TILE_COST: u64 = 6;
const PART_COST: u64 = 8;
const VISIT_COST: u64 = 4;
/// What the fourth kernel costs, in quarters of a visit: its launch, and its bytes.
const MERGE_COST: u64 = 6;
const MERGED_BYTES: u64 = 3 << 19;
/// Parts are not considered beyond as many for each multiprocessor, or else any order is good enough.
const MOST_PARTS: u64 = 6;
const MOST_TILES: u64 = 16;
/// Visits take longer, by one in 14, where the rows of several heads share L2.
const SHARED_CACHE: u64 = 14;
/// The least gain for which tiles are divided, or taken in another order: one in 40.
const LEAST_GAIN: u64 = 40;
const PARTS: [u32; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

impl FusedPlan {
    /// The plan with the order of tiles and the number of parts that balance the work best.
    pub(super) fn balanced(self, problem: &Problem, arch: &Arch) -> FusedPlan {
        let tiles = self.tile_count(problem);
        let processors = u64::from(arch.multiprocessors);
        let ordered = problem.pass.deterministic();
        let most = match (ordered, problem.band.is_full()) {
            (false, _) => MOST_TILES,
            // CTAs that wait for each other's additions gain only where multiprocessors are idle.
            (true, true) => 2,
            (true, false) => 1,
        };
        if !problem.lengths.is_even() || tiles == 0 || tiles > most * processors {
            return self;
        }
        let visits = self.visits_of_tiles(problem);
        let rows = visits.iter().copied().max().unwrap_or(0);
        let alternate = !ordered && !problem.band.is_full();
        let orders: &[CtaOrder] =
            if alternate { &[CtaOrder::RowsFirst, CtaOrder::HeadsFirst] } else { &[self.tile_order] };
        let undivided = self.end(problem, processors, &visits);
        let best = PARTS
            .into_iter()
            .filter(|&parts| {
                parts == 1 || u64::from(parts) <= rows && tiles * u64::from(parts) <= MOST_PARTS * processors
            })
            .flat_map(|row_parts| orders.iter().map(move |&tile_order| (row_parts, tile_order)))
            .map(|(row_parts, tile_order)| FusedPlan { row_parts, tile_order, ..self.clone() })
            .map(|plan| (plan.end(problem, processors, &visits), plan))
            .min_by_key(|&(end, _)| end);
        match best {
            Some((end, plan)) if end < undivided - undivided / LEAST_GAIN => plan,
            _ => self,
        }
    }

    /// The tiles of rows of a query head that each tile of keys of a head sees.
    fn visits_of_tiles(&self, problem: &Problem) -> Vec<u64> {
        let sizes = TileSizes::new(problem);
        let (rows, keys) = (i64::from(sizes.rows), i64::from(sizes.keys()));
        let (seq_q, seq_kv, band) = (problem.seq_q as i64, problem.seq_kv as i64, problem.band);
        let shift = band.shift(problem.seq_q, problem.seq_kv);
        let [tiles, _] = self.key_tiles(problem);
        let visits = |tile: i64| {
            let [level, past] = [tile, tile + 1].map(|tile| (tile * keys).min(seq_kv) - shift);
            let first = band.after.map_or(0, |after| (level - i64::from(after)).clamp(0, seq_q));
            let end = band.before.map_or(seq_q, |before| (past + i64::from(before)).clamp(0, seq_q));
            if first < end { ((end + rows - 1) / rows - first / rows) as u64 } else { 0 }
        };
        (0..tiles as i64).map(visits).collect()
    }

    /// When the last CTA ends, in quarters of a visit, if `processors` of them take parts of tiles in turn.
    fn end(&self, problem: &Problem, processors: u64, visits: &[u64]) -> u64 {
        let [_, batch] = self.key_tiles(problem);
        let (heads, parts) = (batch * problem.heads_kv as u64, u64::from(self.row_parts));
        let alternating = match self.tile_order {
            CtaOrder::RowsFirst => 1,
            CtaOrder::HeadsFirst => self.last_heads(problem, batch),
        };
        let (of_tile, merge) = match parts {
            1 => (TILE_COST, 0),
            _ => {
                let bytes = u64::from(TileSizes::new(problem).part_bytes(problem));
                (PART_COST, MERGE_COST + self.tile_count(problem) * bytes / MERGED_BYTES)
            }
        };
        let cost = |visits: u64, part: u64| {
            let share = visits.div_ceil(parts);
            let rows = share.min(visits.saturating_sub(part * share));
            rows * problem.group_size() as u64 * VISIT_COST + of_tile
        };
        let mut ends = BinaryHeap::from(vec![Reverse(0); processors as usize]);
        for section in (alternating..heads).map(|_| 1).chain([alternating]) {
            for &visits in visits {
                for part in (0..section).flat_map(|_| 0..parts) {
                    if let Some(mut end) = ends.peek_mut() {
                        end.0 += cost(visits, part);
                    }
                }
            }
        }
        let last = ends.into_iter().map(|Reverse(end)| end).max().unwrap_or(0);
        let shared = if alternating > 1 { last * alternating / heads / SHARED_CACHE } else { 0 };
        last + shared + merge
    }
}

#[cfg(test)]
mod tests {
    use problem::{Band, Corner, DType, Layout, Pass};

    use super::*;

    fn problem(batch: usize, [heads, heads_kv]: [usize; 2], [rows, keys]: [usize; 2], dim: usize) -> Problem {
        Problem::new(batch, heads, rows, dim, DType::Bf16)
            .with_heads_kv(heads_kv, Layout::Bshd)
            .with_seq_kv(keys, Layout::Bshd)
            .with_pass(Pass::BACKWARD)
    }

    fn chosen(problem: &Problem) -> FusedPlan {
        FusedPlan::default_for(problem, &Arch::SM_90)
    }

    #[test]
    fn visits_are_those_of_rows_that_see_a_key() {
        let bounds =
            [(None, Some(0)), (Some(100), Some(0)), (Some(7), Some(300)), (None, Some(40)), (Some(0), None)];
        for (corner, dim) in [Corner::BottomRight, Corner::TopLeft].into_iter().zip([64, 128]) {
            for (before, after) in bounds {
                for lengths in [[500, 500], [130, 900], [900, 130], [64, 64]] {
                    let problem = problem(1, [1, 1], lengths, dim).with_band(Band { corner, before, after });
                    let (sizes, [rows, keys]) = (TileSizes::new(&problem), lengths);
                    let found = chosen(&problem).visits_of_tiles(&problem);
                    let sees = |tile: usize, row| {
                        let seen = problem.band.keys(row, rows, keys);
                        let first = tile * sizes.keys() as usize;
                        seen.start.max(first) < seen.end.min(first + sizes.keys() as usize)
                    };
                    let visited = |tile| {
                        let step = sizes.rows as usize;
                        (0..rows)
                            .step_by(step)
                            .filter(|&r| (r..rows.min(r + step)).any(|r| sees(tile, r)))
                            .count()
                    };
                    let exact: Vec<u64> = (0..found.len()).map(|tile| visited(tile) as u64).collect();
                    assert_eq!(found, exact, "{:?} {lengths:?}", problem.band);
                }
            }
        }
    }

    #[test]
    fn few_tiles_of_keys_are_divided_and_many_are_not() {
        for (problem, least) in [
            (problem(9, [8, 1], [14464, 128], 128), 8),
            (problem(1, [6, 1], [6016, 6016], 72), 2),
            (problem(1, [4, 1], [896, 896], 256), 4),
            (problem(2, [4, 1], [1362, 1362], 256).with_band(Band::CAUSAL), 3),
        ] {
            assert!(chosen(&problem).row_parts >= least, "{problem:?}");
        }
        let mut padded = problem(1, [6, 1], [6016, 6016], 72);
        padded.lengths.kv.used = true;
        for problem in [
            problem(8, [16, 16], [2048, 2048], 128).with_band(Band::CAUSAL),
            problem(32, [32, 32], [512, 512], 64),
            problem(1, [1, 1], [16, 16], 64),
            padded,
        ] {
            assert_eq!(chosen(&problem).row_parts, 1, "{problem:?}");
        }
    }

    /// Parts take no more memory than some tiles of each multiprocessor, whatever the lengths.
    #[test]
    fn every_choice_can_be_emitted_and_takes_little_memory() {
        for i in 0..600_usize {
            let draw =
                |salt: usize, most: usize| (i * 7919 + salt * 104_729) * 2_654_435_761 % 1_000_003 % most;
            let (heads_kv, group) = (1 + draw(1, 9), 1 + draw(2, 8));
            let lengths = [3, 4].map(|salt| 1 + (1 << draw(salt, 15)) + draw(salt + 2, 300));
            let dim = [64, 72, 80, 96, 128, 192, 256][draw(7, 7)];
            let problem = problem(1 + draw(8, 12), [heads_kv * group, heads_kv], lengths, dim);
            let problem = problem.with_band(Band::NAMED[draw(9, 3)]);
            let problem = if draw(10, 2) == 0 { problem } else { problem.with_pass(Pass::DETERMINISTIC) };
            let plan = chosen(&problem);
            plan.check(&problem, &Arch::SM_90).unwrap();
            let most = MOST_PARTS * u64::from(Arch::SM_90.multiprocessors);
            assert!(plan.row_parts == 1 || plan.tile_count(&problem) <= most, "{problem:?}");
        }
    }
}
