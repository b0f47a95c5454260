//! The producer's requests: queries, keys, values, and tables that are read from shared memory.

use attend::{RowRange, ScorePrograms};
use problem::Tensor;
use ptx::{Builder, CmpOp, R32, Src, TensorMapPtr};
use tile::{PipelineState, TileRing, WorkTile};

use super::launch::LOADED;
use super::memory::Forward;
use super::plan::SEARCHING_REGISTERS;

impl Forward<'_> {
    /// The producer: FlashAttention-3, Algorithm 1; the numbers in the margin are its lines. Keys are
    /// requested one block ahead of values, in the order in which the consumers read them. A request waits
    /// until its stage is empty (line 7). The tiles of tables are requested before the keys of their block:
    /// they come from DRAM, while keys and values are usually in L2.
    pub(super) fn produce(&self, k: &mut Builder) {
        let [q_map, key_map, value_map] = self.params.maps;
        let table_maps = self.params.programs.iter().flat_map(ScorePrograms::staged_maps);
        for map in self.params.maps.into_iter().chain(table_maps) {
            k.prefetch_tensor_map(map);
        }
        let [q_at, key_at, value_at] =
            [&self.queries, &self.keys, &self.values].map(|ring| ring.pipeline.producer_state(k));
        let tables_at: Vec<PipelineState> =
            self.tables.iter().map(|ring| ring.pipeline.producer_state(k)).collect();
        self.schedule.for_each_as_producer(k, |k, tile, take_next| {
            let rows = self.rows(k, tile);
            let list = self.list(k, tile);
            let (from, end) = match &list {
                None => self.span(k, tile),
                Some(list) => (0.into(), list.count),
            };
            let key_head = self.key_head(k, tile);
            let pages = self.pages(k, tile);
            let in_sequence = rows.position(k, rows.first);
            let position = self.row_of_sequence(k, tile, in_sequence);
            let table_places = self.table_places(k, tile, &rows);
            let [q_part, key_part, value_part] = LOADED.map(|tensor| {
                let head = if tensor == Tensor::Q { tile.head } else { key_head };
                self.distinct(tensor, [head, tile.batch])
            });
            let request = |k: &mut Builder, ring: &TileRing, at, map, block: R32, part: [Src<R32>; 2]| {
                let block = list.map_or(block, |list| list.block(k, block));
                let first = k.mul(block, self.plan.block_n);
                if let Some(pages) = &pages {
                    let [head, _] = part;
                    return self.request_pages(k, (ring, at, map), (tile, pages), first, head);
                }
                let from = self.key_place(k, tile, ring.tile.ragged, first, part);
                ring.request(k, at, map, from);
            };
            let request_tables = |k: &mut Builder, block: R32| {
                if self.tables.is_empty() {
                    return;
                }
                let block = list.map_or(block, |list| list.block(k, block));
                let first = k.mul(block, self.plan.block_n);
                for ((ring, at), (map, outer)) in self.tables.iter().zip(&tables_at).zip(&table_places) {
                    let [batch, head] = outer.clone();
                    ring.request_at(k, at, *map, [first.into(), in_sequence.into(), head, batch]);
                }
            };
            let block = k.sub(end, 1);
            request_tables(k, block);
            // The keys are requested before Q, because the stage of Q is released later.
            request(k, &self.keys, &key_at, key_map, block, key_part.clone()); //          8  last K
            let [head, batch] = q_part;
            self.queries.request(k, &q_at, q_map, [position.into(), head, batch]); //      4  Q
            let step = |k: &mut Builder| {
                let next = k.sub(block, 1);
                request_tables(k, next);
                request(k, &self.keys, &key_at, key_map, next, key_part.clone()); //       8  K
                request(k, &self.values, &value_at, value_map, block, value_part.clone()); // 8  V
                k.mov_to(block, next);
            };
            let (registers, _) = self.plan.register_split();
            if tile.spans.is_none() || registers < SEARCHING_REGISTERS {
                k.while_(|k| k.setp_u(CmpOp::Ne, block, from.clone()), step); //           6
                take_next(k);
            } else {
                // The search for the rows of the next tile takes about as long as a block, so the tile is
                // taken before the keys of the last block are requested.
                let several = |k: &mut Builder| {
                    let left = k.sub(block, from.clone());
                    k.setp_u(CmpOp::Gt, left, 1)
                };
                k.while_(several, step); //                                                6
                take_next(k);
                let more = k.setp_u(CmpOp::Ne, block, from);
                k.if_(more, step);
            }
            request(k, &self.values, &value_at, value_map, block, value_part.clone()); //  8  last V
        });
    }

    /// The tensor map of each table in shared memory, with the coordinates of a tile in the outer dimensions.
    fn table_places(
        &self,
        k: &mut Builder,
        tile: &WorkTile,
        rows: &RowRange,
    ) -> Vec<(TensorMapPtr, [Src<R32>; 2])> {
        let programs = self.params.programs.as_ref().filter(|_| !self.tables.is_empty());
        programs.map_or_else(Vec::new, |programs| programs.staged_places(k, rows, [tile.head, tile.batch]))
    }

    /// Head and batch entry in a tensor map, in which heads or batch entries with stride 0 count as one.
    fn distinct(&self, tensor: Tensor, [head, batch]: [R32; 2]) -> [Src<R32>; 2] {
        let repeated = self.baked.repeated[tensor.into()];
        [(head, repeated.head), (batch, repeated.batch)]
            .map(|(index, one)| if one { 0.into() } else { index.into() })
    }
}
