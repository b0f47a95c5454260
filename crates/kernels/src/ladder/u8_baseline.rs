//! u8 attention, baseline and "cycle 2a": 1597 and 1454 µs on the seeds' L4.
//!
//! What the seeds believed: 8-bit inputs halve the traffic, so attention gets faster. What was wrong: 2 MB are moved in
//! a few µs on any of these GPUs; each code still becomes a half and then a float, one at a time, before a scalar
//! multiply-add. The emulator shows no tensor-core work at all and 32 lanes of a score loop in one bank.
//! Cycle 2a differs in how the codes arrive: 16 a load instead of one.

use problem::Problem;
use ptx::{Builder, Kernel, Pointer, R32, Shared};

use super::u8_common::{self, Cta, DIM, KEYS, Loader, ROWS, THREADS, convert_scalar, decode};
use crate::Arch;

/// Codes per load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Width {
    /// One byte: the baseline.
    Byte,
    /// A `uint4`: cycle 2a.
    Vector16,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, width: Width) -> Kernel {
    let entry = match width {
        Width::Byte => "u8_baseline",
        Width::Vector16 => "u8_cycle2a",
    };
    u8_common::emit(problem, arch, entry, Direct { width })
}

/// Global codes straight to shared halves.
struct Direct {
    width: Width,
}

const TILE_BYTES: u32 = KEYS * DIM * 2;

impl Direct {
    fn load(&self, k: &mut Builder, cta: &Cta, tensor: usize, first: R32, to: Shared, elements: u32) {
        let from = k.index(cta.codes[tensor], first, 1);
        let map = cta.maps[tensor];
        match self.width {
            Width::Byte => convert_scalar(k, cta, map, |k, i| k.index(from, i, 1), to, elements),
            Width::Vector16 => k.for_range(cta.thread, elements / 16, THREADS, |k, i| {
                let from = k.index(from, i, 16);
                let words: [R32; 4] = k.ld_vec(from);
                let to = k.shared_index(to, i, 32);
                for (w, word) in words.into_iter().enumerate() {
                    for byte in 0..4 {
                        let code: R32 = k.shr_u(word, 8 * byte as u32);
                        let code: R32 = k.and(code, 0xff);
                        let value = decode(k, code, map);
                        k.st(to.at(2 * (4 * w as i64 + byte)), value);
                    }
                }
            }),
        }
    }
}

impl Loader for Direct {
    fn shared_bytes(&self) -> u32 {
        ROWS * DIM * 2 + 2 * TILE_BYTES
    }

    fn start(&mut self, _: &mut Builder, _: &Cta) {}

    fn queries(&mut self, k: &mut Builder, cta: &Cta) -> Shared {
        let zero = k.mov(0u32);
        self.load(k, cta, 0, zero, cta.shared, ROWS * DIM);
        cta.shared
    }

    fn tile(&mut self, k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
        let first: R32 = k.mul(index, KEYS * DIM);
        let tiles = [0, 1].map(|i| cta.shared.at(i64::from(ROWS * DIM * 2 + i * TILE_BYTES)));
        for (i, to) in tiles.into_iter().enumerate() {
            self.load(k, cta, 1 + i, first, to, KEYS * DIM);
        }
        k.bar_sync();
        tiles
    }
}
