//! Attention of one sequence whose rows are sharded over the ranks of a group.

use cpu::Element;
use problem::Layout;

use super::agree::{SharedArguments, agree};
use super::call::{RankWork, scores};
use super::heads::{HeadExchange, lacks};
use super::plan::GlobalBand;
use super::rows::RowTensor;
use super::split::check_ranks;
use super::stages::{RankTensors, RowGradients, RowResult, backward, forward};
use super::{Collectives, SequenceSplit};
use crate::error::refused;
use crate::features::CallPlace;
use crate::{Attention, AttentionError, Gradients, Output, TensorView};

/// Which tensors ranks exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardSchedule {
    /// The one with the least predicted time ([`ShardedAttention::explain`]).
    #[default]
    Auto,
    /// Each rank receives the keys that its rows see, and computes them at once. With a window these are the
    /// keys near its rows alone.
    AllGather,
    /// As [`AllGather`](ShardSchedule::AllGather), by parts of the KV heads: one is sent while another one is
    /// computed.
    Sliced {
        /// The parts, a divisor of the KV heads.
        slices: usize,
    },
    /// Each rank receives the keys of one other rank at a time, which takes less memory.
    Ring,
    /// Each rank computes all rows of some heads.
    Ulysses,
    /// Each `together` neighbouring ranks exchange rows against heads among them, as in
    /// [`Ulysses`](ShardSchedule::Ulysses). The keys of their heads go around the ring of the ranks that have
    /// the same heads.
    UlyssesRing {
        /// The ranks that exchange heads, a divisor of all ranks.
        together: usize,
    },
}

impl ShardSchedule {
    /// The ranks that exchange rows against heads.
    pub(super) fn together(self, ranks: usize) -> usize {
        match self {
            ShardSchedule::Ulysses => ranks,
            ShardSchedule::UlyssesRing { together } => together,
            _ => 1,
        }
    }
}

/// A call of shards, made by [`Attention::sharded`].
#[derive(Clone, Debug)]
#[must_use = "nothing is computed until `run` or `backward`"]
pub struct ShardedAttention<'a, Q, K = Q, V = Q> {
    pub(super) call: Attention<'a, Q, K, V>,
    pub(super) split: &'a SequenceSplit,
    pub(super) schedule: ShardSchedule,
}

impl<'a, Q: Element, K: Element, V: Element> Attention<'a, Q, K, V> {
    /// The call as that of a rank, whose Q, K and V are its shards of one sequence or of packed documents.
    /// All ranks make it together, with equal options. Bands, programs, slopes, biases and masks see
    /// positions in the whole sequence: a bias has the shape that it has for all rows. Sinks and tables are
    /// equal on all ranks. Documents are stated by the split, not by [`lengths`](Attention::lengths).
    pub fn sharded(self, split: &'a SequenceSplit) -> ShardedAttention<'a, Q, K, V> {
        ShardedAttention { call: self, split, schedule: ShardSchedule::default() }
    }
}

impl<T: Element> ShardedAttention<'_, T> {
    /// The result of this rank's rows, as [`Attention::run`] returns it. Rows of padding have O = 0 and LSE =
    /// −∞.
    ///
    /// # Errors
    /// On every rank, when one of them refuses its arguments, when they differ, or when a rank does not
    /// answer. A rank that fails while it computes leaves the group.
    pub fn run(self, group: &mut dyn Collectives) -> Result<Output<T>, AttentionError> {
        self.run_as(group)
    }

    /// The gradients of a loss for this rank's rows of Q, K and V, from `out` and `lse`, which
    /// [`run`](ShardedAttention::run) has returned here, and `d_out`, the gradient of the loss by `out`. The
    /// gradients of sinks and tables are this rank's part of their sum over the group
    /// ([`Collectives::sum`]).
    ///
    /// # Errors
    /// As [`run`](ShardedAttention::run); and when `out`, `lse` or `d_out` does not fit the call.
    pub fn backward(
        self,
        group: &mut dyn Collectives,
        out: TensorView<'_, T>,
        lse: &[f32],
        d_out: TensorView<'_, T>,
    ) -> Result<Gradients<T>, AttentionError> {
        let zeros = self.checked().and_then(|whole| whole.zero_gradients(out, lse, d_out));
        let (decided, zeros) = self.agreed(group, zeros, "backward", T::DTYPE.name())?;
        let found = decided.differentiate(group, (out, lse, d_out), zeros);
        found.inspect_err(|_| group.leave())
    }

