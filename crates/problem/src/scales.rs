//! Descale factors of 8-bit inputs.

use serde::{Deserialize, Serialize};

use crate::{Problem, ProblemError, Tensor};

/// The descale factors of a problem's inputs. Element `x` of an input stands for `factor · x`.
///
/// Factors are f32 and operands of a call ([`Operand::Descale`](crate::Operand::Descale)). The product of a
/// query and a key is multiplied by both factors before the softmax scale, the cap and the score program.
/// Factors of queries and keys must be finite and not negative; otherwise the logits of that query or key are
/// NaN, and so are the rows that see the key. A factor of 0 makes the logits 0. The factor of a value may be
/// negative and must be finite; otherwise O is NaN in the rows that see the value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Scales {
    /// Factors of Q. `None` means 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub q: Option<ScaleLayout>,
    /// Factors of K.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub k: Option<ScaleLayout>,
    /// Factors of V.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub v: Option<ScaleLayout>,
}

/// Layout of the factors of one tensor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ScaleLayout {
    /// Rows that share a factor: 64 or 128. Row `i` of a sequence belongs to block `i / rows`. `None` means
    /// that all rows of a batch entry and KV head share a factor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u32>,
    /// Distance in elements from one batch entry to the next: 0 to 2^31 - 1 (0 broadcasts), or any number if
    /// there is one entry. The distances below have the same range.
    pub batch: i64,
    /// Elements from one **KV** head to the next, for Q too, as in FlashAttention-3: the query heads that
    /// share a KV head share a factor.
    pub head: i64,
    /// Elements from one block of rows to the next.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub block: i64,
}

fn is_zero(stride: &i64) -> bool {
    *stride == 0
}

impl ScaleLayout {
    /// One factor for the whole tensor.
    pub const TENSOR: ScaleLayout = ScaleLayout { rows: None, batch: 0, head: 0, block: 0 };

    /// Dense factors `[batch, heads_kv]`.
    pub const fn per_head(heads_kv: usize) -> ScaleLayout {
        ScaleLayout { rows: None, batch: heads_kv as i64, head: 1, block: 0 }
    }

    /// Dense factors `[batch, heads_kv, ⌈seq / rows⌉]`. [`Problem::check`] rejects `rows` other than 64 and
    /// 128.
    pub const fn per_block(heads_kv: usize, seq: usize, rows: u32) -> ScaleLayout {
        let blocks = if rows == 0 { 0 } else { seq.div_ceil(rows as usize) as i64 };
        let batch = (heads_kv as i64).saturating_mul(blocks);
        ScaleLayout { rows: Some(rows), batch, head: blocks, block: 1 }
    }

    /// The index of the factor that belongs to row `row` of a sequence. The indices must lie within the
    /// extents of a problem that [`Problem::check`] accepted, so that the index does not overflow.
    pub const fn index(self, batch: usize, head_kv: usize, row: usize) -> usize {
        let block = self.block_of(row);
        (batch as i64 * self.batch + head_kv as i64 * self.head + block as i64 * self.block) as usize
    }

    const fn block_of(self, row: usize) -> usize {
        let Some(rows) = self.rows else { return 0 };
        match row.checked_div(rows as usize) {
            Some(block) => block,
            None => 0,
        }
    }
}

impl Scales {
    /// The factors of a tensor.
    pub const fn of(&self, tensor: Tensor) -> Option<ScaleLayout> {
        match tensor {
            Tensor::Q => self.q,
            Tensor::K => self.k,
            Tensor::V => self.v,
            _ => None,
        }
    }

    /// The inputs that have factors, with the layout of the factors.
    pub fn each(&self) -> impl Iterator<Item = (Tensor, ScaleLayout)> + use<> {
        let all = [(Tensor::Q, self.q), (Tensor::K, self.k), (Tensor::V, self.v)];
        all.into_iter().filter_map(|(tensor, layout)| Some((tensor, layout?)))
    }

    /// Whether no input has factors.
    pub fn is_empty(&self) -> bool {
        *self == Scales::default()
    }

    /// The rows that share a factor of a tensor; `None` without factors per block of rows.
    pub fn rows(&self, tensor: Tensor) -> Option<u32> {
        self.of(tensor).and_then(|layout| layout.rows)
    }

    /// Whether any input has one factor per block of rows.
    pub fn are_per_block(&self) -> bool {
        self.each().any(|(_, layout)| layout.rows.is_some())
    }
}

