//! The producer's requests.

use problem::Tensor;
use ptx::Builder;
use tile::PipelineState;

use super::emit::Main;
use super::tiles::{KeyTile, Visit};

impl Main<'_> {
    /// The producer: K and V of each tile of keys, then Q and dO of each visit, the latter with the numbers
    /// of their rows. ptxas makes a loop over the lanes of each copy unless it knows that the thread is an
    /// elected lane.
    pub fn produce(&self, k: &mut Builder) {
        for map in self.params.maps {
            k.prefetch_tensor_map(map);
        }
        let at = self.rings.each_ref().map(|ring| ring.pipeline.producer_state(k));
        let alone = k.elect(1);
        k.if_(alone, |k| self.request_tiles(k, &at));
    }

    fn request_tiles(&self, k: &mut Builder, at: &[PipelineState; 4]) {
        self.schedule.for_each_as_producer(k, |k, tile, take_next| {
            let tile = KeyTile::new(k, self, tile);
            tile.if_visited(k, |k, visit| {
                // V comes first: its place is free before that of K.
                for (number, tensor) in [(2, Tensor::V), (1, Tensor::K)] {
                    let [_, head, _] = tile.at;
                    let from = tile.coordinates(k, tensor, head, tile.keys.first);
                    self.rings[number].request(k, &at[number], self.params.maps[number], from);
                }
                k.do_while(|k| {
                    self.request_visit(k, &tile, visit, at);
                    tile.is_visit(k, visit)
                });
            });
            // The consumers still have the visits in the rings to compute.
            take_next(k);
        });
    }

    /// Requests Q and dO of a visit, and moves to the next one.
    fn request_visit(&self, k: &mut Builder, tile: &KeyTile<'_>, visit: Visit, at: &[PipelineState; 4]) {
        let [queries, _, _, gradients] = &self.rings;
        let [q_map, _, _, d_out_map] = self.params.maps;
        let [q_at, _, _, d_out_at] = at;
        let place = tile.place(k, visit);
        let [_, head, _] = place;
        let row = k.mul(visit.tile, self.sizes.rows);
        let from = tile.coordinates(k, Tensor::Q, head, row);
        queries.request(k, q_at, q_map, from);
        let from = tile.coordinates(k, Tensor::DOut, head, row);
        let numbers = self.params.row_tiles.numbers(k, place);
        let beside = (self.numbers, numbers, self.sizes.number_bytes());
        gradients.request_beside(k, d_out_at, (d_out_map, from), beside);
        tile.advance(k, visit);
    }
}