    fn differentiate(
        &self,
        group: &mut dyn Collectives,
        (out, lse, d_out): (TensorView<'_, T>, &[f32], TensorView<'_, T>),
        mut gradients: Gradients<T>,
    ) -> Result<Gradients<T>, AttentionError> {
        let heads = self.heads(group.rank());
        let tensors = self.tensors(group, &heads)?;
        let lse = TensorView::dense(lse, [out.shape[0], out.shape[1], out.shape[2], 1], Layout::Bhsd)?;
        let all = 0..out.shape[1];
        let given = RowGradients {
            out: heads.to_heads(group, RowTensor::of(&out, all.clone()), &heads.of_q)?,
            lse: heads.to_heads(group, RowTensor::of(&lse, all.clone()), &heads.of_q)?,
            d_out: heads.to_heads(group, RowTensor::of(&d_out, all), &heads.of_q)?,
        };
        let sums = backward(&self.work(&heads), &mut heads.others(group), &tensors, &given, &mut gradients)?;
        let dq = heads.to_rows(group, sums.dq, &heads.of_q, 0.0)?;
        let dk = heads.to_rows(group, sums.dk, &heads.of_kv, 0.0)?;
        let dv = heads.to_rows(group, sums.dv, &heads.of_kv, 0.0)?;
        (gradients.dq, gradients.dk, gradients.dv) = (narrowed(&dq), narrowed(&dk), narrowed(&dv));
        Ok(gradients)
    }
}

impl<'a, Q: Element, K: Element, V: Element> ShardedAttention<'a, Q, K, V> {
    /// Sets which tensors ranks exchange. Results of different schedules differ by roundoffs.
    pub fn schedule(mut self, schedule: ShardSchedule) -> Self {
        self.schedule = schedule;
        self
    }

    /// [`run`](ShardedAttention::run) with O of type `T`, as [`Attention::run_as`].
    ///
    /// # Errors
    /// As [`run`](ShardedAttention::run).
    pub fn run_as<T: Element>(self, group: &mut dyn Collectives) -> Result<Output<T>, AttentionError> {
        let [batch, heads_q, rows, _] = self.call.q.shape;
        let shape = [batch, heads_q, rows, self.call.v.shape[3]];
        let strides = Layout::Bhsd.strides(heads_q, rows, shape[3]);
        let checked =
            self.checked().and_then(|whole| whole.problem(T::DTYPE, shape, strides, true).map(|_| ()));
        let (decided, ()) = self.agreed(group, checked, "forward", T::DTYPE.name())?;
        let found = decided.attend::<T>(group).inspect_err(|_| group.leave())?;
        let lse = found.lse.dense(0..rows, 0..heads_q);
        Ok(Output { data: narrowed(&found.out), shape, lse })
    }

    fn attend<T: Element>(&self, group: &mut dyn Collectives) -> Result<RowResult, AttentionError> {
        let heads = self.heads(group.rank());
        let tensors = self.tensors(group, &heads)?;
        let found = forward::<Q, K, V, T>(&self.work(&heads), &mut heads.others(group), &tensors)?;
        let out = heads.to_rows(group, found.out, &heads.of_q, 0.0)?;
        let lse = heads.to_rows(group, found.lse, &heads.of_q, f32::NEG_INFINITY)?;
        Ok(RowResult { out, lse })
    }

    /// The call with its schedule, and what this rank has found in its arguments, if all ranks agree.
    fn agreed<R>(
        &self,
        group: &mut dyn Collectives,
        checked: Result<R, AttentionError>,
        pass: &str,
        out: &str,
    ) -> Result<(ShardedAttention<'a, Q, K, V>, R), AttentionError> {
        let own = check_ranks(self.split, group).and(checked).map(|found| (self.decided(), found));
        let arguments = match &own {
            Ok((decided, _)) => Ok(decided.arguments(pass, out)),
            Err(error) => Err(error.clone()),
        };
        agree(group, arguments)?;
        own
    }

