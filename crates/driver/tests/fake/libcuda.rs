//! A CUDA driver without a GPU. Device memory is host memory. A kernel is run by the program that
//! `FAKE_RUNNER` names, or not at all. The fake is as strict as the real driver: calls without a current
//! context, destroyed handles and unknown addresses are errors.
//!
//! The runner gets a file in `FAKE_LAUNCH`. The file has one line each for the entry, for grid, block, shared
//! memory and cluster, for the parameters (8 bytes each, 128 for a tensor map), for the size of the PTX, and
//! for address and size of each allocation. Then follow an empty line, the PTX and the contents. The runner
//! writes the new contents to the file. `FAKE_VERSION`, `FAKE_STUB`, `FAKE_INIT` (for the first
//! `FAKE_INIT_TIMES` calls), `FAKE_DEVICES`, `FAKE_SM`, `FAKE_THREADS`, `FAKE_LOCAL` and `FAKE_MEMORY` set
//! the properties and errors that the driver reports. While the file `FAKE_HOLD` exists, no event completes.
//! Kernels named `fail` break the context; kernels named `hang` never end.
#![allow(non_snake_case, unused_unsafe)]

mod launch;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CStr, c_char, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

type Result = u32;
const INVALID_VALUE: Result = 1;
const OUT_OF_MEMORY: Result = 2;
const INVALID_CONTEXT: Result = 201;
const INVALID_IMAGE: Result = 200;
const INVALID_PTX: Result = 218;
const INVALID_HANDLE: Result = 400;
const NOT_FOUND: Result = 500;
const NOT_READY: Result = 600;
const ILLEGAL_ADDRESS: Result = 700;
const CAPTURE_UNSUPPORTED: Result = 900;
const CAPTURED_EVENT: Result = 907;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

const CONTEXT: usize = 0x1000;

#[derive(Default)]
struct State {
    /// Handles that must be destroyed: streams, events, modules, graphs, pools, link states.
    live: BTreeSet<usize>,
    next: usize,
    memory: BTreeMap<u64, Vec<u8>>,
    pinned: BTreeMap<usize, Vec<u8>>,
    /// PTX by module.
    modules: BTreeMap<usize, String>,
    /// The context of each module.
    contexts: BTreeMap<usize, usize>,
    functions: BTreeMap<usize, (usize, String)>,
    /// Streams under capture, with the number of the capture.
    capturing: BTreeMap<usize, u64>,
    /// Events that were recorded under capture, with the number of the capture.
    captured: BTreeMap<usize, u64>,
    /// The stream on which each capture began and its graph, by the number of the capture.
    captures: BTreeMap<u64, (usize, usize)>,
    /// Number of captures begun.
    begun: u64,
    graphs: BTreeMap<usize, Graph>,
    /// User objects with their destructor and reference count.
    objects: BTreeMap<usize, (usize, Destroy, usize)>,
    /// Number of synchronisations of streams.
    synchronised: u64,
    launches: u64,
    linked: u64,
    /// Number of tensor maps encoded.
    maps: u64,
    /// The cubin of each linker, until it is destroyed.
    cubins: BTreeMap<usize, Vec<u8>>,
    poison: Result,
    /// Whether a kernel named `hang` was launched.
    hangs: bool,
}

type Destroy = unsafe extern "C" fn(*mut c_void);

/// A graph, executable or not: launches, and the user objects that it refers to.
#[derive(Clone, Default)]
struct Graph {
    work: Vec<Work>,
    objects: Vec<usize>,
}

/// A launch.
#[derive(Clone)]
struct Work {
    module: usize,
    entry: String,
    /// Grid, block, shared memory and cluster.
    shape: [u32; 10],
    params: Vec<u64>,
}

/// Number of calls of `cuInit`.
static STARTS: AtomicU64 = AtomicU64::new(0);
/// Number of calls of the driver's functions.
static CALLS: AtomicU64 = AtomicU64::new(0);
static STATE: Mutex<Option<State>> = Mutex::new(None);

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
    static RELAXED: Cell<u32> = const { Cell::new(0) };
}

