//! The schedules in which keys travel: all at once by slices of heads, or in steps around a ring.
//!
//! The keys of a stage are sent while those of the stage before are computed. Gradients of keys go back to
//! the ranks that hold the keys, which add them in the order of stages: equal calls give equal bits.

use std::ops::Range;

use problem::Element;

use super::call::{KeyRows, RankWork};
use super::plan::{KeyPlan, RowPiece, gather_plan, ring_plan};
use super::rows::{RowTensor, write_bytes};
use super::{Collectives, GroupError};
use crate::merge::nan_or_max;
use crate::{AttentionError, Gradients};

/// A part of the keys: a plan, for some KV heads.
pub(super) struct KeyStage {
    pub heads: Range<usize>,
    pub plan: KeyPlan,
    /// The rows of this rank's keys that others need, with the ranks that need them.
    pub sends: Vec<(usize, RowPiece)>,
}

/// The stages of a call. All ranks have equally many, so that messages arrive in the order in which they are
/// expected.
pub(super) fn stages_of<Q: Element, K: Element, V: Element>(work: &RankWork<'_, Q, K, V>) -> Vec<KeyStage> {
    let &RankWork { split, rank, band, slices, .. } = work;
    let (ranks, each) = (split.ranks(), work.heads_kv.len() / slices);
    let mut stages = Vec::new();
    for step in 0..if work.ring { ranks } else { 1 } {
        let of = |rank| match work.ring {
            true => ring_plan(split, rank, step, band),
            false => gather_plan(split, rank, band),
        };
        let peers = (0..ranks).filter(|&peer| peer != rank && (!work.ring || peer == (rank + step) % ranks));
        let needs = peers.flat_map(|peer| of(peer).pieces.into_iter().map(move |piece| (peer, piece)));
        let sends: Vec<_> = needs.filter(|(_, piece)| piece.rank == rank).collect();
        let plan = of(rank);
        stages.extend((0..slices).map(|slice| KeyStage {
            heads: slice * each..(slice + 1) * each,
            plan: plan.clone(),
            sends: sends.clone(),
        }));
    }
    stages
}

/// Tensors of one rank, `[row, batch, head, dim]`.
pub(super) struct RankTensors<Q, K, V> {
    pub q: RowTensor<Q>,
    pub k: RowTensor<K>,
    pub v: RowTensor<V>,
}

impl<Q: Element, K: Element, V: Element> RankTensors<Q, K, V> {
    /// Sends the rows of this rank's keys that others need in a stage.
    fn send_keys(&self, group: &mut dyn Collectives, stage: &KeyStage) -> Result<(), GroupError> {
        for (peer, piece) in &stage.sends {
            let of_k = self.k.part(piece.shard.clone(), stage.heads.clone());
            let of_v = self.v.part(piece.shard.clone(), stage.heads.clone());
            let (of_k, of_v) = (K::elements(of_k.all()), V::elements(of_v.all()));
            group.send(*peer, [of_k.bytes(), of_v.bytes()].concat())?;
        }
        Ok(())
    }

    /// The key buffer of a stage.
    fn keys(
        &self,
        group: &mut dyn Collectives,
        rank: usize,
        stage: &KeyStage,
    ) -> Result<KeyRows<K, V>, GroupError> {
        let KeyStage { heads, plan, .. } = stage;
        let mut k = RowTensor::zeros(self.k.extents(plan.rows, heads.len()));
        let mut v = RowTensor::zeros(self.v.extents(plan.rows, heads.len()));
        for piece in &plan.pieces {
            let (to_k, to_v) = (k.slice_mut(piece.in_buffer()), v.slice_mut(piece.in_buffer()));
            if piece.rank == rank {
                to_k.copy_from_slice(self.k.part(piece.shard.clone(), heads.clone()).all());
                to_v.copy_from_slice(self.v.part(piece.shard.clone(), heads.clone()).all());
            } else {
                let message = group.receive(piece.rank)?;
                let of_k = size_of_val(to_k).min(message.len());
                write_bytes(to_k, &message[..of_k], piece.rank)?;
                write_bytes(to_v, &message[of_k..], piece.rank)?;
            }
        }
        Ok((k, v))
    }
}

/// O of a rank's rows in f32 and the LSE, `[row, batch, head, dim]` with `dim = 1`.
pub(super) struct RowResult {
    pub out: RowTensor<f32>,
    pub lse: RowTensor<f32>,
}

