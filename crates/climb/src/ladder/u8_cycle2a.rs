//! u8 attention, "cycle 2a": 1454 µs on the authors' L4, 1.10× the baseline.
//!
//! What the authors believed: coalesced asynchronous copies of four bytes make the loads cheap. What was
//! wrong: the loads took only a few per cent of the time. The improvement had other causes: a lane decodes
//! its two columns of a query row once for all keys of a tile, and four scores share the overhead of a loop
//! round. The emulator shows the remaining costs: keys and values are still decoded for every row, every
//! score needs shuffles, and the accumulators are in shared memory. The structure follows the authors'
//! published code; rows are padded to 72 bytes, and the kernel waits for the copies of a tile immediately, so
//! nothing overlaps them.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, F32, Pointer, R32, Violations};

use super::RungKernel;
use super::u8_common::{self, Codes, Cta, Tile, Tiles, load_decoded};

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    u8_common::emit(problem, arch, RungKernel::U8Cycle2a, |k| Words(Codes::declare(k)))
}

/// Codes, four bytes per copy.
struct Words(Codes);

impl Tiles for Words {
    const PITCH: u32 = Codes::PITCH;
    const UNROLL: u32 = 4;
    type Query = [F32; 2];

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        cta.copy_queries(k, self.0.queries, Codes::PITCH);
    }

    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        cta.request_tile(k, tile, self.0.tiles, Codes::PITCH, 4);
        k.cp_async_wait(0);
        k.bar_sync();
    }

    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> [F32; 2] {
        cta.decode_query(k, self.0.queries, row)
    }

    fn product(&self, k: &mut Builder, cta: &Cta, query: &[F32; 2], key: R32, u: u32) -> F32 {
        let at = k.shared_index(self.0.tiles[0], key, 1).at(i64::from(u * Codes::PITCH));
        let first = load_decoded(k, at, cta.scales[1]);
        let sum: F32 = k.mul(query[0], first);
        k.if_(cta.second, |k| {
            let second = load_decoded(k, at.at(32), cta.scales[1]);
            k.mad_to(sum, query[1], second, sum);
        });
        sum
    }

    fn value(&self, k: &mut Builder, cta: &Cta, key: R32, column: u32) -> F32 {
        self.0.value(k, cta, key, column)
    }
}
