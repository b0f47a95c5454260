//! `wgmma`: asynchronous products of a warpgroup (PTX ISA, "Asynchronous Warpgroup Level Matrix
//! Instructions").
//!
//! The emulator computes a product when it is issued; each warp computes its 16 rows. The operands and
//! registers are in flight until a `wgmma.wait_group`. On the hardware a product starts only after all four
//! warps have issued it, so a wait of one warp covers all four. The emulator's wait also ends only after all
//! four warps have issued the product.

use ptx::{Op, Space, Wgmma, WgmmaSource};

use super::Env;
use super::access::{Site, plain};
use super::descriptor::Descriptor;
use super::run::Flow;
use super::units::{Issued, WARPS};
use super::warp::{Split, State, Warp};
use crate::decode::{Inst, Slot, Touches, wgmma_bits};
use crate::memory::{Chunk, SHARED_BASE, load_bytes};
use crate::numerics::Lanes32;
use crate::numerics::tensor::{self, Input, TensorRules};
use crate::order::{Access, ProxySpace, Strength, Touch, Verdict};
use crate::report::{Fidelity, HazardKind};
use crate::semantics::products;

/// The sign bits of the elements in a register.
fn signs(input: Input) -> u32 {
    match input.bits() {
        8 => 0x8080_8080,
        16 => 0x8000_8000,
        _ => 0x8000_0000,
    }
}

