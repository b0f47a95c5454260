//! u8 attention, stage B: 2008 µs on the authors' L4, with wrong results (max_diff 4.5).
//!
//! What the authors believed: a union of `uint8_t[M][D]` and `half[M][D]` lets a tile be converted in place,
//! and halves make the inner loop cheap. They found that element `i` is at byte `i` in one view and at byte
//! `2·i` in the other, and gave up the union. What they did not see: there is no barrier between the threads
//! that still read codes and those that already write halves over them, so the kernel would have raced with
//! any layout. The emulator reports that race. The repaired kernel copies all codes to registers, passes a
//! barrier, and then writes the halves; it converts in place with correct results. Neither kernel uses a
//! tensor core: halves are widened again and multiplied one by one. The structure follows the authors'
//! published code, including the tables of values and rows of 80 elements; copies load one byte at a time
//! again.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, F32, Pointer, R32, Shared, Violations};

use super::RungKernel;
use super::common::{load_half, store_half};
use super::u8_common::{self, Cta, DIM, KEYS, ROWS, THREADS, Tile, Tiles, decode, load_code};
use super::u8_stage_a::Tables;

/// Elements from row to row.
const PITCH: u32 = 80;

/// How a tile is converted in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// Reads a code and writes a half over the codes of other threads.
    Union,
    /// Reads all codes to registers, passes a barrier, then writes all halves.
    ThroughRegisters,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, conversion: Conversion) -> Result<Bound, Violations> {
    let rung = match conversion {
        Conversion::Union => RungKernel::U8StageB,
        Conversion::ThroughRegisters => RungKernel::U8StageBRepaired,
    };
    u8_common::emit(problem, arch, rung, |k| InPlace {
        conversion,
        queries: k.shared_array("queries", 16, 2 * ROWS * PITCH),
        tiles: ["keys", "values"].map(|name| k.shared_array(name, 16, 2 * KEYS * PITCH)),
        tables: Tables::new(k),
    })
}

/// Arrays with space for halves, which initially hold codes.
struct InPlace {
    conversion: Conversion,
    queries: Shared,
    tiles: [Shared; 2],
    tables: Tables,
}

impl InPlace {
    /// Converts the codes of the CTA's queries to halves; each warp converts its own rows.
    fn convert_queries(&self, k: &mut Builder, cta: &Cta) {
        k.for_range(cta.warp, cta.rows, THREADS / 32, |k, row| {
            let place = k.mad(row, PITCH, cta.lane);
            let (from, to) = (k.shared_index(self.queries, place, 1), k.shared_index(self.queries, place, 2));
            cta.columns(k, |k, column| {
                let column = i64::from(32 * column);
                let code = load_code(k, from.at(column));
                let value = decode(k, code, cta.scales[0]);
                store_half(k, to.at(2 * column), value);
            });
        });
    }

    /// Converts the codes of a tile to halves: elements `tid`, `tid + 256`, ….
    fn convert_tile(&self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        cta.elements(k, tile.keys, PITCH, |k, _, place| {
            let codes = self.tiles.map(|tile| {
                let at = k.shared_index(tile, place, 1);
                load_code(k, at)
            });
            for (i, code) in codes.into_iter().enumerate() {
                let value = self.tables.look_up(k, i, code);
                let to = k.shared_index(self.tiles[i], place, 2);
                store_half(k, to, value);
            }
        });
    }

    /// The repair, for an array of `rows` rows: all codes are in registers before any half is written.
    fn convert_behind_barrier(
        &self,
        k: &mut Builder,
        cta: &Cta,
        array: Shared,
        rows: u32,
        mut value: impl FnMut(&mut Builder, R32) -> F32,
    ) {
        let (row, column): (R32, R32) = (k.shr_u(cta.thread, DIM.ilog2()), k.and(cta.thread, DIM - 1));
        let place = k.mad(row, PITCH, column);
        let (from, to) = (k.shared_index(array, place, 1), k.shared_index(array, place, 2));
        let steps = || (0..rows).step_by((THREADS / DIM) as usize).map(|row| i64::from(row * PITCH));
        let codes: Vec<R32> = steps().map(|step| load_code(k, from.at(step))).collect();
        k.bar_sync();
        for (step, code) in steps().zip(codes) {
            let value = value(k, code);
            store_half(k, to.at(2 * step), value);
        }
    }
}

impl Tiles for InPlace {
    const PITCH: u32 = PITCH;
    const UNROLL: u32 = 1;
    type Query = Shared;

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        self.tables.fill(k, cta);
        cta.copy_queries(k, self.queries, PITCH);
    }

    fn started(&mut self, k: &mut Builder, cta: &Cta) {
        match self.conversion {
            Conversion::Union => self.convert_queries(k, cta),
            Conversion::ThroughRegisters => {
                let decode = |k: &mut Builder, code| decode(k, code, cta.scales[0]);
                self.convert_behind_barrier(k, cta, self.queries, ROWS, decode);
            }
        }
        k.bar_sync();
    }

    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        cta.copy_tile(k, tile, self.tiles, PITCH);
        k.bar_sync();
        match self.conversion {
            Conversion::Union => self.convert_tile(k, cta, tile),
            Conversion::ThroughRegisters => {
                for (i, array) in self.tiles.into_iter().enumerate() {
                    let look_up = |k: &mut Builder, code| self.tables.look_up(k, i, code);
                    self.convert_behind_barrier(k, cta, array, KEYS, look_up);
                }
            }
        }
        k.bar_sync();
    }

    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> Shared {
        let row = k.shared_index(self.queries, row, 2);
        k.shared_index(row, cta.lane, 2)
    }

    fn product(&self, k: &mut Builder, _: &Cta, query: &Shared, key: R32, u: u32) -> F32 {
        let key = k.shared_index(self.tiles[0], key, 2).at(i64::from(2 * u * PITCH));
        let [first, second] =
            [0, 64].map(|column| (load_half(k, query.at(column)), load_half(k, key.at(column))));
        let sum: F32 = k.mul(first.0, first.1);
        k.mad(second.0, second.1, sum)
    }

    fn value(&self, k: &mut Builder, _: &Cta, key: R32, column: u32) -> F32 {
        let at = k.shared_index(self.tiles[1], key, 2);
        load_half(k, at.at(i64::from(64 * column)))
    }
}
