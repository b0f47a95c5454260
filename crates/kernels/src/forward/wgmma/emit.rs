//! The generator: FlashAttention-3, Algorithm 1. Its steps are in files of their own: `memory.rs` divides
//! shared memory, `produce.rs` requests tiles, `consumer.rs` sets up a warpgroup and a tile, `store.rs` ends
//! a tile. [`attend::MainLoop`] is the loop over the KV blocks. `rows.rs` selects rows and blocks,
//! `launch.rs` declares the parameters.

use attend::SequenceTiles;
use problem::Problem;
use ptx::Builder;
use tile::{Consumer, Locate, OperandType, Roles};

use super::fp8::transposes_values;
use super::launch::Params;
use super::memory::Forward;
use super::plan::WgmmaPlan;
use crate::contract::Contract;
use crate::draft::Draft;
use crate::{Arch, Baked};

const ENTRY: &str = "flash_forward_wgmma";

impl WgmmaPlan {
    /// Emits the kernel and, if the plan lists blocks, the kernel that lists them before it. The plan has
    /// been checked.
    pub(super) fn drafts<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Vec<Draft<'a>> {
        let mut k = Builder::kernel(ENTRY);
        k.max_threads(self.threads());
        // Without this bound ptxas ignores `setmaxnreg`.
        k.min_ctas_per_sm(self.resident_ctas);
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, (problem, baked), self, arch);
        let target = arch.full_target();
        let launch = (ENTRY, self.launch(problem, arch));
        let body = move |k: &mut Builder| {
            let tiles = params.lengths.map(|lengths| SequenceTiles {
                lengths,
                of_keys: false,
                rows: self.tile_rows(baked),
                heads: self.packed_heads(baked),
            });
            let locate = tiles.as_ref().map(|tiles| tiles as &dyn Locate);
            Forward::new(k, baked, self, params, locate).body(k);
        };
        let lists = self.list_tiles(problem).map(|tiles| tiles.draft(problem, baked, target));
        let transpose = transposes_values(problem).then(|| self.transpose_values(problem, baked, target));
        let forward = Draft::new(k, contract, launch, target, body);
        lists.into_iter().chain(transpose).chain([forward]).collect()
    }

    fn roles(&self) -> Roles {
        let (producer_registers, consumer_registers) = self.register_split();
        Roles { consumers: self.consumers, producer_registers, consumer_registers }
    }
}

impl Forward<'_> {
    /// The kernel; the numbers in the margin are the lines of Algorithm 1. A CTA computes several tiles, one
    /// after the other: lines 4 to 10 and 13 to 25 run for each of them.
    fn body(&self, k: &mut Builder) {
        let roles = self.plan.roles();
        self.write_ones(k);
        let rings = [self.queries.pipeline, self.keys.pipeline, self.values.pipeline];
        let broadcast = self.schedule.broadcast.map(|broadcast| broadcast.pipeline);
        let tables = self.tables.iter().map(|ring| ring.pipeline);
        roles.prepare(k, rings.into_iter().chain(broadcast).chain(tables)); //    1  barriers
        // The roles exchange registers first: lines 3 and 12.
        let produce = |k: &mut Builder| match self.params.pages {
            None => self.produce(k), //                                           2, 4–10  Q, K and V
            Some(_) => self.produce_pages(k),
        };
        let consume = |k: &mut Builder, consumer: &Consumer| {
            self.consume(k, consumer); //                                         11, 13–25
        };
        roles.split(k, produce, consume);
        if let Some(cluster) = self.schedule.cluster {
            cluster.sync_at_end(k);
        }
    }

    /// Writes the columns of ones beside V, with which a product computes the row sums.
    fn write_ones(&self, k: &mut Builder) {
        if let (Some(ones), OperandType::Half(half)) = (self.ones, self.weights) {
            ones.write(k, half);
            // The cluster barrier at the start orders only the initialisation of mbarriers, not other writes
            // to shared memory.
            if self.schedule.cluster.is_some() {
                k.bar_sync();
            }
        }
    }

    /// A consumer warpgroup.
    fn consume(&self, k: &mut Builder, consumer: &Consumer) {
        let state = self.state(k, consumer);
        self.prepare_next(k, &state);
        state.main_loop.open(k);
        state.tiles.for_each(k, |k, at| {
            let tile = self.tile(k, &state, at); //                               13  l = 0, m = −∞
            let more = self.attend(k, &state, at, &tile); //                      13–23  O = 0; O, m, l
            self.finish(k, &state, at, &tile); //                                 24–25  O / l, L = m + ln l
            more
        });
        if let Some(bulk) = &state.bulk {
            bulk.finish(k);
        }
    }
}
