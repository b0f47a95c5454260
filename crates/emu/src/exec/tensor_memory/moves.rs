//! `tcgen05.ld` and `tcgen05.st` (PTX ISA, "Data Movement Shape").

use ptx::{TensorMove, TensorMoveShape};

use super::super::Env;
use super::super::access::addresses;
use super::super::warp::Warp;
use super::access::{Area, Issue};
use crate::decode::Inst;
use crate::order::TensorPipe;
use crate::report::HazardKind;

/// Lanes of tensor memory that a warp can access: warp `w` has the quarter `w % 4`.
const QUARTER: usize = 32;

/// The lane, from the first one on, and the column of the register `index` of a thread. For
/// [`TensorMoveShape::TwoHalves`], the column is that in the thread's half.
fn place(shape: TensorMoveShape, thread: usize, index: usize) -> (usize, usize) {
    match shape {
        TensorMoveShape::Lanes32 => (thread, index),
        TensorMoveShape::Bits64 => (8 * (thread & 1) + thread / 4, 2 * index + (thread >> 1 & 1)),
        TensorMoveShape::Bits128 => (thread / 4 + 8 * (index & 1), 4 * (index / 2) + thread % 4),
        TensorMoveShape::Bits256 => {
            (thread / 4 + 8 * (index >> 1 & 1), 8 * (index / 4) + 2 * (thread % 4) + (index & 1))
        }
        TensorMoveShape::TwoHalves => (thread % 16, index),
    }
}

/// The columns from the address to those of a thread. `distance` is the constant of
/// [`TensorMoveShape::TwoHalves`].
fn start_of(shape: TensorMoveShape, thread: usize, distance: usize) -> usize {
    if shape == TensorMoveShape::TwoHalves && thread >= 16 { distance } else { 0 }
}

/// Lanes of an access, and columns of a repetition.
const fn extent(shape: TensorMoveShape) -> (usize, usize) {
    match shape {
        TensorMoveShape::Lanes32 => (32, 1),
        TensorMoveShape::Bits64 => (16, 2),
        TensorMoveShape::Bits128 => (16, 4),
        TensorMoveShape::Bits256 => (16, 8),
        TensorMoveShape::TwoHalves => (16, 1),
    }
}

impl Env<'_> {
    pub(super) fn move_to_registers(&mut self, warp: &mut Warp, inst: &Inst, moved: &TensorMove) {
        let issue = self.issue_together(warp, inst, TensorPipe::Load);
        let Some((lane, column)) = self.move_areas(warp, &issue, moved, false) else { return };
        let (rank, distance) = (self.rank(warp), inst.target as usize);
        let slots = self.facts.context.program.slots(inst);
        for (index, slot) in slots.iter().enumerate() {
            let values = std::array::from_fn(|thread| {
                let (row, at) = place(moved.shape, thread, index);
                let start = column + start_of(moved.shape, thread, distance);
                let word = |at| self.tensors.word(rank, lane + row, start + at);
                if moved.halves { word(2 * at) & 0xffff | word(2 * at + 1) << 16 } else { word(at) }
            });
            warp.registers.set32(*slot, warp.live, &values);
        }
    }

    pub(super) fn move_from_registers(&mut self, warp: &mut Warp, inst: &Inst, moved: &TensorMove) {
        let issue = self.issue_together(warp, inst, TensorPipe::Store);
        let Some((lane, column)) = self.move_areas(warp, &issue, moved, true) else { return };
        let (rank, distance) = (self.rank(warp), inst.target as usize);
        let slots = self.facts.context.program.slots(inst);
        for (index, slot) in slots.iter().enumerate() {
            let values = *warp.registers.get32(*slot);
            for (thread, value) in values.into_iter().enumerate() {
                let (row, at) = place(moved.shape, thread, index);
                let start = column + start_of(moved.shape, thread, distance);
                let mut set = |at, value| self.tensors.set_word(rank, lane + row, start + at, value);
                if moved.halves {
                    set(2 * at, value & 0xffff);
                    set(2 * at + 1, value >> 16);
                } else {
                    set(at, value);
                }
            }
        }
    }

    /// Checks the address and the areas of a load or store. Returns the first lane and column.
    fn move_areas(
        &mut self,
        warp: &Warp,
        issue: &Issue,
        moved: &TensorMove,
        writes: bool,
    ) -> Option<(usize, usize)> {
        let inst = issue.inst;
        let places = addresses(&warp.registers, inst);
        let address = places[issue.lane] as u32;
        if (0..32).any(|l| warp.live >> l & 1 == 1 && places[l] as u32 != address) {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, issue.lane, None, || {
                "the address of tensor memory differs between threads of the warp".into()
            });
        }
        let (lane, column) = ((address >> 16) as usize, (address & 0xffff) as usize);
        let (lanes, columns) = extent(moved.shape);
        let quarter = QUARTER * (warp.index % self.facts.actors.warps % 4);
        if lane < quarter || lane + lanes > quarter + QUARTER || !lane.is_multiple_of(16) {
            self.report(HazardKind::TensorMemory, inst, warp.index, issue.lane, None, || {
                format!(
                    "accesses lanes {lane} to {} of tensor memory: this warp has lanes {quarter} to {}",
                    lane + lanes - 1,
                    quarter + QUARTER - 1
                )
            });
            return None;
        }
        let columns = columns * usize::from(moved.repeat) * if moved.halves { 2 } else { 1 };
        let halves = moved.shape == TensorMoveShape::TwoHalves;
        let starts = [Some(column), halves.then_some(column + inst.target as usize)];
        let mut allocated = true;
        for start in starts.into_iter().flatten() {
            let area =
                Area { rank: self.rank(warp), lanes: lane..lane + lanes, columns: start..start + columns };
            allocated &= self.touch_area(issue, &area, writes);
        }
        allocated.then_some((lane, column))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each element of an area is in exactly one register of one thread.
    #[test]
    fn registers_cover_an_area_once() {
        use TensorMoveShape::{Bits64, Bits128, Bits256, Lanes32, TwoHalves};
        for shape in [Lanes32, Bits64, Bits128, Bits256, TwoHalves] {
            let (lanes, columns) = extent(shape);
            let columns = if shape == TwoHalves { 8 } else { 4 * columns };
            let mut seen = vec![0; lanes * columns];
            for thread in 0..32 {
                for index in 0..4 * shape.registers() {
                    let (lane, column) = place(shape, thread, index);
                    seen[lane * columns + column + start_of(shape, thread, 4)] += 1;
                }
            }
            assert!(seen.iter().all(|n| *n == 1), "{shape:?}: {seen:?}");
        }
    }
}
