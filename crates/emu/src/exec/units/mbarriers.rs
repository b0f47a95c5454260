//! mbarrier objects (PTX ISA, "mbarrier"): counted phases in shared memory, which wait for arrivals and for
//! bytes of asynchronous copies. The contents of an object's 64 bits are opaque; the emulator keeps its own
//! state instead. From `init` to `inval`, nothing else may access these bits (PTX ISA, "Lifecycle of the
//! mbarrier object").

use std::collections::{BTreeMap, HashMap};

use ptx::Scope;
use rand::{Rng, RngCore};

use crate::memory::RANK_SHIFT;
use crate::order::{Actors, Agent, Clock, Epoch, Strength};

/// The largest number of arrivals or bytes in a phase: 2^20 − 1 (PTX ISA, "Size and contents of mbarrier
/// object").
pub(crate) const LIMIT: u32 = (1 << 20) - 1;

/// Numbers of unsuccessful waits after which copies complete. One of them is drawn at random for each
/// mbarrier.
const VAIN_WAITS: [u32; 4] = [1, 8, 2, 64];

/// The number of unsuccessful waits for the first mbarrier of a patient cluster. Kernels that count their
/// attempts make fewer.
const PATIENCE: u32 = 4096;

/// One mbarrier object.
#[derive(Clone, Debug)]
struct Object {
    /// Arrivals that a phase needs, and the number that is still missing.
    expected: u32,
    pending: u32,
    /// Bytes that the phase still expects. Negative if more bytes have arrived than were announced so far.
    bytes: i64,
    phase: u64,
    /// Accesses released by the arrivals of this phase, and by the arrivals of all completed phases.
    arriving: Released,
    completed: Released,
    /// The actor to which the accesses of the copies belong.
    actor: usize,
    /// Number of copies in flight that will complete on the object.
    flights: u32,
    /// The thread that initialised the object, and the time of the initialisation.
    maker: (Agent, u32, Epoch),
    made_at: u32,
}

/// Accesses that arrivals release, by scope. An arrival and a wait synchronise only if the scopes of both
/// contain both threads.
#[derive(Clone, Debug)]
pub(crate) struct Released {
    /// Accesses released to threads of the arriving thread's CTA, by the rank of the CTA in the cluster. Data
    /// of copies is released to all CTAs.
    near: Vec<Clock>,
    /// Accesses released at cluster scope. Threads of other CTAs acquire them by a wait at cluster scope.
    far: Clock,
}

impl Released {
    fn nothing(actors: Actors) -> Released {
        let clock = Clock::new(actors.total());
        Released { near: vec![clock.clone(); actors.ctas], far: clock }
    }

    fn join(&mut self, home: Agent, other: &Released) {
        for (mine, theirs) in self.near.iter_mut().zip(&other.near) {
            mine.join(home, theirs);
        }
        self.far.join(home, &other.far);
    }

    /// A thread of a CTA arrives.
    fn add(&mut self, home: Agent, rank: usize, clocks: &Clocks) {
        self.near[rank].join(home, &clocks.near);
        if let Some(far) = &clocks.far
            && self.near.len() > 1
        {
            self.far.join(home, far);
        }
    }

    /// Something that no thread did completes for all CTAs.
    fn add_to_all(&mut self, home: Agent, clock: &Clock) {
        self.near.iter_mut().for_each(|near| near.join(home, clock));
        self.far.join(home, clock);
    }

    /// The clocks that a wait by a thread of a CTA acquires. If the wait is relaxed, a later fence of this
    /// scope acquires them.
    pub fn reaching(&self, rank: usize, scope: Scope) -> impl Iterator<Item = (Strength, &Clock)> {
        let far = reaches_peers(scope) && self.near.len() > 1;
        let far = far.then_some((Strength::Cluster, &self.far));
        std::iter::once((Strength::Cta, &self.near[rank])).chain(far)
    }
}

/// Whether a scope includes the other CTAs of the cluster.
pub(crate) fn reaches_peers(scope: Scope) -> bool {
    scope != Scope::Cta
}

/// The accesses that an arrival releases to its CTA, and to the other CTAs of the cluster if its scope
/// includes them.
pub(crate) struct Clocks {
    pub near: Clock,
    pub far: Option<Clock>,
}

