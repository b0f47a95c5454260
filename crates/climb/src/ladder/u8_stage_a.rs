//! u8 attention, stage A: 2047 µs on the authors' L4, 0.71× of cycle 2a.
//!
//! What the authors believed: 16-byte cp.async in two stages hides the loads, and tables of the 256 values
//! save the decoding. What was wrong: the loads took only a few per cent of the time, so there was next to
//! nothing to hide. A table in shared memory turns arithmetic, which overlapped with other warps, into a
//! second dependent load, whose 32 random addresses conflict in the banks. Two tiles of keys and of values,
//! the tables and wider padding need 35 KB per CTA, so an L4 holds two CTAs per SM instead of four. The
//! emulator shows the conflicts of the look-ups; the time model shows the waves. The structure follows the
//! authors' published code; rows are padded to 80 bytes.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Pointer, R32, Shared, Violations};

use super::RungKernel;
use super::common::ALIGN;
use super::u8_common::{self, Cta, KEYS, ROWS, THREADS, Tile, Tiles, decode, load_code};

/// Elements from row to row.
const PITCH: u32 = 80;
const TILE_BYTES: u32 = KEYS * PITCH;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    u8_common::emit(problem, arch, RungKernel::U8StageA, |k| {
        let stages = ["keys", "values"].map(|name| k.shared_array(name, 16, 2 * TILE_BYTES));
        let queries = k.shared_array("queries", 16, ROWS * PITCH);
        TwoStages { queries, stages, tables: Tables::new(k), current: stages }
    })
}

/// The values of all codes, for keys and for values.
pub(super) struct Tables([Shared; 2]);

impl Tables {
    pub(super) fn new(k: &mut Builder) -> Tables {
        Tables(["key_table", "value_table"].map(|name| k.shared_array(name, ALIGN, 4 * 256)))
    }

    /// Each thread fills in one code.
    pub(super) fn fill(&self, k: &mut Builder, cta: &Cta) {
        const { assert!(THREADS == 256, "a thread for each code") };
        for (table, scale) in self.0.into_iter().zip([cta.scales[1], cta.scales[2]]) {
            let value = decode(k, cta.thread, scale);
            let to = k.shared_index(table, cta.thread, 4);
            k.st(to, value);
        }
    }

    /// The value of a code of the keys (0) or of the values (1).
    pub(super) fn look_up(&self, k: &mut Builder, table: usize, code: R32) -> F32 {
        let at = k.shared_index(self.0[table], code, 4);
        k.ld(at)
    }
}

/// Double buffering: codes arrive in a ring of two tiles.
struct TwoStages {
    queries: Shared,
    stages: [Shared; 2],
    tables: Tables,
    /// The stage in use, of keys and of values.
    current: [Shared; 2],
}

impl TwoStages {
    fn stage(&self, k: &mut Builder, index: R32) -> [Shared; 2] {
        let parity: R32 = k.and(index, 1);
        self.stages.map(|tile| k.shared_index(tile, parity, TILE_BYTES))
    }

    fn load(&self, k: &mut Builder, table: usize, at: Shared) -> F32 {
        let code = load_code(k, at);
        self.tables.look_up(k, table, code)
    }
}

impl Tiles for TwoStages {
    const PITCH: u32 = PITCH;
    const UNROLL: u32 = 4;
    type Query = [F32; 2];

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        self.tables.fill(k, cta);
        cta.copy_queries(k, self.queries, PITCH);
    }

    fn started(&mut self, k: &mut Builder, cta: &Cta) {
        let (index, keys): (R32, R32) = (k.mov(0u32), k.mov(KEYS));
        cta.request_tile(k, &Tile { index, count: index, keys }, self.stages, PITCH, 16);
        k.cp_async_wait(0);
        k.bar_sync();
    }

    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile) {
        let index: R32 = k.add(tile.index, 1);
        let more = k.setp_s(CmpOp::Lt, index, tile.count);
        let to = self.stage(k, index);
        k.if_(more, |k| cta.request_tile(k, &Tile { index, ..*tile }, to, PITCH, 16));
        self.current = self.stage(k, tile.index);
    }

    fn used(&mut self, k: &mut Builder) {
        k.cp_async_wait(0);
    }

    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> [F32; 2] {
        cta.decode_query(k, self.queries, row)
    }

    fn product(&self, k: &mut Builder, cta: &Cta, query: &[F32; 2], key: R32, u: u32) -> F32 {
        let at = k.shared_index(self.current[0], key, 1).at(i64::from(u * PITCH));
        let first = self.load(k, 0, at);
        let sum: F32 = k.mul(query[0], first);
        k.if_(cta.second, |k| {
            let second = self.load(k, 0, at.at(32));
            k.mad_to(sum, query[1], second, sum);
        });
        sum
    }

    fn value(&self, k: &mut Builder, _: &Cta, key: R32, column: u32) -> F32 {
        let at = k.shared_index(self.current[1], key, 1);
        self.load(k, 1, at.at(i64::from(32 * column)))
    }
}
