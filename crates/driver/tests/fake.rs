//! Tests the whole crate against a driver library that needs no GPU (`fake/libcuda.rs`): errors, the order of
//! calls and use by several threads. Each scenario runs in its own process, because a process loads the
//! driver once.
#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "the caller's handles, and the fake's counters")]

#[path = "fake/counts.rs"]
mod counts;
#[path = "fake/graphs.rs"]
mod graphs;
#[path = "fake/harness.rs"]
mod harness;
#[path = "fake/messages.rs"]
mod messages;
#[path = "fake/repeats.rs"]
mod repeats;

use std::path::Path;
use std::sync::Arc;

use counts::fake;
use driver::{
    Buffer, CacheStats, Call, Context, DeviceSlice, DriverError, Event, Expect, Function, Gpu, Graph, Key,
    Pinned, Pool, Stream, bytes_of,
};
use flashcore_driver as driver;
use harness::{Folder, SCENARIO, all_pass, run};
use ptx::{
    Access, Arg, BufferSpec, Builder, Dim3, Element, Kernel, L2Promotion, Launch, Machine, Swizzle, Target,
    TargetSuffix, TensorMapSpec,
};

/// A kernel that stores a word. The fake driver does so for a kernel named `store`, and breaks its context
/// for `fail`.
fn kernel(entry: &str) -> Kernel {
    let mut k = Builder::kernel(entry);
    let (to, word) = (k.param_pointer("to"), k.param_u32("word"));
    k.st(to, word);
    let one = Dim3(1, 1, 1);
    Kernel {
        module: k.into_verified(Target::sm(80)).unwrap(),
        entry: entry.to_owned(),
        launch: Launch { cluster: one, ..Launch::new(one, Dim3(32, 1, 1)) },
        buffers: vec![BufferSpec { name: "to".to_owned(), bytes: 4, access: Access::Write }],
        args: vec![Arg::Buffer { index: 0, offset: 0 }, Arg::U32(7)],
        tensor_maps: Vec::new(),
    }
}

fn load(context: &Arc<Context>, kernel: &Kernel) -> Result<Function, DriverError> {
    Function::load(context, kernel, &Expect::of(&kernel.launch))
}

/// Objects alive in the fake driver, kernels launched, modules compiled.
fn counts() -> (u64, u64, u64) {
    let (mut live, mut launches, mut linked) = (0, 0, 0);
    // SAFETY: the function's type.
    unsafe {
        fake::<extern "C" fn(&mut u64, &mut u64, &mut u64)>(c"fake_counts")(
            &mut live,
            &mut launches,
            &mut linked,
        );
    }
    (live, launches, linked)
}

/// Synchronisations of streams, and user objects alive in the fake driver.
fn waits() -> (u64, u64) {
    let (mut synchronised, mut objects) = (0, 0);
    // SAFETY: the function's type.
    unsafe { fake::<extern "C" fn(&mut u64, &mut u64)>(c"fake_waits")(&mut synchronised, &mut objects) };
    (synchronised, objects)
}

/// Sets a function that the fake driver calls within each copy between host and device.
fn within_copy(what: Option<extern "C" fn()>) {
    // SAFETY: the function's type.
    unsafe { fake::<extern "C" fn(Option<extern "C" fn()>)>(c"fake_within_copy")(what) };
}

/// Number of tensor maps encoded.
fn maps_encoded() -> u64 {
    // SAFETY: the function's type.
    unsafe { fake::<extern "C" fn() -> u64>(c"fake_maps")() }
}

