//! An NCCL without GPUs, for ranks that are threads of a process that uses the fake driver. Calls do not
//! block: what waits for another rank is in progress until that rank calls.
//!
//! `FAKE_NCCL_VERSION` sets the version. A rank whose group has an aborted rank gets a remote error.
#![allow(non_snake_case)]

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_char, c_int};
use std::sync::Mutex;

const SUCCESS: u32 = 0;
const INVALID_ARGUMENT: u32 = 4;
const REMOTE_ERROR: u32 = 6;
const IN_PROGRESS: u32 = 7;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

#[repr(C)]
pub struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

enum Wait {
    /// A message from this rank to this address.
    Message(c_int, u64, usize),
    /// The collective of this number: whether it sums, the address of the result, and its bytes.
    Collective(usize, bool, u64, usize),
}

#[derive(Default)]
struct Group {
    ranks: c_int,
    joined: c_int,
    aborted: bool,
    /// Messages by sender and receiver.
    messages: BTreeMap<(c_int, c_int), VecDeque<Vec<u8>>>,
    /// The inputs of each collective, by rank.
    collectives: Vec<BTreeMap<c_int, Vec<u8>>>,
}

#[derive(Default)]
struct Rank {
    id: u64,
    rank: c_int,
    called: usize,
    waits: VecDeque<Wait>,
}

