//! Device memory that kernels need besides the caller's tensors: counters, scratch, and the temporaries by
//! which the kernels of a program pass results on.
//!
//! All counters of a program lie in one allocation, and all its scratch and temporaries in another.
//!
//! Launches that may run concurrently must not share this memory. The launches of one [`Queue`] never run
//! concurrently. A queue is a stream, or a graph that one stream captures. So each queue has its own place
//! (one allocation), which all kernels of the same size use in turn.
//! - A **graph** holds its place through a user object (`cuGraphRetainUserObject`). The driver releases the
//!   user object when the graph, everything instantiated or cloned from it, and their launches are gone. The
//!   alternative is memory that the graph allocates itself, with allocation nodes. The driver would then
//!   reject a second executable graph of one capture, which shares the place today. Such graphs also cannot
//!   be cloned or be a part of other graphs, and PyTorch and other frameworks do both. Each captured call
//!   would also cost two more nodes per launch, and a third that zeroes the counter.
//! - The first [`STEADY`] **streams** keep their places. A launch on a further stream is followed by an
//!   event. When that event has completed, another stream may take the place. So a process with one stream
//!   per request has as many places as concurrent requests, and launches on few streams have no overhead.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use driver::{Buffer, Context, DeviceSlice, DriverError, Event, Pool, PoolBuffer, Queue, Stream, StreamRef};
use kernels::BufferKind;

/// Alignment in bytes of the buffers in an allocation, as the driver aligns allocations (CUDA C++ Programming
/// Guide, "Size and Alignment Requirement").
const ALIGNMENT: usize = 256;
/// A sector of L2 in bytes. The memory of two queues never shares a sector.
const SECTOR: usize = 32;
/// The least size of scratch.
const MIB: usize = 1 << 20;
/// Number of counters that are allocated together.
const COUNTERS: usize = 64;
/// Number of streams that keep their places for good.
const STEADY: usize = 4;

/// Use of a program's own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// Tile counter and completion counts: zero before each launch and after it.
    Counter,
    /// Data that CTAs exchange within a launch, or that one launch of a program leaves for the next; its
    /// content before the first launch is arbitrary.
    Scratch,
    /// Data that one program leaves for the next one of a call, whose scratch lies elsewhere.
    Results,
}

/// The memory of its own that a program needs, one allocation for each purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ScratchLayout {
    /// Purpose and size in bytes of each allocation.
    pub allocations: Vec<(Purpose, usize)>,
}

impl ScratchLayout {
    /// Makes room for a buffer. Returns the index of its allocation and its first byte there.
    pub(super) fn add(&mut self, purpose: Purpose, bytes: usize) -> (usize, usize) {
        let known = self.allocations.iter().position(|(of, _)| *of == purpose);
        let index = known.unwrap_or_else(|| {
            self.allocations.push((purpose, 0));
            self.allocations.len() - 1
        });
        let end = &mut self.allocations[index].1;
        let start = end.next_multiple_of(ALIGNMENT);
        *end = start + bytes;
        (index, start)
    }
}

impl Purpose {
    /// The purpose of a kernel's buffer; `None` for buffers that the caller provides.
    pub(super) fn of(kind: BufferKind) -> Option<Purpose> {
        match kind {
            BufferKind::Counter => Some(Purpose::Counter),
            BufferKind::Scratch | BufferKind::Temporary(_) => Some(Purpose::Scratch),
            BufferKind::Operand(_) | BufferKind::Codes(_) | BufferKind::Array(_) => None,
        }
    }

    /// Size of a place for `bytes` bytes. Scratch is a power of two or three quarters of one, so that
    /// problems of growing size need few places: all sizes up to a place's own add up to less than 3.5 times
    /// that size.
    fn place(self, bytes: usize) -> usize {
        match self {
            Purpose::Counter => bytes.max(SECTOR).next_power_of_two(),
            Purpose::Scratch | Purpose::Results => {
                let power = bytes.max(MIB).next_power_of_two();
                let less = power / 4 * 3;
                if less >= bytes.max(MIB) { less } else { power }
            }
        }
    }
}

/// The counters and scratch of all kernels of a device.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    sizes: Mutex<HashMap<(Purpose, usize), Arc<OwnMemory>>>,
    source: OnceLock<Arc<Source>>,
}

impl Scratch {
    /// Places of at least `bytes` bytes. One place is allocated when this returns. The call is allowed while
    /// a stream is captured.
    pub(super) fn of_size(
        &self,
        context: &Arc<Context>,
        purpose: Purpose,
        bytes: usize,
    ) -> Result<Arc<OwnMemory>, DriverError> {
        let bytes = purpose.place(bytes);
        if let Some(own) = locked(&self.sizes).get(&(purpose, bytes)) {
            return Ok(own.clone());
        }
        let source = match self.source.get() {
            Some(source) => source,
            None => {
                // A threshold of 0: freed memory goes back to the device at once.
                let source = Source { pool: Pool::new(context, 0)?, stream: Stream::new(context)? };
                self.source.get_or_init(|| Arc::new(source))
            }
        };
        let own = OwnMemory::new(context, source, purpose, bytes)?;
        Ok(locked(&self.sizes).entry((purpose, bytes)).or_insert(Arc::new(own)).clone())
    }

