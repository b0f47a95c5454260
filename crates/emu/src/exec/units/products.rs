//! The products of warpgroups in flight (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"): which
//! registers they use, which groups are complete, and whether all warps of a warpgroup issue the same ones.

use std::collections::VecDeque;

use crate::decode::{Slot, Touches};
use crate::order::Actors;

/// Warps of a warpgroup.
pub(crate) const WARPS: usize = 4;

/// How wgmmas use a register.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Use {
    /// Group of the last product that used the register, counted from 1.
    group: u32,
    /// Number of columns of that product if the register held an accumulator, 0 if it held A.
    columns: u16,
    /// Fences executed before the last access by an instruction other than wgmma, counted from 1.
    touched: u32,
    /// The lanes in which an instruction has written the register.
    written: u32,
}

/// The products of a warp.
#[derive(Debug, Default)]
pub(crate) struct WgmmaQueue {
    /// Indexed by register.
    uses: Vec<Use>,
    fences: u32,
    committed: u32,
    /// Number of groups waited for.
    waited: u32,
    /// Whether a product belongs to no group yet.
    open: bool,
}

/// What is wrong with the registers of a product.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RegisterFaults {
    /// Another instruction accessed a register since the last `wgmma.fence`.
    pub unfenced: bool,
    /// A product in flight uses a register with another shape or role.
    pub busy: bool,
    /// The lanes that add to a register which they have not written.
    pub unwritten: u32,
}

impl WgmmaQueue {
    pub fn fence(&mut self) {
        self.fences += 1;
    }

    /// Ends the open group. Returns the number of committed groups.
    pub fn commit(&mut self) -> u32 {
        self.committed += 1;
        self.open = false;
        self.committed
    }

    /// The number of groups that are complete when all but the last `keep` are.
    pub fn due(&self, keep: u32) -> u32 {
        self.committed.saturating_sub(keep)
    }

    /// Waits for groups. Returns whether the warp did not know before that they are complete.
    pub fn wait(&mut self, done: u32) -> bool {
        let new = done > self.waited;
        self.waited = self.waited.max(done);
        new
    }

    /// The number of the group to which the next product belongs, counted from 1.
    pub fn group(&self) -> u32 {
        self.committed + 1
    }

    /// Whether products may still read shared memory.
    pub fn in_flight(&self) -> bool {
        self.open || self.committed > self.waited
    }

    /// Uses registers in a product that joins the open group: D, which the product reads in the lanes
    /// `adding`, and A. `registers` is the number of registers of the warp.
    pub fn issue(
        &mut self,
        registers: usize,
        columns: u16,
        (d, adding): (&[Slot], u32),
        a: &[Slot],
    ) -> RegisterFaults {
        self.uses.resize(registers, Use::default());
        self.open = true;
        let (group, waited) = (self.committed + 1, self.waited);
        let mut faults = RegisterFaults { unfenced: self.fences == 0, ..RegisterFaults::default() };
        for slot in d.iter().filter(|slot| slot.is_some()) {
            let used = &mut self.uses[slot.at()];
            let in_flight = used.group > waited;
            faults.busy |= in_flight && used.columns != columns;
            faults.unfenced |= !in_flight && used.touched == self.fences + 1;
            (used.group, used.columns) = (group, columns);
            faults.unwritten |= adding & !used.written;
            used.written = !0;
        }
        for slot in a {
            let used = &mut self.uses[slot.at()];
            faults.busy |= used.group > waited && used.columns != 0;
            faults.unfenced |= used.touched == self.fences + 1;
            (used.group, used.columns) = (group, 0);
        }
        faults
    }

    /// An instruction of another kind accesses registers in some lanes. Returns whether a product in flight
    /// uses one of them.
    pub fn touch(&mut self, registers: usize, touches: &Touches, lanes: u32) -> bool {
        self.uses.resize(registers, Use::default());
        let mut busy = false;
        for &register in &touches.all {
            let used = &mut self.uses[usize::from(register)];
            used.touched = self.fences + 1;
            busy |= used.group > self.waited;
        }
        for &register in &touches.written {
            self.uses[usize::from(register)].written |= lanes;
        }
        busy
    }
}

/// A product as a warp executes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Issued {
    pub pc: u32,
    /// Descriptors of B and of A; 0 for A in registers.
    pub descriptors: [u64; 2],
    pub adds: bool,
}

/// The products that some but not all warps of a warpgroup have executed, and the number of these that each
/// warp has executed.
#[derive(Clone, Debug, Default)]
struct OpenProducts {
    products: VecDeque<Issued>,
    executed: [usize; WARPS],
}

impl OpenProducts {
    /// Records the next product of a warp, and returns the product that another warp executed in its place if
    /// they differ. Warps that are not `live` execute no further products.
    fn execute(&mut self, warp: usize, product: Issued, live: [bool; WARPS]) -> Option<Issued> {
        let at = self.executed[warp];
        let first = self.products.get(at).copied();
        if first.is_none() {
            self.products.push_back(product);
        }
        self.executed[warp] += 1;
        if self.executed.iter().zip(live).all(|(executed, live)| *executed > 0 || !live) {
            self.products.pop_front();
            self.executed.iter_mut().for_each(|executed| *executed = executed.saturating_sub(1));
        }
        first.filter(|first| *first != product)
    }
}

/// The products of a cluster's warpgroups.
#[derive(Debug)]
pub(crate) struct Products {
    actors: Actors,
    /// The number of groups that each warp has committed, and that each warpgroup has waited for.
    committed: Vec<u32>,
    waited: Vec<u32>,
    /// By warpgroup.
    open: Vec<OpenProducts>,
}

impl Products {
    pub fn new(actors: Actors) -> Products {
        let warps = actors.threads();
        Products {
            actors,
            committed: vec![0; warps],
            waited: vec![0; warps],
            open: vec![OpenProducts::default(); warps],
        }
    }

    /// Notes the number of groups that a warp has committed.
    pub fn commit(&mut self, warp: usize, committed: u32) {
        self.committed[warp] = committed;
    }

    /// Whether a warp has committed so many groups.
    pub fn has_committed(&self, warp: usize, groups: u32) -> bool {
        self.committed[warp] >= groups
    }

    /// Notes that a warp has waited for groups.
    pub fn wait(&mut self, warp: usize, done: u32) {
        let waited = &mut self.waited[self.actors.warpgroup(warp)];
        *waited = done.max(*waited);
    }

    /// The number of groups that a warp of the warpgroup has waited for.
    pub fn waited(&self, warp: usize) -> u32 {
        self.waited[self.actors.warpgroup(warp)]
    }

    /// Records the next product of warp number `at` of a warpgroup whose first warp is `first`. See
    /// [`OpenProducts::execute`].
    pub fn issue(&mut self, first: usize, at: usize, product: Issued, live: [bool; WARPS]) -> Option<Issued> {
        self.open[self.actors.warpgroup(first)].execute(at, product, live)
    }
}
