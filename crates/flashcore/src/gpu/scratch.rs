//! Memory that a kernel has for itself beside the caller's tensors.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use driver::{Buffer, Context, DeviceSlice, DriverError, Queue, Stream};

/// A sector of L2: what two queues' memory never shares.
const SECTOR: usize = 32;

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

    /// How many are allocated at once: counters are small, scratch is megabytes.
    const fn at_once(self) -> usize {
        match self {
            Purpose::Counter => 64,
            Purpose::Scratch => 1,
        }
    }
}

/// One kernel's memory for one purpose. Counters are zeroed once, and every launch leaves its own at zero for the next. Launches that may
/// run at the same time must not share any, so each [`Queue`] has its own: each stream, and each capture of a stream, because graphs
/// captured from one stream may be launched on several. It is never taken back: nothing tells when the last graph that names
/// it is gone.
#[derive(Debug)]
pub(super) struct OwnMemory {
    context: Arc<Context>,
    purpose: Purpose,
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

impl OwnMemory {
    /// So many bytes for each queue. It allocates and may be called while a stream is captured.
    pub(super) fn new(
        context: &Arc<Context>,
        purpose: Purpose,
        bytes: usize,
    ) -> Result<OwnMemory, DriverError> {
        let state = State { slabs: Vec::new(), free: Vec::new(), taken: HashMap::new() };
        let place = bytes.max(1).next_multiple_of(SECTOR);
        let own = OwnMemory { context: context.clone(), purpose, bytes, place, state: Mutex::new(state) };
        own.grow(&mut own.state.lock().unwrap_or_else(PoisonError::into_inner))?;
        Ok(own)
    }

    /// That of the queue that a launch on the stream joins now.
    pub(super) fn of(&self, stream: &Stream) -> Result<DeviceSlice, DriverError> {
        let queue = stream.queue()?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = state.taken.get(&queue) {
            return Ok(*own);
        }
        if state.free.is_empty() {
            self.grow(&mut state)?;
        }
        let own = state.free.pop().unwrap_or(DeviceSlice::EMPTY);
        state.taken.insert(queue, own);
        Ok(own)
    }

    fn grow(&self, state: &mut State) -> Result<(), DriverError> {
        let count = self.purpose.at_once();
        let slab = match self.purpose {
            Purpose::Counter => Buffer::zeroed(&self.context, count * self.place)?,
            Purpose::Scratch => Buffer::new(&self.context, count * self.place)?,
        };
        let places = (0..count).rev().filter_map(|i| slab.slice().part(i * self.place, self.bytes));
        state.free.extend(places);
        state.slabs.push(slab);
        Ok(())
    }
}
