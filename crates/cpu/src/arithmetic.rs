//! The number formats in which a task is computed: f32 throughout, or a faster format.

use problem::{KeyRange, Problem, Sequence, Span};

use crate::Elements;
use crate::aligned::Aligned;
use crate::simd::{Rows, Simd, widen};
use crate::tile::{MAX_WIDTH, Step};
use crate::view::{Any, ElementRows, Inputs};

/// How a task's inputs become the words that its steps work on.
pub(crate) trait Arithmetic: Copy {
    /// The number of lanes of a panel is a multiple of this.
    const LANES: usize;
    /// Whether the lanes of a panel are its query rows. If so, Q and O are transposed in the panel.
    const TRANSPOSED: bool = true;
    /// Whether steps on few rows read elements where they lie, in rows of whole vectors of so many lanes.
    const IN_PLACE: Option<usize> = None;

    /// Number of words of a row of Q or K with `dim` elements.
    fn words(self, dim: usize) -> usize;

    /// Number of words of a row of O with `dim` elements.
    fn words_out(self, dim: usize) -> usize {
        dim
    }

    /// Writes one row of Q as words to `to`, negated if `negate`.
    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]);

    /// Rows of K as words; may use `room`.
    fn keys<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a>;

    /// Rows of V as words; may use `room`.
    fn values<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a>;

    /// One step of the online softmax.
    fn step(self, step: Step<'_>);

    /// Number of words that a step on `keys` keys needs for weights.
    fn weights(self, keys: usize) -> usize {
        keys.next_multiple_of(16) * MAX_WIDTH
    }

    /// The factor that turns a logit of the words into the logit of the elements.
    fn logit_factor(self) -> f64 {
        1.0
    }

    /// Turns sums of words of V into sums of elements, for rows of `width` lanes.
    fn rescale(self, _out: &mut [f32], _width: usize) {}
}

/// Finds, for each head, an arithmetic that is faster than f32 and accurate enough for the head's elements.
pub(crate) trait Faster: Sync {
    type Arithmetic<'a>: Arithmetic
    where
        Self: 'a;

    /// Calls `work` with the arithmetic for the query heads of a task, beginning with `head`, while the
    /// processor is set up for that arithmetic. Returns false without calling `work` if no faster arithmetic
    /// is accurate enough; the task is then computed in f32.
    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(Self::Arithmetic<'_>)) -> bool;
}

/// f32 for all heads if the value is `None`.
impl<F: Faster> Faster for Option<F> {
    type Arithmetic<'a>
        = F::Arithmetic<'a>
    where
        Self: 'a;

    fn compute(&self, batch: usize, head: usize, work: impl FnOnce(F::Arithmetic<'_>)) -> bool {
        self.as_ref().is_some_and(|faster| faster.compute(batch, head, work))
    }
}

/// f32 for every head.
pub(crate) struct Never;

impl Faster for Never {
    type Arithmetic<'a> = Wide<crate::simd::Portable>;

    fn compute(&self, _: usize, _: usize, _: impl FnOnce(Self::Arithmetic<'_>)) -> bool {
        false
    }
}

/// Rows `range` of the tensor in a head of K or V.
#[derive(Clone, Copy)]
pub(crate) struct HeadRows<'a> {
    pub view: Any<'a>,
    pub batch: usize,
    pub head: usize,
    pub range: KeyRange,
}

impl<'a> HeadRows<'a> {
    /// Rows `range` of a sequence in a head.
    pub(crate) fn of(view: Any<'a>, span: Span, head: usize, range: KeyRange) -> Self {
        let Span { batch, start, .. } = span;
        let range = KeyRange { start: start + range.start, end: start + range.end };
        HeadRows { view, batch, head, range }
    }

    /// All rows of a sequence in a head.
    pub(crate) fn all(view: Any<'a>, span: Span, head: usize) -> Self {
        HeadRows::of(view, span, head, KeyRange { start: 0, end: span.len })
    }

