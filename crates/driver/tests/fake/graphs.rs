//! Scenarios of captured graphs: queues, streams that join a capture, values that a graph keeps, and copies
//! during captures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use driver::{Buffer, Call, Context, DriverError, Event, Function, Graph, GraphExec, Pinned, Stream};
use flashcore_driver as driver;

use super::{counts, kernel, load, waits, within_copy};

/// Launches of one queue run one after the other, so they may share memory. Other launches have another
/// queue.
pub fn queues() {
    let context = Context::open(0).unwrap();
    let streams = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [first, second] = streams.each_ref().map(|stream| stream.queue().unwrap());
    assert!(first != second && first == streams[0].queue().unwrap());
    let mut captured = Vec::new();
    for _ in 0..2 {
        Graph::capture(&streams[0], |stream| {
            assert_eq!(stream.queue()?, stream.queue()?);
            captured.push(stream.queue()?);
            Ok::<(), DriverError>(())
        })
        .unwrap();
    }
    assert!(captured[0] != captured[1] && !captured.contains(&first));
    assert_eq!(first, streams[0].queue().unwrap());
    // Streams that join a capture have queues of their own in the capture.
    let fork = Event::new(&context).unwrap();
    Graph::capture(&streams[0], |stream| {
        fork.record(stream)?;
        streams[1].wait(&fork)?;
        assert!(streams[1].queue()?.is_captured() && streams[1].queue()? != stream.queue()?);
        Ok::<(), DriverError>(())
    })
    .unwrap();
    // CU_STREAM_PER_THREAD names a different stream in each thread.
    // SAFETY: this handle is always valid.
    let own = unsafe { Stream::from_raw(&context, 2) };
    let here = own.queue().unwrap();
    let there = std::thread::scope(|scope| scope.spawn(|| own.queue().unwrap()).join().unwrap());
    assert!(here != there && here == own.queue().unwrap());
}

/// A graph keeps the modules and the memory that are used on a stream that joins the capture through an
/// event, and on another `Stream` of the captured handle.
pub fn joined() {
    let context = Context::open(0).unwrap();
    let k = kernel("store");
    let [one, two] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let [fork, join] = [(); 2].map(|()| Event::new(&context).unwrap());
    let spread = |work: &dyn Fn(&Stream) -> Result<(), DriverError>| {
        Graph::capture(&one, |stream| {
            fork.record(stream)?;
            two.wait(&fork)?;
            work(&two)?; // stream two is part of the capture now
            join.record(&two)?;
            stream.wait(&join)
        })
    };
    // SAFETY: the stream outlives its second handle.
    let again = unsafe { Stream::from_raw(&context, one.raw()) };
    type Capture<'a> = &'a dyn Fn(&Function, &Buffer) -> Result<GraphExec, DriverError>;
    let captures: [Capture<'_>; 3] = [
        &|f, b| spread(&|two| f.launch(two, &Call::of(&k), &[b.slice()])),
        &|f, b| Graph::capture(&one, |_| f.launch(&again, &Call::of(&k), &[b.slice()])),
        // A graph that contains another graph.
        &|f, b| {
            let inner = Graph::capture(&two, |two| f.launch(two, &Call::of(&k), &[b.slice()]))?;
            Graph::capture(&one, |one| inner.launch(one))
        },
    ];
    for capture in captures {
        let (before, launched) = (counts().0, counts().1);
        let (function, buffer) = (load(&context, &k).unwrap(), Buffer::new(&context, 4).unwrap());
        let graph = capture(&function, &buffer).unwrap();
        let live = counts().0;
        drop((function, buffer));
        assert_eq!(counts().0, live, "the graph has lost its module or its memory");
        graph.launch(&one).unwrap();
        assert_eq!((counts().1, context.poisoned()), (launched + 1, None));
        drop(graph);
        assert_eq!(counts().0, before, "something was kept for good");
    }
    // The graph does not keep what a stream outside the capture uses.
    let (function, buffer) = (load(&context, &k).unwrap(), Buffer::new(&context, 4).unwrap());
    let before = counts().0;
    let graph = Graph::capture(&one, |_| {
        let (function, buffer) = (load(&context, &k)?, Buffer::new(&context, 4)?);
        function.launch(&two, &Call::of(&k), &[buffer.slice()])
    });
    assert_eq!(counts().0, before + 1, "more than the graph itself was kept");
    drop((graph, function, buffer));
}

