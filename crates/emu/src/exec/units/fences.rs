//! The writes that fences of a warp have released, and those that its strong reads have observed and no fence
//! has acquired yet (PTX ISA, "Release and Acquire Patterns").

use std::sync::Arc;

use crate::order::{Agent, Clock, Moment, Strength, WarpView};

/// Accesses that lanes released with a fence, for each lane.
#[derive(Clone, Debug)]
pub(crate) struct Fenced {
    pub lanes: u32,
    pub strength: Strength,
    /// Set for a `fence.sc` of gpu scope: see [`Sequential`].
    pub sequential: bool,
    /// Set for a `tcgen05.fence::before_thread_sync`, which covers instructions of tensor memory alone.
    pub tensor: bool,
    pub moment: Moment,
}

/// Releases that relaxed reads of a lane observed and that a later fence acquires. The entry covers several
/// lanes if they waited on an mbarrier together, or if a barrier passed it on to them.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub lanes: u32,
    pub strength: Strength,
    /// Set for a `fence.sc` of gpu scope: see [`Sequential`].
    pub sequential: bool,
    pub clock: Clock,
    /// The release that a relaxed read observed last. A repeated observation adds nothing.
    pub last: Option<Arc<Clock>>,
}

/// The releases of sequentially consistent fences of gpu scope, and what strong reads observed of them.
///
/// A `fence.sc` synchronises with every later `fence.sc` (PTX ISA, "Fence-SC"); observed values determine
/// which fence was later. Therefore the signalling or observing thread need not execute the fence itself, as
/// it must in a release or acquire pattern. `write; membar.gl; bar.sync; one thread: atom` and `one thread:
/// atom; bar.sync; membar.gl; read` order the writes and reads of all threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sequential {
    released: Option<Clock>,
    seen: Option<Clock>,
}

impl Sequential {
    /// Adds the state that other warps of the CTA bring to a barrier.
    pub fn join(&mut self, home: u32, other: &Sequential) {
        for (mine, theirs) in [(&mut self.released, &other.released), (&mut self.seen, &other.seen)] {
            if let Some(clock) = theirs {
                join_option(mine, home, clock);
            }
        }
    }
}

fn join_option(known: &mut Option<Clock>, home: u32, clock: &Clock) {
    match known {
        Some(known) => known.join(home, clock),
        None => *known = Some(clock.clone()),
    }
}

/// The fences and the observations of a warp.
#[derive(Debug, Default)]
pub(crate) struct Fences {
    pub released: Vec<Fenced>,
    pub seen: Vec<Seen>,
}

impl Fences {
    /// The accesses that a relaxed arrival releases: those that earlier fences of these lanes cover, if the
    /// fences have at least this scope. Fences for initialised mbarriers are among them.
    pub fn released_to(&self, view: &mut WarpView, lanes: u32, scope: Strength) -> Clock {
        let mut clock = view.release(lanes);
        clock.keep(&view.actors().initialisations(), view.actors().total());
        for fence in self.released.iter().filter(|f| f.lanes & lanes != 0 && f.strength >= scope) {
            clock.join(view.home(), &fence.moment.of(fence.lanes & lanes));
        }
        clock
    }

    /// A fence of lanes: it acquires what the lanes observed at most at this scope, and releases what they
    /// know now. Returns the number of parts of the clocks that the fence copied and joined.
    pub fn fence(
        &mut self,
        view: &mut WarpView,
        (lanes, live): (u32, u32),
        strength: Strength,
        sequential: bool,
    ) -> u64 {
        let mut toll = 0;
        for seen in std::mem::take(&mut self.seen) {
            // If the scope of a release is too wide for this fence, a later fence with a wider scope acquires
            // it.
            let here = if strength >= seen.strength { seen.lanes & lanes } else { 0 };
            if here != 0 {
                view.acquire(here, live, &seen.clock);
            }
            toll += clock_toll(seen.clock.parts());
            if seen.lanes & !here != 0 {
                self.seen.push(Seen { lanes: seen.lanes & !here, ..seen });
            }
        }
        let moment = view.moment(lanes);
        toll += clock_toll(moment.parts());
        for before in &mut self.released {
            // An earlier fence of these lanes with a wider scope, or an earlier `fence.sc`, still covers the
            // accesses before it.
            if before.strength <= strength && (sequential || !before.sequential) {
                before.lanes &= !lanes;
            }
        }
        self.released.retain(|f| f.lanes != 0);
        self.released.push(Fenced { lanes, strength, sequential, tensor: false, moment });
        toll
    }