/// Run in child processes, which set the scenario. Does nothing otherwise.
#[test]
fn scenario() {
    match std::env::var(SCENARIO).as_deref() {
        Ok("too_old") => {
            let expected = DriverError::DriverTooOld { found: 11080, needed: 12000 };
            assert_eq!(Context::open(0).unwrap_err(), expected);
            assert_eq!(driver::devices().unwrap_err(), expected);
        }
        Ok("lacking") => {
            let expected = DriverError::MissingSymbol { name: "cuTensorMapEncodeTiled", version: 13000 };
            assert_eq!(Gpu::open(0).err(), Some(expected));
        }
        Ok("no_device") => {
            assert_eq!(Context::open(0).unwrap_err(), DriverError::NoDevice { ordinal: 0, count: 0 });
        }
        Ok("not_yet") => {
            for _ in 0..2 {
                let error = Context::open(0).unwrap_err();
                assert!(matches!(error, DriverError::Call { call: "cuInit", .. }), "{error:?}");
            }
            Context::open(0).unwrap();
        }
        Ok("unknown") => {
            let message = "CUDA error 919".to_owned();
            assert_eq!(Context::open(0).unwrap_err(), DriverError::Call { call: "cuInit", message });
        }
        Ok("fork") => fork(),
        Ok("joined") => graphs::joined(),
        Ok("dropped_in_flight") => graphs::dropped_in_flight(),
        Ok("user_objects") => graphs::user_objects(),
        Ok("refused_object") => graphs::refused_object(),
        Ok("copies") => graphs::copies(),
        Ok("given_up") => graphs::given_up(),
        Ok("messages") => messages::collectives(),
        Ok("missing_rank") => messages::missing(),
        Ok("old_nccl") => messages::too_old(),
        Ok("forbidden") => {
            let error = Context::open(0).unwrap_err();
            assert!(matches!(error, DriverError::NoPermission { .. }), "{error:?}");
            let text = error.to_string();
            assert!(
                text.contains("is not permitted") && text.contains("ask for access to the device"),
                "{text}"
            );
            assert_eq!(driver::devices().unwrap_err(), error);
        }
        Ok("other_device") => other_device(),
        Ok("ordinals") => ordinals(),
        Ok("work") => work(),
        Ok("memory") => memory(),
        Ok("poison") => poison(),
        Ok("hang") => hang(),
        Ok("first") => cached(CacheStats { misses: 1, stored: 1, ..CacheStats::default() }, 1),
        Ok("second") => cached(CacheStats { hits: 1, ..CacheStats::default() }, 0),
        Ok("damaged") => cached(CacheStats { damaged: 1, stored: 1, ..CacheStats::default() }, 1),
        Ok("refused") => refused(),
        Ok("unwritable") => cached(CacheStats { misses: 1, unwritable: 1, ..CacheStats::default() }, 1),
        Ok("admission") => admission(),
        Ok("contract") => contract(),
        Ok("tensor_maps") => tensor_maps(),
        Ok("repeats") => repeats::repeats(),
        Ok("many_maps") => repeats::many_maps(),
        Ok("other_contexts") => repeats::other_contexts(),
        Ok("queues") => graphs::queues(),
        Ok("graphs") => graphs::graphs(),
        Ok("threads") => threads(),
        Ok("machine") => machine(),
        Ok(other) => panic!("no scenario {other}"),
        Err(_) => {}
    }
}

fn ordinals() {
    for ordinal in [-1, 1] {
        assert_eq!(Context::open(ordinal).unwrap_err(), DriverError::NoDevice { ordinal, count: 1 });
    }
    let context = Context::open(0).unwrap();
    assert!(Arc::ptr_eq(&context, &Context::open(0).unwrap()));
    let info = context.info();
    assert_eq!((info.name.as_str(), info.sm(), info.sms, info.pools), ("Fake GPU", 90, 132, true));
    assert_eq!(info.uuid, "GPU-abababab-abab-abab-abab-abababababab");
    assert_eq!(info.shared_per_cta, 227 << 10);
    assert_eq!(driver::devices().unwrap(), std::slice::from_ref(info));
}

/// Streams of one device with objects of another: the calls are rejected, and both devices stay usable.
fn other_device() {
    let [first, second] = [0, 1].map(|ordinal| Context::open(ordinal).unwrap());
    let (near, far) = (Stream::new(&first).unwrap(), Stream::new(&second).unwrap());
    let k = kernel("store");
    let store = load(&first, &k).unwrap();
    let mut buffer = Buffer::new(&first, 4).unwrap();
    let refused = |outcome: Result<(), DriverError>, found, expected| {
        let error = outcome.unwrap_err();
        let fits = matches!(error, DriverError::OtherDevice { found: f, expected: e, .. } if (f, e) == (found, expected));
        assert!(fits, "{error:?}");
    };
    refused(store.launch(&far, &Call::of(&k), &[buffer.slice()]), 1, 0);
    refused(Event::new(&second).unwrap().record(&near), 0, 1);
    refused(Pool::new(&second, 0).unwrap().allocate(&near, 4).map(drop), 0, 1);
    assert_eq!(counts().1, 0);
    store.launch(&near, &Call::of(&k), &[buffer.slice()]).unwrap();
    let mut word = [0; 4];
    buffer.download(&mut word).unwrap();
    assert_eq!((word, first.poisoned(), second.poisoned()), ([7, 0, 0, 0], None, None));
    buffer.upload(&word).unwrap();
}

