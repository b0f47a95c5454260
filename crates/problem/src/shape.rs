//! The attention problem with its shapes and strides.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::{
    Band, Corner, DType, DTypes, Dropout, GradientStrides, Invariant, Layout, Lengths, Pages, Pass, PassKind,
    ProblemError, ProgramError, Programs, Scales, Score, Storage, Strides, Table, Tensor,
};

/// One attention problem. Build it with [`Problem::new`], set the public fields, then call
/// [`Problem::check`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// Which outputs are computed.
    #[serde(default, skip_serializing_if = "Pass::is_default")]
    pub pass: Pass,
    /// Batch entries.
    pub batch: usize,
    /// Heads of Q and O.
    pub heads_q: usize,
    /// Heads of K and V; divides `heads_q`. Query head `h` reads key head `h / (heads_q / heads_kv)`.
    pub heads_kv: usize,
    /// Query positions.
    pub seq_q: usize,
    /// Key positions. With 0 keys, O = 0 and LSE = −∞.
    pub seq_kv: usize,
    /// Elements of a query or key row.
    pub head_dim: usize,
    /// Elements of a value or output row.
    pub head_dim_v: usize,
    /// Element types of the tensors. In files the field is called `dtype`.
    #[serde(rename = "dtype")]
    pub dtypes: DTypes,
    /// Descale factors of 8-bit inputs.
    #[serde(default, skip_serializing_if = "Scales::is_empty")]
    pub scales: Scales,
    /// Which keys a query sees, by position. In files the field is called `mask`.
    #[serde(rename = "mask")]
    pub band: Band,
    /// How a product of a query and a key becomes a logit.
    #[serde(flatten)]
    pub score: Score,
    /// The probability with which a normalised probability is replaced by 0 ([`Dropout`]); `None` for no
    /// dropout. The state of the generator is an operand of a call. The LSE is that without dropout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f32>,
    /// Sequence lengths that differ between batch entries.
    #[serde(default, skip_serializing_if = "Lengths::is_even")]
    pub lengths: Lengths,
    /// How K and V are stored. `seq_kv` is an upper bound if they lie in pages and have used lengths.
    #[serde(default, skip_serializing_if = "Storage::is_rows")]
    pub storage: Storage,
    /// Programs for the score and the mask.
    #[serde(flatten)]
    pub programs: Programs,
    /// Strides of Q.
    pub q: Strides,
    /// Strides of K.
    pub k: Strides,
    /// Strides of V.
    pub v: Strides,
    /// Whether V is a view of K, as in latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the
    /// first `head_dim_v` elements of each row of K are the row of V, and V has the strides of K. The
    /// operands are two all the same; a kernel may read V's elements from K.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub v_in_k: bool,
    /// Strides of O.
    pub out: Strides,
    /// Strides of the gradients, which the backward pass has.
    #[serde(default, skip_serializing_if = "GradientStrides::is_default")]
    pub gradients: GradientStrides,
}

impl Problem {
    /// A self-attention problem without mask, with dense `[batch, head, sequence, dim]` tensors. If `dtypes`
    /// is one [`DType`], it is the type of the inputs, and O has the type of [`DTypes::from`].
    pub fn new(
        batch: usize,
        heads: usize,
        seq: usize,
        head_dim: usize,
        dtypes: impl Into<DTypes>,
    ) -> Problem {
        let strides = Layout::Bhsd.strides(heads, seq, head_dim);
        Problem {
            pass: Pass::default(),
            batch,
            heads_q: heads,
            heads_kv: heads,
            seq_q: seq,
            seq_kv: seq,
            head_dim,
            head_dim_v: head_dim,
            dtypes: dtypes.into(),
            scales: Scales::default(),
            band: Band::FULL,
            score: Score::default(),
            dropout: None,
            lengths: Lengths::EVEN,
            storage: Storage::Rows,
            programs: Programs::default(),
            q: strides,
            k: strides,
            v: strides,
            v_in_k: false,
            out: strides,
            gradients: GradientStrides::default(),
        }
    }

    /// The reference problem: B=1, H=8, S=512, D=64, f16, no mask.
    pub fn mission() -> Problem {
        Problem::new(1, 8, 512, 64, DType::F16)
    }

    /// Replaces the element types.
    pub fn with_dtypes(mut self, dtypes: DTypes) -> Problem {
        self.dtypes = dtypes;
        self
    }

