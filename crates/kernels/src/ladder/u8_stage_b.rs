//! u8 attention, stage B: 2008 µs on the seeds' L4, and wrong (max_diff 4.5).
//!
//! What the seeds believed: a union of `uint8_t[M][D]` and `half[M][D]` lets a tile be converted in place. They found
//! that element `i` lies at byte `i` in one view and at `2·i` in the other, and gave up the union. What they did not
//! see: no barrier stands between the threads that still read codes and those that already write halves over them, so
//! it would have raced with any layout. The emulator reports that race. Repaired: all codes go to registers, a barrier,
//! and then the halves are written; in place, and right.

use problem::Problem;
use ptx::{Builder, Kernel, Pointer, R32, Shared, Type};

use super::u8_common::{self, Cta, DIM, Element, KEYS, Loader, ROWS, THREADS, convert_scalar, decode};
use super::u8_stage_a::{arrive, request};
use crate::Arch;

/// How a tile is converted in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Conversion {
    /// Read a code, write a half over other threads' codes.
    Union,
    /// All codes to registers, a barrier, all halves.
    ThroughRegisters,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, conversion: Conversion) -> Kernel {
    let entry = match conversion {
        Conversion::Union => "u8_stage_b",
        Conversion::ThroughRegisters => "u8_stage_b_repaired",
    };
    u8_common::emit(problem, arch, entry, InPlace { conversion })
}

/// Two stages, each a tile of keys and one of values with room for halves.
struct InPlace {
    conversion: Conversion,
}

const TILE_BYTES: u32 = KEYS * DIM * 2;

fn stage(k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
    let parity: R32 = k.and(index, 1);
    let stage = k.shared_index(cta.shared.at(i64::from(ROWS * DIM * 2)), parity, 2 * TILE_BYTES);
    [stage, stage.at(i64::from(TILE_BYTES))]
}

impl InPlace {
    fn convert(&self, k: &mut Builder, cta: &Cta, tensor: usize, tile: Shared) {
        let map = cta.maps[tensor];
        match self.conversion {
            Conversion::Union => {
                convert_scalar(k, cta, map, |k, i| k.shared_index(tile, i, 1), tile, KEYS * DIM);
            }
            Conversion::ThroughRegisters => {
                let from = k.shared_index(tile, cta.thread, 1);
                let to = k.shared_index(tile, cta.thread, 2);
                let elements = 0..i64::from(KEYS * DIM / THREADS);
                let codes: Vec<R32> =
                    elements.map(|i| k.ld_as(Type::U8, from.at(i * i64::from(THREADS)))).collect();
                k.bar_sync();
                for (i, code) in codes.into_iter().enumerate() {
                    let value = decode(k, code, map);
                    k.st(to.at(2 * i as i64 * i64::from(THREADS)), value);
                }
            }
        }
    }
}

impl Loader for InPlace {
    const ELEMENT: Element = Element::Half;

    fn shared_bytes(&self) -> u32 {
        ROWS * DIM * 2 + 4 * TILE_BYTES
    }

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        let zero = k.mov(0u32);
        let to = stage(k, cta, zero);
        request(k, cta, zero, to);
    }

    fn queries(&mut self, k: &mut Builder, cta: &Cta) -> Shared {
        let from = cta.codes[0];
        convert_scalar(k, cta, cta.maps[0], |k, i| k.index(from, i, 1), cta.shared, ROWS * DIM);
        cta.shared
    }

    fn tile(&mut self, k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
        let tiles = arrive(k, cta, index, stage);
        for (i, tile) in tiles.into_iter().enumerate() {
            self.convert(k, cta, 1 + i, tile);
        }
        k.bar_sync();
        tiles
    }
}
