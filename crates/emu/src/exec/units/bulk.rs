//! Bulk copies in flight: to shared memory, where they complete on an mbarrier, and to global memory, where
//! threads wait for groups of them (PTX ISA, "Asynchronous operations").

use std::collections::HashMap;
use std::ops::Range;
use std::rc::Rc;

use ptx::{AtomicOp, Type};

use crate::exec::registers::for_lanes;
use crate::exec::tensor_map::Piece;
use crate::memory::Chunk;

/// The data of a copy.
#[derive(Clone, Debug)]
pub(crate) enum Payload {
    /// Pieces of a buffer.
    Global(usize, Rc<Vec<Piece>>),
    /// Shared memory of the cluster, from this offset on.
    Shared(usize),
    /// Values that came from registers.
    Values(Chunk),
    /// The response to a request to cancel a cluster.
    Response([u8; 16]),
}

/// A copy to shared memory that is in flight.
#[derive(Debug)]
pub(crate) struct Flight {
    pub pc: u32,
    pub warp: usize,
    pub lane: usize,
    /// The mbarrier on which the copy completes, and the actor that makes the copy's accesses.
    pub mbarrier: u64,
    pub actor: usize,
    /// Offset in the shared memory of the cluster, and size in bytes.
    pub offset: usize,
    pub bytes: u32,
    pub payload: Payload,
    /// The operation that combines the data with the contents of memory.
    pub reduce: Option<(AtomicOp, Type)>,
}

/// The copies of a cluster to shared memory that are in flight, in the order of their issue.
#[derive(Debug, Default)]
pub(crate) struct BulkFlights {
    flights: Vec<Flight>,
    /// For each mbarrier's actor, the thread that issued the last copy.
    senders: HashMap<usize, (usize, usize)>,
}

impl BulkFlights {
    /// Notes the thread that issues a copy on an mbarrier.
    pub fn note_sender(&mut self, actor: usize, thread: (usize, usize)) {
        self.senders.insert(actor, thread);
    }

    /// The warp that issued the last copy on an mbarrier.
    pub fn sender(&self, actor: usize) -> Option<usize> {
        self.senders.get(&actor).map(|sender| sender.0)
    }

    pub fn depart(&mut self, flight: Flight) {
        self.flights.push(flight);
    }

    /// Removes the last copy.
    pub fn pop(&mut self) -> Option<Flight> {
        self.flights.pop()
    }

    /// Removes the copies on an mbarrier.
    pub fn take(&mut self, mbarrier: u64) -> Vec<Flight> {
        if self.flights.iter().all(|f| f.mbarrier != mbarrier) {
            return Vec::new();
        }
        let (landing, rest) =
            std::mem::take(&mut self.flights).into_iter().partition(|f| f.mbarrier == mbarrier);
        self.flights = rest;
        landing
    }

    /// The instructions that issued the copies on an mbarrier.
    pub fn instructions(&self, mbarrier: u64) -> impl Iterator<Item = u32> {
        self.flights.iter().filter(move |f| f.mbarrier == mbarrier).map(|f| f.pc)
    }

    /// The copies that access a range of the cluster's shared memory, with the offset and what they do there.
    pub fn touching(&self, range: &Range<usize>) -> impl Iterator<Item = (&Flight, usize, &'static str)> {
        self.flights.iter().filter_map(|f| match f.payload {
            _ if range.contains(&f.offset) => Some((f, f.offset, "writes to")),
            Payload::Shared(from) if range.contains(&from) => Some((f, from, "reads")),
            _ => None,
        })
    }
}

/// A copy to global memory that is in flight.
#[derive(Debug)]
pub(crate) struct Departure {
    pub pc: u32,
    pub lane: usize,
    /// The group of the copy. Before the commit, the group to which the next commit will assign the copy.
    pub group: u32,
    /// Offset in the shared memory of the cluster.
    pub offset: usize,
    pub buffer: usize,
    pub pieces: Vec<Piece>,
    pub reduce: Option<(AtomicOp, Type)>,
}

/// The bulk copies of a warp to global memory.
#[derive(Debug, Default)]
pub(crate) struct BulkQueue {
    departures: Vec<Departure>,
    /// Number of committed groups, per lane.
    committed: [u32; 32],
}

impl BulkQueue {
    pub fn commit(&mut self, mask: u32) {
        for_lanes(mask, |lane| self.committed[lane] += 1);
    }

    /// The group to which the next commit of a lane assigns its copies.
    pub fn group(&self, lane: usize) -> u32 {
        self.committed[lane]
    }

    /// The number of a lane's groups that are complete when all but the last `keep` are.
    pub fn due(&self, lane: usize, keep: u32) -> u32 {
        self.committed[lane].saturating_sub(keep)
    }

    pub fn depart(&mut self, departure: Departure) {
        self.departures.push(departure);
    }

    /// The copies in flight.
    pub fn departures(&self) -> &[Departure] {
        &self.departures
    }

    /// Removes the copies that `due` selects.
    pub fn take(&mut self, due: impl Fn(&Departure) -> bool) -> Vec<Departure> {
        let (now, later) = std::mem::take(&mut self.departures).into_iter().partition(due);
        self.departures = later;
        now
    }
}
