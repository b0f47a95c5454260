//! The parameters of the kernel.

use attend::{KeyBand, Lengths, Softcap};
use problem::{Operand, OperandMap, Problem, Tensor};
use ptx::{Builder, F32, Global, R32, R64};

use super::DecodePlan;
use super::boxes::PageBoxes;
use crate::contract::Contract;
use crate::forward::contract::{declare_band, declare_head_strides, declare_softcap, factor_or_one};
use crate::forward::descale::{ScoreDescale, ValueDescale};
use crate::forward::lengths::{PageTable, declare_lengths};

/// A tensor's start, and its strides in bytes. K and V in pages have pages for batch entries.
#[derive(Clone, Copy)]
pub(super) struct TensorStart {
    pub start: Global,
    pub batch_bytes: R64,
    pub head_bytes: R64,
}

/// The kernel's parameters.
#[derive(Clone)]
pub(super) struct DecodeParams {
    pub tensors: OperandMap<TensorStart>,
    pub lse: Option<Global>,
    pub sinks: Option<Global>,
    pub batch: R32,
    pub heads_kv: R32,
    pub seq_q: R32,
    pub seq_kv: R32,
    pub lengths: Option<Lengths>,
    pub pages: Option<PageTable>,
    /// How TMA copies K and V, if it does.
    pub boxes: Option<[PageBoxes; 2]>,
    pub factor: F32,
    pub band: KeyBand,
    pub softcap: Option<Softcap>,
    pub score_descale: Option<ScoreDescale>,
    pub value_descale: Option<ValueDescale>,
    pub parts: Global,
    pub counters: Global,
    /// Parts for which a CTA has room, if keys are cut at fixed pieces.
    pub slots: Option<R32>,
}

impl DecodeParams {
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        problem: &Problem,
        (plan, ctas): (&DecodePlan, u32),
    ) -> DecodeParams {
        let read = Tensor::FORWARD.into_iter().filter(|&t| t != Tensor::V || !plan.views(problem));
        let starts: Vec<_> = read.map(|tensor| (tensor, c.tensor(k, tensor))).collect();
        let tensors: Vec<_> = starts
            .into_iter()
            .map(|(tensor, start)| {
                let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
                (tensor.into(), TensorStart { start, batch_bytes, head_bytes })
            })
            .collect();
        let [heads_kv, seq_q, seq_kv] =
            [("heads_kv", problem.heads_kv), ("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)]
                .map(|(name, value)| c.u32(k, name, value as u32));
        let lengths = declare_lengths(k, c, problem, [seq_q, seq_kv]);
        let [parts, counters] = plan.merge_bytes(problem, ctas);
        DecodeParams {
            tensors: tensors.into_iter().collect(),
            lse: c.operand(k, Operand::Lse),
            sinks: c.operand(k, Operand::Sinks),
            batch: match &lengths {
                Some(lengths) => lengths.batch,
                None => c.u32(k, "batch", problem.batch as u32),
            },
            heads_kv,
            seq_q,
            seq_kv,
            lengths,
            pages: PageTable::declare(k, c, problem),
            boxes: plan.tma.then(|| PageBoxes::declare(k, c, problem, plan)),
            factor: c.f32(k, "scale_log2e", factor_or_one(problem)),
            band: declare_band(k, c, problem),
            softcap: declare_softcap(k, c, problem, plan.tanh),
            score_descale: ScoreDescale::declare(k, c, problem),
            value_descale: ValueDescale::declare(k, c, problem),
            parts: c.scratch(k, parts),
            counters: c.counter(k, counters),
            slots: plan.slots(problem, ctas).map(|slots| c.u32(k, "slots", slots)),
        }
    }
}
