//! The driver crate on a real GPU: checks what the fake driver of the other tests only assumes. Without a GPU
//! these tests do not run, and `cargo xtask test` counts them. With `FLASHCORE_REQUIRE_GPU` set, they fail.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "handles that the driver defines, and fork")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use driver::{Buffer, Call, Context, DriverError, Event, Expect, Function, Graph, Pinned, Pool, Stream};
use flashcore_driver as driver;
use ptx::{Access, Arg, BufferSpec, Builder, Dim3, Kernel, Launch, Target};

fn context() -> Option<Arc<Context>> {
    match Context::open(0) {
        Ok(context) => Some(context),
        Err(error) if std::env::var_os("FLASHCORE_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            filetest::not_run(error);
            None
        }
    }
}

/// A kernel that stores a 32-bit word.
fn store() -> Kernel {
    let mut k = Builder::kernel("store");
    let (to, word) = (k.param_pointer("to"), k.param_u32("word"));
    k.st(to, word);
    let one = Dim3(1, 1, 1);
    let (grid, cluster, block) = (one, one, Dim3(32, 1, 1));
    Kernel {
        module: k.into_verified(Target::sm(80)).unwrap(),
        entry: "store".to_owned(),
        launch: Launch { cluster, ..Launch::new(grid, block) },
        buffers: vec![BufferSpec { name: "to".to_owned(), bytes: 4, access: Access::Write }],
        args: vec![Arg::Buffer { index: 0, offset: 0 }, Arg::U32(7)],
        tensor_maps: Vec::new(),
    }
}

fn load(context: &Arc<Context>) -> Function {
    let kernel = store();
    Function::load(context, &kernel, &Expect::of(&kernel.launch)).unwrap()
}

fn word(stream: &Stream, buffer: &Buffer) -> u32 {
    let mut bytes = [0; 4];
    stream.download(buffer.slice(), &mut bytes).unwrap();
    u32::from_le_bytes(bytes)
}

/// Streams of one device have distinct queues: captured or not, by handle or by thread.
#[test]
fn queues_are_told_apart() {
    let Some(context) = context() else { return };
    let [one, two] = [(); 2].map(|()| Stream::new(&context).unwrap());
    assert!(one.queue().unwrap() != two.queue().unwrap() && one.queue().unwrap() == one.queue().unwrap());
    let fork = Event::new(&context).unwrap();
    let join = Event::new(&context).unwrap();
    let mut seen = vec![one.queue().unwrap(), two.queue().unwrap()];
    for _ in 0..2 {
        Graph::capture(&one, |one| {
            fork.record(one)?;
            two.wait(&fork)?;
            seen.extend([one.queue()?, two.queue()?]);
            assert!(one.queue()?.is_captured() && two.queue()?.is_captured());
            join.record(&two)?;
            one.wait(&join)
        })
        .unwrap();
    }
    let mut apart = seen.clone();
    apart.sort();
    apart.dedup();
    assert_eq!(apart.len(), seen.len(), "{seen:?}");
    assert!(!one.queue().unwrap().is_captured());

    // SAFETY: CU_STREAM_PER_THREAD is always a stream of the context.
    let own = unsafe { Stream::from_raw(&context, 2) };
    let here = own.queue().unwrap();
    let there = std::thread::scope(|scope| scope.spawn(|| own.queue().unwrap()).join().unwrap());
    assert!(here != there && here == own.queue().unwrap());
    assert!(!Stream::default_of(&context).queue().unwrap().is_captured());
}

/// A graph keeps the module and the memory of a launch on a stream that joined its capture.
#[test]
fn graphs_keep_what_joined_streams_use() {
    let Some(context) = context() else { return };
    let [one, two] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [fork, join] = [(); 2].map(|()| Event::new(&context).unwrap());
    let (function, call) = (load(&context), Call::of(&store()));
    let [kept, dropped] = [(); 2].map(|()| Buffer::zeroed(&context, 4).unwrap());
    let graph = Graph::capture(&one, |one| {
        fork.record(one)?;
        two.wait(&fork)?;
        function.launch(&two, &call, &[kept.slice()])?;
        function.launch(&two, &call, &[dropped.slice()])?;
        join.record(&two)?;
        one.wait(&join)
    })
    .unwrap();
    drop((function, dropped));
    // If the memory had been freed, these buffers would get it.
    let others: Vec<Buffer> = (0..64).map(|_| Buffer::zeroed(&context, 4).unwrap()).collect();
    assert_eq!(word(&one, &kept), 0);
    graph.launch(&one).unwrap();
    assert_eq!(word(&one, &kept), 7);
    assert!(
        others.iter().all(|other| word(&one, other) == 0),
        "the graph wrote to memory that is not its own"
    );
    // A graph that contains another graph, which is dropped.
    one.fill(kept.slice(), 0).unwrap();
    one.synchronize().unwrap();
    match Graph::capture(&one, |one| graph.launch(one)) {
        Ok(outer) => {
            drop(graph);
            outer.launch(&two).unwrap();
            assert_eq!(word(&two, &kept), 7);
        }
        Err(error) => eprintln!("this driver takes no graph within a graph: {error}"),
    }
    assert_eq!(context.poisoned(), None);
}

