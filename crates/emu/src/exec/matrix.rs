//! Executes `ldmatrix`, `stmatrix`, `movmatrix` and `mma.sync`, in which a whole warp takes part.

use ptx::{MatrixAccess, Mma, Op, Space};

use super::Env;
use super::access::{Site, plain};
use super::registers::for_lanes;
use super::run::Flow;
use super::warp::{Split, State, Warp};
use crate::decode::{Inst, Slot};
use crate::memory::{Chunk, RANK_SHIFT, SHARED_BASE, load_bytes};
use crate::numerics::tensor::{self, Accumulator};
use crate::numerics::{Lanes32, Lanes64};
use crate::order::{Access, Strength, Verdict};
use crate::report::{Fidelity, HazardKind};
use crate::semantics::products;

impl Env<'_> {
    /// Waits until all running lanes of a warp are at an instruction that the warp executes together, and
    /// reports lanes that are missing for good.
    pub(super) fn converge(
        &mut self,
        warp: &Warp,
        split: &mut Split,
        inst: &Inst,
        mask: u32,
    ) -> Option<Flow> {
        if mask != !0 && !split.forced {
            if mask != warp.live {
                return Some(Flow::Wait(State::Lanes(!0)));
            }
            let lane = mask.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                format!("only lanes {mask:#010x} execute the instruction: the whole warp must")
            });
        }
        split.forced = false;
        None
    }

    pub(super) fn matrix(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        if let Some(wait) = self.converge(warp, split, inst, mask) {
            return wait;
        }
        match inst.op {
            Op::Mma(m) => self.mma(warp, inst, &m, mask),
            Op::Ldmatrix(m) => self.ldmatrix(warp, inst, &m, mask),
            Op::Stmatrix(m) => self.stmatrix(warp, inst, &m, mask),
            Op::WmmaLoad(_) => self.wmma_load(warp, inst, mask),
            Op::WmmaStore(_) => self.wmma_store(warp, inst, mask),
            Op::Wmma(w) => self.wmma(warp, inst, &w, mask),
            Op::Movmatrix => {
                let a = *warp.registers.get32(inst.s[0]);
                let result = std::array::from_fn(|lane| {
                    let row = lane / 4;
                    let half = |column: usize| half_of(a[4 * column + row / 2], row % 2);
                    half(2 * (lane % 4)) | half(2 * (lane % 4) + 1) << 16
                });
                warp.registers.set32(inst.d[0], mask, &result);
            }
            _ => {}
        }
        Flow::Next
    }

    fn mma(&mut self, warp: &mut Warp, inst: &Inst, m: &Mma, mask: u32) {
        let Some(kind) = products::of_mma(m) else { return };
        let slots = self.facts.context.program.slots(inst);
        let [a, b, c] = kind.registers();
        let (d_slots, rest) = slots.split_at(c);
        let (a_slots, rest) = rest.split_at(a);
        let (b_slots, c_slots) = rest.split_at(b);
        if self.facts.context.options.fidelity == Fidelity::Sketch {
            for (to, from) in d_slots.iter().zip(c_slots) {
                let sum = warp.registers.get_any(*from);
                warp.registers.set_any(*to, mask, &sum);
            }
            return;
        }
        let rules = self.facts.context.rules;
        let done = if kind.accumulator() == Accumulator::F64 {
            let gather = |slots: &[Slot]| -> Vec<Lanes64> {
                slots.iter().map(|s| *warp.registers.get64(*s)).collect()
            };
            let (a, b, c) = (gather(a_slots), gather(b_slots), gather(c_slots));
            let mut d = vec![[0; 32]; c.len()];
            let done = tensor::mma_f64(kind, rules, &a, &b, &c, &mut d);
            d_slots.iter().zip(&d).for_each(|(s, d)| warp.registers.set64(*s, mask, d));
            done
        } else {
            // No product takes more registers.
            let [mut a, mut b, mut c, mut d] = [[[0; 32]; 4]; 4];
            for (registers, slots) in [(&mut a, a_slots), (&mut b, b_slots), (&mut c, c_slots)] {
                for (to, slot) in registers.iter_mut().zip(slots) {
                    *to = *warp.registers.get32(*slot);
                }
            }
            let (a, b, c) = (&a[..a_slots.len()], &b[..b_slots.len()], &c[..c_slots.len()]);
            let done = tensor::mma(kind, rules, a, b, c, &mut d[..d_slots.len()]);
            d_slots.iter().zip(&d).for_each(|(s, d)| warp.registers.set32(*s, mask, d));
            done
        };
        if let Err(error) = done {
            self.report(HazardKind::OutOfBounds, inst, warp.index, 0, None, || error.to_string());
        }
    }

    /// The addresses of the rows. Lane 8·matrix + row holds the address of a row.
    fn rows(&mut self, warp: &Warp, inst: &Inst, m: &MatrixAccess, mask: u32) -> ([u64; 32], u32) {
        let lanes = if m.count == 4 { !0 } else { (1u32 << (8 * m.count)) - 1 };
        let mut addresses = super::access::addresses(&warp.registers, inst);
        if inst.space == Space::Generic {
            addresses = addresses.map(|a| crate::memory::resolve(a).1);
        }
        self.log.count_shared(inst, lanes, &addresses, 16);
        if let Some(recorder) = &mut self.log.recorder {
            recorder.shared(warp.index, inst.number, lanes & mask, &addresses, 16);
        }
        (addresses, lanes)
    }

    fn ldmatrix(&mut self, warp: &mut Warp, inst: &Inst, m: &MatrixAccess, mask: u32) {
        let (addresses, lanes) = self.rows(warp, inst, m, mask);
        let mut rows: [Chunk; 32] = [[0; 8]; 32];
        let left = self.load_rows(warp, inst, &addresses, (lanes, mask), &mut rows);
        for_lanes(left, |lane| {
            if let Some(row) = self.load_row(warp, inst, lane, addresses[lane], mask) {
                rows[lane] = row;
            }
        });
        let slots = self.facts.context.program.slots(inst);
        for (matrix, slot) in slots.iter().enumerate() {
            let row = |r: usize| &rows[8 * matrix + r];
            let result: Lanes32 = std::array::from_fn(|lane| {
                let (r, c) = (lane / 4, lane % 4);
                if m.trans {
                    half_of(row(2 * c)[r / 2], r % 2) | half_of(row(2 * c + 1)[r / 2], r % 2) << 16
                } else {
                    row(r)[c]
                }
            });
            warp.registers.set32(*slot, mask, &result);
        }
        if !self.facts.context.follow.is_nothing() {
            self.mark_doubted_rows(warp, inst, m.trans, lanes, &addresses);
        }
    }

    /// Loads rows whose reads have no finding, and returns the others.
    fn load_rows(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        addresses: &[u64; 32],
        (lanes, mask): (u32, u32),
        rows: &mut [Chunk; 32],
    ) -> u32 {
        let layout = &self.facts.context.program.layout;
        let (window, rank) = ((self.rank(warp) as u64) << RANK_SHIFT, self.rank(warp));
        let start = window + SHARED_BASE;
        let mut inside = layout.shared_align >= 16 && layout.shared_extent >= 16;
        let mut offsets = [0; 32];
        for_lanes(lanes, |lane| {
            let offset = addresses[lane].wrapping_sub(start);
            inside &= offset <= u64::from(layout.shared_extent).saturating_sub(16)
                && addresses[lane].is_multiple_of(16);
            offsets[lane] = offset as u32 + (rank * self.facts.span) as u32;
        });
        if !inside {
            return lanes;
        }
        let site = row_site(inst);
        let access = Access { lanes: mask, ..plain(warp, &site, 0) };
        let races = self.facts.context.options.checks.races;
        let left = if races { self.shared.shadow.read_blocks(&offsets, lanes, &access) } else { 0 };
        for_lanes(lanes & !left, |lane| {
            rows[lane] = load_bytes(&self.shared.bytes, offsets[lane] as usize, 16)
        });
        left
    }

    /// Loads 16 bytes that the whole warp reads.
    pub(super) fn load_row(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        lane: usize,
        address: u64,
        mask: u32,
    ) -> Option<Chunk> {
        let site = row_site(inst);
        let offset = self.shared_offset(warp, &site, lane, address)?;
        if self.facts.context.options.checks.races {
            let access = Access { lanes: mask, ..plain(warp, &site, lane) };
            let verdict = self.shared.shadow.read(offset, 16, &access);
            if let Verdict::Conflict(c) = &verdict {
                self.doubt_read(&access, c, Space::Shared, address, 16);
            }
            self.judge_shared_read(verdict, inst, warp.index, lane, address);
        }
        Some(load_bytes(&self.shared.bytes, offset, 16))
    }

    fn stmatrix(&mut self, warp: &mut Warp, inst: &Inst, m: &MatrixAccess, mask: u32) {
        let (addresses, lanes) = self.rows(warp, inst, m, mask);
        let slots = self.facts.context.program.slots(inst);
        let mut rows: [Chunk; 32] = [[0; 8]; 32];
        for (matrix, slot) in slots.iter().enumerate() {
            let values = warp.registers.get32(*slot);
            for (lane, &value) in values.iter().enumerate() {
                let (r, c) = (lane / 4, lane % 4);
                if m.trans {
                    for half in 0..2 {
                        let word = &mut rows[8 * matrix + 2 * c + half][r / 2];
                        *word |= half_of(value, half) << (16 * (r % 2));
                    }
                } else {
                    rows[8 * matrix + r][c] = value;
                }
            }
        }
        let site = row_site(inst);
        for_lanes(lanes, |lane| {
            self.store_shared(warp, &site, lane, addresses[lane], &rows[lane]);
            self.undefined_bytes.store(addresses[lane], 16, false);
        });
    }
}

/// The access to a row of a b16 matrix: 16 bytes.
fn row_site(inst: &Inst) -> Site<'_> {
    Site { inst, space: Space::Shared, bytes: 16, strength: Strength::Weak }
}

fn half_of(word: u32, half: usize) -> u32 {
    word >> (16 * half) & 0xffff
}