/// Uses each kind of object. All of them are destroyed at the end.
fn work() {
    let context = Context::open(0).unwrap();
    {
        let stream = Stream::new(&context).unwrap();
        let store = load(&context, &kernel("store")).unwrap();
        assert_eq!((store.entry(), store.resources().registers), ("store", 40));
        assert_eq!(store.resident_ctas(&kernel("store").launch).unwrap(), 3);
        let pool = Pool::new(&context, 1 << 20).unwrap();
        let buffer = pool.allocate(&stream, 64).unwrap();
        stream.fill(buffer.slice(), 1).unwrap();
        stream.fill_u32(buffer.slice().part(8, 8).unwrap(), 0xff80_0000).unwrap();
        let second = buffer.slice().part(4, 4).unwrap();
        let k = kernel("store");
        store.launch(&stream, &Call::of(&k), &[second]).unwrap();
        let mut bytes = [0; 16];
        stream.download(buffer.slice(), &mut bytes).unwrap();
        assert_eq!(bytes, [1, 1, 1, 1, 7, 0, 0, 0, 0, 0, 0x80, 0xff, 0, 0, 0x80, 0xff]);

        let mut pinned = Pinned::new(&context, 4).unwrap();
        assert_eq!(pinned.as_slice(), [0; 4]);
        pinned.as_mut_slice().copy_from_slice(&[9, 8, 7, 6]);
        let pinned = pinned.upload(&stream, buffer.slice()).unwrap().wait().unwrap();
        let other = pool.allocate(&stream, 4).unwrap();
        stream.copy(other.slice(), buffer.slice().part(0, 4).unwrap()).unwrap();
        let transfer = Pinned::new(&context, 4).unwrap().download(&stream, other.slice()).unwrap();
        assert!(transfer.is_done().unwrap());
        assert_eq!(transfer.wait().unwrap().as_slice(), pinned.as_slice());
        drop(Pinned::new(&context, 4).unwrap().download(&stream, other.slice()).unwrap());

        let (start, end) = (Event::new(&context).unwrap(), Event::new(&context).unwrap());
        start.record(&stream).unwrap();
        end.record(&stream).unwrap();
        Stream::new(&context).unwrap().wait(&end).unwrap();
        assert_eq!(start.elapsed_us(&end).unwrap(), 250.0);
        assert!(stream.is_done().unwrap() && end.is_done().unwrap() && !stream.is_capturing().unwrap());
        assert_eq!(counts().1, 1);
        pool.trim(0).unwrap();
        context.synchronize().unwrap();
    }
    assert_eq!(counts().0, 0, "something was not destroyed");
    // Another library's context stays current on its thread.
    let mut current = 0;
    // SAFETY: the functions' types; the fake takes any handle.
    unsafe {
        assert_eq!(fake::<extern "C" fn(usize) -> u32>(c"cuCtxSetCurrent")(0x7770), 0);
        drop(Buffer::new(&context, 4).unwrap());
        assert_eq!(fake::<extern "C" fn(&mut usize) -> u32>(c"cuCtxGetCurrent")(&mut current), 0);
        assert_eq!(current, 0x7770);
    }
}

