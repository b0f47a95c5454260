//! Ranks whose messages go through channels: threads of one process.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::{Collectives, GroupError};

/// A rank of a group of threads ([`thread_ranks`]) or of processes ([`host_ranks`](super::host_ranks)).
/// Dropping it is leaving the group.
#[derive(Debug)]
pub struct ChannelRank {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) time_out: Duration,
    /// Channels to and from each rank; empty when this rank has left.
    pub(super) senders: Vec<Sender<Vec<u8>>>,
    pub(super) receivers: Vec<Receiver<Vec<u8>>>,
}

/// A group of `ranks` ranks for threads of this process. A rank that does not answer within `time_out` is an
/// error on those that wait for it.
///
/// ```
/// use flashcore::parallel::{Collectives, thread_ranks};
///
/// std::thread::scope(|scope| {
///     for mut group in thread_ranks(2, std::time::Duration::from_secs(10)) {
///         scope.spawn(move || {
///             let mut number = [group.rank() as f32];
///             group.sum(&mut number).unwrap();
///             assert_eq!(number, [1.0]);
///         });
///     }
/// });
/// ```
pub fn thread_ranks(ranks: usize, time_out: Duration) -> Vec<ChannelRank> {
    let of = |rank| ChannelRank { rank, ranks, time_out, senders: Vec::new(), receivers: Vec::new() };
    let mut group: Vec<ChannelRank> = (0..ranks).map(of).collect();
    for from in 0..ranks {
        for to in 0..ranks {
            let (sender, receiver) = channel();
            group[from].senders.push(sender);
            group[to].receivers.push(receiver);
        }
    }
    group
}

impl Collectives for ChannelRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.ranks
    }

    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<(), GroupError> {
        let left = GroupError::Left { rank: self.rank };
        let sent = self.senders.get(to).ok_or(left)?.send(message);
        sent.map_err(|_| GroupError::Ended { rank: self.rank, other: to }).inspect_err(|_| self.leave())
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>, GroupError> {
        let &mut ChannelRank { rank, time_out, .. } = self;
        let channel = self.receivers.get(from).ok_or(GroupError::Left { rank })?;
        let message = channel.recv_timeout(time_out).map_err(|error| match error {
            RecvTimeoutError::Timeout => GroupError::TimedOut { rank, other: from, time_out },
            RecvTimeoutError::Disconnected => GroupError::Ended { rank, other: from },
        });
        message.inspect_err(|_| self.leave())
    }

    fn leave(&mut self) {
        self.senders.clear();
        self.receivers.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(100);

    /// The results of all ranks.
    fn of_each<T: Send>(ranks: usize, time_out: Duration, of: impl Fn(ChannelRank) -> T + Sync) -> Vec<T> {
        let group = thread_ranks(ranks, time_out);
        thread::scope(|scope| {
            let threads: Vec<_> = group.into_iter().map(|rank| scope.spawn(|| of(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn collectives_arrive_in_the_order_of_ranks() {
        for ranks in 1..=4 {
            of_each(ranks, LONG, |mut group| {
                let rank = group.rank();
                let each: Vec<Vec<u8>> = (0..ranks).map(|i| vec![i as u8; rank]).collect();
                assert_eq!(
                    group.all_gather(&[rank as u8; 2]).unwrap(),
                    (0..ranks).map(|i| [i as u8; 2]).collect::<Vec<_>>()
                );
                assert_eq!(
                    group.all_to_all(each).unwrap(),
                    (0..ranks).map(|i| vec![rank as u8; i]).collect::<Vec<_>>()
                );
                group.barrier().unwrap();
                let mut numbers: Vec<f32> = (0..7).map(|i| (i * (rank + 1)) as f32).collect();
                group.sum(&mut numbers).unwrap();
                let factor = (ranks * (ranks + 1) / 2) as f32;
                assert_eq!(numbers, (0..7).map(|i| i as f32 * factor).collect::<Vec<_>>());
            });
        }
    }

    #[test]
    fn a_rank_that_ends_is_late_or_differs_is_an_error_on_the_others() {
        let told = of_each(3, LONG, |mut group| match group.rank() {
            2 => Ok(vec![]), // ends
            _ => group.all_gather(&[1]),
        });
        // One of both may leave before the other one hears of rank 2.
        for (rank, told) in told[..2].iter().enumerate() {
            assert!(matches!(told, Err(GroupError::Ended { rank: of, .. }) if *of == rank), "{told:?}");
        }
        let (time_out, has_timed_out) = (Duration::from_millis(300), Barrier::new(2));
        let told = of_each(2, time_out, |mut group| {
            let told = match group.rank() {
                0 => {
                    let told = group.receive(1);
                    has_timed_out.wait();
                    told
                }
                _ => {
                    has_timed_out.wait();
                    group.receive(0)
                }
            };
            (told, group.barrier())
        });
        assert_eq!(told[0].0, Err(GroupError::TimedOut { rank: 0, other: 1, time_out }));
        assert_eq!(told[1].0, Err(GroupError::Ended { rank: 1, other: 0 }));
        assert_eq!([&told[0].1, &told[1].1], [0, 1].map(|rank| Err(GroupError::Left { rank })).each_ref());
        let told = of_each(2, LONG, |mut group| {
            let mut numbers = vec![0.0; 2 + 4 * group.rank()];
            group.sum(&mut numbers)
        });
        assert_eq!(told[0], Err(GroupError::Size { from: 1, size: 12, expected: 4 }));
        let told = thread_ranks(2, time_out)[0].all_to_all(Vec::new());
        assert_eq!(told, Err(GroupError::Messages { given: 0, ranks: 2 }));
    }
}