#[derive(Default)]
struct State {
    ids: u64,
    groups: BTreeMap<u64, Group>,
    ranks: BTreeMap<usize, Rank>,
    next: usize,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

fn inside<R>(of: impl FnOnce(&mut State) -> R) -> R {
    of(STATE.lock().unwrap().get_or_insert_default())
}

/// A function of the fake driver, whose library the process has loaded.
///
/// # Safety
/// `F` must be the function's type.
unsafe fn driver<F: Copy>(name: &std::ffi::CStr) -> F {
    unsafe extern "C" {
        fn dlopen(name: *const c_char, flags: c_int) -> *mut std::ffi::c_void;
        fn dlsym(library: *mut std::ffi::c_void, name: *const c_char) -> *mut std::ffi::c_void;
    }
    // SAFETY: the functions of C's library, with `RTLD_NOW`; the caller knows the type.
    unsafe { std::mem::transmute_copy(&dlsym(dlopen(c"libcuda.so.1".as_ptr(), 2), name.as_ptr())) }
}

fn read(address: u64, bytes: usize) -> Vec<u8> {
    let mut data = vec![0; bytes];
    // SAFETY: the function's type; the data has as many bytes.
    let result = unsafe {
        driver::<extern "C" fn(*mut u8, u64, usize) -> u32>(c"cuMemcpyDtoH_v2")(
            data.as_mut_ptr(),
            address,
            bytes,
        )
    };
    assert_eq!(result, 0);
    data
}

fn write(address: u64, data: &[u8]) {
    // SAFETY: the function's type; the data has as many bytes.
    let result = unsafe {
        driver::<extern "C" fn(u64, *const u8, usize) -> u32>(c"cuMemcpyHtoD_v2")(
            address,
            data.as_ptr(),
            data.len(),
        )
    };
    assert_eq!(result, 0);
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetVersion(version: &mut c_int) -> u32 {
    *version = std::env::var("FAKE_NCCL_VERSION").map_or(23007, |text| text.parse().unwrap());
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetErrorString(result: u32) -> *const c_char {
    match result {
        INVALID_ARGUMENT => c"invalid argument",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        _ => c"unknown result code",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn ncclGetUniqueId(id: &mut UniqueId) -> u32 {
    inside(|s| {
        s.ids += 1;
        id.0[..8].copy_from_slice(&s.ids.to_ne_bytes());
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommInitRankConfig(
    comm: &mut usize,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: &Config,
) -> u32 {
    if (config.size, config.magic, config.version, config.blocking) != (24, 0xcafe_beef, 21400, 0) {
        return INVALID_ARGUMENT;
    }
    let id = u64::from_ne_bytes(id.0[..8].try_into().unwrap());
    inside(|s| {
        let group = s.groups.entry(id).or_insert_with(|| Group { ranks, ..Group::default() });
        if group.ranks != ranks {
            return INVALID_ARGUMENT;
        }
        group.joined += 1;
        s.next += 1;
        *comm = s.next;
        s.ranks.insert(s.next, Rank { id, rank, ..Rank::default() });
        IN_PROGRESS
    })
}

/// Completes what can be completed, in order.
#[unsafe(no_mangle)]
extern "C" fn ncclCommGetAsyncError(comm: usize, state: &mut u32) -> u32 {
    inside(|s| {
        let Some(rank) = s.ranks.get_mut(&comm) else { return INVALID_ARGUMENT };
        let group = s.groups.get_mut(&rank.id).unwrap();
        *state = SUCCESS;
        if group.joined < group.ranks {
            *state = IN_PROGRESS;
        }
        while let Some(wait) = rank.waits.front() {
            let done = match *wait {
                Wait::Message(from, to, bytes) => {
                    let queue = group.messages.entry((from, rank.rank)).or_default();
                    queue.pop_front().map(|message| {
                        assert_eq!(message.len(), bytes, "sizes differ");
                        write(to, &message);
                    })
                }
                Wait::Collective(number, sums, to, bytes) => {
                    let inputs = &group.collectives[number];
                    (inputs.len() == group.ranks as usize).then(|| {
                        let all: Vec<&Vec<u8>> = inputs.values().collect();
                        if sums {
                            let at = rank.rank as usize * bytes;
                            let number = |x: &[u8], i: usize| {
                                f32::from_ne_bytes(x[at + 4 * i..][..4].try_into().unwrap())
                            };
                            let sum = |i| all.iter().map(|x| number(x, i)).sum::<f32>().to_ne_bytes();
                            write(to, &(0..bytes / 4).flat_map(sum).collect::<Vec<u8>>());
                        } else {
                            write(to, &all.into_iter().flatten().copied().collect::<Vec<u8>>());
                        }
                    })
                }
            };
            if done.is_none() {
                *state = if group.aborted { REMOTE_ERROR } else { IN_PROGRESS };
                break;
            }
            rank.waits.pop_front();
        }
        SUCCESS
    })
}

fn end(comm: usize, aborts: bool) -> u32 {
    inside(|s| {
        let Some(rank) = s.ranks.remove(&comm) else { return INVALID_ARGUMENT };
        s.groups.get_mut(&rank.id).unwrap().aborted |= aborts;
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommFinalize(comm: usize) -> u32 {
    inside(|s| if s.ranks.contains_key(&comm) { SUCCESS } else { INVALID_ARGUMENT })
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommDestroy(comm: usize) -> u32 {
    end(comm, false)
}

#[unsafe(no_mangle)]
extern "C" fn ncclCommAbort(comm: usize) -> u32 {
    end(comm, true)
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupStart() -> u32 {
    SUCCESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclGroupEnd() -> u32 {
    IN_PROGRESS
}

#[unsafe(no_mangle)]
extern "C" fn ncclSend(from: u64, bytes: usize, _: c_int, peer: c_int, comm: usize, _: usize) -> u32 {
    inside(|s| {
        let Some(rank) = s.ranks.get(&comm) else { return INVALID_ARGUMENT };
        let group = s.groups.get_mut(&rank.id).unwrap();
        if peer >= group.ranks {
            return INVALID_ARGUMENT;
        }
        group.messages.entry((rank.rank, peer)).or_default().push_back(read(from, bytes));
        SUCCESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclRecv(to: u64, bytes: usize, _: c_int, peer: c_int, comm: usize, _: usize) -> u32 {
    inside(|s| {
        let Some(rank) = s.ranks.get_mut(&comm) else { return INVALID_ARGUMENT };
        rank.waits.push_back(Wait::Message(peer, to, bytes));
        SUCCESS
    })
}

fn collective(comm: usize, from: (u64, usize), to: (u64, usize), sums: bool) -> u32 {
    inside(|s| {
        let Some(rank) = s.ranks.get_mut(&comm) else { return INVALID_ARGUMENT };
        let group = s.groups.get_mut(&rank.id).unwrap();
        let number = rank.called;
        rank.called += 1;
        if group.collectives.len() == number {
            group.collectives.push(BTreeMap::new());
        }
        group.collectives[number].insert(rank.rank, read(from.0, from.1));
        rank.waits.push_back(Wait::Collective(number, sums, to.0, to.1));
        IN_PROGRESS
    })
}

#[unsafe(no_mangle)]
extern "C" fn ncclAllGather(from: u64, to: u64, bytes: usize, _: c_int, comm: usize, _: usize) -> u32 {
    collective(comm, (from, bytes), (to, 0), false)
}

#[unsafe(no_mangle)]
extern "C" fn ncclReduceScatter(
    from: u64,
    to: u64,
    numbers: usize,
    _: c_int,
    _: c_int,
    comm: usize,
    _: usize,
) -> u32 {
    let ranks = inside(|s| s.ranks.get(&comm).map_or(0, |rank| s.groups[&rank.id].ranks)) as usize;
    collective(comm, (from, 4 * numbers * ranks), (to, 4 * numbers), true)
}
