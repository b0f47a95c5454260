//! u8 attention, baseline and "cycle 2a": 1597 and 1454 µs on the seeds' L4.
//!
//! What the seeds believed: 8-bit inputs halve the traffic, so attention gets faster. What was wrong: 2 MB are moved in
//! a few µs on any of these GPUs; each code becomes a float by itself, again for every row that meets it, before a scalar
//! multiply-add. The emulator shows no tensor-core work at all, conversions outnumbering multiply-adds, and 16 lanes of a
//! score loop in one bank.
//! Cycle 2a differs in how the codes arrive: 16 a load instead of one.

use problem::Problem;
use ptx::{Builder, Kernel, Pointer, R32, Shared};

use super::u8_common::{self, CODE_BYTES, Cta, DIM, Element, Loader, ROWS, THREADS, copy_scalar};
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

/// Codes from global to shared memory, through registers.
struct Direct {
    width: Width,
}

impl Direct {
    fn load(&self, k: &mut Builder, cta: &Cta, tensor: usize, first: R32, to: Shared, elements: u32) {
        let from = k.index(cta.codes[tensor], first, 1);
        match self.width {
            Width::Byte => copy_scalar(k, cta, from, to, elements),
            Width::Vector16 => k.for_range(cta.thread, elements / 16, THREADS, |k, i| {
                let (from, to) = (k.index(from, i, 16), k.shared_index(to, i, 16));
                let words: [R32; 4] = k.ld_vec(from);
                k.st_vec(to, words);
            }),
        }
    }
}

impl Loader for Direct {
    const ELEMENT: Element = Element::Code;

    fn shared_bytes(&self) -> u32 {
        ROWS * DIM + 2 * CODE_BYTES
    }

    fn start(&mut self, _: &mut Builder, _: &Cta) {}

    fn queries(&mut self, k: &mut Builder, cta: &Cta) -> Shared {
        let zero = k.mov(0u32);
        self.load(k, cta, 0, zero, cta.shared, ROWS * DIM);
        cta.shared
    }

    fn tile(&mut self, k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
        let first: R32 = k.mul(index, CODE_BYTES);
        let tiles = [0, 1].map(|i| cta.shared.at(i64::from(ROWS * DIM + i * CODE_BYTES)));
        for (i, to) in tiles.into_iter().enumerate() {
            self.load(k, cta, 1 + i, first, to, CODE_BYTES);
        }
        k.bar_sync();
        tiles
    }
}
