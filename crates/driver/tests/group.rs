//! NCCL between the GPUs of this host, which the fake library of the other tests only assumes. With fewer
//! than two GPUs, or without the library, these tests do not run, and `cargo xtask test` counts them. With
//! `FLASHCORE_REQUIRE_GPU` set, they fail.
#![cfg(target_os = "linux")]

use std::thread;
use std::time::Duration;

use driver::{Buffer, Communicator, Context, DriverError, GroupId, Stream, devices};
use flashcore_driver as driver;

/// The number of GPUs and the name of a group of them.
fn group() -> Option<(usize, GroupId)> {
    let found = devices().and_then(|gpus| Ok((gpus.len(), GroupId::new()?)));
    let why = match found {
        Ok((ranks, id)) if ranks > 1 => return Some((ranks, id)),
        Ok((ranks, _)) => format!("{ranks} GPU, and two are needed"),
        Err(error) => error.to_string(),
    };
    assert!(std::env::var_os("FLASHCORE_REQUIRE_GPU").is_none(), "{why}");
    filetest::not_run(why);
    None
}

/// The results of the ranks, each a thread with a GPU of its own.
fn on_gpus<R: Send>(
    (ranks, id): (usize, GroupId),
    time_out: Duration,
    of: impl Fn(&Communicator, &Stream) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let of = &of;
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let context = Context::open(rank as i32).unwrap();
                    let group = Communicator::join(&context, &id, rank, ranks, time_out).unwrap();
                    of(&group, &Stream::new(&context).unwrap())
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers of a rank, exact in f32.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 7 + rank * 1013) % 4093) as f32).collect()
}

fn uploaded(stream: &Stream, numbers: &[f32]) -> Buffer {
    let mut buffer = Buffer::new(stream.context(), size_of_val(numbers)).unwrap();
    let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_ne_bytes()).collect();
    buffer.upload(&bytes).unwrap();
    buffer
}

fn downloaded(buffer: &Buffer) -> Vec<f32> {
    let mut bytes = vec![0; buffer.bytes()];
    buffer.download(&mut bytes).unwrap();
    bytes.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect()
}

/// Every kind of message between all GPUs, of sizes from one number to 16 MiB.
#[test]
fn messages_between_gpus_arrive() {
    let Some(group) = group() else { return };
    on_gpus(group, Duration::from_secs(60), |group, stream| {
        let (rank, ranks) = (group.rank(), group.ranks());
        for count in [1, 1000, 1 << 22] {
            let own = uploaded(stream, &numbers(rank, count));
            let room = |count: usize| Buffer::zeroed(stream.context(), 4 * count).unwrap();
            let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            let (from, all, sum) = (room(count), room(ranks * count), room(count));
            group.exchange(stream, &[(next, own.slice())], &[(before, from.slice())]).unwrap();
            group.all_gather(stream, own.slice(), all.slice()).unwrap();
            group.reduce_scatter(stream, all.slice(), sum.slice()).unwrap();
            group.wait(stream).unwrap();
            assert_eq!(downloaded(&from), numbers(before, count));
            let every: Vec<f32> = (0..ranks).flat_map(|rank| numbers(rank, count)).collect();
            assert_eq!(downloaded(&all), every);
            let sums: Vec<f32> = numbers(rank, count).iter().map(|x| x * ranks as f32).collect();
            assert_eq!(downloaded(&sum), sums);
        }
    });
}

/// A rank whose partner does not call: an error in time, and the process goes on.
#[test]
fn a_gpu_that_waits_alone_gets_an_error() {
    let Some(group) = group() else { return };
    let time_out = Duration::from_secs(3);
    let told = on_gpus(group, time_out, |group, stream| {
        let buffer = uploaded(stream, &[1.0]);
        if group.rank() > 0 {
            thread::sleep(2 * time_out); // the partner is there, and sends nothing
            return Ok(());
        }
        group.exchange(stream, &[], &[(1, buffer.slice())])?;
        group.wait(stream)
    });
    assert!(matches!(told[0], Err(DriverError::GroupTimedOut { rank: 0, .. })), "{told:?}");
}
