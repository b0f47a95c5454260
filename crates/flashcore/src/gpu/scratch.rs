//! Memory that kernels have for themselves beside the caller's tensors.
//!
//! Launches that may run at the same time must not share any. Launches of one [`Queue`] never do: those of
//! one stream, or those that one stream puts into one graph. So each queue has a place of its own, which all
//! kernels of that size use in turn.
//! - A **graph** holds its place by a user object (`cuGraphRetainUserObject`), and the driver tells when the
//!   graph, everything that was instantiated or cloned from it, and their launches are gone. The alternative
//!   is memory that the graph allocates itself, by allocation nodes. The driver would then refuse a second
//!   executable graph of one capture, which shares the place today. But such graphs also cannot be cloned or
//!   be a part of others, PyTorch and other frameworks do both, and each captured call would cost two more
//!   nodes at each launch, and another that zeroes the counter.
//! - The first [`STEADY`] **streams** keep their places. A launch on a further stream is followed by an
//!   event, and when the event is reached, another stream may take the place. So a process with a stream for
//!   each request has as many places as requests at once, and launches on few streams pay nothing.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use driver::{Buffer, Context, DeviceSlice, DriverError, Event, Pool, PoolBuffer, Queue, Stream};

/// A sector of L2: what two queues' memory never shares.
const SECTOR: usize = 32;
/// To what sizes of scratch are rounded up, so that kernels share it.
const MIB: usize = 1 << 20;
/// Counters that are allocated at once.
const COUNTERS: usize = 64;
/// Streams whose places are theirs for good.
const STEADY: usize = 4;

/// What a kernel has memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Purpose {
    /// To hand out tiles and to count what is done: zero before each launch, and after it.
    Counter,
    /// For what CTAs leave each other within a launch: it begins with anything.
    Scratch,
}

impl Purpose {
    /// Of a kernel's buffer of that name.
    pub(super) fn of(name: &str) -> Option<Purpose> {
        match name {
            "counter" => Some(Purpose::Counter),
            "scratch" => Some(Purpose::Scratch),
            _ => None,
        }
    }

    /// Bytes of a place for so many.
    fn place(self, bytes: usize) -> usize {
        match self {
            Purpose::Counter => bytes.max(SECTOR).next_power_of_two(),
            Purpose::Scratch => bytes.max(1).next_multiple_of(MIB),
        }
    }
}

/// The memory of all kernels of a device.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    sizes: Mutex<HashMap<(Purpose, usize), Arc<OwnMemory>>>,
    source: OnceLock<Arc<Source>>,
}

impl Scratch {
    /// Places of at least so many bytes, one of which is there when this returns. It may be called while a
    /// stream is captured.
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
                // What is freed goes back to the device.
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

/// Where scratch is allocated: in the order of a stream of its own, so that freeing it does not wait for the
/// device.
#[derive(Debug)]
struct Source {
    pool: Pool,
    stream: Stream,
}

/// The memory of one queue.
#[derive(Debug)]
enum Place {
    /// All of a slab's counters from an offset on.
    Counter {
        slab: Arc<Buffer>,
        offset: usize,
        bytes: usize,
    },
    Scratch(PoolBuffer),
}

impl Place {
    fn slice(&self) -> DeviceSlice<'_> {
        match self {
            // `grow` has cut the slab into places.
            Place::Counter { slab, offset, bytes } => {
                slab.slice().part(*offset, *bytes).unwrap_or(DeviceSlice::EMPTY)
            }
            Place::Scratch(buffer) => buffer.slice(),
        }
    }
}

/// Places of one size for one purpose. Counters are zeroed once, and every launch leaves its own at zero for
/// the next.
#[derive(Debug)]
pub(super) struct OwnMemory {
    context: Arc<Context>,
    source: Arc<Source>,
    purpose: Purpose,
    bytes: usize,
    state: Mutex<State>,
    /// Places of graphs that are gone. A thread of the driver locks it, so no function of CUDA is called
    /// meanwhile.
    returned: Arc<Mutex<Vec<Queue>>>,
}

#[derive(Debug, Default)]
struct State {
    free: Vec<Arc<Place>>,
    streams: HashMap<Queue, Held>,
    graphs: HashMap<Queue, Arc<Place>>,
}

/// A stream's place.
#[derive(Debug)]
struct Held {
    place: Arc<Place>,
    /// Recorded after each launch; `None` where the place is the stream's for good.
    last: Option<Arc<Event>>,
    /// Launches whose event is not recorded yet.
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

    /// The place for a launch on the stream, which joins the queue.
    pub(super) fn lease(&self, stream: &Stream, queue: Queue) -> Result<Lease<'_>, DriverError> {
        let mut state = locked(&self.state);
        if queue.is_captured() {
            if let Some(place) = state.graphs.get(&queue) {
                return Ok(Lease { own: self, queue, place: place.clone(), last: None });
            }
            let place = self.take(&mut state)?;
            // Where this fails, the place is free again.
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

    /// A place that no queue has.
    fn take(&self, state: &mut State) -> Result<Arc<Place>, DriverError> {
        self.collect(state);
        if self.purpose == Purpose::Scratch {
            // One for the next queue is enough.
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

    /// Takes back the places of graphs that are gone.
    fn collect(&self, state: &mut State) {
        let returned = std::mem::take(&mut *locked(&self.returned));
        state.free.extend(returned.iter().filter_map(|queue| state.graphs.remove(queue)));
    }

    fn trim(&self) -> Result<(), DriverError> {
        let mut state = locked(&self.state);
        self.collect(&mut state);
        if self.purpose == Purpose::Scratch {
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
                let place = |i| Place::Counter { slab: slab.clone(), offset: i * bytes, bytes };
                free.extend((0..COUNTERS).rev().map(|i| Arc::new(place(i))));
            }
            Purpose::Scratch => {
                let Source { pool, stream } = &*self.source;
                free.push(Arc::new(Place::Scratch(pool.allocate_now(stream, bytes)?)));
            }
        }
        Ok(())
    }
}

impl Held {
    /// Whether all launches that were given the place are done, as far as can be told.
    fn is_done(&self) -> bool {
        let done = |event: &Arc<Event>| event.is_done().unwrap_or(false);
        self.launching == 0 && self.last.as_ref().is_some_and(done)
    }
}

/// Gives a graph's place back when dropped. It calls no CUDA.
struct Returned {
    queue: Queue,
    to: Arc<Mutex<Vec<Queue>>>,
}

impl Drop for Returned {
    fn drop(&mut self) {
        locked(&self.to).push(self.queue);
    }
}

/// A place while a launch that uses it is enqueued.
pub(super) struct Lease<'a> {
    own: &'a OwnMemory,
    queue: Queue,
    place: Arc<Place>,
    /// The event to record, where the place is not the stream's for good.
    last: Option<Arc<Event>>,
}

impl Lease<'_> {
    /// The memory.
    pub(super) fn slice(&self) -> DeviceSlice<'_> {
        self.place.slice()
    }

    /// The launch is on the stream.
    pub(super) fn launched(self, stream: &Stream) {
        if let Some(last) = &self.last
            && last.record(stream).is_err()
            && let Some(held) = locked(&self.own.state).streams.get_mut(&self.queue)
        {
            // Nothing tells when the launch is done.
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