/// Sets a flag when dropped.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Whether the flag is set within 20 s. A thread of the driver sets it.
fn soon(flag: &AtomicBool) -> bool {
    let start = Instant::now();
    while !flag.load(Ordering::SeqCst) && start.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(1));
    }
    flag.swap(false, Ordering::SeqCst)
}

/// A value kept with a graph is dropped when the executable graph is, or when a capture is cancelled, and not
/// before.
#[test]
fn what_is_kept_with_a_graph_goes_with_it() {
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    let (function, call) = (load(&context), Call::of(&store()));
    let buffer = Buffer::zeroed(&context, 4).unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let capture = |stream: &Stream| {
        stream.keep_with_graph(Flag(gone.clone()))?;
        (0..1000).try_for_each(|_| function.launch(stream, &call, &[buffer.slice()]))
    };
    let graph = Graph::capture(&stream, capture).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(word(&stream, &buffer), 7);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!gone.load(Ordering::SeqCst), "told before the executable graph is gone");
    graph.launch(&stream).unwrap();
    drop(graph);
    assert!(soon(&gone), "not told that the graph is gone");
    // Waiting within a capture is an error and cancels the capture.
    let error = Graph::capture(&stream, |stream| {
        capture(stream)?;
        stream.synchronize()
    });
    assert!(error.is_err() && soon(&gone));
    assert!(stream.keep_with_graph(Flag(gone.clone())).is_err() && soon(&gone));
    stream.synchronize().unwrap();
}

/// Copies of host memory under capture are rejected, and the capture continues.
#[test]
fn host_memory_is_not_copied_by_graphs() {
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::zeroed(&context, 4).unwrap();
    let graph = Graph::capture(&stream, |stream| {
        let refused = [
            stream.upload(buffer.slice(), &[1; 4]),
            stream.download(buffer.slice(), &mut [0; 4]),
            Pinned::new(&context, 4)?.upload(stream, buffer.slice()).map(drop),
            Pinned::new(&context, 4)?.download(stream, buffer.slice()).map(drop),
        ];
        for outcome in refused {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("the stream is being captured; copy before or after"), "{error}");
        }
        stream.fill_u32(buffer.slice(), 9)
    })
    .unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!(word(&stream, &buffer), 9);
    let mut pinned = Pinned::new(&context, 4).unwrap();
    pinned.as_mut_slice().copy_from_slice(&[1, 2, 3, 4]);
    let pinned = pinned.upload(&stream, buffer.slice()).unwrap().wait().unwrap();
    let back = Pinned::new(&context, 4).unwrap().download(&stream, buffer.slice()).unwrap().wait().unwrap();
    assert_eq!(back.as_slice(), pinned.as_slice());
}

/// A graph that is dropped while it runs on another stream than that of its memory waits for the launch.
#[test]
fn a_graph_that_is_dropped_waits_for_its_launch() {
    const BYTES: usize = 256 << 20;
    let Some(context) = context() else { return };
    let [one, two] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let pool = Pool::new(&context, 0).unwrap();
    let buffer = pool.allocate_now(&one, BYTES).unwrap();
    // Some 20 ms of work.
    let graph =
        Graph::capture(&one, |one| (0..256).try_for_each(|byte| one.fill(buffer.slice(), byte as u8)))
            .unwrap();
    drop(buffer);
    graph.launch(&two).unwrap();
    drop(graph);
    assert!(two.is_done().unwrap());
}

/// Memory of a pool returns to the device. An event without time shows when work is done.
#[test]
fn pools_give_memory_back() {
    const BYTES: usize = 256 << 20;
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    let pool = Pool::new(&context, 0).unwrap();
    let used = |before: usize| before.saturating_sub(context.free_memory().unwrap().0);
    let (before, _) = context.free_memory().unwrap();
    let mut held = None;
    // The same allocation while another stream is captured.
    let empty = Graph::capture(&Stream::new(&context).unwrap(), |_| {
        held = Some(pool.allocate_now(&stream, BYTES)?);
        Ok::<(), DriverError>(())
    });
    let buffer = held.unwrap();
    empty.unwrap().launch(&stream).unwrap();
    stream.fill(buffer.slice(), 1).unwrap();
    let done = Event::without_time(&context).unwrap();
    done.record(&stream).unwrap();
    done.synchronize().unwrap();
    assert!(done.is_done().unwrap() && used(before) >= BYTES);
    drop(buffer);
    stream.synchronize().unwrap();
    pool.trim(0).unwrap();
    // Tests that run at once hold memory of the same device for a while.
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while used(before) >= BYTES / 2 && std::time::Instant::now() < patience {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    assert!(used(before) < BYTES / 2);
}

/// Every call in a forked child returns an error at once.
#[test]
fn a_forked_child_is_told() {
    let Some(context) = context() else { return };
    let stream = Stream::new(&context).unwrap();
    // SAFETY: the child only makes the tested calls, and exits without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let forked = Some(DriverError::Forked);
        let told = Context::open(0).err() == forked && stream.synchronize().err() == forked;
        // SAFETY: exits at once.
        unsafe { libc::_exit(if told { 7 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: the process is our child; the pointer is to a live number.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
    stream.synchronize().unwrap();
}