fn memory() {
    let context = Context::open(0).unwrap();
    let error = Buffer::new(&context, 2000).unwrap_err();
    assert_eq!(error.to_string(), "out of memory: 2000 bytes of device memory were asked for");
    let stream = Stream::new(&context).unwrap();
    let error = Pool::new(&context, 0).unwrap().allocate(&stream, 1001).unwrap_err();
    assert_eq!(error.to_string(), "out of memory: 1001 bytes of pooled device memory were asked for");
    // After these errors, the context is still usable.
    let mut buffer = Buffer::new(&context, 1000).unwrap();
    assert_eq!(buffer.upload(&[0; 1001]), Err(DriverError::Copy { bytes: 1001, room: 1000 }));
    assert_eq!(buffer.download(&mut [0; 1001]), Err(DriverError::Copy { bytes: 1001, room: 1000 }));
    buffer.upload(bytes_of(&[1.5f32])).unwrap();
    let mut back = [0; 4];
    buffer.download(&mut back).unwrap();
    assert_eq!(f32::from_le_bytes(back), 1.5);
    drop(buffer);
    let empty = Buffer::new(&context, 0).unwrap();
    stream.fill(empty.slice(), 0).unwrap();
}

fn poison() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffer = Buffer::new(&context, 4).unwrap();
    let k = kernel("fail");
    load(&context, &k).unwrap().launch(&stream, &Call::of(&k), &[buffer.slice()]).unwrap();
    assert!(context.poisoned().is_none());
    let error = stream.synchronize().unwrap_err();
    let text = error.to_string();
    assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS") && text.contains("restart the process"), "{text}");
    // All later calls return the first cause.
    assert_eq!(context.poisoned(), Some(&error));
    assert_eq!(Buffer::new(&context, 4).unwrap_err(), error);
    assert_eq!(Stream::new(&context).unwrap_err(), error);
    assert_eq!(load(&Context::open(0).unwrap(), &kernel("store")).unwrap_err(), error);
}

/// A kernel that never ends costs the time limit. After that, no call waits for it, not even a destructor.
fn hang() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let limit = std::time::Duration::from_millis(10);
    stream.synchronize_within(limit).unwrap();
    let buffer = Buffer::new(&context, 4).unwrap();
    let k = kernel("hang");
    load(&context, &k).unwrap().launch(&stream, &Call::of(&k), &[buffer.slice()]).unwrap();
    let error = stream.synchronize_within(limit).unwrap_err();
    assert!(error.to_string().contains("unusable after a kernel did not end within 0.01 s"), "{error}");
    assert_eq!(context.poisoned(), Some(&error));
    assert_eq!(stream.synchronize().unwrap_err(), error);
    drop(buffer);
}

fn cached(expected: CacheStats, compiled: u64) {
    let context = Context::open(0).unwrap();
    load(&context, &kernel("store")).unwrap();
    assert_eq!(context.cache().stats(), expected);
    assert_eq!(counts().2, compiled);
}

/// An undamaged file whose cubin the driver rejects: the kernel is compiled again and the file replaced.
fn refused() {
    let context = Context::open(0).unwrap();
    let k = kernel("store");
    let key = Key::new(&k.module.to_string(), 90, &context.info().compiler());
    context.cache().put(&key, b"no cubin at all");
    load(&context, &k).unwrap();
    load(&context, &k).unwrap();
    let expected = CacheStats { hits: 2, damaged: 1, stored: 2, ..CacheStats::default() };
    assert_eq!((context.cache().stats(), counts().2), (expected, 1));
}

fn admission() {
    let context = Context::open(0).unwrap();
    let k = kernel("store");
    let strict = Expect { local_bytes: Some(64), ..Expect::of(&k.launch) };
    let error = Function::load(&context, &k, &strict).unwrap_err();
    let expected = DriverError::Admission {
        entry: "store".to_owned(),
        what: "local bytes per thread",
        found: 80,
        accepted: 64,
    };
    assert_eq!(error, expected);
    assert_eq!(counts().0, 0, "the module that was refused is still there");
    assert_eq!(load(&context, &k).unwrap().resources().local, 80);
    let mut wide = k.clone();
    wide.launch.block = Dim3(257, 1, 1);
    assert!(
        load(&context, &wide)
            .unwrap_err()
            .to_string()
            .contains("invalid value '257' for threads per CTA: expected at most 256")
    );
    let mut deep = k.clone();
    deep.launch.dynamic_shared = 240 << 10;
    assert!(
        load(&context, &deep)
            .unwrap_err()
            .to_string()
            .contains("invalid value '245760' for shared bytes per CTA")
    );
    let mut absent = kernel("store");
    absent.entry = "elsewhere".to_owned();
    assert!(load(&context, &absent).unwrap_err().to_string().contains("no entry of that name"));
    assert!(
        load(&context, &kernel("absent")).unwrap_err().to_string().contains("cuModuleGetFunction failed")
    );
}