impl RowResult {
    /// Merges the result of rows from `first` on and of query heads from `head` on over further keys.
    fn merge<T: Element>(&mut self, at: [usize; 2], out: &[T], lse: &[f32], heads: usize) {
        let mut lses = lse.iter();
        let total = &mut self.lse;
        self.out.each_row(at, out, heads, |sum, part, [row, batch, head]| {
            let lse = lses.next().copied().unwrap_or(f32::NEG_INFINITY);
            merge_row(sum, &mut total.row_mut(row, batch, head)[0], part, lse);
        });
    }
}

/// Merges the result of a row over further keys. Rows that saw no key there are not read.
fn merge_row<T: Element>(out: &mut [f32], lse: &mut f32, part: &[T], part_lse: f32) {
    if part_lse == f32::NEG_INFINITY {
        return;
    }
    if *lse == f32::NEG_INFINITY {
        out.iter_mut().zip(part).for_each(|(out, part)| *out = part.to_f32());
        *lse = part_lse;
        return;
    }
    let largest = nan_or_max(*lse, part_lse);
    let weight = |lse: f32| if lse == largest { 1.0 } else { (lse - largest).exp() };
    let (before, further) = (weight(*lse), weight(part_lse));
    let share = further / (before + further);
    out.iter_mut().zip(part).for_each(|(out, part)| *out += share * (part.to_f32() - *out));
    *lse = largest + (before + further).ln();
}

/// The result of this rank's rows. Calls return O in the type `T`.
pub(super) fn forward<Q: Element, K: Element, V: Element, T: Element>(
    work: &RankWork<'_, Q, K, V>,
    group: &mut dyn Collectives,
    tensors: &RankTensors<Q, K, V>,
) -> Result<RowResult, AttentionError> {
    let stages = stages_of(work);
    let [rows, batch, heads, dim] = tensors.v.extents(tensors.q.rows(), work.heads_q.len());
    let mut result = RowResult {
        out: RowTensor::zeros([rows, batch, heads, dim]),
        lse: RowTensor::filled([rows, batch, heads, 1], f32::NEG_INFINITY),
    };
    tensors.send_keys(group, &stages[0])?;
    for (i, stage) in stages.iter().enumerate() {
        if let Some(next) = stages.get(i + 1) {
            tensors.send_keys(group, next)?;
        }
        let keys = tensors.keys(group, work.rank, stage)?;
        for call in &stage.plan.calls {
            let part = work.run(call, &stage.heads, &tensors.q, &keys, |call| call.run_as::<T>())?;
            let heads = work.queries_of(&stage.heads);
            result.merge([call.rows().start, heads.start], &part.data, &part.lse, heads.len());
        }
    }
    Ok(result)
}

/// The result of the forward pass and the gradient of O, of a rank's rows.
pub(super) struct RowGradients<T> {
    pub out: RowTensor<T>,
    pub lse: RowTensor<f32>,
    pub d_out: RowTensor<T>,
}

/// The sums of a rank's gradients in f32: of its rows, and its part of those of sinks and tables.
pub(super) struct GradientSums {
    pub dq: RowTensor<f32>,
    pub dk: RowTensor<f32>,
    pub dv: RowTensor<f32>,
}

/// The gradients of this rank's rows. Its part of those of sinks and tables is added to `of_terms`.
pub(super) fn backward<T: Element>(
    work: &RankWork<'_, T, T, T>,
    group: &mut dyn Collectives,
    tensors: &RankTensors<T, T, T>,
    given: &RowGradients<T>,
    of_terms: &mut Gradients<T>,
) -> Result<GradientSums, AttentionError> {
    let stages = stages_of(work);
    let RankTensors { q, k, v } = tensors;
    let zeros = |x: &RowTensor<T>, heads: &Range<usize>| RowTensor::zeros(x.extents(x.rows(), heads.len()));
    let mut sums = GradientSums {
        dq: zeros(q, &work.heads_q),
        dk: zeros(k, &work.heads_kv),
        dv: zeros(v, &work.heads_kv),
    };
    tensors.send_keys(group, &stages[0])?;
    for (i, stage) in stages.iter().enumerate() {
        if let Some(next) = stages.get(i + 1) {
            tensors.send_keys(group, next)?;
        }
        let keys = tensors.keys(group, work.rank, stage)?;
        let of_keys = differentiate(work, stage, tensors, &keys, given, (&mut sums.dq, of_terms))?;
        if i > 0 {
            sums.receive(group, &stages[i - 1])?;
        }
        sums.give(group, work.rank, stage, &of_keys)?;
    }
    sums.receive(group, &stages[stages.len() - 1])?;
    Ok(sums)
}