/// The name of a tensor's factors in FlashAttention-3.
pub const fn descale_name(tensor: Tensor) -> &'static str {
    match tensor {
        Tensor::Q => "descale_q",
        Tensor::K => "descale_k",
        Tensor::V => "descale_v",
        _ => "descale_out",
    }
}

impl Problem {
    /// Number of elements from the first factor of a tensor to the last; 0 without factors, also if the
    /// tensor has no batch entry, no head, or, with factors per block, no row. `usize::MAX` where the number
    /// is larger, or a used stride is negative, which [`Problem::check`] rejects.
    pub fn scale_len(&self, tensor: Tensor) -> usize {
        let Some(layout) = self.scales.of(tensor) else { return 0 };
        let steps = self.steps(tensor, layout);
        if steps.iter().any(|&(extent, _)| extent == 0) {
            return 0;
        }
        let mut used = steps.into_iter().filter(|&(extent, _)| extent > 1);
        let len = used.try_fold(1usize, |len, (extent, stride)| {
            len.checked_add((extent - 1).checked_mul(usize::try_from(stride).ok()?)?)
        });
        len.unwrap_or(usize::MAX)
    }

    /// The positions of the factors of a tensor in their array, whose strides [`Problem::check`] has checked.
    pub fn scale_positions(&self, tensor: Tensor) -> impl Iterator<Item = usize> + use<> {
        let steps = self.scales.of(tensor).map_or([(0, 0); 3], |layout| self.steps(tensor, layout));
        let [batches, heads, blocks] =
            steps.map(|(extent, stride)| (0..extent).map(move |i| i as i64 * stride));
        let of_heads = move |first| heads.clone().map(move |head| first + head);
        let of_blocks = move |first| blocks.clone().map(move |block| (first + block) as usize);
        batches.flat_map(of_heads).flat_map(of_blocks)
    }

    /// The extents of the factors of a tensor (batch entries, KV heads, blocks of rows) with their strides.
    fn steps(&self, tensor: Tensor, layout: ScaleLayout) -> [(usize, i64); 3] {
        let seq = if tensor == Tensor::Q { self.seq_q } else { self.seq_kv };
        let blocks = match (layout.rows, seq) {
            (Some(_), 0) => 0,
            _ => layout.block_of(seq.max(1) - 1) + 1,
        };
        [(self.batch, layout.batch), (self.heads_kv, layout.head), (blocks, layout.block)]
    }

    /// The factor that belongs to a row of a sequence; 1 without factors. `factors` are those of the tensor,
    /// from the first to the last; `at` is the batch entry, the KV head and the row.
    pub fn descale(&self, factors: &[f32], tensor: Tensor, at: [usize; 3]) -> f32 {
        let [batch, head_kv, row] = at;
        self.scales.of(tensor).map_or(1.0, |layout| factors[layout.index(batch, head_kv, row)])
    }

    /// A factor of a tensor as kernels use it: NaN unless it is finite and, for Q and K, not negative.
    pub fn accepted_factor(tensor: Tensor, factor: f32) -> f32 {
        let fits = factor.is_finite() && (factor >= 0.0 || tensor == Tensor::V);
        if fits { factor } else { f32::NAN }
    }