/// An arrival.
pub(crate) struct Arrival<'c> {
    pub count: u32,
    /// The number by which the arrival count of later phases decreases.
    pub dropped: u32,
    /// Bytes that the arrival announces.
    pub bytes: u32,
    pub clocks: Option<&'c Clocks>,
}

/// A wait of lanes on one object, after which a repeated wait needs no check: the lanes know no less, the
/// object is the same, and their use is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CheckedWait {
    address: u64,
    lanes: u32,
    /// The epoch in which the use is recorded.
    epoch: Epoch,
    /// [`Mbarriers::changes`] at that time.
    changes: usize,
}

/// The objects of a cluster, by address.
#[derive(Debug, Default)]
pub(crate) struct Mbarriers {
    objects: BTreeMap<u64, Object>,
    /// Number of objects initialised so far.
    made: usize,
    /// Number of objects initialised or ended so far.
    changes: usize,
    /// By actor, the phase in which copies complete now.
    phases: HashMap<usize, Epoch>,
    /// By address, the number of further unsuccessful waits before the copies complete.
    vain_waits: HashMap<u64, u32>,
    /// Whether copies have stayed in flight after an unsuccessful wait.
    waited_for: bool,
}

impl Mbarriers {
    /// Expects one more arrival in this phase.
    pub fn expect_more(&mut self, address: u64) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.pending += 1;
        }
    }

    /// The actor of an object, and the epoch of accesses that complete on it now.
    pub fn actor(&self, address: u64) -> Option<(usize, Epoch)> {
        let actor = self.objects.get(&address)?.actor;
        Some((actor, self.phases.get(&actor).copied().unwrap_or(1)))
    }

    /// Counts a copy that will complete on an object.
    pub fn depart(&mut self, address: u64) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.flights += 1;
        }
    }

    /// Describes the arrivals and bytes for which a phase still waits.
    pub fn describe(&self, address: u64) -> String {
        let Some(object) = self.objects.get(&address) else { return "which is not initialised".into() };
        let Object { expected, pending, bytes, flights, phase, .. } = *object;
        format!(
            "phase {phase}: {pending} of {expected} arrivals and {bytes} bytes are missing, {flights} copies are on their way"
        )
    }

    /// The objects whose bytes can never balance: their addresses, the lines where they were initialised, and
    /// the bytes.
    pub fn unbalanced(&self) -> impl Iterator<Item = (u64, u32, i64)> {
        let off = |(address, o): (&u64, &Object)| {
            (o.bytes != 0 && o.flights == 0).then_some((*address, o.made_at, o.bytes))
        };
        self.objects.iter().filter_map(off)
    }

    /// A wait of lanes that were allowed to use the object at `address` in an epoch.
    pub fn checked(&self, address: u64, lanes: u32, epoch: Epoch) -> CheckedWait {
        CheckedWait { address, lanes, epoch, changes: self.changes }
    }

    /// The line where the object was initialised.
    pub fn made_at(&self, address: u64) -> Option<u32> {
        self.objects.get(&address).map(|object| object.made_at)
    }

    /// The thread that initialised the object, and the time of the initialisation.
    pub fn maker(&self, address: u64) -> Option<(Agent, u32, Epoch)> {
        self.objects.get(&address).map(|object| object.maker)
    }

    /// Whether copies on their way will complete on the object.
    pub fn has_flights(&self, address: u64) -> bool {
        self.objects.get(&address).is_some_and(|object| object.flights > 0)
    }

    pub fn phase(&self, address: u64) -> Option<u64> {
        self.objects.get(&address).map(|object| object.phase)
    }

    /// The accesses that the arrivals of all completed phases released.
    pub fn completed(&self, address: u64) -> Option<&Released> {
        self.objects.get(&address).map(|object| &object.completed)
    }

    /// Initialises an object for `count` arrivals in a phase, by a thread at a time, in a line.
    pub fn init(
        &mut self,
        address: u64,
        count: u32,
        actors: Actors,
        maker: (Agent, u32, Epoch),
        made_at: u32,
    ) {
        let nothing = Released::nothing(actors);
        let object = Object {
            expected: count,
            pending: count,
            bytes: 0,
            phase: 0,
            arriving: nothing.clone(),
            completed: nothing,
            actor: actors.mbarrier((address >> RANK_SHIFT) as usize, self.made),
            flights: 0,
            maker,
            made_at,
        };
        self.made += 1;
        self.changes += 1;
        self.objects.insert(address, object);
    }

    /// Ends an object.
    pub fn end(&mut self, address: u64) {
        self.changes += 1;
        self.objects.remove(&address);
    }

    /// Instructions of tensor memory that are complete before the next arrival: waits of all CTAs acquire
    /// them.
    pub fn complete_products(&mut self, address: u64, home: Agent, clock: &Clock) {
        if let Some(object) = self.objects.get_mut(&address) {
            object.arriving.add_to_all(home, clock);
        }
    }

    /// Announces bytes. Returns the number of bytes that the phase expects if it is too large.
    pub fn expect_bytes(&mut self, address: u64, bytes: u32) -> Option<i64> {
        let object = self.objects.get_mut(&address)?;
        object.bytes += i64::from(bytes);
        (object.bytes > i64::from(LIMIT)).then_some(object.bytes)
    }

    /// Counts bytes that have arrived, by a copy in flight or by an instruction. Returns the number of bytes
    /// that were not expected if it is too large.
    pub fn deliver(&mut self, address: u64, bytes: u32, by_copy: bool) -> Option<i64> {
        let object = self.objects.get_mut(&address)?;
        object.bytes -= i64::from(bytes);
        object.flights -= u32::from(by_copy && object.flights > 0);
        (object.bytes < -i64::from(LIMIT)).then_some(-object.bytes)
    }

    /// Counts an arrival of a thread of the CTA of a rank. Returns the state before, which is the phase and
    /// the number of pending arrivals, and whether more arrive than were pending.
    pub fn arrive(
        &mut self,
        address: u64,
        home: Agent,
        rank: usize,
        arrival: &Arrival,
    ) -> Option<(u64, bool)> {
        let object = self.objects.get_mut(&address)?;
        let state = object.phase << 32 | u64::from(object.pending);
        if let Some(clocks) = arrival.clocks {
            object.arriving.add(home, rank, clocks);
        }
        object.expected -= arrival.dropped.min(object.expected);
        let surplus = arrival.count > object.pending;
        object.pending = object.pending.saturating_sub(arrival.count);
        Some((state, surplus))
    }

    /// Completes the phase if nothing is missing. Returns the number of copies on their way to a phase that
    /// completes.
    pub fn complete_phase(&mut self, address: u64, home: Agent, actors: Actors) -> u32 {
        let Some(object) = self.objects.get_mut(&address) else { return 0 };
        if object.pending != 0 || object.bytes != 0 {
            return 0;
        }
        object.phase += 1;
        object.pending = object.expected;
        let arrived = std::mem::replace(&mut object.arriving, Released::nothing(actors));
        object.completed.join(home, &arrived);
        let epoch = self.phases.entry(object.actor).or_insert(1);
        for completed in &mut object.completed.near {
            completed.learn(home, home + object.actor as Agent, !0, *epoch);
        }
        *epoch += 1;
        object.flights
    }

    /// Whether the copies to an mbarrier stay in flight after this unsuccessful wait. A wait may fail any
    /// number of times (PTX ISA, "mbarrier.try_wait"), so a kernel must not rely on the number of attempts.
    /// With `patient`, the copies to the first mbarrier that is waited for stay so long that a loop with a
    /// fixed number of attempts ends before them.
    pub fn still_flies(&mut self, address: u64, patient: bool, rng: &mut impl RngCore) -> bool {
        let first = patient && !std::mem::replace(&mut self.waited_for, true);
        let draw = || if first { PATIENCE } else { VAIN_WAITS[rng.random_range(0..4)] };
        let waits = self.vain_waits.entry(address).or_insert_with(draw);
        *waits -= 1;
        let stays = *waits > 0;
        if !stays {
            self.vain_waits.remove(&address);
        }
        stays
    }
}

/// An address without the rank of its CTA.
pub(crate) fn inside(address: u64) -> u64 {
    address & ((1 << RANK_SHIFT) - 1)
}