    /// Replaces the band.
    pub fn with_band(mut self, band: Band) -> Problem {
        self.band = band;
        self
    }

    /// Sets the cap on the logits.
    pub fn with_softcap(mut self, softcap: f32) -> Problem {
        self.score.softcap = Some(softcap);
        self
    }

    /// Sets whether the LSE is returned.
    pub fn with_lse(mut self, lse: bool) -> Problem {
        self.pass = match self.pass {
            Pass::Forward { continues, invariant, .. } => Pass::Forward { lse, continues, invariant },
            Pass::Backward { .. } => Pass::forward(lse),
        };
        self
    }

    /// Sets on what the bits of a row of O and of the LSE must not depend.
    pub fn with_invariant(mut self, invariant: impl Into<Option<Invariant>>) -> Problem {
        self.pass = match self.pass {
            Pass::Forward { lse, continues, .. } => {
                Pass::Forward { lse, continues, invariant: invariant.into() }
            }
            Pass::Backward { .. } => self.pass,
        };
        self
    }

    /// Replaces the pass.
    pub fn with_pass(mut self, pass: Pass) -> Problem {
        self.pass = pass;
        self
    }

    /// Sets the number of K/V heads to `heads_kv`. All tensors become dense in `layout`.
    pub fn with_heads_kv(mut self, heads_kv: usize, layout: Layout) -> Problem {
        self.heads_kv = heads_kv;
        self.with_layout(layout)
    }

    /// Sets the number of keys to `seq_kv`. All tensors become dense in `layout`.
    pub fn with_seq_kv(mut self, seq_kv: usize, layout: Layout) -> Problem {
        self.seq_kv = seq_kv;
        self.with_layout(layout)
    }

    /// Makes all tensors dense in `layout`.
    pub fn with_layout(mut self, layout: Layout) -> Problem {
        self.q = layout.strides(self.heads_q, self.seq_q, self.head_dim);
        self.k = layout.strides(self.heads_kv, self.seq_kv, self.head_dim);
        self.v = layout.strides(self.heads_kv, self.seq_kv, self.v_columns());
        self.out = layout.strides(self.heads_q, self.seq_q, self.head_dim_v);
        self.gradients = GradientStrides::default();
        self
    }

    /// Makes V the first `head_dim_v` columns of K.
    pub fn with_v_in_k(mut self, head_dim_v: usize) -> Problem {
        (self.head_dim_v, self.v, self.v_in_k) = (head_dim_v, self.k, true);
        self.out = Layout::Bshd.strides(self.heads_q, self.extents(Tensor::Out)[2], head_dim_v);
        self
    }

    /// Elements of a dense row of V: those of K, if V is a view of K.
    pub(crate) const fn v_columns(&self) -> usize {
        if self.v_in_k { self.head_dim } else { self.head_dim_v }
    }

    /// The factor on Q Kᵀ, with the default `1/√head_dim` resolved.
    pub fn softmax_scale(&self) -> f32 {
        self.score.scale.unwrap_or_else(|| (1.0 / (self.head_dim as f64).sqrt()) as f32)
    }

    /// Query heads per K/V head. Returns 1 when `heads_kv` is 0; [`Problem::check`] rejects that.
    pub const fn group_size(&self) -> usize {
        match self.heads_q.checked_div(self.heads_kv) {
            Some(heads) => heads,
            None => 1,
        }
    }

    /// Extents `[batch, heads, rows, dim]` of a tensor. A packed tensor has batch extent 1. K and V in pages
    /// have the pages in place of batch entries.
    pub const fn extents(&self, tensor: Tensor) -> [usize; 4] {
        let [heads, dim] = match tensor {
            Tensor::Q | Tensor::Dq => [self.heads_q, self.head_dim],
            Tensor::K | Tensor::Dk => [self.heads_kv, self.head_dim],
            Tensor::V | Tensor::Dv => [self.heads_kv, self.head_dim_v],
            Tensor::Out | Tensor::DOut => [self.heads_q, self.head_dim_v],
        };
        if let (Tensor::K | Tensor::V, Storage::Pages(Pages { rows, count, .. })) = (tensor, self.storage) {
            return [count, heads, rows, dim];
        }
        let (packed, seq) = if tensor.is_of_keys() {
            (self.lengths.kv.packed, self.seq_kv)
        } else {
            (self.lengths.q.packed, self.seq_q)
        };
        match packed {
            None => [self.batch, heads, seq, dim],
            Some(rows) => [1, heads, rows, dim],
        }
    }

