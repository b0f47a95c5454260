//! Launches that come again.

use super::*;
use counts::calls_of;

/// A launch is one call of the driver, also with tensor maps of buffers that it was given before.
pub fn repeats() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let buffers = [(); 3].map(|()| Buffer::zeroed(&context, 1040).unwrap());
    for (k, maps) in [(kernel("store"), 0), (mapped(), 1)] {
        let (function, call) = (load(&context, &k).unwrap(), Call::of(&k));
        let launch =
            |buffer: &Buffer| calls_of(|| function.launch(&stream, &call, &[buffer.slice()]).unwrap());
        launch(&buffers[0]);
        // The context is asked for where a map is encoded.
        assert_eq!(buffers.each_ref().map(launch), [1, 1 + 2 * maps, 1 + 2 * maps]);
        assert_eq!(buffers.each_ref().map(launch), [1; 3]);
    }
}

/// More buffers than the maps of which are kept: each launch has the map of its buffer.
pub fn many_maps() {
    let context = Context::open(0).unwrap();
    let stream = Stream::new(&context).unwrap();
    let k = mapped();
    let (function, call) = (load(&context, &k).unwrap(), Call::of(&k));
    let memory = Buffer::zeroed(&context, 200 * 1040).unwrap();
    for round in 1..=2 {
        for index in 0..200 {
            let slice = memory.slice().part(index * 1040, 1040).unwrap();
            function.launch(&stream, &call, &[slice]).unwrap();
            let mut word = [0; 20];
            stream.download(slice.part(0, 20).unwrap(), &mut word).unwrap();
            assert_eq!(word[16], 9, "{round} {index}");
            stream.fill(slice, 0).unwrap();
        }
    }
    assert!((201..=400).contains(&maps_encoded()), "{}", maps_encoded());
}

/// Another library makes another context current, or none. The launch goes to the stream's device, and the
/// other context stays current.
pub fn other_contexts() {
    let [first, second] = [0, 1].map(|ordinal| Context::open(ordinal).unwrap());
    let k = kernel("store");
    let call = Call::of(&k);
    let mut all = Vec::new();
    for context in [&first, &second] {
        all.push((
            Stream::new(context).unwrap(),
            load(context, &k).unwrap(),
            Buffer::new(context, 4).unwrap(),
        ));
    }
    // SAFETY: the functions' types.
    let (set, get) = unsafe {
        (
            fake::<extern "C" fn(usize) -> u32>(c"cuCtxSetCurrent"),
            fake::<extern "C" fn(&mut usize) -> u32>(c"cuCtxGetCurrent"),
        )
    };
    let current = || {
        let mut current = 0;
        assert_eq!(get(&mut current), 0);
        current
    };
    first.bind().unwrap();
    let own = current();
    second.bind().unwrap();
    let others = current();
    for (before, after) in [(own, own), (others, others), (0, own), (others, others), (own, own)] {
        assert_eq!(set(before), 0);
        for (index, (stream, store, buffer)) in all.iter().enumerate() {
            let launched = counts().1;
            store.launch(stream, &call, &[buffer.slice()]).unwrap();
            store.launch(stream, &call, &[buffer.slice()]).unwrap();
            assert_eq!((counts().1 - launched, current()), (2, after), "{index}");
        }
        assert_eq!((first.poisoned(), second.poisoned()), (None, None));
    }
}
