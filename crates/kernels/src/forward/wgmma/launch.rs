//! The launch contract of the family.

use problem::{Problem, Tensor};
use ptx::{Access, Arg, BufferSpec, Dim3, Launch, TensorMapSpec};
use tile::{BulkStore, COUNTER_BYTES, Handout, Partials, Tail};

use super::plan::{Store, WgmmaPlan};
use crate::Arch;
use crate::forward::contract::{
    band_args, head_strides, pointer, softcap_args, tensor_buffers, tensor_rows, unsigned_factor,
};

/// The tensors that are loaded through tensor maps.
pub(super) const LOADED: [Tensor; 3] = [Tensor::Q, Tensor::K, Tensor::V];

impl WgmmaPlan {
    pub(super) fn launch(&self, problem: &Problem, arch: &Arch) -> Launch {
        let takers = self.takers(problem, arch) as u32;
        Launch {
            grid: Dim3(takers * self.cluster, 1, 1),
            cluster: Dim3(self.cluster, 1, 1),
            block: Dim3(self.threads(), 1, 1),
            dynamic_shared: self.shared_bytes(problem),
            overlapping: false,
        }
    }

    pub(super) fn buffers(&self, problem: &Problem, arch: &Arch) -> Vec<BufferSpec> {
        let mut buffers = tensor_buffers(problem, problem.pass.lse());
        let mut own = |name: &str, bytes| {
            buffers.push(BufferSpec { name: name.to_owned(), bytes, access: Access::ReadWrite });
        };
        if self.handout == Handout::Dynamic {
            own("counter", COUNTER_BYTES);
        }
        if self.tail == Tail::Shared {
            // The same size for all lengths, and never empty: an empty buffer has no address.
            let (room, warps) = (self.room(arch), self.tile_warps());
            let parts = Partials::bytes(room, warps, problem.head_dim_v as u32).max(16);
            own("scratch", parts as usize);
            own("counter", Partials::counter_bytes(room, warps).max(16) as usize);
        }
        buffers
    }

    pub(super) fn tensor_maps(&self, problem: &Problem) -> Vec<TensorMapSpec> {
        let tiles = self.tile_shapes(problem);
        let mut maps: Vec<TensorMapSpec> = LOADED
            .into_iter()
            .zip(tiles)
            .map(|(tensor, tile)| tile.map(&tensor_rows(problem, tensor)))
            .collect();
        if self.store == Store::Bulk {
            let tile = BulkStore::tile(problem.head_dim_v as u32);
            maps.push(tile.map(&tensor_rows(problem, Tensor::Out)));
        }
        maps
    }

    /// One value per parameter, in the order in which the generator declares them.
    pub(super) fn args(&self, problem: &Problem, arch: &Arch) -> Vec<Arg> {
        let maps = LOADED.len() + usize::from(self.store == Store::Bulk);
        let mut args: Vec<Arg> = (0..maps).map(|index| Arg::TensorMap { index }).collect();
        args.push(pointer(problem, Tensor::Out));
        let mut next = Tensor::Out as usize + 1;
        let shares = self.tail == Tail::Shared;
        for wanted in [problem.pass.lse(), self.handout == Handout::Dynamic, shares, shares] {
            if wanted {
                args.push(Arg::Buffer { index: next, offset: 0 });
                next += 1;
            }
        }
        args.extend(head_strides(problem, Tensor::Out));
        let numbers = [
            problem.seq_q as u64,
            problem.seq_kv as u64,
            self.tile_count(problem),
            self.row_blocks(problem),
            self.tile_heads(problem),
            self.section(problem),
        ];
        args.extend(numbers.map(|n| Arg::U32(n as u32)));
        if let Some(round) = self.last_round(problem, arch) {
            let numbers = [round.blocks, round.whole(), round.piece(), round.longer()];
            args.extend(numbers.map(|n| Arg::U32(n as u32)));
        }
        args.push(Arg::F32(unsigned_factor(problem)));
        args.extend(band_args(problem).chain(softcap_args(problem)));
        args
    }
}