    /// Frees the scratch that no launch uses any more and no stream or graph holds.
    pub(super) fn trim(&self) -> Result<(), DriverError> {
        let sizes: Vec<_> = locked(&self.sizes).values().cloned().collect();
        for own in sizes {
            own.trim()?;
        }
        let Some(source) = self.source.get() else { return Ok(()) };
        source.stream.synchronize()?;
        source.pool.trim(0)
    }
}

/// Where scratch is allocated: from a pool, in the order of a stream of its own, so that freeing does not
/// wait for the device.
#[derive(Debug)]
struct Source {
    pool: Pool,
    stream: Stream,
}

/// The memory of one queue.
#[derive(Debug)]
struct Place {
    memory: Memory,
    /// Held while all kernels of a program are enqueued, so that no launch of another thread on the same
    /// queue comes between them and overwrites their temporaries. Counters need none: every launch leaves
    /// them at 0.
    turn: Mutex<()>,
}

#[derive(Debug)]
enum Memory {
    /// The counters of a slab from `offset` on.
    Counter {
        slab: Arc<Buffer>,
        offset: usize,
        bytes: usize,
    },
    Scratch(PoolBuffer),
}

impl Place {
    fn new(memory: Memory) -> Arc<Place> {
        Arc::new(Place { memory, turn: Mutex::default() })
    }

    fn slice(&self) -> DeviceSlice<'_> {
        match &self.memory {
            // `grow` has divided the slab into places, so the part exists.
            Memory::Counter { slab, offset, bytes } => {
                slab.slice().part(*offset, *bytes).unwrap_or(DeviceSlice::EMPTY)
            }
            Memory::Scratch(buffer) => buffer.slice(),
        }
    }
}

/// The places of one size for one purpose. Counters are zeroed once. Every launch leaves its counter at zero
/// for the next launch.
#[derive(Debug)]
pub(super) struct OwnMemory {
    context: Arc<Context>,
    source: Arc<Source>,
    purpose: Purpose,
    bytes: usize,
    state: Mutex<State>,
    /// Queues of destroyed graphs, whose places are free. A thread of the driver locks this list, so no CUDA
    /// function may be called while it is locked.
    returned: Arc<Mutex<Vec<Queue>>>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Arc<Place>>,
    streams: BTreeMap<Queue, Held>,
    graphs: BTreeMap<Queue, Arc<Place>>,
}

/// The place of a stream.
#[derive(Debug)]
struct Held {
    place: Arc<Place>,
    /// Recorded after each launch; `None` if the stream keeps the place for good.
    last: Option<Arc<Event>>,
    /// Number of launches whose event is not recorded yet.
    launching: usize,
}

impl OwnMemory {
    fn new(
        context: &Arc<Context>,
        source: &Arc<Source>,
        purpose: Purpose,
        bytes: usize,
    ) -> Result<OwnMemory, DriverError> {
        let own = OwnMemory {
            context: context.clone(),
            source: source.clone(),
            purpose,
            bytes,
            state: Mutex::default(),
            returned: Arc::default(),
        };
        own.grow(&mut locked(&own.state).free)?;
        Ok(own)
    }

