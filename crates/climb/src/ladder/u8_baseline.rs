//! u8 attention, baseline: 1597 µs on the authors' L4.
//!
//! What the authors believed: 8-bit inputs halve the traffic, so attention gets faster. What was wrong: any
//! of these GPUs moves 2 MB in a few µs, and nothing else became cheaper. Each code is converted to a float
//! (a conversion, a division, a multiply-add, a product) again for every row that uses it, and the query's
//! own codes again for every key, all for one multiply-add. Each score costs ten dependent steps of shuffles
//! and additions, and two more for scaling and broadcast. The emulator shows no tensor-core work, one
//! multiply-add of the two products in twenty-three instructions, and every score passing through local
//! memory. The structure follows the authors' published code; rows are padded to 72 bytes.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, F32, Pointer, R32, Shared, Violations};

use super::RungKernel;
use super::u8_common::{self, Codes, Cta, Tile, Tiles, load_decoded};

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    u8_common::emit(problem, arch, RungKernel::U8Baseline, |k| Bytes(Codes::declare(k)))
}

/// Codes, loaded one byte at a time and decoded at each use.
struct Bytes(Codes);

impl Tiles for Bytes {
    const PITCH: u32 = Codes::PITCH;
    const UNROLL: u32 = 1;
    type Query = Shared;

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        cta.copy_queries(k, self.0.queries, Codes::PITCH);
    }

    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        cta.copy_tile(k, tile, self.0.tiles, Codes::PITCH);
        k.bar_sync();
    }

    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> Shared {
        let row = k.shared_index(self.0.queries, row, 1);
        k.shared_index(row, cta.lane, 1)
    }

    fn product(&self, k: &mut Builder, cta: &Cta, query: &Shared, key: R32, u: u32) -> F32 {
        let sum: F32 = k.mov(0.0f32);
        let key = k.shared_index(self.0.tiles[0], key, 1).at(i64::from(u * Codes::PITCH));
        cta.columns(k, |k, column| {
            let column = i64::from(32 * column);
            let q = load_decoded(k, query.at(column), cta.scales[0]);
            let x = load_decoded(k, key.at(column), cta.scales[1]);
            k.mad_to(sum, q, x, sum);
        });
        sum
    }

    fn value(&self, k: &mut Builder, cta: &Cta, key: R32, column: u32) -> F32 {
        self.0.value(k, cta, key, column)
    }
}
