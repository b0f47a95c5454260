//! The `cp.async` copies of a warp that are in flight.

use crate::exec::registers::for_lanes;

/// A copy in flight, for some lanes.
#[derive(Debug)]
pub(crate) struct CopyFlight {
    pub pc: u32,
    /// Lanes whose copy has not been waited for.
    pub lanes: u32,
    /// Lanes that have not committed the copy to a group.
    pub open: u32,
    /// Index of the group, per lane.
    pub group: [u32; 32],
    /// Offsets in the shared memory of the cluster.
    pub destination: [u32; 32],
    pub source: [u64; 32],
    pub bytes: u32,
    /// Number of bytes read; the other bytes of the destination are set to zero.
    pub taken: [u32; 32],
    /// Lanes whose source lies in memory that the kernel may write.
    pub watched: u32,
    /// Whether the bytes were moved at issue, although no thread may rely on this.
    pub arrived: bool,
}

/// The copies of a warp.
#[derive(Debug, Default)]
pub(crate) struct CopyQueue {
    flights: Vec<CopyFlight>,
    /// Number of committed groups, per lane.
    committed: [u32; 32],
}

impl CopyQueue {
    pub fn commit(&mut self, mask: u32) {
        for flight in self.flights.iter_mut().rev().take_while(|f| f.open != 0 || f.lanes != 0) {
            let lanes = flight.open & mask;
            for_lanes(lanes, |lane| flight.group[lane] = self.committed[lane]);
            flight.open &= !lanes;
        }
        for_lanes(mask, |lane| self.committed[lane] += 1);
    }

    pub fn depart(&mut self, flight: CopyFlight) {
        self.flights.push(flight);
    }

    /// Removes all copies, so that some can be completed.
    pub fn take(&mut self) -> Vec<CopyFlight> {
        std::mem::take(&mut self.flights)
    }

    /// Puts the copies back that are still in flight for some lane.
    pub fn keep(&mut self, mut flights: Vec<CopyFlight>) {
        flights.retain(|f| f.lanes != 0);
        self.flights = flights;
    }

    /// Number of committed groups, per lane.
    pub fn committed(&self) -> [u32; 32] {
        self.committed
    }
}