    pub(crate) fn check_scales(&self) -> Result<(), ProblemError> {
        for (tensor, layout) in self.scales.each() {
            let refuse = |reason| Err(ProblemError::Scales { argument: descale_name(tensor), reason });
            if !self.dtypes.of(tensor).is_fp8() {
                return refuse("the tensor is not e4m3 or e5m2; expected no factors");
            }
            if !matches!(layout.rows, None | Some(64 | 128)) {
                return refuse("expected one factor per KV head, or per block of 64 or 128 rows");
            }
            // A stride of an extent of 1 reaches no other factor. NumPy and PyTorch give such strides any
            // value.
            let (steps, most) = (self.steps(tensor, layout), 1 << 31);
            if steps.iter().any(|(extent, stride)| *extent > 1 && !(0..most).contains(stride)) {
                return refuse("expected strides from 0 to 2^31 - 1");
            }
            if self.scale_len(tensor) > 1 << 58 {
                return refuse("expected strides with which all factors span at most 2^58 elements");
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Layout};

    #[test]
    fn factors_follow_their_strides() {
        let mut p = Problem::new(2, 8, 200, 64, DType::E4m3).with_heads_kv(4, Layout::Bhsd);
        assert_eq!((p.scale_len(Tensor::Q), p.check()), (0, Ok(())));
        p.scales.q = Some(ScaleLayout::TENSOR);
        p.scales.k = Some(ScaleLayout::per_head(4));
        p.scales.v = Some(ScaleLayout::per_block(4, 200, 64));
        assert_eq!([Tensor::Q, Tensor::K, Tensor::V].map(|t| p.scale_len(t)), [1, 8, 32]);
        assert_eq!(p.scales.v.unwrap().index(1, 2, 130), 16 + 8 + 2);
        p.check().unwrap();
        let positions = |p: &Problem, tensor| p.scale_positions(tensor).collect::<Vec<_>>();
        assert_eq!(positions(&p, Tensor::Q), [0; 8], "one factor for all heads");
        assert_eq!(positions(&p, Tensor::V), (0..32).collect::<Vec<_>>());
        let gaps = ScaleLayout { rows: None, batch: 100, head: 2, block: 0 };
        let strided = Problem { scales: Scales { k: Some(gaps), ..Scales::default() }, ..p.clone() };
        assert_eq!(positions(&strided, Tensor::K), [0, 2, 4, 6, 100, 102, 104, 106]);
        assert!(positions(&strided, Tensor::V).is_empty(), "no factors");
        let text = serde_json::to_string(&p).unwrap();
        assert_eq!(serde_json::from_str::<Problem>(&text).unwrap(), p);
        assert!(!serde_json::to_string(&Problem::mission()).unwrap().contains("scales"));
    }

    #[test]
    fn strides_of_one_factor_have_any_value() {
        let mut p = Problem::new(1, 2, 60, 64, DType::E4m3);
        let far = ScaleLayout { rows: Some(64), batch: -1, head: 1, block: 1 << 40 };
        p.scales.k = Some(far);
        assert_eq!((p.check(), p.scale_len(Tensor::K), far.index(0, 1, 59)), (Ok(()), 2, 1));
    }

    #[test]
    fn tensors_without_rows_have_no_block_with_a_factor() {
        let mut p = Problem::new(1, 2, 60, 64, DType::E4m3).with_seq_kv(0, Layout::Bhsd);
        p.scales.q = Some(ScaleLayout::per_block(2, 60, 64));
        p.scales.k = Some(ScaleLayout::per_block(2, 0, 64));
        p.scales.v = Some(ScaleLayout::per_head(2));
        let lengths = |p: &Problem| [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| p.scale_len(tensor));
        assert_eq!((p.check(), lengths(&p)), (Ok(()), [2, 0, 2]));
        assert_eq!(lengths(&Problem { batch: 0, ..p.clone() }), [0; 3]);
        assert_eq!(lengths(&Problem { heads_kv: 0, ..p }), [0; 3]);
    }

    #[test]
    fn wrong_layouts_are_named() {
        let refused = |change: fn(&mut Problem)| {
            let mut p = Problem::new(1, 2, 100, 64, DType::E4m3);
            change(&mut p);
            p.check().unwrap_err().to_string()
        };
        const OF: ScaleLayout = ScaleLayout::TENSOR;
        assert!(refused(|p| p.scales.k = Some(ScaleLayout { rows: Some(32), ..OF })).contains("64 or 128"));
        assert!(refused(|p| p.scales.k = Some(ScaleLayout { head: -1, ..OF })).contains("strides from 0"));
        assert!(refused(|p| p.scales.k = Some(ScaleLayout { head: 1 << 31, ..OF })).contains("2^31 - 1"));
        assert!(refused(|p| p.scales.q = Some(ScaleLayout::per_block(2, 100, 0))).contains("64 or 128"));
        assert!(
            refused(|p| p.scales.q = Some(ScaleLayout::per_block(1 << 40, 1 << 40, 64)))
                .contains("strides from 0 to 2^31 - 1")
        );
        let far = refused(|p| {
            (p.seq_kv, p.k.row, p.v.row) = (1 << 40, 0, 0);
            p.scales.k = Some(ScaleLayout { rows: Some(64), block: (1 << 31) - 1, ..OF });
        });
        assert!(far.contains("span at most 2^58 elements"), "{far}");
        let sixteen = refused(|p| {
            p.dtypes.v = DType::Bf16;
            p.scales.v = Some(OF);
        });
        assert!(sixteen.starts_with("invalid factors descale_v: the tensor is not e4m3"), "{sixteen}");
    }
}