fn with(f: impl FnOnce(&mut State) -> Result) -> Result {
    let mut state = STATE.lock().unwrap();
    let state = state.get_or_insert_with(State::default);
    f(state)
}

/// Runs `f` for a call that needs one of our contexts to be current and not broken.
fn inside(f: impl FnOnce(&mut State) -> Result) -> Result {
    if !(CONTEXT..CONTEXT + devices()).contains(&CURRENT.get()) {
        return INVALID_CONTEXT;
    }
    with(|state| if state.poison != 0 { state.poison } else { f(state) })
}

/// Number of devices. Each device has a context; memory and all other state is shared.
fn devices() -> usize {
    variable("FAKE_DEVICES", 1) as usize
}

/// Destroys user objects as the driver does, on a separate thread that has no context.
fn destroy(gone: Vec<(usize, Destroy)>) {
    let all = move || gone.into_iter().for_each(|(data, destroy)| unsafe { destroy(data as *mut c_void) });
    std::thread::spawn(all).join().unwrap();
}

fn destroy_graph(graph: usize) -> Result {
    let mut gone = Vec::new();
    let result = with(|s| {
        let objects = s.graphs.remove(&graph).map_or(Vec::new(), |graph| graph.objects);
        gone = s.release(&objects);
        s.destroy(graph)
    });
    destroy(gone);
    result
}

/// A function that a test wants to run within each copy between host and device.
static WITHIN_COPY: Mutex<Option<extern "C" fn()>> = Mutex::new(None);

#[unsafe(no_mangle)]
pub extern "C" fn fake_within_copy(what: Option<extern "C" fn()>) {
    *WITHIN_COPY.lock().unwrap() = what;
}

fn within_copy() {
    let what = *WITHIN_COPY.lock().unwrap();
    if let Some(what) = what {
        what();
    }
}

/// Synchronisations of streams, and user objects alive.
#[unsafe(no_mangle)]
pub extern "C" fn fake_waits(synchronised: *mut u64, objects: *mut u64) {
    with(|s| {
        unsafe { (*synchronised, *objects) = (s.synchronised, s.objects.len() as u64) };
        0
    });
}

fn variable(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(otherwise)
}

/// The bytes of each parameter: the text between the entry's name and its body has one `.param` for each. A
/// module without text has as many addresses as `FAKE_PARAMS` says.
fn param_bytes(text: &str, name: &str) -> Vec<usize> {
    if !text.contains(".version") {
        return vec![8; variable("FAKE_PARAMS", 0) as usize];
    }
    let named = |entry: &&str| entry.split(['(', ' ', '\n']).next() == Some(name);
    let entry = text.split(".entry ").skip(1).find(named).unwrap_or(text);
    let size = |param: &str| match param.split_once('[') {
        Some((_, length)) => length.split(']').next().unwrap().trim().parse().unwrap(),
        None if param.contains("64") => 8,
        None => 4,
    };
    entry.split('{').next().unwrap_or("").split(".param").skip(1).map(size).collect()
}

impl State {
    fn make(&mut self) -> usize {
        self.next += 1;
        let handle = 0x10_0000 + 0x10 * self.next;
        self.live.insert(handle);
        handle
    }

    /// A module of the current context.
    fn module(&mut self, text: String) -> usize {
        let module = self.make();
        self.modules.insert(module, text);
        self.contexts.insert(module, CURRENT.get());
        module
    }

    fn destroy(&mut self, handle: usize) -> Result {
        if self.live.remove(&handle) { 0 } else { INVALID_HANDLE }
    }

    /// The graph that a stream is being captured into.
    fn under_capture(&mut self, stream: usize) -> Option<&mut Graph> {
        let (_, graph) = self.captures[self.capturing.get(&stream)?];
        self.graphs.get_mut(&graph)
    }

    /// Releases one reference to each user object. Returns the objects without a remaining reference.
    fn release(&mut self, objects: &[usize]) -> Vec<(usize, Destroy)> {
        let mut gone = Vec::new();
        for object in objects {
            let Some((data, destroy, references)) = self.objects.get_mut(object) else { continue };
            *references -= 1;
            if *references == 0 {
                gone.push((*data, *destroy));
                self.objects.remove(object);
            }
        }
        gone
    }