    /// Number of elements of the LSE: `[batch][head][row]`, or `[head][row]` for packed queries. `usize::MAX`
    /// where the number is larger, which [`Problem::check`] rejects.
    pub const fn lse_len(&self) -> usize {
        let [batch, heads, rows, _] = self.extents(Tensor::Q);
        batch.saturating_mul(heads).saturating_mul(rows)
    }

    /// Strides of a tensor.
    pub const fn strides(&self, tensor: Tensor) -> Strides {
        let GradientStrides { d_out, dq, dk, dv } = self.gradients;
        let (of_gradient, strides) = match tensor {
            Tensor::Q => (None, self.q),
            Tensor::K => (None, self.k),
            Tensor::V => (None, self.v),
            Tensor::Out => (None, self.out),
            Tensor::DOut => (d_out, self.out),
            Tensor::Dq => (dq, self.q),
            Tensor::Dk => (dk, self.k),
            Tensor::Dv => (dv, self.v),
        };
        match of_gradient {
            Some(strides) => strides,
            None => strides,
        }
    }

    /// Sets the strides of a tensor. Gradients without strides of their own follow.
    pub const fn set_strides(&mut self, tensor: Tensor, strides: Strides) {
        match tensor {
            Tensor::Q => self.q = strides,
            Tensor::K => self.k = strides,
            Tensor::V => self.v = strides,
            Tensor::Out => self.out = strides,
            Tensor::DOut => self.gradients.d_out = Some(strides),
            Tensor::Dq => self.gradients.dq = Some(strides),
            Tensor::Dk => self.gradients.dk = Some(strides),
            Tensor::Dv => self.gradients.dv = Some(strides),
        }
    }

