//! Memory that a kernel keeps between its launches: the counter that hands out its tiles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Buffer, Context, DeviceSlice, DriverError, Queue, Stream};

/// Counters that are allocated at once.
const SLAB: usize = 64;
/// A sector of L2: what two counters never share.
const SECTOR: usize = 32;

/// The counters of one kernel. They are zeroed once, and every launch leaves its own at zero for the next. Launches that may run at
/// the same time must not share one, so each [`Queue`] has its own: each stream, and each capture of a stream, because graphs
/// captured from one stream may be launched on several. A counter is never taken back: nothing tells when the last graph that names
/// it is gone. It is 32 bytes.
#[derive(Debug)]
pub(super) struct Counters {
    context: Arc<Context>,
    /// Bytes of one, and of the place it takes.
    bytes: usize,
    place: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    slabs: Vec<Buffer>,
    free: Vec<DeviceSlice>,
    taken: HashMap<Queue, DeviceSlice>,
}

impl Counters {
    /// Counters of so many bytes. It allocates and may be called while a stream is captured.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Counters, DriverError> {
        let state = State { slabs: Vec::new(), free: Vec::new(), taken: HashMap::new() };
        let place = bytes.max(1).next_multiple_of(SECTOR);
        let counters = Counters { context: context.clone(), bytes, place, state: Mutex::new(state) };
        counters.grow(&mut counters.state.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(counters)
    }

    /// The counter of the queue that a launch on the stream joins now.
    pub(super) fn of(&self, stream: &Stream) -> Result<DeviceSlice, DriverError> {
        let queue = stream.queue()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(counter) = state.taken.get(&queue) {
            return Ok(*counter);
        }
        if state.free.is_empty() {
            self.grow(&mut state)?;
        }
        let counter = state.free.pop().unwrap_or(DeviceSlice::EMPTY);
        state.taken.insert(queue, counter);
        Ok(counter)
    }

    fn grow(&self, state: &mut State) -> Result<(), DriverError> {
        let slab = Buffer::zeroed(&self.context, SLAB * self.place)?;
        let places = (0..SLAB).rev().filter_map(|i| slab.slice().part(i * self.place, self.bytes));
        state.free.extend(places);
        state.slabs.push(slab);
        Ok(())
    }
}
