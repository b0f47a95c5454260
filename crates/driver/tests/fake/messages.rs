//! Messages between GPUs, by NCCL.

use std::thread;
use std::time::Duration;

use super::*;
use driver::{Communicator, GroupId};

const TIME_OUT: Duration = Duration::from_secs(60);

/// The results of ranks that are threads.
fn on_ranks<R: Send>(
    ranks: usize,
    time_out: Duration,
    of: impl Fn(&Communicator, &Stream) -> R + Sync,
) -> Vec<R> {
    let (context, id) = (Context::open(0).unwrap(), GroupId::new().unwrap());
    thread::scope(|scope| {
        let (context, of) = (&context, &of);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let group = Communicator::join(context, &id, rank, ranks, time_out).unwrap();
                    of(&group, &Stream::new(context).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn uploaded(stream: &Stream, numbers: &[f32]) -> Buffer {
    let mut buffer = Buffer::new(stream.context(), size_of_val(numbers)).unwrap();
    buffer.upload(bytes_of(numbers)).unwrap();
    buffer
}

fn downloaded(buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.download(&mut bytes).unwrap();
    bytes.chunks_exact(4).map(|bytes| f32::from_ne_bytes(bytes.try_into().unwrap())).collect()
}

/// Every kind of message between three ranks.
pub fn collectives() {
    let live = counts().0;
    on_ranks(3, TIME_OUT, |group, stream| {
        let (rank, ranks) = (group.rank(), group.ranks());
        let own = uploaded(stream, &[rank as f32, 10.0 + rank as f32]);
        let room = |numbers: usize| Buffer::new(stream.context(), 4 * numbers).unwrap();
        let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        let (from, all, sum) = (room(2), room(6), room(2));
        group.exchange(stream, &[(next, own.slice())], &[(before, from.slice())]).unwrap();
        group.all_gather(stream, own.slice(), all.slice()).unwrap();
        group.reduce_scatter(stream, all.slice(), sum.slice()).unwrap();
        group.wait(stream).unwrap();
        assert_eq!(downloaded(&from), [before as f32, 10.0 + before as f32]);
        assert_eq!(downloaded(&all), [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
        assert_eq!(downloaded(&sum), [3.0 * rank as f32, 30.0 + 3.0 * rank as f32]);
        let short = group.all_gather(stream, own.slice(), from.slice()).unwrap_err();
        assert_eq!(short, DriverError::Copy { bytes: 24, room: 8 });
        let short = group.reduce_scatter(stream, all.slice(), all.slice()).unwrap_err();
        assert_eq!(short, DriverError::Copy { bytes: 72, room: 24 });
    });
    assert_eq!(counts().0, live, "all streams and buffers are freed");
}

/// A rank that does not call, one that ends, and one that never joins: an error on the others in time.
pub fn missing() {
    let time_out = Duration::from_secs(4);
    let told = on_ranks(2, time_out, |group, stream| {
        let buffer = uploaded(stream, &[1.0]);
        let exchange = || group.exchange(stream, &[], &[(1, buffer.slice())]);
        (group.rank() == 0).then(|| [exchange().unwrap_err(), exchange().unwrap_err()])
    });
    let [first, second] = told[0].clone().unwrap();
    assert_eq!(first, DriverError::GroupTimedOut { rank: 0, call: "ncclGroupEnd", time_out });
    assert!(
        first.to_string().contains("rank 0 has waited for other ranks in ncclGroupEnd for 4s"),
        "{first}"
    );
    assert!(second.to_string().contains("the group had an error before; make a new group"), "{second}");

    let told = on_ranks(2, TIME_OUT, |group, stream| {
        let buffer = uploaded(stream, &[1.0]);
        match group.rank() {
            0 => group.exchange(stream, &[], &[(1, buffer.slice())]),
            _ => group.exchange(stream, &[(7, buffer.slice())], &[]), // an error, after which the rank ends
        }
    });
    let remote = "remote process exited or there was a network error".to_owned();
    assert_eq!(told[0], Err(DriverError::Nccl { call: "ncclGroupEnd", message: remote }));
    assert_eq!(
        told[1],
        Err(DriverError::Nccl { call: "ncclGroupEnd", message: "invalid argument".to_owned() })
    );

    let (context, id) = (Context::open(0).unwrap(), GroupId::new().unwrap());
    let time_out = Duration::from_millis(200);
    let alone = Communicator::join(&context, &id, 0, 2, time_out).unwrap_err();
    assert_eq!(alone, DriverError::GroupTimedOut { rank: 0, call: "ncclCommInitRankConfig", time_out });
    let beyond = Communicator::join(&context, &id, 2, 2, time_out).unwrap_err().to_string();
    assert!(beyond.contains("invalid value '2' for rank: expected a number below 2"), "{beyond}");
}

/// A library that is too old.
pub fn too_old() {
    let told = GroupId::new().unwrap_err();
    assert_eq!(told, DriverError::NcclTooOld { found: 21003, needed: 21400 });
    assert_eq!(told.to_string(), "NCCL 2.10.3 is installed, needed is 2.14.0 or later; update the library");
}