/// The gradients of the keys of a stage. Those of queries, sinks and tables are added.
fn differentiate<T: Element>(
    work: &RankWork<'_, T, T, T>,
    stage: &KeyStage,
    tensors: &RankTensors<T, T, T>,
    keys: &KeyRows<T, T>,
    given: &RowGradients<T>,
    (dq, of_terms): (&mut RowTensor<f32>, &mut Gradients<T>),
) -> Result<KeyRows<f32, f32>, AttentionError> {
    let heads = work.queries_of(&stage.heads);
    let extents = |x: &RowTensor<T>| x.extents(x.rows(), stage.heads.len());
    let (mut dk, mut dv) = (RowTensor::zeros(extents(&keys.0)), RowTensor::zeros(extents(&keys.1)));
    for call in &stage.plan.calls {
        let (rows, first_key) = (call.rows(), call.keys().start);
        let found = work.run(call, &stage.heads, &tensors.q, keys, |call| {
            let (out, d_out) = (
                given.out.view(rows.clone(), heads.clone())?,
                given.d_out.view(rows.clone(), heads.clone())?,
            );
            call.backward(out, &given.lse.dense(rows.clone(), heads.clone()), d_out)
        })?;
        let add = |sum: &mut [f32], part: &[T], _: [usize; 3]| {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part.to_f32());
        };
        dq.each_row([rows.start, heads.start], &found.dq, heads.len(), add);
        dk.each_row([first_key, 0], &found.dk, stage.heads.len(), add);
        dv.each_row([first_key, 0], &found.dv, stage.heads.len(), add);
        let first = work.heads_q.start + heads.start;
        for (sum, part) in of_terms.d_sinks.iter_mut().skip(first).zip(&found.d_sinks) {
            *sum += part;
        }
        let tables = of_terms.d_tables.iter_mut().flatten().zip(found.d_tables.iter().flatten());
        tables.for_each(|(sum, part)| *sum += part);
    }
    Ok((dk, dv))
}

impl GradientSums {
    /// Adds the gradients of this rank's own keys of a stage, and sends those of others to them.
    fn give(
        &mut self,
        group: &mut dyn Collectives,
        rank: usize,
        stage: &KeyStage,
        (dk, dv): &KeyRows<f32, f32>,
    ) -> Result<(), GroupError> {
        for piece in &stage.plan.pieces {
            let (of_k, of_v) = (dk.slice(piece.in_buffer()), dv.slice(piece.in_buffer()));
            if piece.rank == rank {
                self.add(piece, stage, of_k, of_v);
            } else {
                let message = [bytemuck::cast_slice::<f32, u8>(of_k), bytemuck::cast_slice(of_v)].concat();
                group.send(piece.rank, message)?;
            }
        }
        Ok(())
    }

    /// Adds the gradients of this rank's keys that others have computed in a stage.
    fn receive(&mut self, group: &mut dyn Collectives, stage: &KeyStage) -> Result<(), GroupError> {
        for (peer, piece) in &stage.sends {
            let message = group.receive(*peer)?;
            let [of_k, of_v] = [&self.dk, &self.dv].map(|x| {
                let [rows, batch, heads, dim] = x.extents(piece.shard.len(), stage.heads.len());
                rows * batch * heads * dim
            });
            let mut parts = vec![0.0f32; of_k + of_v];
            write_bytes(&mut parts, &message, *peer)?;
            let (of_k, of_v) = parts.split_at(of_k);
            self.add(piece, stage, of_k, of_v);
        }
        Ok(())
    }

    fn add(&mut self, piece: &RowPiece, stage: &KeyStage, of_k: &[f32], of_v: &[f32]) {
        self.dk.add(piece.shard.clone(), stage.heads.clone(), of_k);
        self.dv.add(piece.shard.clone(), stage.heads.clone(), of_v);
    }
}