/// A graph that is dropped waits for its launches. It does not wait for a launch that became a part of
/// another graph, and not for a stream that is being captured: a wait would end the capture. The memory of
/// such a launch is never freed.
pub fn dropped_in_flight() {
    let context = Context::open(0).unwrap();
    let k = kernel("store");
    let [one, two] = [(); 2].map(|()| Stream::new(&context).unwrap());
    let function = load(&context, &k).unwrap();
    let capture = |buffer: &Buffer| {
        Graph::capture(&one, |one| function.launch(one, &Call::of(&k), &[buffer.slice()])).unwrap()
    };
    let waited = |work: &mut dyn FnMut()| {
        let before = waits().0;
        work();
        waits().0 - before
    };
    let live = counts().0;
    assert_eq!(waited(&mut || drop(capture(&Buffer::new(&context, 4).unwrap()))), 0, "nothing was launched");
    let launch = |stream: &Stream| {
        let graph = capture(&Buffer::new(&context, 4).unwrap());
        graph.launch(stream).unwrap();
        graph
    };
    assert_eq!(waited(&mut || drop(launch(&two))), 1);
    let own_stream = || launch(&Stream::new(&context).unwrap());
    assert_eq!(waited(&mut || drop(own_stream())), 1, "the graph keeps the stream of its launch");
    let within = || {
        let inner = capture(&Buffer::new(&context, 4).unwrap());
        Graph::capture(&two, |two| inner.launch(two)).unwrap()
    };
    assert_eq!(waited(&mut || drop(within())), 0, "only the outer graph can be launched");
    assert_eq!(counts().0, live, "something was kept for good");

    let mut graph = Some(launch(&two));
    let during = Graph::capture(&two, |two| {
        assert_eq!(waited(&mut || drop(graph.take())), 0);
        assert!(two.is_capturing()?);
        Ok::<(), DriverError>(())
    });
    assert!(during.is_ok());
    drop(during);
    assert_eq!(counts().0, live + 1, "the memory of a launch that may be running was freed");
    // CU_STREAM_PER_THREAD of another thread.
    // SAFETY: this handle is always valid.
    let own = unsafe { Stream::from_raw(&context, 2) };
    graph = std::thread::scope(|scope| scope.spawn(|| Some(launch(&own))).join().unwrap());
    assert_eq!(waited(&mut || drop(graph.take())), 0);
    assert_eq!(counts().0, live + 2);
}

/// Sets a flag when dropped.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// A value kept with a graph is dropped when the executable graph is, or when a capture is cancelled.
pub fn user_objects() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let flag = || Flag(gone.clone());
    let graph = Graph::capture(&stream, |stream| stream.keep_with_graph(flag())).unwrap();
    assert_eq!((gone.swap(false, Ordering::SeqCst), waits().1), (false, 1));
    graph.launch(&stream).unwrap();
    drop(graph);
    assert_eq!((gone.swap(false, Ordering::SeqCst), waits().1), (true, 0));

    let error = Graph::capture(&stream, |stream| {
        stream.keep_with_graph(flag())?;
        assert!(!gone.load(Ordering::SeqCst));
        stream.synchronize()
    });
    assert!(error.is_err() && gone.swap(false, Ordering::SeqCst));
    // Without a capture, no graph exists that the value could be kept with.
    let error = stream.keep_with_graph(flag()).unwrap_err().to_string();
    assert!(error.contains("the stream is not being captured") && gone.load(Ordering::SeqCst), "{error}");
}

/// A driver that rejects a user object.
pub fn refused_object() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let gone = Arc::new(AtomicBool::new(false));
    let error = Graph::capture(&stream, |stream| stream.keep_with_graph(Flag(gone.clone()))).unwrap_err();
    assert!(matches!(error, DriverError::Call { call: "cuGraphRetainUserObject", .. }), "{error}");
    assert_eq!((gone.load(Ordering::SeqCst), waits().1), (true, 0));
}