    fn stream(&self, stream: usize) -> Result {
        if stream == 0 || stream == PER_THREAD || self.live.contains(&stream) { 0 } else { INVALID_HANDLE }
    }

    /// The memory of this address range.
    fn range(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let (&start, memory) = self.memory.range_mut(..=address).next_back()?;
        memory.get_mut((address - start) as usize..)?.get_mut(..bytes)
    }

    fn run(&mut self, work: &Work) {
        self.launches += 1;
        match work.entry.as_str() {
            "fail" => self.poison = ILLEGAL_ADDRESS,
            "hang" => self.hangs = true,
            // The second parameter, a word, is stored at the address in the first.
            "store" => match self.range(work.params[0], 4) {
                Some(to) => to.copy_from_slice(&(*work.params.last().unwrap() as u32).to_le_bytes()),
                None => self.poison = ILLEGAL_ADDRESS,
            },
            _ => {
                if let Some(runner) = std::env::var_os("FAKE_RUNNER") {
                    self.hand_over(work, runner.as_ref());
                }
            }
        }
    }

    fn allocate(&mut self, bytes: usize) -> std::result::Result<u64, Result> {
        let used: usize = self.memory.values().map(Vec::len).sum();
        if (used + bytes) as u64 > variable("FAKE_MEMORY", 1 << 30) {
            return Err(OUT_OF_MEMORY);
        }
        self.next += 1;
        let address = (self.next as u64) << 32;
        self.memory.insert(address, vec![0xcd; bytes]);
        Ok(address)
    }
}

macro_rules! fake {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {
        $(#[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> Result {
            CALLS.fetch_add(1, Relaxed);
            unsafe { $body }
        })*
    };
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_counts(live: *mut u64, launches: *mut u64, linked: *mut u64) {
    with(|s| {
        unsafe {
            *live = (s.live.len() + s.memory.len() + s.pinned.len()) as u64;
            *launches = s.launches;
            *linked = s.linked;
        }
        0
    });
}

