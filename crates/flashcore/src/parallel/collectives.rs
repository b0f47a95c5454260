//! Messages between the ranks of a group.

use super::GroupError;

/// The ranks of a group, as one of them sees the group. A message is bytes. Messages from one rank to another
/// arrive in the order in which they are sent.
///
/// Two functions carry all schedules: `send` and `receive`. The collectives below are made of them. A
/// collective is called by all ranks together.
pub trait Collectives {
    /// The number of this rank, below [`ranks`](Collectives::ranks).
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn ranks(&self) -> usize;

    /// Sends a message, and returns before the other rank has received it.
    ///
    /// # Errors
    /// [`GroupError::Ended`] if the other rank has left the group.
    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<(), GroupError>;

    /// Waits for the next message of a rank.
    ///
    /// # Errors
    /// [`GroupError::Ended`] if the other rank has left the group, [`GroupError::TimedOut`] if no message
    /// comes within the time-out.
    fn receive(&mut self, from: usize) -> Result<Vec<u8>, GroupError>;

    /// Leaves the group. Later calls are errors, here and on the ranks that wait for this one.
    fn leave(&mut self);

    /// The messages of all ranks, in the order of ranks.
    ///
    /// # Errors
    /// As [`receive`](Collectives::receive).
    fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let messages = vec![own.to_vec(); self.ranks()];
        self.all_to_all(messages)
    }

    /// Sends message `i` to rank `i`. Returns the messages that the ranks have sent to this one, in their
    /// order.
    ///
    /// # Errors
    /// As [`receive`](Collectives::receive), and [`GroupError::Messages`] unless there is a message for each
    /// rank.
    fn all_to_all(&mut self, messages: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, GroupError> {
        let (rank, ranks) = (self.rank(), self.ranks());
        if messages.len() != ranks {
            return Err(GroupError::Messages { given: messages.len(), ranks });
        }
        let mut own = Vec::new();
        for (to, message) in messages.into_iter().enumerate() {
            if to == rank {
                own = message;
            } else {
                self.send(to, message)?;
            }
        }
        (0..ranks)
            .map(|from| if from == rank { Ok(std::mem::take(&mut own)) } else { self.receive(from) })
            .collect()
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// As [`receive`](Collectives::receive).
    fn barrier(&mut self) -> Result<(), GroupError> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Part `rank` of the sum of all ranks' numbers, which are as many on each and a multiple of the ranks.
    /// Numbers are added in the order of ranks.
    ///
    /// # Errors
    /// As [`receive`](Collectives::receive), and [`GroupError::Size`] if ranks differ.
    fn reduce_scatter(&mut self, numbers: &[f32]) -> Result<Vec<f32>, GroupError> {
        let ranks = self.ranks();
        let each = numbers.len().div_ceil(ranks);
        let part =
            |rank: usize| &numbers[(rank * each).min(numbers.len())..((rank + 1) * each).min(numbers.len())];
        let messages = (0..ranks).map(|rank| bytemuck::cast_slice(part(rank)).to_vec()).collect();
        let mut sum = vec![0.0; part(self.rank()).len()];
        for (from, message) in self.all_to_all(messages)?.into_iter().enumerate() {
            add(&mut sum, &message, from)?;
        }
        Ok(sum)
    }

    /// Replaces numbers by their sums over all ranks, in equal bits on all of them.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Collectives::reduce_scatter).
    fn sum(&mut self, numbers: &mut [f32]) -> Result<(), GroupError> {
        let part = self.reduce_scatter(numbers)?;
        let parts = self.all_gather(bytemuck::cast_slice(&part))?.concat();
        numbers.fill(0.0);
        add(numbers, &parts, self.rank())
    }
}

/// Adds the numbers of a message.
pub(super) fn add(sums: &mut [f32], message: &[u8], from: usize) -> Result<(), GroupError> {
    expect(message, size_of_val(sums), from)?;
    for (sum, bytes) in sums.iter_mut().zip(message.as_chunks().0) {
        *sum += f32::from_ne_bytes(*bytes);
    }
    Ok(())
}

/// Refuses a message of another size.
pub(super) fn expect(message: &[u8], expected: usize, from: usize) -> Result<(), GroupError> {
    match message.len() {
        size if size == expected => Ok(()),
        size => Err(GroupError::Size { from, size, expected }),
    }
}
