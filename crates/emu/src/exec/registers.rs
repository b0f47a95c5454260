//! The register files of a warp.

use ptx::Type;

use crate::decode::{Class, Program, Slot};
use crate::memory::Chunk;
use crate::numerics::{Lanes32, Lanes64};

/// Register files of a warp: an array of 32 lanes for each register.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registers {
    pub w32: Vec<Lanes32>,
    pub w64: Vec<Lanes64>,
    pub pred: Vec<u32>,
}

/// Calls `f` with the index of each set bit.
#[inline(always)]
pub(crate) fn for_lanes(mut mask: u32, mut f: impl FnMut(usize)) {
    while mask != 0 {
        f(mask.trailing_zeros() as usize);
        mask &= mask - 1;
    }
}

impl Registers {
    pub fn new(program: &Program) -> Registers {
        let [w32, w64, pred] = program.sizes;
        let mut registers =
            Registers { w32: vec![[0; 32]; w32], w64: vec![[0; 32]; w64], pred: vec![0; pred] };
        for &(slot, value) in &program.constants {
            registers.fill(slot, |_| value);
        }
        registers
    }

    /// Sets a register lane by lane, from 64-bit values.
    pub fn fill(&mut self, slot: Slot, value: impl Fn(usize) -> u64) {
        match slot.class {
            Class::W32 => self.w32[slot.at()] = std::array::from_fn(|l| value(l) as u32),
            Class::W64 => self.w64[slot.at()] = std::array::from_fn(value),
            Class::Pred => {
                self.pred[slot.at()] = (0..32).fold(0, |set, l| set | (value(l) as u32 & 1) << l);
            }
            Class::Sink => {}
        }
    }

    #[inline(always)]
    pub fn set32(&mut self, slot: Slot, mask: u32, values: &Lanes32) {
        if slot.class != Class::W32 {
            return;
        }
        let target = &mut self.w32[slot.at()];
        if mask == !0 {
            *target = *values;
        } else {
            for lane in 0..32 {
                target[lane] = if mask >> lane & 1 == 1 { values[lane] } else { target[lane] };
            }
        }
    }

    #[inline(always)]
    pub fn set64(&mut self, slot: Slot, mask: u32, values: &Lanes64) {
        if slot.class != Class::W64 {
            return;
        }
        let target = &mut self.w64[slot.at()];
        if mask == !0 {
            *target = *values;
        } else {
            for lane in 0..32 {
                target[lane] = if mask >> lane & 1 == 1 { values[lane] } else { target[lane] };
            }
        }
    }

    #[inline(always)]
    pub fn set_pred(&mut self, slot: Slot, mask: u32, values: u32) {
        if slot.class == Class::Pred {
            let target = &mut self.pred[slot.at()];
            *target = *target & !mask | values & mask;
        }
    }

    /// Sets a register of either width.
    pub fn set_any(&mut self, slot: Slot, mask: u32, values: &Lanes64) {
        match slot.class {
            Class::W32 => self.set32(slot, mask, &values.map(|v| v as u32)),
            Class::W64 => self.set64(slot, mask, values),
            Class::Pred | Class::Sink => {}
        }
    }

    #[inline(always)]
    pub fn get32(&self, slot: Slot) -> &Lanes32 {
        &self.w32[slot.at()]
    }

    #[inline(always)]
    pub fn get64(&self, slot: Slot) -> &Lanes64 {
        &self.w64[slot.at()]
    }

    /// A predicate source. It is negated if bit `position` of `negated` is set.
    #[inline(always)]
    pub fn get_pred(&self, slot: Slot, negated: u8, position: u32) -> u32 {
        let value = self.pred[slot.at()];
        if negated >> position & 1 == 1 { !value } else { value }
    }

    /// A register of either width, zero-extended.
    #[inline(always)]
    pub fn get_any(&self, slot: Slot) -> Lanes64 {
        match slot.class {
            Class::W64 => self.w64[slot.at()],
            Class::W32 => self.w32[slot.at()].map(u64::from),
            Class::Pred | Class::Sink => [0; 32],
        }
    }

    /// One lane of a register of either width.
    #[inline(always)]
    pub fn lane(&self, slot: Slot, lane: usize) -> u64 {
        match slot.class {
            Class::W64 => self.w64[slot.at()][lane],
            Class::W32 => u64::from(self.w32[slot.at()][lane]),
            Class::Pred => u64::from(self.pred[slot.at()] >> lane & 1),
            Class::Sink => 0,
        }
    }
}

/// Writes element `element` of each lane's loaded data to a register, which may be wider.
#[inline(always)]
pub(super) fn scatter(
    registers: &mut Registers,
    slot: Slot,
    mask: u32,
    chunks: &[Chunk; 32],
    element: usize,
    ty: Type,
) {
    let bits = ty.bits();
    match (bits, slot.class) {
        (64, _) => {
            let value = std::array::from_fn(|l| {
                u64::from(chunks[l][2 * element]) | u64::from(chunks[l][2 * element + 1]) << 32
            });
            registers.set64(slot, mask, &value);
        }
        (32, Class::W32) => registers.set32(slot, mask, &std::array::from_fn(|l| chunks[l][element])),
        _ => {
            let at = element * bits as usize;
            let raw = |l: usize| u64::from(chunks[l][at / 32]) >> (at % 32) & (u64::MAX >> (64 - bits));
            let value = std::array::from_fn(|l| {
                if ty.is_signed() { ((raw(l) << (64 - bits)) as i64 >> (64 - bits)) as u64 } else { raw(l) }
            });
            // The upper half of a slot that holds 16 bits has no meaning: readers mask it.
            registers.set_any(slot, mask, &value);
        }
    }
}

/// Reads element `element` of each lane's data to store from a register, which may be wider.
#[inline(always)]
pub(super) fn gather(registers: &Registers, slot: Slot, chunks: &mut [Chunk; 32], element: usize, ty: Type) {
    match ty.bits() {
        64 => {
            let value = registers.get_any(slot);
            for (chunk, v) in chunks.iter_mut().zip(value) {
                chunk[2 * element] = v as u32;
                chunk[2 * element + 1] = (v >> 32) as u32;
            }
        }
        32 if slot.class == Class::W32 => {
            let value = registers.get32(slot);
            chunks.iter_mut().zip(value).for_each(|(chunk, v)| chunk[element] = *v);
        }
        bits => {
            let value = registers.get_any(slot);
            let at = element * bits as usize;
            for (chunk, v) in chunks.iter_mut().zip(value) {
                chunk[at / 32] |= ((v & (u64::MAX >> (64 - bits))) << (at % 32)) as u32;
            }
        }
    }
}