fake! {
    cuDriverGetVersion(version: *mut i32) {
        *version = variable("FAKE_VERSION", 13000) as i32;
        variable("FAKE_STUB", 0) as Result
    }
    cuInit(_flags: u32) {
        let again = STARTS.fetch_add(1, Relaxed) < variable("FAKE_INIT_TIMES", u64::MAX);
        if again { variable("FAKE_INIT", 0) as Result } else { 0 }
    }
    cuGetErrorName(error: Result, text: *mut *const c_char) {
        // An error code that is newer than this driver.
        if error == 919 { *text = std::ptr::null(); return INVALID_VALUE; }
        *text = match error { 34 => c"CUDA_ERROR_STUB_LIBRARY", 2 => c"CUDA_ERROR_OUT_OF_MEMORY", 700 => c"CUDA_ERROR_ILLEGAL_ADDRESS", 800 => c"CUDA_ERROR_NOT_PERMITTED", _ => c"CUDA_ERROR" }.as_ptr(); 0
    }
    cuGetErrorString(error: Result, text: *mut *const c_char) {
        *text = if error == 919 { std::ptr::null() } else { c"told by the fake".as_ptr() };
        if error == 919 { INVALID_VALUE } else { 0 }
    }
    cuDeviceGetCount(count: *mut i32) { *count = devices() as i32; 0 }
    cuDeviceGet(device: *mut i32, ordinal: i32) { *device = ordinal; 0 }
    cuDeviceGetName(name: *mut c_char, length: i32, _device: i32) {
        let text = c"Fake GPU".to_bytes_with_nul();
        assert!(length as usize >= text.len());
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()); 0
    }
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], _device: i32) { *uuid = [0xab; 16]; 0 }
    cuDeviceTotalMem_v2(bytes: *mut usize, _device: i32) { *bytes = 1 << 30; 0 }
    cuDeviceGetAttribute(value: *mut i32, which: u32, _device: i32) {
        // CUdevice_attribute: multiprocessors, L2, threads per SM, capability, shared per SM, shared opt-in,
        // pools.
        *value = match which { 16 => 132, 38 => 50 << 20, 39 => 2048, 75 => variable("FAKE_SM", 90) as i32 / 10, 76 => variable("FAKE_SM", 90) as i32 % 10, 81 => 228 << 10, 97 => 227 << 10, 115 => 1, _ => return INVALID_VALUE };
        0
    }
    cuDevicePrimaryCtxRetain(context: *mut usize, device: i32) { *context = CONTEXT + device as usize; 0 }
    cuCtxGetCurrent(context: *mut usize) { *context = CURRENT.get(); 0 }
    cuCtxResetPersistingL2Cache() { inside(|_| 0) }
    cuCtxSetCurrent(context: usize) { CURRENT.set(context); 0 }
    cuCtxSynchronize() { inside(|_| 0) }
    cuThreadExchangeStreamCaptureMode(mode: *mut u32) { *mode = RELAXED.replace(*mode); 0 }
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        inside(|s| {
            *total = variable("FAKE_MEMORY", 1 << 30) as usize;
            *free = *total - s.memory.values().map(Vec::len).sum::<usize>();
            0
        })
    }

    cuStreamCreate(stream: *mut usize, _flags: u32) { inside(|s| { *stream = s.make(); 0 }) }
    cuStreamDestroy_v2(stream: usize) { inside(|s| s.destroy(stream)) }
    cuStreamSynchronize(stream: usize) {
        inside(|s| { s.synchronised += 1; if s.capturing.contains_key(&stream) { CAPTURE_UNSUPPORTED } else { s.stream(stream) } })
    }
    cuStreamQuery(stream: usize) { inside(|s| if s.hangs { NOT_READY } else { s.stream(stream) }) }
    cuStreamWaitEvent(stream: usize, event: usize, _flags: u32) {
        inside(|s| {
            if let Some(&capture) = s.captured.get(&event) { s.capturing.insert(stream, capture); }
            if s.live.contains(&event) { s.stream(stream) } else { INVALID_HANDLE }
        })
    }
    cuStreamIsCapturing(stream: usize, status: *mut u32) {
        inside(|s| { *status = s.capturing.contains_key(&stream).into(); s.stream(stream) })
    }
    // The query fails while the stream is captured, as with some drivers.
    cuStreamGetId(stream: usize, id: *mut u64) {
        inside(|s| if s.capturing.contains_key(&stream) { CAPTURE_UNSUPPORTED } else { *id = stream as u64; s.stream(stream) })
    }
    cuStreamGetCaptureInfo_v2(stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize, _nodes: *mut c_void, _count: *mut usize) {
        inside(|s| {
            *status = s.capturing.contains_key(&stream).into();
            if let Some(number) = s.capturing.get(&stream) { (*id, *graph) = (*number, s.captures[number].1); }
            s.stream(stream)
        })
    }
    cuStreamBeginCapture_v2(stream: usize, _mode: u32) {
        inside(|s| {
            if stream == 0 || s.capturing.contains_key(&stream) { return CAPTURE_UNSUPPORTED; }
            s.begun += 1;
            let graph = s.make();
            s.graphs.insert(graph, Graph::default());
            s.captures.insert(s.begun, (stream, graph));
            s.capturing.insert(stream, s.begun);
            s.stream(stream)
        })
    }
    cuStreamEndCapture(stream: usize, graph: *mut usize) {
        inside(|s| {
            let Some(&number) = s.capturing.get(&stream) else { return INVALID_VALUE };
            let (origin, made) = s.captures[&number];
            if origin != stream { return INVALID_VALUE; }
            s.captures.remove(&number);
            s.capturing.retain(|_, capture| *capture != number);
            s.captured.retain(|_, capture| *capture != number);
            *graph = made;
            0
        })
    }
    cuUserObjectCreate(object: *mut usize, data: *mut c_void, destroy: Destroy, references: u32, flags: u32) {
        inside(|s| {
            if references != 1 || flags != 1 { return INVALID_VALUE; }
            s.next += 1;
            *object = 0x100_0000 + 0x10 * s.next;
            s.objects.insert(*object, (data as usize, destroy, 1));
            0
        })
    }
    cuUserObjectRelease(object: usize, count: u32) {
        let mut gone = Vec::new();
        let result = inside(|s| if count == 1 { gone = s.release(&[object]); 0 } else { INVALID_VALUE });
        destroy(gone);
        result
    }
    cuGraphRetainUserObject(graph: usize, object: usize, count: u32, flags: u32) {
        inside(|s| {
            // CU_GRAPH_USER_OBJECT_MOVE: the caller's reference becomes the graph's.
            if count != 1 || flags != 1 || !s.objects.contains_key(&object) { return INVALID_VALUE; }
            if let refused @ 1.. = variable("FAKE_RETAIN", 0) { return refused as Result; }
            let Some(graph) = s.graphs.get_mut(&graph) else { return INVALID_HANDLE };
            graph.objects.push(object);
            0
        })
    }
    cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, _flags: u64) {
        inside(|s| {
            let Some(graph) = s.graphs.get(&graph).cloned() else { return INVALID_HANDLE };
            for object in &graph.objects { s.objects.get_mut(object).unwrap().2 += 1; }
            *exec = s.make();
            s.graphs.insert(*exec, graph);
            0
        })
    }
    cuGraphLaunch(exec: usize, stream: usize) {
        inside(|s| {
            let Some(Graph { work: launches, .. }) = s.graphs.get(&exec).cloned() else { return INVALID_HANDLE };
            if let Some(graph) = s.under_capture(stream) { graph.work.extend(launches); return 0; }
            if launches.iter().any(|work| !s.live.contains(&work.module)) { return INVALID_HANDLE; }
            launches.iter().for_each(|work| s.run(work));
            s.stream(stream)
        })
    }
    cuGraphDestroy(graph: usize) { destroy_graph(graph) }
    cuGraphExecDestroy(exec: usize) { destroy_graph(exec) }

    cuEventCreate(event: *mut usize, _flags: u32) { inside(|s| { *event = s.make(); 0 }) }
    cuEventDestroy_v2(event: usize) { inside(|s| s.destroy(event)) }
    cuEventRecord(event: usize, stream: usize) {
        inside(|s| {
            match s.capturing.get(&stream).copied() {
                Some(capture) => { s.captured.insert(event, capture); }
                None => { s.captured.remove(&event); }
            }
            if s.live.contains(&event) { s.stream(stream) } else { INVALID_HANDLE }
        })
    }
    cuEventSynchronize(event: usize) {
        inside(|s| {
            if s.captured.contains_key(&event) { return CAPTURED_EVENT; }
            if s.live.contains(&event) { 0 } else { INVALID_HANDLE }
        })
    }
    cuEventQuery(event: usize) {
        inside(|s| {
            // A query while any stream is captured needs the relaxed mode.
            if !s.capturing.is_empty() && RELAXED.get() != 2 { return CAPTURE_UNSUPPORTED; }
            if s.captured.contains_key(&event) { return CAPTURED_EVENT; }
            if std::env::var_os("FAKE_HOLD").is_some_and(|file| std::path::Path::new(&file).exists()) { return NOT_READY; }
            if s.live.contains(&event) { 0 } else { INVALID_HANDLE }
        })
    }
    cuEventElapsedTime(ms: *mut f32, _start: usize, _end: usize) { *ms = 0.25; inside(|_| 0) }

    cuMemAlloc_v2(address: *mut u64, bytes: usize) {
        inside(|s| match s.allocate(bytes) { Ok(a) => { *address = a; 0 } Err(e) => e })
    }
    cuMemFree_v2(address: u64) { inside(|s| if s.hangs { panic!("waits for ever") } else if s.memory.remove(&address).is_some() { 0 } else { INVALID_VALUE }) }
    cuMemHostAlloc(start: *mut *mut c_void, bytes: usize, _flags: u32) {
        inside(|s| {
            let mut memory = vec![0xcd; bytes];
            *start = memory.as_mut_ptr().cast();
            s.pinned.insert(*start as usize, memory);
            0
        })
    }
    cuMemFreeHost(start: *mut c_void) {
        inside(|s| if s.pinned.remove(&(start as usize)).is_some() { 0 } else { INVALID_VALUE })
    }
    cuMemPoolCreate(pool: *mut usize, _props: *const c_void) { inside(|s| { *pool = s.make(); 0 }) }
    cuMemPoolDestroy(pool: usize) { inside(|s| s.destroy(pool)) }
    cuMemPoolSetAttribute(pool: usize, _which: u32, _value: *mut c_void) {
        inside(|s| if s.live.contains(&pool) { 0 } else { INVALID_HANDLE })
    }
    cuMemPoolTrimTo(pool: usize, _keep: usize) { inside(|s| if s.live.contains(&pool) { 0 } else { INVALID_HANDLE }) }
    cuMemAllocFromPoolAsync(address: *mut u64, bytes: usize, pool: usize, stream: usize) {
        inside(|s| {
            if !s.live.contains(&pool) || s.stream(stream) != 0 { return INVALID_HANDLE; }
            match s.allocate(bytes) { Ok(a) => { *address = a; 0 } Err(e) => e }
        })
    }
    cuMemFreeAsync(address: u64, stream: usize) {
        inside(|s| if s.memory.remove(&address).is_some() { s.stream(stream) } else { INVALID_VALUE })
    }
    cuMemcpyHtoD_v2(to: u64, from: *const u8, bytes: usize) { cuMemcpyHtoDAsync_v2(to, from, bytes, 0) }
    cuMemcpyDtoH_v2(to: *mut u8, from: u64, bytes: usize) { cuMemcpyDtoHAsync_v2(to, from, bytes, 0) }
    cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, bytes: usize, stream: usize) {
        within_copy();
        inside(|s| {
            if s.capturing.contains_key(&stream) { return CAPTURE_UNSUPPORTED; }
            let Some(memory) = s.range(to, bytes) else { return INVALID_VALUE };
            memory.copy_from_slice(std::slice::from_raw_parts(from, bytes));
            s.stream(stream)
        })
    }
    cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, bytes: usize, stream: usize) {
        within_copy();
        inside(|s| {
            if s.capturing.contains_key(&stream) { return CAPTURE_UNSUPPORTED; }
            let Some(memory) = s.range(from, bytes) else { return INVALID_VALUE };
            std::slice::from_raw_parts_mut(to, bytes).copy_from_slice(memory);
            s.stream(stream)
        })
    }
    cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        inside(|s| {
            let Some(memory) = s.range(from, bytes).map(|m| m.to_vec()) else { return INVALID_VALUE };
            let Some(to) = s.range(to, bytes) else { return INVALID_VALUE };
            to.copy_from_slice(&memory);
            s.stream(stream)
        })
    }
    cuMemsetD8Async(to: u64, byte: u8, count: usize, stream: usize) {
        inside(|s| {
            let Some(memory) = s.range(to, count) else { return INVALID_VALUE };
            memory.fill(byte);
            s.stream(stream)
        })
    }
    cuMemsetD32Async(to: u64, word: u32, count: usize, stream: usize) {
        inside(|s| {
            let Some(memory) = s.range(to, 4 * count) else { return INVALID_VALUE };
            memory.chunks_exact_mut(4).for_each(|piece| piece.copy_from_slice(&word.to_le_bytes()));
            s.stream(stream)
        })
    }

    cuLinkCreate_v2(_n: u32, _options: *mut c_void, _values: *mut c_void, state: *mut usize) {
        inside(|s| { *state = s.make(); 0 })
    }
    cuLinkAddData_v2(state: usize, kind: u32, data: *mut c_char, size: usize, _name: *const c_char, _n: u32, _options: *mut c_void, _values: *mut c_void) {
        inside(|s| {
            let text = CStr::from_ptr(data);
            if !s.live.contains(&state) || kind != 1 || text.to_bytes_with_nul().len() != size { return INVALID_VALUE; }
            if !text.to_string_lossy().contains(".version") { return INVALID_PTX; }
            s.cubins.insert(state, [b"ELF ", text.to_bytes_with_nul()].concat());
            s.linked += 1;
            0
        })
    }
    cuLinkComplete(state: usize, cubin: *mut *mut c_void, size: *mut usize) {
        inside(|s| {
            let Some(made) = s.cubins.get_mut(&state) else { return INVALID_VALUE };
            (*cubin, *size) = (made.as_mut_ptr().cast(), made.len());
            0
        })
    }
    cuLinkDestroy(state: usize) { with(|s| { s.cubins.remove(&state); s.destroy(state) }) }
    cuModuleLoadDataEx(module: *mut usize, image: *const u8, _n: u32, _options: *mut c_void, _values: *mut c_void) {
        inside(|s| {
            // Loading while any stream is captured needs the relaxed mode.
            if !s.capturing.is_empty() && RELAXED.get() != 2 { return CAPTURE_UNSUPPORTED; }
            // A cubin or a fat binary, which this fake cannot run; a cubin made by this fake; or the text of
            // a whole program.
            let start = std::slice::from_raw_parts(image, 4);
            if start == b"\x7fELF" || start == 0xba55_ed50_u32.to_le_bytes() || start == 0x4662_43b1_u32.to_le_bytes() {
                *module = s.module(String::new());
                return 0;
            }
            let cubin = start == b"ELF ";
            let text = CStr::from_ptr(image.add(if cubin { 4 } else { 0 }).cast()).to_string_lossy().into_owned();
            if !text.contains(".version") { return if cubin { INVALID_IMAGE } else { INVALID_PTX }; }
            *module = s.module(text);
            0
        })
    }
    cuModuleLoadData(module: *mut usize, image: *const u8) {
        cuModuleLoadDataEx(module, image, 0, std::ptr::null_mut(), std::ptr::null_mut())
    }
    cuModuleLoadFatBinary(module: *mut usize, image: *const u8) { cuModuleLoadData(module, image) }
    cuLibraryLoadData(library: *mut usize, image: *const u8, _jit: *mut c_void, _jit_values: *mut c_void, _jit_count: u32, _options: *mut c_void, _values: *mut c_void, _count: u32) { cuModuleLoadData(library, image) }
    cuLibraryGetKernel(kernel: *mut usize, library: usize, name: *const c_char) { cuModuleGetFunction(kernel, library, name) }
    cuFuncGetParamInfo(function: usize, index: usize, offset: *mut usize, bytes: *mut usize) {
        inside(|s| {
            let Some((module, name)) = s.functions.get(&function) else { return INVALID_HANDLE };
            let sizes = param_bytes(&s.modules[module], name);
            let Some(&size) = sizes.get(index) else { return INVALID_VALUE };
            (*offset, *bytes) = (sizes[..index].iter().sum(), size);
            0
        })
    }
    cuKernelGetParamInfo(kernel: usize, index: usize, offset: *mut usize, bytes: *mut usize) {
        cuFuncGetParamInfo(kernel, index, offset, bytes)
    }
    cuPointerGetAttribute(value: *mut u64, which: u32, address: u64) {
        inside(|s| {
            let Some((&start, memory)) = s.memory.range(..=address).next_back() else { return INVALID_VALUE };
            if address - start >= memory.len() as u64 { return INVALID_VALUE; }
            *value = match which { 11 => start, 12 => memory.len() as u64, _ => return INVALID_VALUE };
            0
        })
    }
    cuCtxGetDevice(device: *mut i32) { *device = CURRENT.get().wrapping_sub(CONTEXT) as i32; inside(|_| 0) }
    cuGetProcAddress_v2(symbol: *const c_char, found: *mut usize, _version: i32, _flags: u64, _status: *mut u32) {
        unsafe extern "C" { fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void; fn dlopen(file: *const c_char, flags: i32) -> *mut c_void; }
        *found = dlsym(dlopen(c"libcuda.so.1".as_ptr(), 1), symbol) as usize;
        if *found == 0 { NOT_FOUND } else { 0 }
    }
    cuModuleUnload(module: usize) { inside(|s| s.destroy(module)) }
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) {
        inside(|s| {
            let name = CStr::from_ptr(name).to_string_lossy().into_owned();
            if !s.live.contains(&module) { return INVALID_HANDLE; }
            if name == "absent" { return NOT_FOUND; }
            s.next += 1;
            *function = 0x9000_0000 + s.next;
            s.functions.insert(*function, (module, name));
            0
        })
    }
    cuFuncLoad(function: usize) {
        inside(|s| {
            if !s.capturing.is_empty() && RELAXED.get() != 2 { return CAPTURE_UNSUPPORTED; }
            if s.functions.contains_key(&function) { 0 } else { INVALID_HANDLE }
        })
    }
    cuFuncGetAttribute(value: *mut i32, which: u32, _function: usize) {
        // CUfunction_attribute: max threads, shared, local, registers.
        *value = match which { 0 => variable("FAKE_THREADS", 256) as i32, 1 => 0, 3 => variable("FAKE_LOCAL", 0) as i32, 4 => 40, _ => return INVALID_VALUE };
        inside(|_| 0)
    }
    cuFuncSetAttribute(_function: usize, _which: u32, _value: i32) { inside(|_| 0) }
    cuOccupancyMaxActiveBlocksPerMultiprocessor(ctas: *mut i32, _function: usize, _threads: i32, _shared: usize) {
        *ctas = 3; inside(|_| 0)
    }
    cuLaunchKernel(function: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *mut *mut u64, extra: *mut c_void) {
        cuLaunchKernelEx(&Config { shape: [gx, gy, gz, bx, by, bz, shared], stream, attributes: std::ptr::dangling(), count: 0 }, function, params, extra)
    }
    cuLaunchKernelEx(config: *const Config, function: usize, params: *mut *mut u64, _extra: *mut c_void) {
        inside(|s| {
            let Some((module, name)) = s.functions.get(&function).cloned() else { return INVALID_HANDLE };
            if !s.live.contains(&module) || s.contexts[&module] != CURRENT.get() { return INVALID_HANDLE; }
            let stream = (*config).stream;
            let sizes = param_bytes(&s.modules[&module], &name);
            let of = |(i, bytes): (usize, &usize)| std::slice::from_raw_parts(*params.add(i), bytes.div_ceil(8)).to_vec();
            let params = sizes.iter().enumerate().flat_map(of).collect();
            let mut shape = [1; 10];
            shape[..7].copy_from_slice(&(*config).shape);
            for attribute in std::slice::from_raw_parts((*config).attributes, (*config).count as usize) {
                // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                if attribute[0] == 4 { shape[7..].copy_from_slice(&attribute[2..5]); }
            }
            let work = Work { module, entry: name, shape, params };
            match s.under_capture(stream) {
                Some(graph) => graph.work.push(work),
                None => s.run(&work),
            }
            s.stream(stream)
        })
    }
}