    /// Size of a place in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The place for a launch on `stream`, which belongs to `queue`.
    pub(super) fn lease(&self, stream: StreamRef<'_>, queue: Queue) -> Result<Lease<'_>, DriverError> {
        let mut state = locked(&self.state);
        if queue.is_captured() {
            if let Some(place) = state.graphs.get(&queue) {
                return Ok(Lease { own: self, queue, place: place.clone(), last: None });
            }
            let place = self.take(&mut state)?;
            // When this call fails, it drops the `Returned`, and the place is free again.
            state.graphs.insert(queue, place.clone());
            stream.keep_with_graph(Returned { queue, to: self.returned.clone() })?;
            return Ok(Lease { own: self, queue, place, last: None });
        }
        if let Some(held) = state.streams.get_mut(&queue) {
            held.launching += 1;
            return Ok(Lease { own: self, queue, place: held.place.clone(), last: held.last.clone() });
        }
        let steady = state.streams.values().filter(|held| held.last.is_none()).count() < STEADY;
        let last = if steady { None } else { Some(Arc::new(Event::without_time(&self.context)?)) };
        let place = self.take(&mut state)?;
        state.streams.insert(queue, Held { place: place.clone(), last: last.clone(), launching: 1 });
        Ok(Lease { own: self, queue, place, last })
    }

    /// Takes a place that no queue has.
    fn take(&self, state: &mut State) -> Result<Arc<Place>, DriverError> {
        self.collect(state);
        if self.purpose != Purpose::Counter {
            // One spare place is enough for the next queue.
            state.free.truncate(1);
        }
        if state.free.is_empty()
            && let Some(queue) =
                state.streams.iter().find_map(|(queue, held)| held.is_done().then_some(*queue))
            && let Some(held) = state.streams.remove(&queue)
        {
            return Ok(held.place);
        }
        if state.free.is_empty() {
            self.grow(&mut state.free)?;
        }
        state.free.pop().ok_or(DriverError::OutOfMemory { what: "memory of a kernel's own".to_owned() })
    }

    /// Frees the places of destroyed graphs.
    fn collect(&self, state: &mut State) {
        let returned = std::mem::take(&mut *locked(&self.returned));
        state.free.extend(returned.iter().filter_map(|queue| state.graphs.remove(queue)));
    }

    fn trim(&self) -> Result<(), DriverError> {
        let mut state = locked(&self.state);
        self.collect(&mut state);
        if self.purpose != Purpose::Counter {
            state.streams.retain(|_, held| !held.is_done());
            state.free.clear();
        }
        Ok(())
    }

    fn grow(&self, free: &mut Vec<Arc<Place>>) -> Result<(), DriverError> {
        let bytes = self.bytes;
        match self.purpose {
            Purpose::Counter => {
                let slab = Arc::new(Buffer::zeroed(&self.context, COUNTERS * bytes)?);
                let place = |i| Place::new(Memory::Counter { slab: slab.clone(), offset: i * bytes, bytes });
                free.extend((0..COUNTERS).rev().map(place));
            }
            Purpose::Scratch | Purpose::Results => {
                let Source { pool, stream } = &*self.source;
                free.push(Place::new(Memory::Scratch(pool.allocate_now(stream, bytes)?)));
            }
        }
        Ok(())
    }
}

impl Held {
    /// Whether all launches that were given the place are known to be done.
    fn is_done(&self) -> bool {
        let done = |event: &Arc<Event>| event.is_done().unwrap_or(false);
        self.launching == 0 && self.last.as_ref().is_some_and(done)
    }
}

/// Returns a graph's place when dropped. Calls no CUDA function.
struct Returned {
    queue: Queue,
    to: Arc<Mutex<Vec<Queue>>>,
}

impl Drop for Returned {
    fn drop(&mut self) {
        locked(&self.to).push(self.queue);
    }
}

/// A place while the launches that use it are being enqueued.
pub(super) struct Lease<'a> {
    own: &'a OwnMemory,
    queue: Queue,
    place: Arc<Place>,
    /// The event to record; `None` if the stream keeps the place for good.
    last: Option<Arc<Event>>,
}

impl Lease<'_> {
    pub(super) fn slice(&self) -> DeviceSlice<'_> {
        self.place.slice()
    }

    /// Keeps every other program off the place's scratch while the guard lives.
    pub(super) fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        (self.own.purpose != Purpose::Counter).then(|| locked(&self.place.turn))
    }

    /// To be called after the launches were enqueued: records the event.
    pub(super) fn launched(self, stream: StreamRef<'_>) {
        if let Some(last) = &self.last
            && last.record(stream).is_err()
            && let Some(held) = locked(&self.own.state).streams.get_mut(&self.queue)
        {
            // Without the event, nothing shows when the launch is done, so the stream never returns this
            // scratch memory.
            held.last = None;
        }
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        if self.last.is_some()
            && let Some(held) = locked(&self.own.state).streams.get_mut(&self.queue)
        {
            held.launching = held.launching.saturating_sub(1);
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_of_growing_size_needs_few_places() {
        let sizes = [(0, 1), (1, 1), (2, 2), (5, 6), (6, 6), (7, 8), (100, 128), (257, 384), (385, 512)];
        for (mib, place) in sizes {
            assert_eq!(Purpose::Scratch.place(mib * MIB), place * MIB, "{mib}");
        }
        let places: std::collections::BTreeSet<usize> =
            (0..=1024).map(|mib| Purpose::Scratch.place(mib * MIB)).collect();
        assert!(places.iter().sum::<usize>() < 7 * 1024 * MIB / 2, "{places:?}");
    }

    /// Two buffers of equal size once had one place.
    #[test]
    fn buffers_of_a_program_do_not_overlap() {
        let mut layout = ScratchLayout::default();
        let buffers = [
            (Purpose::Counter, 4),
            (Purpose::Scratch, 1000),
            (Purpose::Scratch, 1000),
            (Purpose::Counter, 4),
            (Purpose::Scratch, 0),
        ];
        let places = buffers.map(|(purpose, bytes)| layout.add(purpose, bytes));
        assert_eq!(places, [(0, 0), (1, 0), (1, 1024), (0, 256), (1, 2048)]);
        assert_eq!(layout.allocations, [(Purpose::Counter, 260), (Purpose::Scratch, 2048)]);
    }
}