    /// A `tcgen05.fence::before_thread_sync`: relaxed writes and arrivals of the lanes release what the lanes
    /// know of instructions of tensor memory.
    pub fn before_thread_sync(&mut self, view: &WarpView, lanes: u32) {
        self.released.iter_mut().filter(|f| f.tensor).for_each(|f| f.lanes &= !lanes);
        self.released.retain(|f| f.lanes != 0);
        let (strength, moment) = (Strength::Gpu, view.tensor_moment(lanes));
        self.released.push(Fenced { lanes, strength, sequential: false, tensor: true, moment });
    }

    /// A `tcgen05.fence::after_thread_sync`: the lanes acquire what their relaxed reads and waits observed of
    /// instructions of tensor memory.
    pub fn after_thread_sync(&self, view: &mut WarpView, (lanes, live): (u32, u32)) {
        let (tensors, total) = (view.actors().tensors(), view.actors().total());
        for seen in self.seen.iter().filter(|s| s.lanes & lanes != 0) {
            let mut clock = seen.clock.clone();
            clock.keep(&tensors, total);
            view.acquire(seen.lanes & lanes, live, &clock);
        }
    }

    /// Keeps what a relaxed wait of lanes observed. Their next fence of at least this scope acquires it.
    pub fn see(&mut self, home: Agent, lanes: u32, strength: Strength, clock: &Clock) {
        let alike = |s: &&mut Seen| s.lanes == lanes && s.strength == strength && !s.sequential;
        match self.seen.iter_mut().find(alike) {
            Some(seen) => seen.clock.join(home, clock),
            None => {
                let clock = clock.clone();
                self.seen.push(Seen { lanes, strength, sequential: false, clock, last: None });
            }
        }
    }

    /// The state that a barrier passes on from these lanes to the lanes that leave it.
    pub fn sequential(&self, view: &WarpView, lanes: u32) -> Sequential {
        let (home, mut carried) = (view.home(), Sequential::default());
        for fence in self.released.iter().filter(|f| f.sequential && f.lanes & lanes != 0) {
            join_option(&mut carried.released, home, &fence.moment.of(fence.lanes & lanes));
        }
        for seen in self.seen.iter().filter(|s| s.sequential && s.lanes & lanes != 0) {
            join_option(&mut carried.seen, home, &seen.clock);
        }
        carried
    }

    /// Applies the state that a barrier passed on to the lanes that leave it.
    pub fn inherit(&mut self, view: &WarpView, lanes: u32, carried: &Sequential) {
        let (strength, sequential) = (Strength::Gpu, true);
        if let Some(clock) = &carried.released {
            self.released.retain(|f| !(f.sequential && f.lanes & !lanes == 0));
            let moment = view.carried(clock);
            self.released.push(Fenced { lanes, strength, sequential, tensor: false, moment });
        }
        if let Some(clock) = &carried.seen {
            self.seen.retain(|s| !(s.sequential && s.lanes & !lanes == 0));
            self.seen.push(Seen { lanes, strength, sequential, clock: clock.clone(), last: None });
        }
    }
}

/// Cost of copying and joining a clock with `parts` parts, in warp instructions.
pub(crate) fn clock_toll(parts: usize) -> u64 {
    1 + parts as u64 / 16
}