/// While host memory is copied, no capture can contain the copy. A copy that a capture could contain is
/// rejected.
pub fn copies() {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    static THREADS: Mutex<Vec<std::thread::JoinHandle<()>>> = Mutex::new(Vec::new());
    static STREAM: OnceLock<Stream> = OnceLock::new();
    extern "C" fn capture_meanwhile() {
        // The capture itself copies nothing, so this function runs once for each copy below.
        let capture = || {
            let stream = STREAM.get().unwrap();
            Graph::capture(stream, |_| {
                BEGUN.store(true, Ordering::SeqCst);
                Ok::<(), DriverError>(())
            })
            .unwrap();
        };
        THREADS.lock().unwrap().push(std::thread::spawn(capture));
        std::thread::sleep(Duration::from_millis(100));
        assert!(!BEGUN.load(Ordering::SeqCst), "captured while host memory was copied");
    }
    let context = Context::open(0).unwrap();
    let stream = STREAM.get_or_init(|| Stream::new(&context).unwrap());
    let buffer = Buffer::new(&context, 4).unwrap();
    let pinned = || Pinned::new(&context, 4).unwrap();
    let copies: [&dyn Fn() -> Result<(), DriverError>; 4] = [
        &|| stream.upload(buffer.slice(), &[1; 4]),
        &|| stream.download(buffer.slice(), &mut [0; 4]),
        &|| pinned().upload(stream, buffer.slice())?.wait().map(drop),
        &|| pinned().download(stream, buffer.slice())?.wait().map(drop),
    ];
    for copy in copies {
        within_copy(Some(capture_meanwhile));
        copy().unwrap();
        within_copy(None);
        THREADS.lock().unwrap().drain(..).for_each(|thread| thread.join().unwrap());
        assert!(BEGUN.swap(false, Ordering::SeqCst));
        let error = Graph::capture(stream, |_| copy()).unwrap_err().to_string();
        assert!(error.contains("the stream is being captured; copy before or after"), "{error}");
    }
    drop(buffer);
    assert_eq!(counts().0, 1, "more is left than the stream");
}

/// Another thread finds the context unusable while host memory is copied. The copy is still waited for.
/// Memory is not freed when nothing shows that its copy is done.
pub fn given_up() {
    static HUNG: OnceLock<Stream> = OnceLock::new();
    extern "C" fn give_up() {
        let error = HUNG.get().unwrap().synchronize_within(Duration::ZERO).unwrap_err();
        assert!(error.is_hang(), "{error}");
    }
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 4).unwrap();
    let transfer = Pinned::new(&context, 4).unwrap().upload(&stream, buffer.slice()).unwrap();
    let k = kernel("hang");
    let hung = HUNG.get_or_init(|| Stream::new(&context).unwrap());
    load(&context, &k).unwrap().launch(hung, &Call::of(&k), &[buffer.slice()]).unwrap();
    within_copy(Some(give_up));
    let (waited, live) = (waits().0, counts().0);
    let mut bytes = [1; 4];
    stream.download(buffer.slice(), &mut bytes).unwrap();
    assert_eq!((waits().0, bytes), (waited + 1, [0; 4]));
    within_copy(None);
    assert!(transfer.wait().unwrap_err().is_hang());
    assert_eq!(counts().0, live, "the memory of a copy was freed");
}

pub fn graphs() {
    let context = Context::open(0).unwrap();
    {
        let stream = Stream::new(&context).unwrap();
        let buffer = Buffer::new(&context, 4).unwrap();
        let k = kernel("store");
        let launch = |stream: &Stream| {
            // The function is loaded while the stream is captured, and dropped before the graph runs.
            load(&context, &k)?.launch(stream, &Call::of(&k), &[buffer.slice()])
        };
        let graph = Graph::capture(&stream, |stream| {
            assert!(stream.is_capturing().unwrap());
            drop(Buffer::new(&context, 4)?);
            (0..3).try_for_each(|_| launch(stream))
        })
        .unwrap();
        assert_eq!(counts().1, 0);
        graph.launch(&stream).unwrap();
        graph.launch(&stream).unwrap();
        assert_eq!(counts().1, 6);
        // SAFETY: the graph is not launched; only the handle is stored.
        drop(unsafe { driver::GraphExec::from_raw(0x77) });

        let error = Graph::capture(&stream, |stream| stream.synchronize()).unwrap_err();
        assert!(error.to_string().contains("cuStreamSynchronize failed"), "{error}");
        assert!(!stream.is_capturing().unwrap());
        let pinned = Pinned::new(&context, 4).unwrap();
        let error =
            Graph::capture(&stream, |stream| pinned.upload(stream, buffer.slice()).map(drop)).unwrap_err();
        assert!(error.to_string().contains("the stream is being captured"), "{error}");
        let default = Stream::default_of(&context);
        assert!(Graph::capture(&default, |_| Ok::<(), DriverError>(())).is_err());
    }
    assert_eq!(counts().0, 0, "something was not destroyed");
}