    /// The tensors of the pass.
    pub const fn tensors(&self) -> &'static [Tensor] {
        Tensor::of_pass(self.pass.kind())
    }

    /// The number of elements of a buffer that holds the tensor, and the index of element (0, 0, 0, 0) in
    /// that buffer. The index is not 0 when a stride is negative. `None` when the span exceeds 64-bit byte
    /// offsets.
    pub fn span(&self, tensor: Tensor) -> Option<(usize, usize)> {
        let [b, h, s, d] = self.extents(tensor);
        if b == 0 || h == 0 || s == 0 || d == 0 {
            return Some((0, 0));
        }
        let st = self.strides(tensor);
        let (mut low, mut high) = (0i128, d as i128 - 1);
        for (extent, stride) in [(b, st.batch), (h, st.head), (s, st.row)] {
            let reach = (extent as i128 - 1).checked_mul(stride as i128)?;
            if reach < 0 { low += reach } else { high += reach }
        }
        let elements = high - low + 1;
        // Byte offsets must fit in 64 bits too.
        (elements <= (i64::MAX / 8) as i128).then_some((elements as usize, (-low) as usize))
    }

    /// Whether there is nothing to compute: no sequence, no query head or no query row.
    pub fn is_empty(&self) -> bool {
        self.batch == 0 || self.heads_q == 0 || self.seq_q == 0 || self.lengths.q.packed == Some(0)
    }

    /// If the problem is empty, the same problem with an extent of 1 in place of each extent of 0 that makes
    /// it empty: it is valid or invalid for the same reasons. Otherwise the problem itself.
    pub fn with_a_row(&self) -> Cow<'_, Problem> {
        if !self.is_empty() {
            return Cow::Borrowed(self);
        }
        let (heads_q, heads_kv) = if self.heads_q == 0 { (1, 1) } else { (self.heads_q, self.heads_kv) };
        let mut lengths = self.lengths;
        lengths.q.packed = lengths.q.packed.map(|rows| rows.max(1));
        let mut with_a_row = Problem {
            lengths,
            batch: self.batch.max(1),
            heads_q,
            heads_kv,
            seq_q: self.seq_q.max(1),
            programs: self.programs.with_one_element(),
            ..self.clone()
        };
        // Strides of outputs without elements may be any.
        let kind = self.pass.kind();
        let outputs = self.tensors().iter().filter(|tensor| tensor.is_output(kind));
        for &tensor in outputs.filter(|&&tensor| self.extents(tensor).contains(&0)) {
            let [_, heads, rows, dim] = with_a_row.extents(tensor);
            with_a_row.set_strides(tensor, Layout::Bhsd.strides(heads, rows, dim));
        }
        Cow::Owned(with_a_row)
    }

    /// An equivalent problem in the canonical form that plans and kernels take.
    ///
    /// - Bounds that the mask program states become bounds of the band.
    /// - Bounds of the band that exclude no key are dropped.
    /// - A top-left band over equal lengths is aligned to the bottom right.
    /// - With a top-left causal bound, the keys after the last visible key are cut off. They stay when the
    ///   row stride of K or V is negative, because the last row is then the first one in the buffer, and the
    ///   remaining rows must keep their place in memory. They also stay with programs, which may read the
    ///   number of keys, and in the backward pass, which writes their gradients.
    pub fn canonical(&self) -> Cow<'_, Problem> {
        if self.programs.mask.is_some() {
            let (band, mask) = self.programs.split_band(self);
            if band != self.band {
                let programs = Programs { mask, ..self.programs.clone() };
                return Cow::Owned(Problem { band, programs, ..self.clone() }.canonical().into_owned());
            }
        }
        if !self.lengths.is_even() {
            let band = self.band.simplified_up_to(self.seq_q, self.seq_kv);
            return if band == self.band {
                Cow::Borrowed(self)
            } else {
                Cow::Owned(Problem { band, ..self.clone() })
            };
        }
        let band = self.band.simplified(self.seq_q, self.seq_kv);
        let forwards = self.k.row >= 0 && self.v.row >= 0;
        let unread = forwards && self.programs.is_empty() && !self.pass.is_backward();
        let cut = band.after == Some(0) && self.seq_q < self.seq_kv && unread;
        let (band, seq_kv) = match band.corner {
            Corner::TopLeft if self.seq_q == self.seq_kv || cut => {
                (band.aligned(Corner::BottomRight), if cut { self.seq_q } else { self.seq_kv })
            }
            _ => (band, self.seq_kv),
        };
        if (band, seq_kv) == (self.band, self.seq_kv) {
            return Cow::Borrowed(self);
        }
        Cow::Owned(Problem { band, seq_kv, ..self.clone() })
    }

    /// Floating-point operations of the matrix products: two in the forward pass (S, O), five in the backward
    /// pass (S, dP, dV, dQ, dK). Masked scores are not counted. A causal square counts as half, which is the
    /// convention of FlashAttention's benchmarks.
    pub fn flops(&self) -> f64 {
        let (rows, keys) = (self.seq_q, self.seq_kv);
        let scores: f64 = match self.band.simplified(rows, keys) {
            Band::FULL => rows as f64 * keys as f64,
            Band::CAUSAL if rows == keys => rows as f64 * keys as f64 / 2.0,
            Band::CAUSAL_TOP_LEFT if rows <= keys => rows as f64 * rows as f64 / 2.0,
            band => (0..rows).map(|row| band.keys(row, rows, keys).len() as f64).sum(),
        };
        let (dim, dim_v) = (self.head_dim as f64, self.head_dim_v as f64);
        let dims = if self.pass.is_backward() { 3.0 * dim + 2.0 * dim_v } else { dim + dim_v };
        2.0 * dims * scores * self.batch as f64 * self.heads_q as f64
    }

    /// The minimum memory traffic in bytes: each input is read once, except keys and values that no row sees,
    /// and a V that is a view of K.
    /// Each output is written once.
    pub fn bytes(&self) -> f64 {
        let shown = self.band.keys_of_all_rows(self.seq_q, self.seq_kv).len();
        let rows_of = |tensor| match tensor {
            Tensor::K | Tensor::V => shown,
            Tensor::Dk | Tensor::Dv => self.seq_kv,
            _ => self.seq_q,
        };
        let of = |tensor| {
            let [batch, heads, _, dim] = self.extents(tensor);
            let in_pages = tensor.is_of_keys() && !self.storage.is_rows();
            let batch = if in_pages { self.batch } else { batch };
            let elements: f64 = [batch, heads, rows_of(tensor), dim].iter().map(|&n| n as f64).product();
            elements * self.dtypes.of(tensor).bytes() as f64
        };
        let apart = |tensor: &&Tensor| **tensor != Tensor::V || !self.v_in_k;
        self.tensors().iter().filter(apart).map(|&tensor| of(tensor)).sum()
    }

    /// Rejects a problem that no implementation supports.
    ///
    /// # Errors
    /// A [`ProblemError`] that names the argument, its value and what is accepted.
    pub fn check(&self) -> Result<(), ProblemError> {
        for (argument, value) in [
            ("batch", self.batch),
            ("heads_q", self.heads_q),
            ("heads_kv", self.heads_kv),
            ("seq_q", self.seq_q),
            ("head_dim", self.head_dim),
            ("head_dim_v", self.head_dim_v),
        ] {
            if value == 0 {
                return Err(ProblemError::Zero { argument });
            }
        }
        if !self.heads_q.is_multiple_of(self.heads_kv) {
            return Err(ProblemError::HeadsNotGrouped { heads_q: self.heads_q, heads_kv: self.heads_kv });
        }
        // Kernels scale scores in units of log2.
        if !(self.softmax_scale() * std::f32::consts::LOG2_E).is_finite() {
            return Err(ProblemError::Scale { value: self.softmax_scale().to_string() });
        }
        self.score.check(self.softmax_scale())?;
        Dropout::check(self.dropout)?;
        self.dtypes.check()?;
        self.check_scales()?;
        self.check_lengths()?;
        self.check_storage()?;
        self.check_view()?;
        self.programs.check(self)?;
        self.check_pass()?;
        for &tensor in self.tensors() {
            let [b, h, s, d] = self.extents(tensor);
            let dense = [b, h, s, d].iter().try_fold(1i64, |n, &x| n.checked_mul(i64::try_from(x).ok()?));
            if dense.is_none_or(|n| n > i64::MAX / 8) || self.span(tensor).is_none() {
                return Err(ProblemError::TooLarge { tensor: tensor.name() });
            }
            if tensor.is_output(self.pass.kind()) {
                self.check_output_rows(tensor)?;
            }
        }
        Ok(())
    }

    /// Rejects a problem of another pass.
    ///
    /// # Errors
    /// [`ProblemError::Pass`].
    pub fn expect_pass(&self, expected: PassKind) -> Result<(), ProblemError> {
        let pass = self.pass.kind();
        if pass == expected { Ok(()) } else { Err(ProblemError::Pass { pass, expected }) }
    }

    /// Rejects a backward pass without derivatives.
    fn check_pass(&self) -> Result<(), ProblemError> {
        let refuse = |reason| Err(ProblemError::Backward { reason });
        let Pass::Backward { wants, .. } = self.pass else { return Ok(()) };
        if self.dtypes.has_fp8() {
            return refuse("8-bit inputs have no gradients; expected f16, bf16 or f32");
        }
        if !self.storage.is_rows() {
            return refuse("keys and values in pages have no gradients; expected strided rows");
        }
        self.score.check_backward(wants)?;
        if let Some(score) = &self.programs.score {
            let no_derivative =
                |error: ProgramError| ProblemError::Program { what: "score", reason: error.to_string() };
            score.derivative().map_err(no_derivative)?;
        }
        for i in (0..u8::BITS as u8).filter(|&i| wants.table(i)) {
            let is_float = |table: &Table| table.dtype.is_float();
            if !self.programs.tables.get(usize::from(i)).is_some_and(is_float) {
                return refuse("a gradient is wanted of a table that is missing or holds integers");
            }
        }
        Ok(())
    }

    /// Rejects a V that cannot be a view of K.
    fn check_view(&self) -> Result<(), ProblemError> {
        let refuse = |reason| Err(ProblemError::View { reason });
        match self.v_in_k {
            true if self.head_dim_v > self.head_dim => refuse("expected a head_dim_v of at most head_dim"),
            true if self.v != self.k => refuse("expected the strides of k for v"),
            true if self.dtypes.v != self.dtypes.k => refuse("expected the element type of k for v"),
            _ => Ok(()),
        }
    }

    fn check_lengths(&self) -> Result<(), ProblemError> {
        let Lengths { q, kv, .. } = self.lengths;
        let refuse = |argument, reason| Err(ProblemError::Side { argument, reason });
        for (argument, side, seq) in [("q", q, self.seq_q), ("kv", kv, self.seq_kv)] {
            // Arrays of lengths hold 32-bit integers.
            if !side.is_even() && seq.max(side.packed.unwrap_or(0)) > i32::MAX as usize {
                return refuse(argument, "expected at most 2^31 - 1 rows");
            }
        }
        if q.packed == Some(0) {
            return refuse("q", "the packed tensor has no row; expected 1 or more");
        }
        if self.lengths.left_padded && self.seq_kv > i32::MAX as usize {
            return refuse("kv", "expected at most 2^31 - 1 rows");
        }
        Ok(())
    }

    /// Sorts the strides of an output with elements by size. Each stride must exceed the span of the smaller
    /// ones.
    fn check_output_rows(&self, tensor: Tensor) -> Result<(), ProblemError> {
        let extents @ [b, h, s, d] = self.extents(tensor);
        if extents.contains(&0) {
            return Ok(());
        }
        let Strides { batch, head, row } = self.strides(tensor);
        let mut dims = [(b, batch), (h, head), (s, row)];
        dims.sort_by_key(|&(_, stride)| stride.unsigned_abs());
        let mut reach = d as u128;
        for (extent, stride) in dims.into_iter().filter(|&(extent, _)| extent > 1) {
            if u128::from(stride.unsigned_abs()) < reach {
                let strides = format!("batch {batch}, head {head}, row {row}");
                return Err(ProblemError::OverlappingOutput { tensor: tensor.name(), strides });
            }
            reach += (extent as u128 - 1) * u128::from(stride.unsigned_abs());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ElementType, Table};

    #[test]
    fn empty_problems_get_a_row() {
        for change in [
            (|p: &mut Problem| p.batch = 0) as fn(&mut Problem),
            |p| p.seq_q = 0,
            |p| (p.heads_q, p.heads_kv) = (0, 0),
            |p| p.lengths.q.packed = Some(0),
            |p| {
                (p.heads_q, p.lengths.q.packed, p.out.row) = (0, Some(5), 0);
            },
            |p| {
                p.heads_q = 0;
                p.programs.score = Some("s + t0[h]".parse().unwrap());
                p.programs.tables = vec![Table::dense(ElementType::F32, &[0])];
            },
        ] {
            let mut problem = Problem::new(2, 4, 8, 16, DType::F16);
            change(&mut problem);
            assert!(problem.is_empty());
            let with_a_row = problem.with_a_row();
            assert!(!with_a_row.is_empty());
            assert_eq!(with_a_row.check(), Ok(()));
        }
        let mut ungrouped = Problem::new(2, 4, 8, 16, DType::F16);
        ungrouped.heads_kv = 0;
        assert!(!ungrouped.is_empty() && ungrouped.with_a_row().check().is_err());
    }

    #[test]
    fn mission_costs() {
        let p = Problem::mission();
        p.check().unwrap();
        assert_eq!(p.flops(), 4.0 * 8.0 * 512.0 * 512.0 * 64.0);
        assert_eq!(p.bytes(), 4.0 * 8.0 * 512.0 * 64.0 * 2.0);
        assert_eq!(p.softmax_scale(), 0.125);
    }

    /// The scores of a causal rectangle are counted one by one, those of a causal square as half. Keys that
    /// no row sees are not counted.
    #[test]
    fn masked_work_is_not_counted() {
        let of = |band, seq_q, seq_kv| {
            let p =
                Problem::new(1, 1, seq_q, 8, DType::F16).with_seq_kv(seq_kv, Layout::Bhsd).with_band(band);
            (p.flops() / 32.0, p.bytes() / 16.0)
        };
        assert_eq!(of(Band::CAUSAL_TOP_LEFT, 4, 4), of(Band::CAUSAL, 4, 4));
        assert_eq!(of(Band::CAUSAL_TOP_LEFT, 4, 9), of(Band::CAUSAL, 4, 4));
        assert_eq!(of(Band::CAUSAL_TOP_LEFT, 5, 2), (9.0, 14.0));
        assert_eq!(of(Band::CAUSAL, 5, 2), (3.0, 14.0));
        assert_eq!(of(Band::CAUSAL, 2, 5), (9.0, 14.0));
        assert_eq!(of(Band::CAUSAL_TOP_LEFT, 3, 0), (0.0, 6.0));
    }

    #[test]
    fn the_canonical_problem_computes_the_same() {
        let window = Band::window(2, 0);
        let bands =
            Band::NAMED.into_iter().chain([window, window.aligned(Corner::TopLeft), Band::window(1, 20)]);
        let bands: Vec<Band> = bands.collect();
        for (seq_q, seq_kv) in [(4, 4), (4, 9), (9, 4), (3, 0), (1, 7)] {
            for (band, backwards) in bands.iter().flat_map(|&band| [(band, false), (band, true)]) {
                let mut p = Problem::new(2, 4, seq_q, 8, DType::F16)
                    .with_seq_kv(seq_kv, Layout::Bshd)
                    .with_band(band);
                p.v.row *= if backwards { -1 } else { 1 };
                let same = p.canonical();
                assert_eq!(same.canonical().as_ref(), same.as_ref());
                for row in 0..seq_q {
                    let keys = |p: &Problem| p.band.keys(row, p.seq_q, p.seq_kv);
                    let (ours, theirs) = (keys(&p), keys(&same));
                    assert!(
                        ours == theirs || ours.is_empty() && theirs.is_empty(),
                        "{band} {seq_q} {seq_kv}"
                    );
                }
                let stays = seq_q > seq_kv || seq_q < seq_kv && backwards;
                let top_left = band == Band::CAUSAL_TOP_LEFT && stays;
                assert!(!band.is_causal() || (same.band == Band::CAUSAL_TOP_LEFT) == top_left);
                let origins = |p: &Problem| Tensor::FORWARD.map(|tensor| p.span(tensor).unwrap().1);
                assert_eq!(origins(&p), origins(&same));
            }
        }
    }

    #[test]
    fn refusals_name_the_argument() {
        let mut p = Problem::mission();
        p.seq_q = 0;
        assert_eq!(p.check(), Err(ProblemError::Zero { argument: "seq_q" }));
        let p = Problem::new(usize::MAX, 2, 2, 1, DType::F32);
        assert_eq!((p.lse_len(), p.check()), (usize::MAX, Err(ProblemError::TooLarge { tensor: "q" })));
        let p = Problem::mission().with_heads_kv(3, Layout::Bhsd);
        assert!(matches!(p.check(), Err(ProblemError::HeadsNotGrouped { heads_q: 8, heads_kv: 3 })));
        let mut p = Problem::mission();
        p.out.row = 63;
        assert!(matches!(p.check(), Err(ProblemError::OverlappingOutput { .. })));
        let mut p = Problem::mission();
        p.k.head = i64::MAX;
        assert_eq!(p.check(), Err(ProblemError::TooLarge { tensor: "k" }));
        let mut p = Problem::mission();
        for scale in [f32::NAN, f32::INFINITY, 3e38, -3e38] {
            p.score.scale = Some(scale);
            assert!(matches!(p.check(), Err(ProblemError::Scale { .. })), "{scale}");
        }
        for softcap in [0.0, -50.0, f32::NAN, f32::INFINITY, 3e38, 1e-45] {
            let p = Problem::mission().with_softcap(softcap);
            assert!(matches!(p.check(), Err(ProblemError::Softcap { .. })), "{softcap}");
        }
        Problem::mission().with_softcap(50.0).check().unwrap();
        let latent = Problem::new(1, 16, 9, 72, DType::F16).with_v_in_k(64);
        assert_eq!((latent.check(), latent.v.row, latent.out.row), (Ok(()), 72, 16 * 64));
        let other = latent.clone().with_heads_kv(2, Layout::Bshd);
        assert_eq!((other.check(), other.v.row), (Ok(()), 2 * 72));
        assert_eq!(other.with_pages(4, 9).check(), Ok(()));
        for change in
            [(|p| p.head_dim_v = 80) as fn(&mut Problem), |p| p.v.row = 64, |p| p.dtypes.v = DType::Bf16]
        {
            let mut p = latent.clone();
            change(&mut p);
            assert!(p.check().is_err(), "{p:?}");
        }
    }

    #[test]
    fn negative_strides_move_the_origin() {
        let mut p = Problem::mission();
        p.k.row = -64;
        assert_eq!(p.span(Tensor::K), Some((8 * 512 * 64, 511 * 64)));
        p.k = Strides { batch: 0, head: 0, row: 0 };
        assert_eq!(p.span(Tensor::K), Some((64, 0)));
        p.check().unwrap();
    }
}
