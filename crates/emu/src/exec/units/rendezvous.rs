//! The barrier between the CTAs of a cluster, and the accesses to the shared memory of other CTAs.

use smallvec::SmallVec;

use crate::order::{Actors, Agent, Clock, Epoch};

/// The barrier between the CTAs of a cluster.
#[derive(Debug, Default)]
pub(crate) struct Rendezvous {
    /// Number of completed phases.
    phase: u64,
    /// Number of threads that have arrived in this phase and have not exited.
    arrived: u32,
    clock: Option<Clock>,
    /// Accesses that the threads of the last phase released.
    released: Clock,
    line: u32,
}

impl Rendezvous {
    /// Number of completed phases.
    pub fn phase(&self) -> u64 {
        self.phase
    }

    /// Threads arrive by the instruction of a line.
    pub fn arrive(&mut self, home: Agent, clock: Clock, lanes: u32, line: u32) {
        self.line = line;
        self.arrived += lanes.count_ones();
        match &mut self.clock {
            Some(known) => known.join(home, &clock),
            None => self.clock = Some(clock),
        }
    }

    /// Removes exiting lanes from those that have arrived, because the barrier does not wait for exited
    /// lanes. The accesses that these lanes released on arrival stay released.
    pub fn withdraw(&mut self, attendance: &mut Attendance, lanes: u32) {
        if attendance.phase == self.phase {
            self.arrived -= (attendance.lanes & lanes).count_ones();
        }
        attendance.leave(lanes);
    }

    /// Completes the phase when all threads that have not exited have arrived.
    pub fn complete(&mut self, expected: u32) {
        if self.arrived > 0 && self.arrived >= expected {
            self.phase += 1;
            self.arrived = 0;
            self.released = self.clock.take().unwrap_or_default();
        }
    }

    /// Accesses that the threads of the last phase released.
    pub fn released(&self) -> &Clock {
        &self.released
    }

    /// Describes the wait for the report of a deadlock.
    pub fn describe(&self, expected: u32) -> String {
        let Rendezvous { arrived, line, .. } = self;
        format!(
            "for the cluster barrier, where {arrived} of {expected} threads have arrived, the last at line {line}"
        )
    }
}

/// The state of a warp at the cluster barrier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attendance {
    /// Lanes that have arrived and have not waited yet, and the phase in which they arrived.
    lanes: u32,
    phase: u64,
    /// Lanes that arrived in an earlier phase, before other lanes of the warp waited and arrived again.
    before: u32,
}

impl Attendance {
    /// The lanes that have arrived and not waited.
    pub fn not_waited(self) -> u32 {
        self.lanes | self.before
    }

    /// Notes the arrival of lanes in the current phase.
    pub fn arrive(&mut self, lanes: u32, phase: u64) {
        if self.phase != phase {
            *self = Attendance { lanes: 0, phase, before: self.before | self.lanes };
        }
        self.lanes |= lanes;
    }

    /// Whether lanes wait for a phase that is not complete. `current` is the phase of the barrier.
    pub fn waits(self, lanes: u32, current: u64) -> bool {
        lanes & self.lanes != 0 && current == self.phase
    }

    /// Whether lanes of `live` have not arrived.
    pub fn absent(self, live: u32) -> bool {
        live & !self.lanes != 0
    }

    /// Removes lanes that have waited or that exit.
    pub fn leave(&mut self, lanes: u32) {
        self.lanes &= !lanes;
        self.before &= !lanes;
    }
}

/// Accesses of lanes of a warp to the shared memory of another CTA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Visit {
    /// The actor and the epoch that the other CTA must know before it exits.
    pub actor: usize,
    pub epoch: Epoch,
    pub lanes: u32,
    pub pc: u32,
}

/// Accesses to the shared memory of other CTAs. A CTA must not exit before the accesses to its shared memory
/// (PTX ISA, "mapa"; CUDA C++ Programming Guide, "Distributed Shared Memory").
#[derive(Debug)]
pub(crate) struct Visits {
    /// For each CTA and each warp of the cluster, the last accesses of the warp's lanes to the CTA's shared
    /// memory. A lane has at most one for each actor.
    last: Vec<Vec<SmallVec<[Visit; 1]>>>,
    /// The accesses that the warps of each CTA knew to have happened when they exited.
    exits: Vec<Clock>,
}

impl Visits {
    pub fn new(actors: Actors) -> Visits {
        let ctas = if actors.ctas > 1 { actors.ctas } else { 0 };
        Visits {
            last: vec![vec![SmallVec::new(); actors.threads()]; ctas],
            exits: vec![Clock::new(actors.total()); ctas],
        }
    }

    /// Records the access of a lane of a warp to the shared memory of the CTA of rank `rank`. Whatever comes
    /// after the lane's new access comes after its earlier ones.
    pub fn note(&mut self, rank: usize, warp: usize, new: Visit) {
        let last = &mut self.last[rank][warp];
        let together = |v: &Visit| (v.actor, v.epoch, v.pc) == (new.actor, new.epoch, new.pc);
        let place = last.iter().position(together);
        if place.is_some() && last.len() == 1 {
            last[0].lanes |= new.lanes;
            return;
        }
        last.iter_mut().filter(|v| v.actor == new.actor).for_each(|v| v.lanes &= !new.lanes);
        match place {
            Some(at) => last[at].lanes |= new.lanes,
            None => last.push(new),
        }
        last.retain(|v| v.lanes != 0);
    }

    /// Adds what exiting threads of a CTA know and made.
    pub fn exit(&mut self, rank: usize, home: Agent, clock: &Clock) {
        self.exits[rank].join(home, clock);
    }

    /// The accesses to the shared memory of a CTA that its threads did not know when they exited: the warps,
    /// the lanes and the instructions.
    pub fn unknown_at_exit(&mut self, rank: usize, home: Agent) -> Vec<(usize, u32, u32)> {
        let exit = &self.exits[rank];
        let left = |v: Visit| exit.unknown(home, home + v.actor as Agent, v.lanes, v.epoch);
        let unknown = self.last[rank].iter_mut().enumerate().flat_map(|(warp, visits)| {
            std::mem::take(visits).into_iter().map(move |v| (warp, left(v), v.pc))
        });
        unknown.filter(|(_, lanes, _)| *lanes != 0).collect()
    }
}