    pub(super) fn heads(&self, rank: usize) -> HeadExchange<'_> {
        HeadExchange::new(
            self.split,
            rank,
            self.schedule.together(self.split.ranks()),
            [self.call.q.shape[1], self.call.k.shape[1]],
        )
    }

    /// This rank's tensors: its rows of all heads, or more rows of some heads.
    fn tensors(
        &self,
        group: &mut dyn Collectives,
        heads: &HeadExchange<'_>,
    ) -> Result<RankTensors<Q, K, V>, AttentionError> {
        let Attention { q, k, v, .. } = &self.call;
        Ok(RankTensors {
            q: heads.to_heads(group, RowTensor::of(q, 0..q.shape[1]), &heads.of_q)?,
            k: heads.to_heads(group, RowTensor::of(k, 0..k.shape[1]), &heads.of_kv)?,
            v: heads.to_heads(group, RowTensor::of(v, 0..v.shape[1]), &heads.of_kv)?,
        })
    }

    pub(super) fn work<'w>(&'w self, heads: &'w HeadExchange<'_>) -> RankWork<'w, Q, K, V> {
        let [heads_q, heads_kv] = heads.own();
        RankWork {
            options: &self.call,
            split: &heads.joined,
            rank: heads.number,
            band: self.band(),
            ring: matches!(self.schedule, ShardSchedule::Ring | ShardSchedule::UlyssesRing { .. }),
            slices: if let ShardSchedule::Sliced { slices } = self.schedule { slices } else { 1 },
            heads_q,
            heads_kv,
        }
    }

    pub(super) fn band(&self) -> GlobalBand {
        // A sequence sees itself, so that both corners are one.
        let (band, _) = self.call.bands.resolve(true);
        let features = &self.call.features;
        let programs = [&features.score_program, &features.mask_program];
        let positional = features.slopes.is_some()
            || features.bias.is_some()
            || features.mask.is_some()
            || programs.into_iter().any(Option::is_some);
        let bound = |keys: Option<u32>| keys.map(|keys| keys as usize);
        GlobalBand { before: bound(band.before), after: bound(band.after), positional }
    }

    /// The call with this rank's rows, whose programs and tables see the whole sequence. It checks all
    /// arguments when its problem is made.
    fn checked(&self) -> Result<Attention<'a, Q, K, V>, AttentionError> {
        let (call, split) = (&self.call, self.split);
        let ([batch, heads, rows, _], [_, heads_kv, rows_kv, _]) = (call.q.shape, call.k.shape);
        for (argument, of) in [("q", rows), ("k", rows_kv)] {
            if of != split.rows() {
                let expected = format!("{}, the rows of a shard of this split", split.rows());
                return Err(refused(argument, "number of rows", of, expected));
            }
        }
        if split.documents.len() > 2 && batch != 1 {
            return Err(refused("q", "batch", batch, "1: packed documents have no batch"));
        }
        if let Some((array, _)) = call.features.lengths.given() {
            return Err(refused(array, "use in a sharded call", "given", "none: the split states documents"));
        }
        if let Some((p, _)) = call.features.dropout {
            return Err(refused("dropout", "probability", p, "0 in a sharded call"));
        }
        if let Some((tensor, layout)) =
            call.features.scales.0.each().find(|(_, layout)| layout.rows.is_some())
        {
            let argument = problem::descale_name(tensor);
            let value = format!("{:?}", layout.rows);
            return Err(refused(argument, "rows of a block", value, "none: one factor for each KV head"));
        }
        let ranks = split.ranks();
        let together = self.schedule.together(ranks);
        if together == 0 || !ranks.is_multiple_of(together) {
            let expected = format!("a divisor of {ranks}, the ranks");
            return Err(refused("schedule", "number of ranks together", together, expected));
        }
        if let Some(expected) = lacks(heads, heads_kv, together) {
            return Err(refused("schedule", "number of ranks together", together, expected));
        }
        if let ShardSchedule::Sliced { slices } = self.schedule
            && (slices == 0 || !heads_kv.is_multiple_of(slices))
        {
            let expected = format!("a divisor of {heads_kv}, the heads of k");
            return Err(refused("schedule", "number of slices", slices, expected));
        }
        let mut whole = call.clone();
        whole.features.place = self.band().positional.then(|| CallPlace {
            scores: scores(call, split),
            first: [0; 4],
            length: split.length(),
        });
        Ok(whole)
    }

    /// The arguments that must be equal on all ranks. Contents of tensors and tables are not compared.
    fn arguments(&self, pass: &str, out: &str) -> SharedArguments {
        let Attention { q, k, v, score, features, tf32, .. } = &self.call;
        let tables: Vec<_> = features.tables.iter().map(|view| &view.table).collect();
        let shapes =
            [&features.bias, &features.mask].map(|view| view.as_ref().map(|view| &view.table.extents));
        let of_heads = features.of_heads.iter().map(|(argument, _, values)| (*argument, values.len()));
        let counts = (of_heads.collect::<Vec<_>>(), features.slopes.map(<[f32]>::len));
        let programs = (&features.score_program, &features.mask_program);
        let parameters = (&features.floats, &features.ints);
        vec![
            ("the pass", pass.to_owned()),
            ("the element types", [Q::DTYPE, K::DTYPE, V::DTYPE].map(|x| x.name()).join(", ") + " to " + out),
            ("the shape of q", format!("{:?}", q.shape)),
            ("the shape of k", format!("{:?}", k.shape)),
            ("the shape of v", format!("{:?}", v.shape)),
            ("the split", format!("{:?}", (&self.split.fragments, &self.split.documents))),
            ("the schedule", format!("{:?}", self.schedule)),
            ("the band", format!("{:?}", self.band())),
            ("the scale and the cap", format!("{score:?}, tf32: {tf32}")),
            ("the values of heads and slopes", format!("{counts:?}")),
            ("the programs", format!("{programs:?} {parameters:?}")),
            ("the tables", format!("{tables:?} {shapes:?}")),
            ("the descale factors", format!("{:?}", features.scales.0)),
        ]
    }
}

/// `[batch, head, row, dim]` of `[row, batch, head, dim]`, rounded.
fn narrowed<T: Element>(x: &RowTensor<f32>) -> Vec<T> {
    let dense = x.dense(0..x.rows(), 0..x.heads());
    let mut narrow = vec![T::from_f32(0.0); dense.len()];
    T::narrow_scaled(&dense, 1.0, &mut narrow);
    narrow
}