impl Env<'_> {
    /// Executes an instruction that the threads of a warpgroup execute together.
    pub(super) fn warpgroup(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst, mask: u32) -> Flow {
        if mask != !0 && !split.forced {
            if mask != warp.live {
                return Flow::Wait(State::Lanes(!0));
            }
            let lane = mask.trailing_zeros() as usize;
            self.report(HazardKind::BarrierDivergence, inst, warp.index, lane, None, || {
                format!("only lanes {mask:#010x} execute the instruction: all threads of the warpgroup must")
            });
        }
        split.forced = false;
        match inst.op {
            Op::Wgmma(w) => self.wgmma_product(warp, inst, &w),
            Op::WgmmaFence => warp.wgmma.fence(),
            Op::WgmmaCommitGroup => self.products.commit(warp.index, warp.wgmma.commit()),
            Op::WgmmaWaitGroup => return self.wgmma_wait(warp, split, inst),
            Op::Setmaxnreg(change) => return self.change_registers(warp, split, inst, change),
            _ => {}
        }
        Flow::Next
    }

    fn wgmma_wait(&mut self, warp: &mut Warp, split: &mut Split, inst: &Inst) -> Flow {
        let keep = warp.registers.lane(inst.s[0], 0) as u32;
        let done = warp.wgmma.due(keep);
        let mut group = self.facts.warpgroup_of(warp.index);
        if group.any(|w| self.live[w] != 0 && !self.products.has_committed(w, done)) {
            return self.retry(split);
        }
        split.polls = 0;
        if warp.wgmma.wait(done) {
            self.products.wait(warp.index, done);
            let actor = self.facts.actors.wgmma(warp.index);
            warp.view.learn(!0, warp.live, (actor, !0), done);
        }
        Flow::Next
    }

    fn wgmma_product(&mut self, warp: &mut Warp, inst: &Inst, w: &Wgmma) {
        let Some(kind) = products::of_wgmma(w) else { return };
        if self.facts.warpgroup_of(warp.index).len() < WARPS {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, 0, None, || {
                "the warpgroup has fewer than four warps".into()
            });
            return;
        }
        let slots = self.facts.context.program.slots(inst);
        let (d_slots, a_slots) = slots.split_at(w.d_registers());
        let adding = warp.registers.get_pred(inst.s[2], inst.negated, 2) & warp.live;
        self.check_registers(warp, inst, w, (d_slots, adding), a_slots);
        self.check_uniform(warp, inst, w, adding);
        let adds = adding & 1 == 1;
        if self.facts.context.options.fidelity == Fidelity::Sketch {
            let zeroed = if adds { &[] } else { d_slots };
            zeroed.iter().for_each(|slot| warp.registers.set32(*slot, !0, &[0; 32]));
            return;
        }
        let a = match w.a_source {
            WgmmaSource::Registers => {
                let mut a = [[0; 32]; 4];
                a.iter_mut().zip(a_slots).for_each(|(a, slot)| *a = *warp.registers.get32(*slot));
                Some(a)
            }
            WgmmaSource::Shared => self.left(warp, inst),
        };
        let Some(mut a) = a else { return };
        if inst.target & wgmma_bits::NEGATE_A != 0 {
            a.iter_mut().flatten().for_each(|x| *x ^= signs(kind.a()));
        }
        let transposed = inst.target & wgmma_bits::TRANSPOSE_B != 0;
        let b = Descriptor::new(warp.registers.lane(inst.s[1], 0), transposed);
        let per_block = kind.registers()[2];
        // Each block of eight columns is computed as a product of its own.
        self.log.toll += (d_slots.len() / per_block) as u64;
        for (block, registers) in d_slots.chunks_exact(per_block).enumerate() {
            let Some(mut b) = self.right(warp, inst, &b, block as u64, transposed) else { return };
            if inst.target & wgmma_bits::NEGATE_B != 0 {
                b.iter_mut().flatten().for_each(|x| *x ^= signs(kind.b()));
            }
            let mut c = [[0; 32]; 4];
            if adds {
                c.iter_mut().zip(registers).for_each(|(c, slot)| *c = *warp.registers.get32(*slot));
            }
            let mut d: [Lanes32; 4] = [[0; 32]; 4];
            let done =
                tensor::mma(kind, TensorRules::HopperAsync, &a, &b, &c[..per_block], &mut d[..per_block]);
            if let Err(error) = done {
                self.report(HazardKind::OutOfBounds, inst, warp.index, 0, None, || error.to_string());
                return;
            }
            registers.iter().zip(&d).for_each(|(slot, d)| warp.registers.set32(*slot, !0, d));
        }
    }

    /// This warp's 16 rows of A in the layout of mma's fragments: register 2·chunk + row / 8.
    fn left(&mut self, warp: &Warp, inst: &Inst) -> Option<[Lanes32; 4]> {
        let transposed = inst.target & wgmma_bits::TRANSPOSE_A != 0;
        let a = Descriptor::new(warp.registers.lane(inst.s[0], 0), transposed);
        let first = (warp.index % self.facts.actors.warps % WARPS) as u64;
        let mut rows = [[0; 32]; 4];
        for half in 0..2 {
            let b = self.right(warp, inst, &a, 2 * first + half, transposed)?;
            (rows[half as usize], rows[2 + half as usize]) = (b[0], b[1]);
        }
        Some(rows)
    }

    /// Eight rows of A or columns of B in the layout of mma's fragments: one register for each 16 bytes of K.
    fn right(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        descriptor: &Descriptor,
        block: u64,
        transposed: bool,
    ) -> Option<[Lanes32; 2]> {
        let mut registers: [Lanes32; 2] = [[0; 32]; 2];
        let start = self.rank(warp) * self.facts.span;
        let site = Site { inst, space: Space::Shared, bytes: 16, strength: Strength::Weak };
        let access = Access {
            actor: self.facts.actors.wgmma(warp.index),
            epoch: warp.wgmma.group(),
            proxy: Some(ProxySpace::Shared),
            touch: Touch::Wgmma,
            lanes: warp.live,
            ..plain(warp, &site, 0)
        };
        // The chunks of 16 bytes: for each k, or two for each row.
        let chunks = self.operand_chunks(warp, inst, start, &access, |i| match transposed {
            true => descriptor.chunk(block, i),
            false => descriptor.chunk(8 * block + i / 2, i % 2),
        })?;
        for (i, chunk) in chunks.iter().enumerate() {
            if transposed {
                let (register, shift) = (&mut registers[i / 8], 16 * (i % 2));
                for j in 0..8 {
                    let element = chunk[j / 2] >> (16 * (j % 2)) & 0xffff;
                    register[4 * j + i % 8 / 2] |= element << shift;
                }
            } else {
                let row = i / 2;
                registers[i % 2][4 * row..4 * row + 4].copy_from_slice(&chunk[..4]);
            }
        }
        Some(registers)
    }

    /// The chunks of 16 bytes at 16 addresses, read by the asynchronous proxy. The shared memory of the
    /// warp's CTA begins at `start` in that of the cluster.
    #[inline(always)]
    fn operand_chunks(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        start: usize,
        access: &Access,
        address: impl Fn(u64) -> u64,
    ) -> Option<[Chunk; 16]> {
        let extent = u64::from(self.facts.context.program.layout.shared_extent);
        let (mut offsets, mut plain) = ([0; 32], true);
        for (i, offset) in offsets.iter_mut().enumerate().take(16) {
            // For an address below the start of shared memory, the offset is close to 2^64.
            let at = address(i as u64).wrapping_sub(SHARED_BASE);
            *offset = at.wrapping_add(start as u64) as u32;
            plain &= at.saturating_add(16) <= extent && offset.is_multiple_of(16);
        }
        let left = match (plain, self.facts.context.options.checks.races) {
            (true, true) => self.shared.shadow.read_blocks(&offsets, 0xffff, access),
            (true, false) => 0,
            (false, _) => 0xffff,
        };
        let mut chunks = [Chunk::default(); 16];
        for (i, chunk) in chunks.iter_mut().enumerate() {
            *chunk = match left >> i & 1 {
                0 => load_bytes(&self.shared.bytes, offsets[i] as usize, 16),
                _ => self.operand_chunk(warp, inst, address(i as u64), start, access)?,
            };
        }
        Some(chunks)
    }

    /// Like [`Env::operand_chunks`], for one chunk.
    fn operand_chunk(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        address: u64,
        start: usize,
        access: &Access,
    ) -> Option<Chunk> {
        let layout = &self.facts.context.program.layout;
        let offset = address.wrapping_sub(SHARED_BASE);
        // For an address below the start of shared memory, the offset is close to 2^64.
        let end = offset.saturating_add(16);
        if end > u64::from(layout.shared_extent) {
            let place = Some((Space::Shared, address));
            self.report(HazardKind::OutOfBounds, inst, warp.index, 0, place, || {
                format!("a descriptor leads to address {address:#x}, outside of shared memory")
            });
            return None;
        }
        let offset = start + offset as usize;
        if self.facts.context.options.checks.races {
            match self.shared.shadow.read(offset, 16, access) {
                Verdict::Fine => {}
                found => {
                    let address = self.facts.shared_address(offset);
                    self.judge_shared_read(found, inst, warp.index, 0, address);
                }
            }
        }
        Some(load_bytes(&self.shared.bytes, offset, 16))
    }

    /// Checks that descriptors and the predicate are equal in all lanes and warps, and that all warps of the
    /// warpgroup execute the same product. `adding` are the lanes where the predicate is true.
    fn check_uniform(&mut self, warp: &Warp, inst: &Inst, w: &Wgmma, adding: u32) {
        let differs = |slot: Slot| {
            let values = warp.registers.get_any(slot);
            slot.is_some() && values.iter().any(|v| *v != values[0])
        };
        let a = w.a_source == WgmmaSource::Shared && differs(inst.s[0]);
        if a || differs(inst.s[1]) || adding != 0 && adding != warp.live {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, 0, None, || {
                "its descriptors or its predicate differ between threads of the warp".into()
            });
        }
        let in_shared = w.a_source == WgmmaSource::Shared;
        let a = if in_shared { warp.registers.lane(inst.s[0], 0) } else { 0 };
        let descriptors = [warp.registers.lane(inst.s[1], 0), a];
        let product = Issued { pc: inst.pc, descriptors, adds: adding != 0 };
        let group = self.facts.warpgroup_of(warp.index);
        let live = std::array::from_fn(|at| self.live[group.start + at] != 0);
        let at = warp.index - group.start;
        if let Some(other) = self.products.issue(group.start, at, product, live) {
            let threads = vec![self.thread(warp.index, 0)];
            let (other_line, message) = if other.pc == inst.pc {
                (None, "its descriptors or its predicate differ between warps of the warpgroup")
            } else {
                (Some(self.line(other.pc)), "another warp of the warpgroup executes another product instead")
            };
            self.log.findings.report(HazardKind::BarrierDivergence, inst.line, other_line, || {
                (threads, None, message.into())
            });
        }
    }

    /// Checks the registers of a product against accesses by other instructions and by products in flight.
    /// The product reads D only in the lanes `adding`.
    fn check_registers(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        w: &Wgmma,
        (d, adding): (&[Slot], u32),
        a: &[Slot],
    ) {
        let registers = warp.registers.w32.len();
        let faults = warp.wgmma.issue(registers, w.shape.n, (d, adding), a);
        if faults.busy {
            self.report(HazardKind::AsyncNotWaited, inst, warp.index, 0, None, || {
                "uses registers of a wgmma with another shape or role that no wait_group covers".into()
            });
        }
        if faults.unwritten != 0 && self.facts.context.options.checks.uninitialised {
            let lane = faults.unwritten.trailing_zeros() as usize;
            self.report(HazardKind::UninitialisedRead, inst, warp.index, lane, None, || {
                "adds to a register that the thread has not written".into()
            });
        }
        if faults.unfenced {
            self.report(HazardKind::MissingWgmmaFence, inst, warp.index, 0, None, || {
                "uses registers that other instructions accessed since the last wgmma.fence".into()
            });
        }
    }

    /// Checks an instruction of another kind that reads or writes registers of products.
    #[inline(never)]
    pub(super) fn touch_registers(&mut self, warp: &mut Warp, inst: &Inst, touches: &Touches, mask: u32) {
        let registers = warp.registers.w32.len();
        if warp.wgmma.touch(registers, touches, mask) {
            let lane = mask.trailing_zeros() as usize;
            self.report(HazardKind::AsyncNotWaited, inst, warp.index, lane, None, || {
                "accesses a register of a wgmma in flight: no wgmma.wait_group covers it".into()
            });
        }
    }

    /// Checks, when the warp exits, that its products are complete. Otherwise no thread could know when they
    /// read for the last time.
    pub(super) fn leave_wgmma(&mut self, warp: &Warp, inst: &Inst) {
        if warp.live == 0 && warp.wgmma.in_flight() {
            self.report(HazardKind::AsyncNotWaited, inst, warp.index, 0, None, || {
                "the warp exits while a wgmma may still read shared memory: no wgmma.wait_group covers it"
                    .into()
            });
        }
    }
}