#[cfg(not(lacking))]
fake! {
    cuTensorMapEncodeTiled(map: *mut [u64; 16], element: u32, rank: u32, address: u64, extents: *const u64, strides: *const u64, boxes: *const u32, _steps: *const u32, _interleave: u32, swizzle: u32) {
        // Our own encoding in place of the hardware's: address; rank, element and swizzle; extents; strides;
        // box.
        (*map) = [0; 16];
        (*map)[0] = address;
        (*map)[1] = u64::from(rank) | u64::from(element) << 8 | u64::from(swizzle) << 16;
        for i in 0..rank as usize {
            (*map)[2 + i] = *extents.add(i);
            if i > 0 { (*map)[6 + i] = *strides.add(i - 1); }
            (*map)[11 + i] = u64::from(*boxes.add(i));
        }
        inside(|s| { s.maps += 1; 0 })
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_calls() -> u64 {
    CALLS.load(Relaxed)
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_maps() -> u64 {
    let mut maps = 0;
    with(|s| {
        maps = s.maps;
        0
    });
    maps
}

#[repr(C)]
pub struct Config {
    /// Grid, block and shared memory.
    shape: [u32; 7],
    stream: usize,
    /// `CUlaunchAttribute`: the identity, and the value from byte 8 on.
    attributes: *const [u32; 18],
    count: u32,
}
