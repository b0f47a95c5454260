//! `tcgen05.cp`.

use ptx::{CtaGroup, TensorCopyShape};

use super::super::Env;
use super::super::access::{addresses, based};
use super::super::descriptor::Descriptor;
use super::super::registers::for_lanes;
use super::super::warp::Warp;
use super::access::{Area, Issue};
use crate::decode::Inst;
use crate::report::HazardKind;

/// Where a row of the source goes: the lanes that receive it. And the chunks of 16 bytes of a row.
fn target(shape: TensorCopyShape, row: usize) -> Vec<usize> {
    match shape {
        TensorCopyShape::Rows128Bits256 | TensorCopyShape::Rows128Bits128 | TensorCopyShape::Rows4Bits256 => {
            vec![row]
        }
        TensorCopyShape::Rows64Pairs02 => vec![row, row + 64],
        TensorCopyShape::Rows64Pairs01 => vec![row / 32 * 64 + row % 32, row / 32 * 64 + row % 32 + 32],
        TensorCopyShape::Rows32 => (0..4).map(|quarter| 32 * quarter + row).collect(),
    }
}

/// Rows, and chunks of 16 bytes of a row.
const fn extent(shape: TensorCopyShape) -> (usize, usize) {
    match shape {
        TensorCopyShape::Rows128Bits256 => (128, 2),
        TensorCopyShape::Rows4Bits256 => (4, 2),
        TensorCopyShape::Rows128Bits128 => (128, 1),
        TensorCopyShape::Rows64Pairs02 | TensorCopyShape::Rows64Pairs01 => (64, 1),
        TensorCopyShape::Rows32 => (32, 1),
    }
}

impl Env<'_> {
    pub(super) fn tensor_copies(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        (group, shape): (CtaGroup, TensorCopyShape),
        mask: u32,
    ) {
        for_lanes(mask, |lane| {
            let issue = self.issue_of(warp, inst, lane);
            let address = addresses(&warp.registers, inst)[lane] as u32;
            let source = warp.registers.lane(inst.s[0], lane);
            for rank in self.ranks_of(warp, group) {
                self.tensor_copy(&issue, (rank, address, source), shape);
            }
        });
    }

    /// The ranks of the CTAs of a group.
    pub(super) fn ranks_of(&self, warp: &Warp, group: CtaGroup) -> std::ops::Range<usize> {
        let rank = self.facts.rank(warp.index);
        match group {
            CtaGroup::One => rank..rank + 1,
            CtaGroup::Two => {
                let first = rank & !1;
                first..(first + 2).min(self.facts.ctas.len())
            }
        }
    }

    fn tensor_copy(
        &mut self,
        issue: &Issue,
        (rank, address, source): (usize, u32, u64),
        shape: TensorCopyShape,
    ) -> Option<()> {
        let (lane, column) = ((address >> 16) as usize, (address & 0xffff) as usize);
        if lane != 0 {
            self.report(HazardKind::TensorMemory, issue.inst, issue.warp, issue.lane, None, || {
                format!("copies to lane {lane} of tensor memory: expected lane 0")
            });
            return None;
        }
        let (rows, chunks) = extent(shape);
        let descriptor = match Descriptor::blackwell(source, false) {
            Ok(descriptor) => descriptor,
            Err(message) => {
                self.report(HazardKind::OutOfBounds, issue.inst, issue.warp, issue.lane, None, || message);
                return None;
            }
        };
        let columns = column..column + 4 * chunks;
        if !self.touch_area(issue, &Area { rank, lanes: 0..128, columns }, true) {
            return None;
        }
        self.log.toll += (rows * chunks) as u64;
        for row in 0..rows {
            for chunk in 0..chunks {
                let words = self.shared_chunk(issue, rank, descriptor.chunk(row as u64, chunk as u64))?;
                for lane in target(shape, row) {
                    for (i, word) in words.into_iter().enumerate() {
                        self.tensors.set_word(rank, lane, column + 4 * chunk + i, word);
                    }
                }
            }
        }
        Some(())
    }

    /// An address operand of tensor memory that is neither the first nor a list: lane and column.
    pub(super) fn tensor_address(
        &self,
        warp: &Warp,
        (slot, offset): (crate::decode::Slot, i64),
        lane: usize,
    ) -> (usize, usize) {
        let address = based(&warp.registers, slot, offset)[lane] as u32;
        ((address >> 16) as usize, (address & 0xffff) as usize)
    }
}
