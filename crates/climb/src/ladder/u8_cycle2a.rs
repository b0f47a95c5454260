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
use ptx::{Builder, F32, Pointer, R32, Shared, Violations};

use super::RungKernel;
use super::common::ALIGN;
use super::u8_common::{self, Cta, KEYS, ROWS, Tile, Tiles, load_decoded};

/// Elements from row to row.
const PITCH: u32 = 72;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    u8_common::emit(problem, arch, RungKernel::U8Cycle2a, |k| Words {
        queries: k.shared_array("queries", ALIGN, ROWS * PITCH),
        tiles: ["keys", "values"].map(|name| k.shared_array(name, ALIGN, KEYS * PITCH)),
    })
}

/// Codes, four bytes per copy.
struct Words {
    queries: Shared,
    tiles: [Shared; 2],
}

impl Tiles for Words {
    const PITCH: u32 = PITCH;
    const UNROLL: u32 = 4;
    type Query = [F32; 2];

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        cta.copy_queries(k, self.queries, PITCH);
    }

    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        cta.request_tile(k, tile, self.tiles, PITCH, 4);
        k.cp_async_wait(0);
        k.bar_sync();
    }

    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> [F32; 2] {
        cta.decode_query(k, self.queries, row)
    }

    fn product(&self, k: &mut Builder, cta: &Cta, query: &[F32; 2], key: R32, u: u32) -> F32 {
        let at = k.shared_index(self.tiles[0], key, 1).at(i64::from(u * PITCH));
        let first = load_decoded(k, at, cta.scales[1]);
        let sum: F32 = k.mul(query[0], first);
        k.if_(cta.second, |k| {
            let second = load_decoded(k, at.at(32), cta.scales[1]);
            k.mad_to(sum, query[1], second, sum);
        });
        sum
    }

    fn value(&self, k: &mut Builder, cta: &Cta, key: R32, column: u32) -> F32 {
        let at = k.shared_index(self.tiles[1], key, 1);
        load_decoded(k, at.at(i64::from(32 * column)), cta.scales[2])
    }
}