fn contract() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let k = kernel("store");
    let store = load(&context, &k).unwrap();
    let refuse = |launch: &Launch, args: &[Arg], words: &str| {
        let call = Call::new(*launch, args.to_vec());
        let error = store.launch(&stream, &call, &[DeviceSlice::EMPTY]).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refuse(&k.launch, &k.args[..1], "its parameters take [8, 4] bytes, given are [8]");
    refuse(&k.launch, &[k.args[0].clone(), Arg::U64(7)], "given are [8, 8]");
    refuse(&k.launch, &[Arg::Buffer { index: 1, offset: 0 }, k.args[1].clone()], "names buffer 1 of 1");
    let beyond = Arg::Buffer { index: 0, offset: 1 };
    refuse(&k.launch, &[beyond, k.args[1].clone()], "begins 1 bytes into buffer 0 of 0");
    refuse(
        &k.launch,
        &vec![Arg::Null; 65],
        "invalid value '65' for the number of parameters: expected at most 64",
    );
    let shared = Launch { dynamic_shared: (48 << 10) + 1, ..k.launch };
    refuse(&shared, &k.args, "49153 bytes of dynamic shared memory; at most 49152 were stated");
    refuse(
        &Launch { block: Dim3(512, 1, 1), ..k.launch },
        &k.args,
        "invalid value '512' for threads per CTA",
    );
    assert_eq!(counts().1, 0);
    refuse(&k.launch, &[Arg::TensorMap { index: 0 }, k.args[1].clone()], "names tensor map 0 of 0");
    // Clusters and an overlapping start are accepted.
    let buffer = Buffer::new(&context, 1024).unwrap();
    let cluster = Launch { cluster: Dim3(2, 1, 1), grid: Dim3(2, 1, 1), overlapping: true, ..k.launch };
    let call = Call::new(cluster, vec![k.args[0].clone(), Arg::U32(5)]);
    store.launch(&stream, &call, &[buffer.slice()]).unwrap();
    let mut word = [0; 4];
    stream.download(buffer.slice(), &mut word).unwrap();
    assert_eq!(u32::from_le_bytes(word), 5);
    // Architecture-specific code runs on its architecture only.
    let specific = |sm| Target { sm, suffix: TargetSuffix::ArchSpecific };
    for (target, runs) in
        [(specific(90), true), (specific(100), false), (Target::sm(89), true), (Target::sm(100), false)]
    {
        let mut of_target = k.clone();
        let mut module = of_target.module.into_module();
        (module.target, module.version) = (target, module.version.max(target.minimum_version()));
        of_target.module = module.verify().unwrap();
        match load(&context, &of_target) {
            Ok(_) => assert!(runs, "{target}"),
            Err(error) => {
                let expected = format!("launch of store: its code is for {target}; Fake GPU is sm_90");
                assert!(!runs && error.to_string() == expected, "{error}");
            }
        }
    }
}

/// A kernel with a tensor map in place of its pointer. The fake driver stores to the address of the map's
/// tensor.
fn mapped() -> Kernel {
    let k = kernel("store");
    let spec = TensorMapSpec {
        buffer: 0,
        offset: 16,
        element: Element::F16,
        extents: vec![64, 8],
        strides: vec![128],
        box_extents: vec![64, 8],
        swizzle: Swizzle::Bytes128,
        l2_promotion: L2Promotion::Bytes128,
        wraps: false,
    };
    let mut builder = Builder::kernel("store");
    builder.param_tensor_map("map");
    builder.param_u32("word");
    Kernel {
        module: builder.into_verified(Target::sm_a(90)).unwrap(),
        args: vec![Arg::TensorMap { index: 0 }, Arg::U32(9)],
        tensor_maps: vec![spec],
        buffers: vec![BufferSpec { name: "to".to_owned(), bytes: 1040, access: Access::Write }],
        ..k
    }
}