    pub(crate) fn rows(self) -> impl ElementRows<'a> + Clone {
        let HeadRows { view, batch, head, range } = self;
        (range.start..range.end).map(move |row| view.row(batch, head, row))
    }
}

/// The heads of a call, for which [`Faster`] decides.
pub(crate) struct HeadsOf<'a> {
    pub problem: &'a Problem,
    /// The rows of each batch entry.
    pub sequences: &'a [Sequence],
    pub inputs: Inputs<'a>,
    /// Number of query heads whose rows belong to one task.
    pub together: usize,
    /// Whether the plan's instruction set computes the problem in its own arithmetic.
    pub fits: bool,
    /// The largest factor on a product of a query and a key, apart from the softmax scale.
    pub largest_factor: f32,
    /// Whether there are such factors.
    pub has_factors: bool,
}

/// f32: each word is an element, widened to f32.
#[derive(Clone, Copy)]
pub(crate) struct Wide<S>(pub S);

impl<S: Simd> Wide<S> {
    /// The rows as f32, without a copy if they are dense f32 already.
    fn widened<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let HeadRows { view, batch, head, range } = rows;
        let ld = view.dim();
        let dense = view.dense_rows(batch, head, range.start, range.len());
        if let Some(Elements::F32(data)) = dense {
            return Rows { data, ld };
        }
        let to = room.resize(range.len() * ld);
        match dense {
            Some(all) => widen(self.0, all, to),
            None => rows.rows().zip(to.chunks_exact_mut(ld)).for_each(|(row, to)| widen(self.0, row, to)),
        }
        Rows { data: to, ld }
    }
}

impl<S: Simd> Arithmetic for Wide<S> {
    const LANES: usize = S::LANES;

    fn words(self, dim: usize) -> usize {
        dim
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        widen(self.0, row, to);
        if negate {
            to.iter_mut().for_each(|x| *x = -*x);
        }
    }

    fn keys<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn values<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    /// Dispatches to the step that is compiled for the panel's width.
    fn step(self, step: Step<'_>) {
        match step.panel.width / S::LANES {
            4 if S::MAX_VECTORS >= 4 => self.0.step::<4>(step),
            3 if S::MAX_VECTORS >= 3 => self.0.step::<3>(step),
            2 => self.0.step::<2>(step),
            _ => self.0.step::<1>(step),
        }
    }
}

/// f32 with the lanes along the head dim. Rows are padded with zeros to whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Dotted<S>(pub S);

impl<S: Simd> Dotted<S> {
    /// The rows as f32, without a copy if they are dense f32 and whole vectors already.
    fn widened<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        let ld = self.words(rows.view.dim());
        if ld == rows.view.dim() {
            return Wide(self.0).widened(rows, room);
        }
        let to = room.resize(rows.range.len() * ld);
        for (row, to) in rows.rows().zip(to.chunks_exact_mut(ld)) {
            self.query(row, false, to);
        }
        Rows { data: to, ld }
    }
}

impl<S: Simd> Arithmetic for Dotted<S> {
    const LANES: usize = 1;
    const TRANSPOSED: bool = false;
    const IN_PLACE: Option<usize> = if S::IN_PLACE { Some(S::LANES) } else { None };

    fn words(self, dim: usize) -> usize {
        dim.next_multiple_of(S::LANES)
    }

    fn words_out(self, dim: usize) -> usize {
        self.words(dim)
    }

    fn query(self, row: Elements<'_>, negate: bool, to: &mut [f32]) {
        let (numbers, rest) = to.split_at_mut(row.len());
        Wide(self.0).query(row, negate, numbers);
        rest.fill(0.0);
    }

    fn keys<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn values<'a>(self, rows: HeadRows<'a>, room: &'a mut Aligned) -> Rows<'a> {
        self.widened(rows, room)
    }

    fn step(self, step: Step<'_>) {
        self.0.step_dims(step);
    }
}
