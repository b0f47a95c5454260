//! u8 attention, stage A: 2047 µs on the seeds' L4, 0.71× of cycle 2a.
//!
//! What the seeds believed: cp.async hides the loads. What was wrong: the loads took 5 % of the time, so there was next
//! to nothing to hide; a second copy of every tile and the bookkeeping of stages came on top.

use problem::Problem;
use ptx::{Builder, Kernel, Pointer, R32, Shared};

use super::u8_common::{self, CODE_BYTES, Cta, DIM, Element, Loader, ROWS, THREADS, copy_scalar, has_next};
use crate::Arch;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Kernel {
    u8_common::emit(problem, arch, "u8_stage_a", TwoStages)
}

/// Codes arrive two tiles deep.
struct TwoStages;

/// Requests the codes of a tile of keys and of values into a stage.
pub(super) fn request(k: &mut Builder, cta: &Cta, index: R32, to: [Shared; 2]) {
    let first: R32 = k.mul(index, CODE_BYTES);
    for (i, to) in to.into_iter().enumerate() {
        let from = k.index(cta.codes[1 + i], first, 1);
        k.for_range(cta.thread, CODE_BYTES / 16, THREADS, |k, chunk| {
            let (to, from) = (k.shared_index(to, chunk, 16), k.index(from, chunk, 16));
            k.cp_async16(to, from);
        });
    }
    k.cp_async_commit();
}

/// Where the tiles of keys and values of an index lie.
pub(super) type Stage = fn(&mut Builder, &Cta, R32) -> [Shared; 2];

/// Requests the next tile, waits for this one and says where it is.
pub(super) fn arrive(k: &mut Builder, cta: &Cta, index: R32, stage: Stage) -> [Shared; 2] {
    let more = has_next(k, cta, index);
    k.if_(more, |k| {
        let next: R32 = k.add(index, 1);
        let to = stage(k, cta, next);
        request(k, cta, next, to);
    });
    k.if_(!more, |k| k.cp_async_commit());
    k.cp_async_wait(1);
    k.bar_sync();
    stage(k, cta, index)
}

fn stage(k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
    let parity: R32 = k.and(index, 1);
    let stage = k.shared_index(cta.shared.at(i64::from(ROWS * DIM)), parity, 2 * CODE_BYTES);
    [stage, stage.at(i64::from(CODE_BYTES))]
}

impl Loader for TwoStages {
    const ELEMENT: Element = Element::Code;

    fn shared_bytes(&self) -> u32 {
        ROWS * DIM + 4 * CODE_BYTES
    }

    fn start(&mut self, k: &mut Builder, cta: &Cta) {
        let zero = k.mov(0u32);
        let to = stage(k, cta, zero);
        request(k, cta, zero, to);
    }

    fn queries(&mut self, k: &mut Builder, cta: &Cta) -> Shared {
        copy_scalar(k, cta, cta.codes[0], cta.shared, ROWS * DIM);
        cta.shared
    }

    fn tile(&mut self, k: &mut Builder, cta: &Cta, index: R32) -> [Shared; 2] {
        arrive(k, cta, index, stage)
    }
}
