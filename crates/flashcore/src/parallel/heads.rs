//! The exchange of rows against heads (DeepSpeed-Ulysses): each rank of a few gets all their rows of some
//! heads.

use std::ops::Range;

use problem::Element;

use super::rows::{RowTensor, from_bytes};
use super::{Collectives, GroupError, SequenceSplit};

/// Neighbouring ranks that exchange rows against heads.
pub(super) struct HeadExchange<'a> {
    split: &'a SequenceSplit,
    /// The split in which these ranks hold their rows together.
    pub joined: SequenceSplit,
    /// The number of the neighbours in the joined split, and this rank's among them.
    pub number: usize,
    member: usize,
    together: usize,
    /// Of each of them, the query heads and the KV heads.
    pub of_q: Vec<Range<usize>>,
    pub of_kv: Vec<Range<usize>>,
}

/// Why so many heads cannot be given to ranks, or none.
pub(super) fn lacks(heads: usize, heads_kv: usize, together: usize) -> Option<String> {
    if !heads.is_multiple_of(together) {
        return Some(format!("a divisor of {heads}, the heads of q"));
    }
    let fits = heads_kv.is_multiple_of(together) || together.is_multiple_of(heads_kv);
    (!fits).then(|| format!("a divisor or a multiple of {heads_kv}, the heads of k"))
}

impl<'a> HeadExchange<'a> {
    pub fn new(
        split: &'a SequenceSplit,
        rank: usize,
        together: usize,
        heads: [usize; 2],
    ) -> HeadExchange<'a> {
        let [heads_q, heads_kv] = heads;
        let (each, group) = (heads_q / together, heads_q / heads_kv);
        let of_q: Vec<_> = (0..together).map(|i| i * each..(i + 1) * each).collect();
        // Fewer KV heads than ranks are read by several ranks.
        let of_kv = of_q.iter().map(|of| of.start / group..(of.end - 1) / group + 1).collect();
        let joined = if together == 1 { split.clone() } else { split.joined(together) };
        HeadExchange {
            split,
            joined,
            number: rank / together,
            member: rank % together,
            together,
            of_q,
            of_kv,
        }
    }

    /// The heads of this rank.
    pub fn own(&self) -> [Range<usize>; 2] {
        [self.of_q[self.member].clone(), self.of_kv[self.member].clone()]
    }

    /// The group of the ranks that exchange heads.
    pub fn neighbours<'g>(&self, group: &'g mut dyn Collectives) -> RankSubset<'g> {
        let first = self.number * self.together;
        RankSubset { group, members: (first..first + self.together).collect(), rank: self.member }
    }

    /// The group of the ranks that have the heads of this one, and other rows.
    pub fn others<'g>(&self, group: &'g mut dyn Collectives) -> RankSubset<'g> {
        let members = (0..self.joined.ranks()).map(|number| number * self.together + self.member).collect();
        RankSubset { group, members, rank: self.number }
    }

    /// The rows of a member in its shard and in the joined one.
    fn places(&self, member: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        self.split.places(self.number * self.together + member).filter_map(|(here, there)| {
            let joined = self.joined.places(self.number).find(|(_, rows)| *rows == there)?;
            Some((here, joined.0))
        })
    }

    /// All rows of this rank's heads, of a shard with all heads.
    pub fn to_heads<T: Element>(
        &self,
        group: &mut dyn Collectives,
        x: RowTensor<T>,
        of: &[Range<usize>],
    ) -> Result<RowTensor<T>, GroupError> {
        if self.together == 1 {
            return Ok(x);
        }
        let used = self.places(self.member).map(|(here, _)| here.len()).sum();
        let message = |of: &Range<usize>| T::elements(x.part(0..used, of.clone()).all()).bytes().to_vec();
        let messages = self.neighbours(group).all_to_all(of.iter().map(message).collect())?;
        let extents = |rows| x.extents(rows, of[self.member].len());
        let mut joined = RowTensor::zeros(extents(self.joined.rows()));
        for (member, message) in messages.iter().enumerate() {
            let rows = self.places(member).map(|(here, _)| here.len()).sum();
            let part: Vec<T> = from_bytes(message, extents(rows).iter().product(), member)?;
            let width = extents(1).iter().product::<usize>();
            for (here, there) in self.places(member) {
                joined.slice_mut(there).copy_from_slice(&part[here.start * width..here.end * width]);
            }
        }
        Ok(joined)
    }

    /// This rank's rows of all heads, `[row, batch, head, dim]`, from all rows of each rank's heads. Heads
    /// that several ranks have are added. Padding is `padding`.
    pub fn to_rows(
        &self,
        group: &mut dyn Collectives,
        x: RowTensor<f32>,
        of: &[Range<usize>],
        padding: f32,
    ) -> Result<RowTensor<f32>, GroupError> {
        if self.together == 1 {
            return Ok(x);
        }
        let heads = of.last().map_or(0, |of| of.end);
        let message = |member: usize| {
            let rows = self.places(member).flat_map(|(_, there)| x.slice(there).to_vec());
            bytemuck::cast_slice(&rows.collect::<Vec<f32>>()).to_vec()
        };
        let messages = self.neighbours(group).all_to_all((0..self.together).map(message).collect())?;
        let used: usize = self.places(self.member).map(|(here, _)| here.len()).sum();
        let mut shard = RowTensor::filled(x.extents(self.split.rows(), heads), padding);
        shard.slice_mut(0..used).fill(0.0);
        for (member, message) in messages.iter().enumerate() {
            let elements = x.extents(used, of[member].len()).iter().product();
            shard.add(0..used, of[member].clone(), &from_bytes::<f32>(message, elements, member)?);
        }
        Ok(shard)
    }
}

/// Some ranks of a group, as a group of its own.
pub(super) struct RankSubset<'g> {
    group: &'g mut dyn Collectives,
    members: Vec<usize>,
    rank: usize,
}

impl Collectives for RankSubset<'_> {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.members.len()
    }

    fn send(&mut self, to: usize, message: Vec<u8>) -> Result<(), GroupError> {
        self.group.send(self.members[to], message)
    }

    fn receive(&mut self, from: usize) -> Result<Vec<u8>, GroupError> {
        self.group.receive(self.members[from])
    }

    fn leave(&mut self) {
        self.group.leave();
    }
}