/// Maps are encoded from the buffers' addresses, once per address. A graph keeps the maps of its capture.
fn tensor_maps() {
    let context = Context::open(0).unwrap();
    let k = mapped();
    let function = load(&context, &k).unwrap();
    let call = Call::of(&k);
    let buffers = [(); 2].map(|()| Buffer::zeroed(&context, 1040).unwrap());
    let word = |buffer: &Buffer| {
        let mut bytes = [0; 20];
        buffer.download(&mut bytes).unwrap();
        assert_eq!(bytes[..16], [0; 16]);
        bytes[16]
    };
    let stream = Stream::new(&context).unwrap();
    for (buffer, encoded) in [(0, 1), (0, 1), (1, 2), (1, 2), (0, 2)] {
        function.launch(&stream, &call, &[buffers[buffer].slice()]).unwrap();
        assert_eq!(maps_encoded(), encoded);
        assert_eq!(word(&buffers[buffer]), 9);
        stream.fill(buffers[buffer].slice(), 0).unwrap();
    }
    // A thread may launch first, without a current context.
    std::thread::scope(|scope| {
        scope.spawn(|| call.check(&context).unwrap());
        scope.spawn(|| function.launch(&stream, &call, &[buffers[1].slice()]).unwrap());
    });
    stream.fill(buffers[1].slice(), 0).unwrap();
    let graph =
        Graph::capture(&stream, |stream| function.launch(stream, &call, &[buffers[1].slice()])).unwrap();
    function.launch(&stream, &call, &[buffers[0].slice()]).unwrap();
    drop((call, function));
    stream.fill(buffers[0].slice(), 0).unwrap();
    graph.launch(&stream).unwrap();
    assert_eq!((word(&buffers[0]), word(&buffers[1])), (0, 9));

    let mut gpu = Gpu::open(0).unwrap();
    let mut buffer = gpu.allocate(1040).unwrap();
    gpu.launch(&k, &mut [&mut buffer]).unwrap();
    let refuse = |change: fn(&mut Kernel), slices: &[DeviceSlice], words: &str| {
        let mut k = mapped();
        change(&mut k);
        let error =
            load(&context, &k).unwrap().launch(&stream, &Call::of(&k), slices).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    let whole = buffers[0].slice();
    let short = whole.part(0, 1039).unwrap();
    refuse(
        |_| (),
        &[short],
        "tensor map of to: invalid value '1039' for memory in bytes: expected at least 1040, which the extents reach",
    );
    let odd = whole.part(8, 1032).unwrap();
    refuse(|_| (), &[odd], "expected multiples of 16 that are not 0");
    refuse(|_| (), &[DeviceSlice::EMPTY], "expected multiples of 16 that are not 0");
    refuse(|_| (), &[], "names buffer 0 of 0");
    refuse(
        |k| k.tensor_maps[0].strides[0] = 24,
        &[whole],
        "tensor map of to: invalid value '24' for stride in bytes: expected multiples of 16",
    );
    refuse(|k| k.args[0] = Arg::TensorMap { index: 1 }, &[whole], "names tensor map 1 of 1");
}

/// In a forked child of a process that uses CUDA, every call returns an error.
fn fork() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    // SAFETY: the child only makes the tested calls, and exits without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let told = |error: Option<DriverError>| error == Some(DriverError::Forked);
        let all = [
            told(Context::open(0).err()),
            told(driver::devices().err()),
            told(Buffer::new(&context, 4).err()),
            told(stream.synchronize().err()),
            told(stream.queue().err()),
        ];
        // SAFETY: exits at once.
        unsafe { libc::_exit(if all == [true; 5] { 7 } else { 1 }) }
    }
    let mut status = 0;
    // SAFETY: the process is our child; the pointer is to a live number.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 7));
    // The parent is not affected.
    Buffer::new(&context, 4).unwrap();
    stream.synchronize().unwrap();
}

fn threads() {
    let context = Context::open(0).unwrap();
    let shared = Stream::new(&context).unwrap();
    let store = load(&context, &kernel("store")).unwrap();
    std::thread::scope(|scope| {
        for n in 0..8u32 {
            let (context, shared, store) = (context.clone(), shared.clone(), store.clone());
            scope.spawn(move || {
                for round in 0..50 {
                    let stream = if round % 2 == 0 { Stream::new(&context).unwrap() } else { shared.clone() };
                    let buffer = Buffer::new(&context, 4).unwrap();
                    let word = n * 1000 + round;
                    let k = kernel("store");
                    let call = Call::new(k.launch, vec![k.args[0].clone(), Arg::U32(word)]);
                    store.launch(&stream, &call, &[buffer.slice()]).unwrap();
                    let mut back = [0; 4];
                    stream.download(buffer.slice(), &mut back).unwrap();
                    assert_eq!(u32::from_le_bytes(back), word);
                    assert!(Arc::ptr_eq(&Context::open(0).unwrap(), &context));
                }
            });
        }
    });
    drop((shared, store));
    assert_eq!((counts().0, counts().1), (0, 400));
}

