//! One call of a rank: a part of the sharded call, as a call of its own.

use std::ops::Range;

use problem::{Band, Corner, Element, Operand, ScaleLayout};

use super::SequenceSplit;
use super::plan::{BandCall, GlobalBand};
use super::rows::RowTensor;
use crate::bands::Bands;
use crate::features::CallPlace;
use crate::{Attention, AttentionError, LengthValues, ScaleValues, attention};

/// The arguments that all calls of a rank share.
pub(super) struct RankWork<'a, Q, K, V> {
    /// The sharded call with its options. Its tensors are not read.
    pub options: &'a Attention<'a, Q, K, V>,
    /// The split over the ranks among which keys travel, and this rank's number among them.
    pub split: &'a SequenceSplit,
    pub rank: usize,
    pub band: GlobalBand,
    pub ring: bool,
    /// The parts into which the KV heads are cut, one of which is sent while another one is computed.
    pub slices: usize,
    /// The query heads and the KV heads that are computed here, of all.
    pub heads_q: Range<usize>,
    pub heads_kv: Range<usize>,
}

/// The keys and values of a stage.
pub(super) type KeyRows<K, V> = (RowTensor<K>, RowTensor<V>);

impl<Q: Element, K: Element, V: Element> RankWork<'_, Q, K, V> {
    /// The query heads that share a KV head.
    pub fn group(&self) -> usize {
        self.heads_q.len() / self.heads_kv.len()
    }

    /// The query heads of KV heads. All are counted from the first that is computed here.
    pub fn queries_of(&self, heads_kv: &Range<usize>) -> Range<usize> {
        heads_kv.start * self.group()..heads_kv.end * self.group()
    }

    /// Runs a call of a plan, of some KV heads: `q` has all heads, `keys` those alone.
    pub fn run<R>(
        &self,
        call: &BandCall,
        heads_kv: &Range<usize>,
        q: &RowTensor<Q>,
        (k, v): &KeyRows<K, V>,
        run: impl FnOnce(Attention<'_, Q, K, V>) -> Result<R, AttentionError>,
    ) -> Result<R, AttentionError> {
        let heads = self.queries_of(heads_kv);
        let views = (k.view(call.keys(), 0..heads_kv.len())?, v.view(call.keys(), 0..heads_kv.len())?);
        let mut part = attention(q.view(call.rows(), heads.clone())?, views.0, views.1);
        let whole = self.options;
        (part.tf32, part.device, part.score) = (whole.tf32, whole.device, whole.score);
        part.bands = bands(call);
        part.features = whole.features.clone();
        let (first, first_kv) = (self.heads_q.start + heads.start, self.heads_kv.start + heads_kv.start);
        // A sink takes part in each row once.
        let takes_part = |operand: Operand| operand != Operand::Sinks || call.first().own;
        part.features.of_heads.retain(|(_, operand, _)| takes_part(*operand));
        for (_, _, values) in &mut part.features.of_heads {
            *values = &values[first..first + heads.len()];
        }
        let kv = first_kv..first_kv + heads_kv.len();
        part.features.scales = whole.factors(kv);
        part.features.place = self.band.positional.then(|| self.place(call, first));
        let arrays = CallLengths::of(call);
        part.features.lengths = arrays.values();
        run(part)
    }

    fn place(&self, call: &BandCall, head: usize) -> CallPlace {
        let sequence = call.first();
        let [query, key] = sequence.positions;
        let ends = &self.split.documents[sequence.document..];
        let scores = scores(self.options, self.split);
        CallPlace { scores, first: [query, key, sequence.document, head], length: ends[1] - ends[0] }
    }
}

/// The extents of the whole scores: `[batch, heads_q, seq_q, seq_kv]`.
pub(super) fn scores<Q, K, V>(whole: &Attention<'_, Q, K, V>, split: &SequenceSplit) -> [usize; 4] {
    let [batch, heads, ..] = whole.q.shape;
    let documents = split.documents.len() - 1;
    let longest = split.documents.windows(2).map(|ends| ends[1] - ends[0]).max().unwrap_or(0);
    [if documents > 1 { documents } else { batch }, heads, longest, longest]
}

impl<'a, Q, K, V> Attention<'a, Q, K, V> {
    /// The descale factors of some KV heads.
    fn factors(&self, heads: Range<usize>) -> (problem::Scales, ScaleValues<'a>) {
        let (layouts, values) = self.features.scales;
        let batch = self.q.shape[0];
        let of = |layout: Option<ScaleLayout>, values: &'a [f32]| match layout {
            Some(layout) => {
                let at = |batch: usize, head: usize| layout.index(batch, head, 0);
                &values[at(0, heads.start)..at(batch - 1, heads.end - 1) + 1]
            }
            None => values,
        };
        let ScaleValues { q, k, v } = values;
        (layouts, ScaleValues { q: of(layouts.q, q), k: of(layouts.k, k), v: of(layouts.v, v) })
    }
}

fn bands(call: &BandCall) -> Bands {
    let bound = |keys: Option<usize>| keys.and_then(|keys| u32::try_from(keys).ok());
    let (before, after) = (bound(call.first().before), bound(call.first().after));
    let mut bands = Bands::FULL;
    bands.add(Band { corner: Corner::BottomRight, before, after }.aligned(Corner::BottomRight));
    bands
}

/// The lengths of a call's sequences; empty for one sequence.
#[derive(Default)]
struct CallLengths {
    cumulative_q: Vec<i32>,
    cumulative_kv: Vec<i32>,
    used_kv: Vec<i32>,
}

impl CallLengths {
    fn of(call: &BandCall) -> CallLengths {
        if call.sequences.len() == 1 {
            return CallLengths::default();
        }
        let (rows, keys) = (call.rows(), call.keys());
        let starts = |of: fn(&super::plan::SequenceCall) -> usize, from: usize, end: usize| {
            let starts = call.sequences.iter().map(of).chain([end]);
            starts.map(|start| (start - from) as i32).collect::<Vec<_>>()
        };
        let cumulative_kv = starts(|x| x.keys.start, keys.start, keys.end);
        let used: Vec<i32> = call.sequences.iter().map(|x| x.keys.len() as i32).collect();
        let gaps = cumulative_kv.windows(2).zip(&used).any(|(ends, &used)| ends[1] - ends[0] != used);
        CallLengths {
            cumulative_q: starts(|x| x.rows.start, rows.start, rows.end),
            cumulative_kv,
            used_kv: if gaps { used } else { Vec::new() },
        }
    }

    fn values(&self) -> LengthValues<'_> {
        let CallLengths { cumulative_q, cumulative_kv, used_kv } = self;
        LengthValues { cumulative_q, cumulative_kv, used_kv, ..LengthValues::default() }
    }
}