fn machine() {
    let mut gpu = Gpu::open(0).unwrap();
    let k = kernel("store");
    let mut buffer = gpu.allocate(4).unwrap();
    gpu.upload(&mut buffer, &[0; 4]).unwrap();
    gpu.launch(&k, &mut [&mut buffer]).unwrap();
    assert_eq!(gpu.time(&k, &mut [&mut buffer], 10).unwrap(), 25.0);
    assert_eq!((counts().1, counts().2), (12, 1));
    let mut back = [0; 4];
    gpu.download(&buffer, &mut back).unwrap();
    assert_eq!(back, [7, 0, 0, 0]);
    let mut small = gpu.allocate(3).unwrap();
    let error = gpu.launch(&k, &mut [&mut small]).unwrap_err().to_string();
    assert_eq!(error, "launch of store: buffer to needs 4 bytes and has 3");
    // The same text with more dynamic shared memory gives the same function.
    let mut roomy = k.clone();
    roomy.launch.dynamic_shared = 100 << 10;
    gpu.launch(&roomy, &mut [&mut buffer]).unwrap();
    assert_eq!((gpu.load(&roomy).unwrap().registers, counts().2), (40, 1));
}

/// Scenarios that have a cache of their own, with variables of the fake driver.
const SCENARIOS: [(&str, &[(&str, &str)]); 31] = [
    ("too_old", &[("FAKE_VERSION", "11080")]),
    ("no_device", &[("FAKE_INIT", "100")]),
    // CUDA_ERROR_SYSTEM_NOT_READY: a service of the machine has not started yet.
    ("not_yet", &[("FAKE_INIT", "802"), ("FAKE_INIT_TIMES", "2")]),
    // CUDA_ERROR_NOT_PERMITTED.
    ("forbidden", &[("FAKE_INIT", "800")]),
    ("other_device", &[("FAKE_DEVICES", "2")]),
    ("unknown", &[("FAKE_INIT", "919")]),
    ("fork", &[]),
    ("ordinals", &[]),
    ("work", &[]),
    ("memory", &[("FAKE_MEMORY", "1000")]),
    ("poison", &[]),
    ("hang", &[]),
    ("admission", &[("FAKE_LOCAL", "80")]),
    ("contract", &[]),
    ("tensor_maps", &[]),
    ("many_maps", &[]),
    ("repeats", &[]),
    ("other_contexts", &[("FAKE_DEVICES", "2")]),
    ("queues", &[]),
    ("graphs", &[]),
    ("joined", &[]),
    ("dropped_in_flight", &[]),
    ("user_objects", &[]),
    ("refused_object", &[("FAKE_RETAIN", "801")]),
    ("copies", &[]),
    ("given_up", &[]),
    ("messages", &[]),
    ("missing_rank", &[]),
    ("old_nccl", &[("FAKE_NCCL_VERSION", "21003")]),
    ("threads", &[]),
    ("machine", &[]),
];

#[test]
fn every_scenario_passes() {
    all_pass(&[], &SCENARIOS);
}

#[test]
fn a_driver_without_a_function_is_an_error_with_its_name() {
    run("lacking", true, Path::new("/nonexistent"), &[]);
}

#[test]
fn a_second_process_compiles_nothing() {
    let folder = Folder::new("cache");
    run("first", false, &folder.0, &[]);
    run("second", false, &folder.0, &[]);
    let file = std::fs::read_dir(&folder.0).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    run("damaged", false, &folder.0, &[]);
    run("second", false, &folder.0, &[]);
    run("unwritable", false, Path::new("/proc/flashcore"), &[]);
    run("refused", false, &folder.0.join("refused"), &[]);
}
